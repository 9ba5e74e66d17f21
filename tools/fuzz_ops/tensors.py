"""Tensor arguments as data: dtype, sizes, how they lie in memory, and what they hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["DTYPES", "FLOATS", "HALVES", "INTEGERS", "LAYOUTS", "Tensor", "dtype_class", "fill", "geometry",
           "layout_class"]  # fmt: skip

FLOATS = ("float32", "float64", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex64")

LAYOUTS = {
    "contiguous": "dense", "misaligned": "offset", "permuted": "permuted", "channels_last": "permuted",
    "offset": "offset", "gaps": "gaps", "stepped": "gaps", "odd ones": "gaps",
    "expanded": "expanded", "overlapping": "expanded", "neg": "lazy", "conj": "lazy",
}  # fmt: skip
"""Ways to lie in memory, and the class of each."""

_COUNTED = {"dense": "dense", "expanded": "shared"}


def layout_class(layout: str) -> str:
    """The class under which a layout is counted: ``dense``; ``shared``, where indices share memory; ``strided``, all
    else, also lazy bits, which the wrappers settle before a rule sees the tensor."""
    return _COUNTED.get(LAYOUTS[layout], "strided")


def dtype_class(dtype: str) -> str:
    """The class under which a type is counted: ``float``, ``half``, ``integer`` (also bool) or ``complex``."""
    if dtype in HALVES:
        return "half"
    return "float" if dtype in FLOATS else "complex" if dtype.startswith("complex") else "integer"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor argument. ``fill`` is the name of a way to fill it and its parameters; ``second`` are the sizes for
    another call of the same compiled program."""

    name: str
    dtype: str
    size: tuple[int, ...]
    layout: str = "contiguous"
    fill: tuple[object, ...] = ("normal",)
    seed: int = 0
    grad: bool = False
    second: tuple[int, ...] | None = None

    def make(self, again: bool = False) -> torch.Tensor:
        """A new tensor; ``again``: for the second call."""
        size = self.second if again and self.second is not None else self.size
        stride, offset, length = geometry(size, self.layout, self.seed)
        values = fill(self.fill, length, self.dtype, self.seed + again)
        made = torch.as_strided(values, size, stride, offset)
        return self._finished(made)

    def _finished(self, made: torch.Tensor) -> torch.Tensor:
        if self.layout == "neg":
            made = torch._neg_view(made)
        elif self.layout == "conj":
            made = made.conj()
        return made.detach().requires_grad_() if self.grad else made

    def text(self) -> str:
        """Python that makes it."""
        stride, offset, length = geometry(self.size, self.layout, self.seed)
        values = fill(self.fill, length, self.dtype, self.seed)
        if length <= 64:
            held = f"torch.tensor({_literal(values)}, dtype=torch.{self.dtype})"
        else:
            held = f"fill({self.fill!r}, {length}, {self.dtype!r}, {self.seed})"
        text = f"torch.as_strided({held}, {self.size}, {stride}, {offset})"
        if self.layout == "contiguous":
            text = f"{held}.view({self.size})"
        text += ".conj()" if self.layout == "conj" else ""
        if self.layout == "neg":
            text = f"torch._neg_view({text})"
        return f"{text}.detach().requires_grad_()" if self.grad else text


def _literal(values: torch.Tensor) -> str:
    """Python with the names ``inf`` and ``nan``."""
    if values.is_complex():
        return f"[{', '.join(f'complex({v.real!r}, {v.imag!r})' for v in values.tolist())}]"
    return repr(values.tolist())


def geometry(size: Sequence[int], layout: str, seed: int) -> tuple[tuple[int, ...], int, int]:
    """Strides, offset and length of the storage."""
    rng = random.Random(seed * 31 + len(size))
    order = list(range(len(size)))
    extents = list(size)
    offset, step = 0, [1] * len(size)
    if layout == "permuted":
        rng.shuffle(order)
        if order == sorted(order):
            order.reverse()
    elif layout == "channels_last" and len(size) >= 3:
        order = [0, *range(2, len(size)), 1]
    elif layout in ("gaps", "overlapping"):
        extents = [n + rng.randrange(3) for n in extents]
        offset = rng.randrange(6)
    elif layout == "stepped":
        step = [rng.choice((1, 2, 3)) for _ in extents]
        extents = [max(n * s, 1) for n, s in zip(extents, step, strict=True)]
    elif layout in ("misaligned", "offset"):
        offset = 1 if layout == "misaligned" else rng.choice((2, 3, 5, 16, 40))
    stride = [0] * len(size)
    running = 1
    for dim in reversed(order):
        stride[dim] = running * step[dim]
        running *= max(extents[dim], 1)
    if layout == "expanded":
        for dim in rng.sample(order, rng.randint(1, len(order))) if order else ():
            stride[dim] = 0
    elif layout == "overlapping" and order:
        stride[rng.choice(order)] = rng.choice((1, 2))
    for dim, n in enumerate(size):
        if n == 1 and layout in ("odd ones", "gaps"):
            stride[dim] = rng.choice((0, 1, 7, 100))
    reach = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return tuple(stride), offset, offset + reach + (0 if layout == "contiguous" else rng.randrange(2))


# --- what they hold ---------------------------------------------------------------------------------------------

_FLOAT_SPECIALS = (
    0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 0.5, 2.5, 1e38, -3e38, 1e-40, -1e-42, 65504.0,
    5e-324, 1e300, -1e300, 88.8, -104.0, 710.0, 1e-8, 2147483648.0, -9.3e18, 16777217.0,
)  # fmt: skip
_INT_SPECIALS = (0, 1, -1, 127, -128, 255, 32767, 2**31 - 1, -(2**31), 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 16777217)


def fill(how: tuple[object, ...], length: int, dtype: str, seed: int) -> torch.Tensor:
    """``length`` elements of a type; the same for the same arguments."""
    target = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    name, *parameters = how
    if target.is_complex:
        parts = [fill(how, length, "float64", seed * 2 + i) for i in range(2)]
        return torch.complex(*parts).to(target)
    made = _FILLS[str(name)](length, target, generator, *parameters)
    if target.is_floating_point or made.dtype == target:
        return made.to(target)
    if target is torch.bool:
        return made > 0.3 if made.is_floating_point() else made % 2 == 1
    return (made * 3).round().to(torch.int64).to(target) if made.is_floating_point() else made.to(target)


def _normal(n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, generator=g, dtype=torch.float64) * 2


def _unit(n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.rand(n, generator=g, dtype=torch.float64)


def _special(n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    exact = not dtype.is_floating_point
    pool = torch.tensor(_INT_SPECIALS if exact else _FLOAT_SPECIALS, dtype=torch.int64 if exact else torch.float64)
    ordinary = torch.randint(-9, 10, (n,), generator=g) if exact else _normal(n, dtype, g)
    picks = pool[torch.randint(0, len(pool), (n,), generator=g)]
    return torch.where(torch.rand(n, generator=g) < 0.5, picks, ordinary)


def _ties(n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.randint(0 if dtype is torch.uint8 else -1, 3, (n,), generator=g)


def _large(n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(100, 127, (n,), generator=g)
    most = {torch.float16: 6e4, torch.float64: 1e300}.get(dtype, 3e38)
    return (torch.rand(n, generator=g, dtype=torch.float64) * 2 - 1) * most


def _hundreds(n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.randint(50, 120, (n,), generator=g)


def _constant(n: int, dtype: torch.dtype, g: torch.Generator, value: float) -> torch.Tensor:
    return torch.full((n,), value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _index(n: int, dtype: torch.dtype, g: torch.Generator, low: int, high: int) -> torch.Tensor:
    """Integers from ``low`` up to, not including, ``high``."""
    return torch.randint(low, max(high, low + 1), (n,), generator=g)


def _increasing(n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    return torch.rand(n, generator=g, dtype=torch.float64).cumsum(0) - 1


_FILLS: dict[str, Callable[..., torch.Tensor]] = {
    "normal": _normal, "unit": _unit, "special": _special, "ties": _ties, "large": _large, "hundreds": _hundreds,
    "constant": _constant, "index": _index, "increasing": _increasing,
}  # fmt: skip
