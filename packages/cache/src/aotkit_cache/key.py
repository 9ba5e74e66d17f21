"""Cache keys: named parts with one canonical text each, and a digest over all of them.

Note [Canonical text of a key part]
Two values may share a key only if they are interchangeable for the compiler. So the text is an injective,
typed JSON form: `1`, `1.0`, `True` and `"1"` differ, and so do a list and a tuple. What has no order (dict
items, sets) is sorted. Everything else is refused with `Uncacheable`: a `repr` that happens to hold an address
or to leave out a field would give a wrong hit, and a wrong hit is worse than none. JSON rather than `repr`
because `explain` can read it back to say where in a nested value two keys part, without evaluating anything.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import Uncacheable

_FORMAT = "aotkit-key-1"
_MAX_DEPTH = 64
_TORCH_SCALARS = frozenset({"dtype", "device", "layout", "memory_format"})


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Named parts that together decide what a compilation yields.

    Attributes:
        parts: (name, canonical JSON text) pairs, sorted by name, names unique.
        digest: SHA-256 over all parts, 64 hexadecimal digits; the entry's address in a store.

    Make one with `make_key`; the constructor takes texts that are canonical already.
    """

    parts: tuple[tuple[str, str], ...]
    digest: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parts]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"key parts need distinct names, but {', '.join(map(repr, twice))} occurs more than once")
        object.__setattr__(self, "parts", tuple(sorted(self.parts)))
        object.__setattr__(self, "digest", _digest(self.parts))

    def __str__(self) -> str:
        return "\n".join([f"key {self.digest}", *(f"  {name} = {text}" for name, text in self.parts)])

    def to_json(self) -> dict[str, str]:
        """The parts as a JSON object (name to canonical text)."""
        return dict(self.parts)

    @staticmethod
    def from_json(data: Mapping[str, str]) -> CacheKey:
        """The key that `to_json` described."""
        return CacheKey(tuple(data.items()))


def make_key(**parts: object) -> CacheKey:
    """Make a key from named ingredients; their order does not matter.

    Values may be None, bool, int, float, complex, str, bytes (hashed), enum members, `torch.dtype`,
    `torch.device`, `torch.layout`, `torch.memory_format`, dataclass instances (their compared fields), and
    lists, tuples, `torch.Size`, sets and dicts of these. Pass names that are no identifiers as
    `make_key(**{"input.0": ...})`.

    Raises:
        Uncacheable: an ingredient is of another type (a tensor, a SymInt, a callable, ...).
    """
    return CacheKey(tuple((name, _dump(_canonical(value, name, 0))) for name, value in parts.items()))


def _digest(parts: tuple[tuple[str, str], ...]) -> str:
    return hashlib.sha256(_encode(_dump([_FORMAT, [list(part) for part in parts]]))).hexdigest()


# One for all texts: ``json.dumps`` makes an encoder for each of them, which takes longer than a short text does.
_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


def _encode(text: str) -> bytes:
    # Lone surrogates occur in file names; "surrogatepass" keeps distinct strings distinct.
    return text.encode("utf-8", "surrogatepass")


def _canonical(value: object, path: str, depth: int) -> object:
    """The JSON form of `value`: see Note [Canonical text of a key part]."""
    if depth > _MAX_DEPTH:
        raise Uncacheable(
            f"key part {path[:80]}... is nested more than {_MAX_DEPTH} levels deep; pass a digest instead"
        )
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind in (float, complex):
        return {kind.__name__: repr(value)}
    if isinstance(value, bytes):
        return {"bytes": hashlib.sha256(value).hexdigest(), "length": len(value)}
    if isinstance(value, enum.Enum):
        return {"enum": f"{kind.__module__}.{kind.__qualname__}.{value.name}"}
    if kind.__module__ == "torch" and kind.__name__ in _TORCH_SCALARS:
        return {f"torch.{kind.__name__}": str(value)}
    return _canonical_container(value, path, depth + 1)


def _canonical_container(value: object, path: str, depth: int) -> object:
    kind = type(value)
    if kind is list:
        return [_canonical(item, f"{path}[{i}]", depth) for i, item in enumerate(_items(value))]
    if kind is tuple or (kind.__module__, kind.__name__) == ("torch", "Size"):
        return {"tuple": [_canonical(item, f"{path}[{i}]", depth) for i, item in enumerate(_items(value))]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((_canonical(item, f"{path}{{}}", depth) for item in value), key=_dump)}
    if kind is dict and isinstance(value, dict):
        pairs = [
            [_canonical(name, f"{path}<key>", depth), _canonical(item, f"{path}[{name!r}]", depth)]
            for name, item in value.items()
        ]
        return {"dict": sorted(pairs, key=lambda pair: _dump(pair[0]))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: _canonical(getattr(value, f.name), f"{path}.{f.name}", depth)
            for f in dataclasses.fields(value)
            if f.compare
        }
        return {"object": f"{kind.__module__}.{kind.__qualname__}", "fields": fields}
    raise Uncacheable(
        f"key part {path} is a {kind.__module__}.{kind.__qualname__}, which has no canonical text; "
        "pass its metadata or a digest of its contents instead"
    )


def _items(value: object) -> tuple[object, ...]:
    assert isinstance(value, (list, tuple))
    return tuple(value)
