"""Gradients of padding by the tensor's own elements and of upsampling: each gradient is added to where it came from."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import DType
from ..symbolic import Expr, smax, smin, to_expr
from ..target import on_host
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype, ir_dtype
from .registry import RuleTable, aten
from .values import View

__all__ = ["TABLE"]

TABLE = RuleTable("resample")


def _zeros(
    ctx: LoweringContext, node: Node, dtype: torch.dtype | None = None, like: torch.Tensor | None = None
) -> View:
    """The result with zeros, or where ``dtype`` is another one than its own, or ``like`` lies otherwise in memory, a
    temporary of its sizes."""
    val = node.meta["val"]
    other = like is not None or (dtype is not None and dtype != val.dtype)
    result = ctx.declare(f"{node.name}_sum" if other else node.name, val if like is None else like, dtype=dtype)
    nest = ctx.nest(f"{result.buffer}_start", node, result.sizes)
    nest.store(result, nest.index, nest.const(0, ir_dtype(result.dtype)))
    ctx.add(nest)
    return result


# -- pads ------------------------------------------------------------------------------------------------


def _reflected(at: Expr, size: Expr) -> Expr:
    inside = smax(at, -at)
    return smin(inside, (size - 1) * 2 - inside)


def _replicated(at: Expr, size: Expr) -> Expr:
    return smin(smax(at, to_expr(0)), size - 1)


def _pad_backward(source: Callable[[Expr, Expr], Expr]) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, grad: View, x: View, padding: Sequence[object]) -> View:
        result = _zeros(ctx, node)
        nest = ctx.nest(result.buffer, node, grad.sizes)
        index = list(nest.index)
        for position, low in enumerate(padding[::2]):
            if not isinstance(low, int | Expr):
                raise Fallback("pads must be integers")
            dim = len(index) - 1 - position
            index[dim] = source(index[dim] - low, x.sizes[dim])
        nest.store(result, index, nest.load(grad, nest.index), mode="add")
        ctx.add(nest)
        return result

    return rule


for _count in (1, 2, 3):
    TABLE.add(getattr(aten, f"reflection_pad{_count}d_backward").default, _pad_backward(_reflected))
    TABLE.add(getattr(aten, f"replication_pad{_count}d_backward").default, _pad_backward(_replicated))


# -- upsampling ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tap:
    """An input element that an output element is made of: where, and its weight (``None``: 1)."""

    place: Expr
    weight: Value | None


@dataclass(frozen=True, slots=True)
class _Line:
    """One upsampled dimension: output index, sizes, and the user's factor."""

    nest: ViewBuilder
    at: Expr
    size: Expr
    count: Expr
    factor: object
    dtype: DType

    def op(self, name: str, *args: Value | float) -> Value:
        """An op of the table; Python numbers become constants."""
        return self.nest.op(name, *(a if isinstance(a, Value) else self.nest.const(a, self.dtype) for a in args))

    def scale(self, align_corners: bool) -> Value:
        """Input elements per output element."""
        nest = self.nest
        if align_corners:
            steps = nest.scalar(smax(self.count - 1, to_expr(1)), self.dtype)
            ratio = self.op("div", nest.scalar(self.size - 1, self.dtype), steps)
            return ratio if self.count != 1 else nest.const(0, self.dtype)
        if isinstance(self.factor, float) and self.factor > 0:
            return nest.const(1.0 / self.factor, self.dtype)
        return self.op("div", nest.scalar(self.size, self.dtype), nest.scalar(self.count, self.dtype))

    def position(self, align_corners: bool) -> Value:
        """The place in the input, as a number between elements; not clamped."""
        at = self.nest.scalar(self.at, self.dtype)
        if align_corners:
            return self.op("mul", self.scale(True), at)
        return self.op("sub", self.op("mul", self.scale(False), self.op("add", at, 0.5)), 0.5)

    def checked(self, place: Value) -> Expr:
        """An integer value, clamped into the input, as an index."""
        nest = self.nest
        high = nest.op("minimum", place, nest.index_value(self.size - 1))
        return nest.check_index(nest.op("maximum", high, nest.const(0, DType.I64)), self.size)


def _nearest(offset: float) -> Callable[[_Line, bool], list[_Tap]]:
    def taps(line: _Line, _: bool) -> list[_Tap]:
        at = line.nest.scalar(line.at, line.dtype)
        moved = line.op("add", at, offset) if offset else at
        place = line.op("floor", line.op("mul", moved, line.scale(False)))
        return [_Tap(line.checked(line.nest.cast(place, DType.I64)), None)]

    return taps


def _linear(line: _Line, align_corners: bool) -> list[_Tap]:
    """Two places, of which the second has a share also where that is 0; see Note [Weights of neighbours]."""
    if line.size == line.count:
        return [_Tap(line.at, line.op("add", 1.0, 0.0)), _Tap(line.at, line.op("add", 0.0, 0.0))]
    position = line.position(align_corners)
    position = position if align_corners else line.op("maximum", position, 0.0)
    low = line.nest.op("minimum", line.nest.cast(position, DType.I64), line.nest.index_value(line.size - 1))
    high = line.nest.op("add", low, line.nest.const(1, DType.I64))
    part = line.op("minimum", line.op("sub", position, line.nest.cast(low, line.dtype)), 1.0)
    return [_Tap(line.checked(low), line.op("sub", 1.0, part)), _Tap(line.checked(high), part)]


def _cubic(line: _Line, align_corners: bool) -> list[_Tap]:
    position = line.position(align_corners)
    whole = line.op("floor", position)
    part, first = line.op("sub", position, whole), line.nest.cast(whole, DType.I64)

    def near(x: Value) -> Value:  # ((A + 2) x - (A + 3)) x x + 1, with A = -0.75
        return line.op("add", line.op("mul", line.op("mul", line.op("sub", line.op("mul", x, 1.25), 2.25), x), x), 1.0)

    def far(x: Value) -> Value:  # ((A x - 5 A) x + 8 A) x - 4 A
        inner = line.op("mul", line.op("add", line.op("mul", x, -0.75), 3.75), x)
        return line.op("add", line.op("mul", line.op("sub", inner, 6.0), x), 3.0)

    rest = line.op("sub", 1.0, part)
    weights = [far(line.op("add", part, 1.0)), near(part), near(rest), far(line.op("add", rest, 1.0))]
    return [
        _Tap(line.checked(line.nest.op("add", first, line.nest.const(step, DType.I64))), weight)
        for step, weight in zip((-1, 0, 1, 2), weights, strict=True)
    ]


def _repeats(offset: float, size: Expr, count: Expr, factor: object) -> int | None:
    """How often each element stands in a row that eager upsamples to the nearest, if all do as often, one after the
    other. Eager takes places in single precision."""
    if size.constant is None or count.constant is None or not 0 < size.constant <= count.constant:
        return None
    times, rest = divmod(count.constant, size.constant)
    scale = 1.0 / factor if isinstance(factor, float) and factor > 0 else size.constant / count.constant
    if rest:
        return None
    narrow = _single(scale)
    places = (int(_single((at + offset) * narrow)) for at in range(count.constant))  # a product of two is exact before
    return times if all(place == at // times for at, place in enumerate(places)) else None


def _single(number: float) -> float:
    """Rounded to single precision."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _sum_of_repeats(
    ctx: LoweringContext, node: Node, grad: View, result: View, times: Sequence[int], wide: torch.dtype
) -> View:
    """The gradient where each element was repeated: a sum over its copies."""
    nest = ctx.nest(result.buffer, node, result.sizes)
    count = len(times)
    copies = nest.stage([to_expr(number) for number in times])
    places = (at * number + copy for at, number, copy in zip(nest.index[-count:], times, copies, strict=True))
    value = nest.load(grad, (*nest.index[:-count], *places))
    total = nest.reduce("sum", nest.cast(value, ir_dtype(wide)))
    nest.stage()
    nest.store(result, nest.index, nest.cast(total, ir_dtype(result.dtype)))
    ctx.add(nest)
    return result


def _nearest_backward(offset: float) -> Callable[..., View]:
    add = _upsample_backward(_nearest(offset), False)

    def rule(ctx: LoweringContext, node: Node, grad: View, out: Sequence[object], sizes: object, *rest: object) -> View:
        count = len(out)
        factors = rest if len(rest) == count else (None,) * count
        val = node.meta["val"]
        pairs = zip(val.shape[-count:], grad.sizes[-count:], factors, strict=True)
        times = [
            _repeats(offset, to_expr(n), size, factor) if isinstance(n, int) else None for n, size, factor in pairs
        ]
        if not grad.dtype.is_floating_point or any(number is None for number in times):
            return add(ctx, node, grad, out, sizes, *rest)
        wide = torch.float32 if grad.dtype.itemsize < 4 else grad.dtype
        result = ctx.declare(node.name, val)
        return _sum_of_repeats(ctx, node, grad, result, [number for number in times if number is not None], wide)

    return rule


def _lies_in_rows(val: torch.Tensor, grad: View) -> bool:
    """Whether neighbours in memory are neighbours in a row of an image: generated code adds them up one by one, and for
    each computes the places anew, where ATen has two loops. With channels side by side, those are a vector."""
    return on_host(val) and val.is_contiguous() and grad.strides[-1] == 1


def _channels_together(val: torch.Tensor, grad: View) -> torch.Tensor | None:
    """The gradient with the channels of a pixel side by side, where those of what is added up lie so and its own do
    not: channels are added as vectors then. Eager gives that of bicubic upsampling with contiguous rows."""
    if not on_host(val) or val.dim() != 4 or grad.strides[1] != 1 or not val.is_contiguous():
        return None
    return torch.empty_like(val, memory_format=torch.channels_last)


def _upsample_backward(taps: Callable[[_Line, bool], list[_Tap]], corners: bool) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, grad: View, out: Sequence[object], sizes: object, *rest: object) -> View:
        count = len(out)
        if not grad.dtype.is_floating_point:
            raise Fallback("gradients of upsampled integers are left to ATen")
        if corners and count == 2 and _lies_in_rows(node.meta["val"], grad):
            raise Fallback("gradients of images whose rows are contiguous are added up faster by ATen")
        align, factors = (bool(rest[0]), rest[1:]) if corners else (False, rest)
        if len(factors) < count:
            factors = (*factors, *[None] * (count - len(factors)))
        wide = torch.float32 if grad.dtype.itemsize < 4 else grad.dtype  # eager adds float16 up in float32
        together = _channels_together(node.meta["val"], grad) if count == 2 else None
        result = _zeros(ctx, node, wide, together)
        dtype = compute_dtype(grad.dtype)
        nest = ctx.nest(result.buffer, node, grad.sizes)
        places = dtype if corners else DType.F32  # eager finds the nearest in single precision, whatever it adds
        lines = [
            _Line(nest, nest.index[k - count], result.sizes[k - count], grad.sizes[k - count], factors[k], places)
            for k in range(count)
        ]
        value = nest.cast(nest.load(grad, nest.index), dtype)
        for index, weights in _combined([taps(line, align) for line in lines]):
            share = value
            for weight in weights:
                share = nest.op("mul", share, weight)
            nest.store(result, (*nest.index[:-count], *index), share, mode="add")
        ctx.add(nest)
        if wide is grad.dtype and together is None:
            return result
        return ctx.pointwise(node, [result], lambda _, total: total)

    return rule


def _combined(taps: Sequence[Sequence[_Tap]]) -> Iterator[tuple[list[Expr], list[Value]]]:
    for chosen in product(*taps):
        yield [tap.place for tap in chosen], [tap.weight for tap in chosen if tap.weight is not None]


_UPSAMPLE = {
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d": _nearest_backward(0.0),
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d": _nearest_backward(0.5),
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d": _upsample_backward(_linear, True),
    "upsample_bicubic2d": _upsample_backward(_cubic, True),
}
for _names, _rule in _UPSAMPLE.items():
    for _name in _names.split():
        TABLE.add(getattr(aten, f"{_name}_backward").default, _rule)
