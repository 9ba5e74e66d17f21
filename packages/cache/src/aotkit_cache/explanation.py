"""Why two keys are not the same key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from .key import CacheKey

_MAX_SHOWN = 120


@dataclass(frozen=True, slots=True)
class PartDifference:
    """One place where two keys differ.

    Attributes:
        path: part name, followed by where inside the part, such as `inputs[3].stride[0]`.
        old: readable value in the first key, or None where it has none.
        new: readable value in the second key, or None where it has none.
    """

    path: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        if self.old is None:
            return f"{self.path}: only in the second key ({self.new})"
        if self.new is None:
            return f"{self.path}: only in the first key ({self.old})"
        return f"{self.path}: {self.old} -> {self.new}"


def differences(a: CacheKey, b: CacheKey) -> tuple[PartDifference, ...]:
    """Every place where the two keys differ, in the order of part names."""
    old, new = dict(a.parts), dict(b.parts)
    found: list[PartDifference] = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            found.append(PartDifference(name, None, _render(json.loads(new[name]))))
        elif name not in new:
            found.append(PartDifference(name, _render(json.loads(old[name])), None))
        elif old[name] != new[name]:
            found.extend(_walk(name, json.loads(old[name]), json.loads(new[name])))
    return tuple(found)


def explain(a: CacheKey, b: CacheKey) -> str:
    """Say which parts of two keys differ, with both values, one line each.

    Nested parts are followed down to the value that differs; of long texts (a graph, say) the first differing
    line is shown. Equal keys give a sentence that says so.
    """
    found = differences(a, b)
    if not found:
        return "the keys are equal"
    places = "1 place" if len(found) == 1 else f"{len(found)} places"
    return "\n".join([f"the keys differ in {places}:", *(f"  {difference}" for difference in found)])


def _walk(path: str, old: object, new: object) -> Iterator[PartDifference]:
    """Descend where both values have the same structure; report where they stop being alike."""
    if old == new and type(old) is type(new):
        return
    old_items, new_items = _children(old), _children(new)
    if old_items is None or new_items is None or old_items.keys() != new_items.keys() or _tag(old) != _tag(new):
        yield _leaf(path, old, new)
        return
    for step in old_items:
        yield from _walk(path + step, old_items[step], new_items[step])


def _children(value: object) -> dict[str, object] | None:
    """Sub-values by path step, or None for a leaf. Reads the forms of Note [Canonical text of a key part]."""
    if isinstance(value, list):
        return {f"[{i}]": item for i, item in enumerate(value)}
    if not isinstance(value, dict):
        return None
    if "tuple" in value:
        return _children(value["tuple"])
    if "fields" in value:
        return {f".{name}": item for name, item in value["fields"].items()}
    if "dict" in value:
        return {f"[{_render(name)}]": item for name, item in value["dict"]}
    return None


def _tag(value: object) -> object:
    if isinstance(value, dict):
        return value.get("object", next(iter(value)))
    return "list"


def _leaf(path: str, old: object, new: object) -> PartDifference:
    if isinstance(old, str) and isinstance(new, str) and ("\n" in old or "\n" in new):
        old_lines, new_lines = old.split("\n"), new.split("\n")
        for number in range(max(len(old_lines), len(new_lines))):
            left = old_lines[number] if number < len(old_lines) else None
            right = new_lines[number] if number < len(new_lines) else None
            if left != right:
                return PartDifference(f"{path}, line {number + 1}", *_window(left, right))
    if isinstance(old, str) and isinstance(new, str):
        left, right = _window(old, new)
        return PartDifference(path, left, right)
    return PartDifference(path, _shorten(_render(old)), _shorten(_render(new)))


def _window(old: str | None, new: str | None) -> tuple[str, str]:
    """Quote both texts; cut a long common beginning so that the difference is in view."""
    if old is None or new is None:
        return (
            "(text ends)" if old is None else _shorten(repr(old)),
            "(text ends)" if new is None else _shorten(repr(new)),
        )
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    start = max(0, start - 30) if max(len(old), len(new)) > _MAX_SHOWN else 0
    prefix = "..." if start else ""
    return prefix + _shorten(repr(old[start:])), prefix + _shorten(repr(new[start:]))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _render(value: object) -> str:
    """A canonical JSON value in Python-like notation."""
    if isinstance(value, list):
        return f"[{', '.join(map(_render, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    match value:
        case {"tuple": list(items)}:
            return f"({', '.join(map(_render, items))}{',' if len(items) == 1 else ''})"
        case {"set": list(items)}:
            return f"{{{', '.join(map(_render, items))}}}" if items else "set()"
        case {"dict": list(pairs)}:
            return f"{{{', '.join(f'{_render(name)}: {_render(item)}' for name, item in pairs)}}}"
        case {"object": str(name), "fields": dict(fields)}:
            inside = ", ".join(f"{field}={_render(item)}" for field, item in fields.items())
            return f"{name.rpartition('.')[2]}({inside})"
        case {"bytes": str(digest), "length": length}:
            return f"<{length} bytes, sha256 {digest[:12]}>"
        case _:
            return str(next(iter(value.values())))
