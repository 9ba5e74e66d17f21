"""Drawing the arguments of one operator: what every kind of argument may be, tried in eager mode as they are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .program import Call, Number, Ref, invoke, overload, value_of
from .tensors import DTYPES, FLOATS, INTEGERS, LAYOUTS, Tensor

__all__ = ["KINDS", "Draw", "scalar_pool"]

_SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 31, 33)
_LARGE = (64, 127, 300, 1023, 4099)
_ORDINARY = (2, 3, 0.5, 2.0, -1.5, 0.1, 1, 1.0, -2, 0.3, 7)
_ODD: tuple[Any, ...] = (
    0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e300, 3e38, -1e38, 1e-40, 5e-324, 0, -1, True, False, 1, 1.0,
    2**31, -(2**31) - 1, 2**40, 2**63 - 1, 255, 65504.0, 1e-8,
)  # fmt: skip
#: Operators with which an integer tensor divides: a zero among the divisors raises in one and not in another lane.
_MOST_ELEMENTS = 6000


def scalar_pool() -> tuple[Any, ...]:
    """Numbers that are worth a try as operands."""
    return _ODD


@dataclass(slots=True)
class Draw:
    """The state of one draw. ``dtype`` and ``layout`` are the goal, used for the first tensor of an operator.

    Values are real: each call is made as soon as it is drawn, so the next one knows what it works on. ``reuse``:
    the share of tensors that are results of earlier calls.
    """

    rng: random.Random
    dtype: str = "float32"
    layout: str = "contiguous"
    grad: bool = False
    dynamic: bool = False
    most: int = _MOST_ELEMENTS
    tensors: list[Tensor] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    reuse: float = 0.0
    fresh_goal: bool = True
    lazy: bool = True
    fill: str = ""

    # -- tensors ---------------------------------------------------------------------------------------------------

    def size(self, low: int = 0, high: int = 4, least: int = 0) -> list[int]:
        """Sizes of a tensor of ``low`` to ``high`` dimensions, each at least ``least``."""
        rank = self.rng.choice([r for r in (1, 2, 2, 3, 3, 4, 0, 5) if low <= r <= high] or [high])
        found = [max(least, self.rng.choice(_SIZES)) for _ in range(rank)]
        if rank and self.rng.random() < 0.04:
            found[self.rng.randrange(rank)] = self.rng.choice(_LARGE)
        while _count(found) > self.most:
            largest = found.index(max(found))
            found[largest] = max(least, found[largest] // 3)
        return found

    def tensor(
        self,
        size: Sequence[int],
        dtype: str | None = None,
        fill: tuple[object, ...] | None = None,
        layout: str | None = None,
    ) -> Ref:
        """A new argument."""
        dtype = dtype or self.dtype
        layout = layout or self.any_layout()
        if fill is None:
            fill = self.any_fill(dtype)
        if layout == "conj" and dtype != "complex64":
            layout = "neg"
        if layout == "neg" and (dtype == "bool" or fill[0] == "index" or not self.lazy):
            layout = "offset"
        grad = self.grad and dtype in (*FLOATS, "complex64") and self.rng.random() < 0.9
        second = tuple(size)
        made = Tensor(
            f"x{len(self.tensors)}", dtype, tuple(size), layout, fill, self.rng.randrange(1 << 30), grad, second
        )
        self.tensors.append(made)
        self.values[made.name] = made.make()
        return Ref(made.name)

    def primary(
        self,
        low: int = 0,
        high: int = 4,
        least: int = 0,
        dtype: str | None = None,
        fill: tuple[object, ...] | None = None,
    ) -> Ref:
        """The tensor that an operator is about: one there is already, if it fits, or one of the goal."""
        if self.rng.random() < self.reuse:
            fitting = [
                ref
                for ref in self.known()
                if low <= self.dim(ref) <= high
                and min(self.shape(ref), default=least) >= least
                and (dtype is None or self.dtype_of(ref) == dtype)
            ]
            if fitting:
                return self.rng.choice(fitting[-4:])
        return self.tensor(self.size(low, high, least), dtype, fill, self.goal_layout())

    def partner(self, other: Ref, dtype: str | None = None, fill: tuple[object, ...] | None = None) -> Ref:
        """A tensor that broadcasts with ``other``, mostly of its type."""
        shape = self.shape(other)
        kind = self.rng.random()
        if dtype is None:
            dtype = self.dtype_of(other) if self.rng.random() < 0.75 else self.rng.choice(DTYPES[:-1])
        if kind < 0.55:
            size = shape
        elif kind < 0.7:
            size = [1 if self.rng.random() < 0.4 else n for n in shape]
        elif kind < 0.85:
            size = shape[self.rng.randint(0, len(shape)) :]
        elif kind < 0.93:
            size = []
        else:
            size = [self.rng.choice((1, 2, 3)), *shape] if len(shape) < 4 else shape
            size = size if _count(size) <= self.most else shape
        if self.rng.random() < self.reuse:
            for ref in self.known()[::-1]:
                if self.shape(ref) == size and self.dtype_of(ref) == dtype:
                    return ref
        return self.tensor(size, dtype, fill)

    def like(self, other: Ref, fill: tuple[object, ...] | None = None, dtype: str | None = None) -> Ref:
        """A tensor of the same sizes and (unless told) type."""
        return self.tensor(self.shape(other), dtype or self.dtype_of(other), fill)

    def known(self) -> list[Ref]:
        """All tensors there are so far, results last."""
        found = [Ref(t.name) for t in self.tensors]
        for call in self.calls:
            found += call.outputs
        return [ref for ref in found if isinstance(value_of(self.values, ref), torch.Tensor)]

    def value(self, ref: Ref) -> torch.Tensor:
        """What a reference holds at present."""
        found: torch.Tensor = value_of(self.values, ref)
        return found

    def shape(self, ref: Ref) -> list[int]:
        """Its sizes."""
        return list(self.value(ref).shape)

    def dim(self, ref: Ref) -> int:
        """How many dimensions it has."""
        return self.value(ref).dim()

    def dtype_of(self, ref: Ref) -> str:
        """The name of its type."""
        return str(self.value(ref).dtype).removeprefix("torch.")

    def goal_layout(self) -> str:
        """The layout of the goal for the first tensor, then any."""
        if self.fresh_goal:
            self.fresh_goal = False
            return self.layout
        return self.any_layout()

    def floats(self, share: float = 0.93) -> None:
        """Draw floating-point tensors from here on, mostly, for an operator that refuses all else."""
        if self.dtype not in FLOATS and self.flag(share):
            self.dtype = self.pick(*FLOATS)

    def integer_or_none(self, value: int | None) -> Any:
        """:meth:`integer`, unless there is none."""
        return None if value is None else self.integer(value)

    def any_layout(self) -> str:
        """Often the goal's, often plain."""
        kind = self.rng.random()
        if kind < 0.3:
            return self.layout
        return "contiguous" if kind < 0.55 else self.rng.choice([*LAYOUTS][: -1 if self.lazy else -2])

    def any_fill(self, dtype: str) -> tuple[object, ...]:
        """Mostly ordinary numbers, or what was asked for."""
        if self.fill and self.rng.random() < 0.7:
            return (self.fill,)
        if self.grad and self.rng.random() < 0.5:
            return ("normal",)
        names = ("normal",) * 8 + ("special",) * 4 + ("ties",) * 2 + ("unit", "unit", "hundreds", "large")
        return (self.rng.choice(names),)

    # -- numbers ---------------------------------------------------------------------------------------------------

    def scalar(self) -> Any:
        """A Python number."""
        return self.rng.choice(_ODD) if self.rng.random() < 0.45 else self.rng.choice(_ORDINARY)

    def a_dim(self, ref: Ref | int) -> int:
        """A dimension, counted from the front or from the end; seldom one too many."""
        rank = ref if isinstance(ref, int) else self.dim(ref)
        if self.rng.random() < 0.015:
            return rank + self.rng.choice((0, 1))
        return self.rng.randrange(-rank, rank) if rank else self.rng.choice((0, -1))

    def dims(self, ref: Ref, least: int = 0) -> list[int]:
        """Some distinct dimensions."""
        rank = self.dim(ref)
        chosen = self.rng.sample(range(rank), self.rng.randint(min(least, rank), rank))
        return [d - rank if self.rng.random() < 0.3 else d for d in chosen]

    def flag(self, share: float = 0.5) -> bool:
        """A coin."""
        return self.rng.random() < share

    def pick(self, *choices: Any) -> Any:
        """One of them."""
        return self.rng.choice(choices)

    def index_into(self, bound: int, size: Sequence[int], dtype: str = "int64", negative: bool = True) -> Ref:
        """A tensor of indices, some negative, many repeated, seldom one out of range."""
        low, high = (-bound if negative and self.flag() else 0), bound
        if self.flag(0.04):
            low, high = self.pick((low - 1, high), (low, high + 2))
        return self.tensor(size, dtype, ("index", low, high))

    def integer(self, value: int) -> Any:
        """An integer argument; among dynamic sizes often one that the second call has another value for."""
        if not self.dynamic or self.flag(0.5):
            return value
        second = self.pick(value, value + 1, -value, value - 1, -1, 0, value + 3)
        made = Number(f"n{len(self.numbers)}", value, min(second, 2**63 - 1))
        self.numbers.append(made)
        return made

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, op: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Call:
        """Append a call and make it. Raises what eager raises, the call is kept then, too."""
        made = Call(f"v{len(self.calls)}", op, tuple(args), tuple((kwargs or {}).items()))
        self.calls.append(made)
        result = invoke(made, self.values)
        self.values[made.result] = result
        if isinstance(result, list | tuple):
            self.calls[-1] = Call(made.result, op, made.args, made.kwargs, len(result))
        return self.calls[-1]

    def by_schema(self, op: str) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for a schema: tensors that broadcast with the first, numbers by the names of the arguments."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        first: Ref | None = None
        for argument in overload(op)._schema.arguments:
            if argument.name in _LEFT_OUT:
                continue
            optional = argument.has_default_value()
            if optional and (self.flag(0.4) or kwargs.get("...")):
                kwargs["..."] = True  # what follows goes by its name
                continue
            value = self._of_schema(argument, first)
            if first is None and isinstance(value, Ref):
                first = value
            if argument.kwarg_only or kwargs.get("..."):
                kwargs[argument.name] = value
            else:
                args.append(value)
        kwargs.pop("...", None)
        return args, kwargs

    def _of_schema(self, argument: Any, first: Ref | None) -> Any:
        kind = str(argument.real_type)
        base = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
        if kind != base and self.flag(0.25) and argument.name not in ("min", "max"):
            return None
        if base == "Tensor":
            return self.primary() if first is None else self.partner(first)
        several = base.startswith("List[int]") and argument.name in ("dim", "dims")
        chooser = _BY_TYPE[base] if several else KINDS.get(argument.name) or _BY_TYPE.get(base)
        if chooser is None:
            raise NotImplementedError(f"no kind of argument for {argument.name}: {kind}")
        return chooser(self, first)


def _count(size: Sequence[int]) -> int:
    total = 1
    for n in size:
        total *= max(n, 1)
    return total


_LEFT_OUT = ("layout", "device", "pin_memory", "non_blocking", "generator", "sparse_grad", "implicit")


def _memory_format(d: Draw, first: Any) -> Any:
    rank = d.dim(first) if first is not None else 0
    formats = [torch.contiguous_format, torch.preserve_format]
    if rank in (4, 5):
        formats.append(torch.channels_last if rank == 4 else torch.channels_last_3d)
    return d.rng.choice(formats)


def _dtype(d: Draw, first: Any) -> Any:
    return getattr(torch, d.rng.choice((*FLOATS, *INTEGERS, "bool")))


#: What an argument may be, by its name in schemas.
KINDS: dict[str, Callable[[Draw, Any], Any]] = {
    "dim": lambda d, x: d.a_dim(x),
    "dim0": lambda d, x: d.a_dim(x),
    "dim1": lambda d, x: d.a_dim(x),
    "dim2": lambda d, x: d.a_dim(x),
    "dims": lambda d, x: d.dims(x),
    "dtype": _dtype,
    "memory_format": _memory_format,
    "approximate": lambda d, x: d.pick("none", "tanh"),
    "rounding_mode": lambda d, x: d.pick(None, "trunc", "floor"),
    "reduction": lambda d, x: d.pick(0, 1, 2),
    "eps": lambda d, x: d.pick(1e-5, 1e-3, 0.0, 1e-12, 0.3),
    "correction": lambda d, x: d.pick(0, 1, 2, 0.5, 1.0, 3),
    "ord": lambda d, x: d.pick(0, 1, 2, 3, float("inf"), float("-inf"), -1, 0.5, 2.0, 2.5),
    "decimals": lambda d, x: d.pick(0, 1, 2, 3, -1, -2),
    "diagonal": lambda d, x: d.rng.randint(-5, 5),
    "offset": lambda d, x: d.rng.randint(-3, 3),
    "alpha": lambda d, x: d.scalar() if d.flag(0.3) else d.pick(1, 2, 0.5, -1, 3),
    "p": lambda d, x: d.pick(0.0, 0.3, 0.5, 1.0, 0.9),
    "lambd": lambda d, x: d.pick(0.5, 0.0, 1, 2.5, 0.1),
    "negative_slope": lambda d, x: d.pick(0.01, 0.3, 1.5, 0, 2, 0.0),
    "beta": lambda d, x: d.pick(1, 2, 0.5, 3.0, 10, 1.0),
    "threshold": lambda d, x: d.pick(20, 1, 0.5, 0, -1.0, 5.0),
    "min_val": lambda d, x: d.pick(-1, -2.5, 0, 0.0, float("-inf"), 0.5),
    "max_val": lambda d, x: d.pick(1, 2.5, 6, 0.5, float("inf")),
    "reduce": lambda d, x: d.pick("sum", "prod", "mean", "amax", "amin"),
    "n": lambda d, x: d.pick(0, 1, 2, 3, 4),
    "k": lambda d, x: d.rng.randint(1, max(1, min(d.shape(x), default=1))),
}
# One that a family's recipe has no say in.
_BY_TYPE: dict[str, Callable[[Draw, Any], Any]] = {
    "Scalar": lambda d, x: d.scalar(),
    "number": lambda d, x: d.scalar(),
    "bool": lambda d, x: d.flag(),
    "float": lambda d, x: float(d.pick(0.0, 0.5, 1.0, 2.0, 1e-5, -1.0)),
    "int": lambda d, x: d.rng.randint(-3, 4),
    "SymInt": lambda d, x: d.integer(d.rng.randint(-3, 4)),
    "List[int]": lambda d, x: d.dims(x),
    "List[SymInt]": lambda d, x: d.dims(x),
    "ScalarType": _dtype,
    "MemoryFormat": _memory_format,
}
KINDS["self_is_result"] = lambda d, x: False
