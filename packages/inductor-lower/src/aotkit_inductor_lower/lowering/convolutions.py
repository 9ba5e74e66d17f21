"""Convolutions and their gradients as contractions, each with ATen's call in it where one contraction is all of it.

Note [Three sums]
    Each result of ``convolution`` and ``convolution_backward`` is one of three sums. Along one dimension, with places
    ``y`` and taps ``k``:

    * :func:`gathered`: ``out[n, o, y] = sum x[n, c, y*stride + k*dilation - pad] * w[o, c, k]``. A convolution; the
      gradient of a transposed one by its input.
    * :func:`scattered`: ``out[n, o, y] = sum x[n, c, (y + pad - k*dilation) / stride] * w[c, o, k]``, over the taps for
      which the quotient is whole. A transposed convolution; the gradient of a convolution by its input.
    * :func:`by_weight`: ``out[o, c, k] = sum left[n, o, y] * right[n, c, y*stride + k*dilation - pad]``. The gradient
      by the weights, of either kind.

    Groups are a batch: channels of a group are a dimension of their own. Where an index may lie outside of the image
    the load has a mask, and 0 is read there.

Note [Places of a scattered sum]
    With a stride the quotient of a scattered sum is whole for every ``stride``-th place only, and which taps take part
    depends on the remainder of the place. So the result is computed in as many parts as there are remainders (of all
    dimensions together), each a contraction with affine indices that multiplies no more than it must, or zeros where no
    tap takes part. With a stride of 1 there is one part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from ..ir import Arg, Buffer, BufferRef, Contraction, DType, ExternCall, Instr, Literal, LoopNest, Operand, Range
from ..ir.builder import NestBuilder, Value
from ..ir.walk import definitions, rename
from ..ops.dtypes import FLOATS, dtype_from_torch_name
from ..symbolic import Expr, sym, to_expr
from .context import LoweringContext
from .extern import lower_extern
from .values import NodeValue

__all__ = ["BACKWARD", "CONVOLUTION", "Parts", "by_weight", "convolution_parts", "gathered", "is_convolution"]
__all__ += ["lower_convolution", "scattered"]

CONVOLUTION = "aten.convolution.default"
BACKWARD = "aten.convolution_backward.default"
Parts = tuple[Contraction | LoopNest, ...]


def lower_convolution(ctx: LoweringContext, node: Node, reason: str) -> NodeValue:
    """ATen's call of ``convolution``, in a contraction where it is one. ``reason``: of the call."""
    value = lower_extern(ctx, node, reason)
    call = ctx.steps[-1]
    assert isinstance(call, ExternCall)
    parts = convolution_parts(call, ctx.buffers, ctx.capabilities.device).get(0, ())
    if len(parts) == 1 and isinstance(parts[0], Contraction):
        ctx.steps[-1] = replace(parts[0], library=call)
    return value


# -- what a call says ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension of images, see Note [Three sums]."""

    stride: int
    pad: int
    dilation: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A convolution, or its backward: its tensors by name, what their elements are, and how it slides."""

    name: str
    call: ExternCall
    dtype: DType
    axes: tuple[_Axis, ...]
    transposed: bool
    groups: int

    @property
    def accumulate(self) -> DType:
        """What is summed in."""
        return DType.F64 if self.dtype is DType.F64 else DType.F32


def convolution_parts(call: ExternCall, buffers: Mapping[str, Buffer], device: str = "cpu") -> dict[int, Parts]:
    """What computes each result of an ATen call of a convolution or its backward, by the result's number: steps that
    need nothing of each other. Nothing for a call that is no convolution of floats on the kernels' ``device`` whose
    numbers are plain. The gradient by a bias is a plain sum of what arrives."""
    found: dict[int, Parts] = {}
    if call.target == CONVOLUTION and call.results and call.results[0] is not None:
        found = _forward(call, buffers, device)
    if call.target == BACKWARD:
        found = _backward(call, buffers, device)
    return {number: parts for number, parts in found.items() if parts}


def _forward(call: ExternCall, buffers: Mapping[str, Buffer], device: str) -> dict[int, Parts]:
    x, w, bias = (_tensor(arg, buffers) for arg in call.args[:3])
    out = buffers[call.results[0] or ""]
    how = _how(call, call.args[3:], [t for t in (x, w, bias, out) if t is not None], device)
    if how is None or x is None or w is None or (bias is None and not _is_none(call.args[2])):
        return {}
    if how.transposed:
        return {0: scattered(how, x, w, out, bias)}
    return {0: (gathered(how, x, w, out, bias),)}


def _backward(call: ExternCall, buffers: Mapping[str, Buffer], device: str) -> dict[int, Parts]:
    grad, x, w = (_tensor(arg, buffers) for arg in call.args[:3])
    results = [None if name is None else buffers[name] for name in call.results]
    if grad is None or x is None or w is None or len(results) != 3:
        return {}
    how = _how(call, call.args[4:10], [grad, x, w, *(r for r in results if r is not None)], device)
    if how is None:
        return {}
    found: dict[int, Parts] = {}
    by_x, by_w, by_bias = results
    if by_x is not None:
        own = replace(how, name=by_x.name)
        found[0] = (gathered(own, grad, w, by_x),) if how.transposed else scattered(own, grad, w, by_x)
    if by_w is not None:
        own = replace(how, name=by_w.name)
        found[1] = (by_weight(own, *((x, grad) if how.transposed else (grad, x)), by_w),)
    if by_bias is not None:
        found[2] = (_by_bias(replace(how, name=by_bias.name), grad, by_bias),)
    return found


def _how(call: ExternCall, args: Sequence[Arg], tensors: Sequence[Buffer], device: str) -> _Call | None:
    """``args``: stride, padding, dilation, transposed, output padding, groups."""
    first = tensors[0]
    spatial = len(first.sizes) - 2
    dtype = dtype_from_torch_name(first.dtype)
    if call.kwargs or len(args) != 6 or spatial < 1 or dtype not in FLOATS:
        return None
    if any(t.dtype != first.dtype or t.device != device for t in tensors):
        return None
    stride, pad, dilation = (_numbers(arg, spatial) for arg in args[:3])
    transposed, groups = _plain(args[3]), _plain(args[5])
    if stride is None or pad is None or dilation is None or min(*stride, *dilation) < 1 or min(pad) < 0:
        return None
    if not isinstance(transposed, bool) or not isinstance(groups, int) or groups < 1:
        return None
    axes = tuple(map(_Axis, stride, pad, dilation))
    how = _Call(call.name, call, dtype, axes, transposed, groups)
    return how if all(len(t.sizes) in (1, spatial + 2) for t in tensors) else None


def _tensor(arg: Arg, buffers: Mapping[str, Buffer]) -> Buffer | None:
    return buffers[arg.name] if isinstance(arg, BufferRef) and not arg.number else None


def _plain(arg: Arg) -> object:
    return arg.value if isinstance(arg, Literal) else None


def _is_none(arg: Arg) -> bool:
    return isinstance(arg, Literal) and arg.value is None


def _numbers(arg: Arg, count: int) -> list[int] | None:
    """So many integers, also given as one."""
    given = [_plain(item) for item in arg] if isinstance(arg, tuple) else [_plain(arg)]
    numbers = [n for n in given if isinstance(n, int) and not isinstance(n, bool)]
    if len(numbers) != len(given) or len(numbers) not in (1, count):
        return None
    return numbers * count if len(numbers) == 1 else numbers


# -- the three sums --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sum:
    """One contraction under construction: loops by name, and the bodies of its factors."""

    how: _Call
    loops: dict[str, Expr] = field(default_factory=dict)

    def along(self, letter: str, sizes: Iterable[Expr]) -> list[Expr]:
        """A loop for each dimension of the images, and its variable."""
        names = [self.loop(f"{letter}{d}", size) for d, size in enumerate(sizes)]
        return names

    def loop(self, name: str, size: Expr) -> Expr:
        """One loop, and its variable."""
        self.loops[name] = size
        return sym(name)

    def group(self) -> Expr:
        """The variable of the loop over groups; 0 without such a loop."""
        return self.loop("g", to_expr(self.how.groups)) if self.how.groups > 1 else to_expr(0)

    def ranges(self, *letters: str) -> tuple[Range, ...]:
        """The loops with names that begin with one of these letters, in the order of the letters."""
        chosen = (name for letter in letters for name in self.loops if name[0] == letter)
        return tuple(Range(name, self.loops[name]) for name in chosen)

    def operand(self, side: str, buffer: Buffer, place: Sequence[Expr], limits: Mapping[int, int]) -> Operand:
        """The element at a place. ``limits``: whether a dimension has places below 0 (1), above its size (2)."""
        builder = NestBuilder(side, (), buffers=None)
        conditions: list[Value] = []
        for dim, sides in limits.items():
            if not sides:
                continue
            number = builder.index_value(place[dim])
            if sides & 1:
                conditions.append(builder.op("ge", number, builder.const(0, DType.I64)))
            if sides & 2:
                conditions.append(builder.op("lt", number, _size(builder, buffer.sizes[dim])))
        mask = None
        for condition in conditions:
            mask = condition if mask is None else builder.op("logical_and", mask, condition)
        value = builder.load_element(buffer.name, tuple(place), self.how.dtype, mask, 0.0 if mask else 0)
        (stage,) = builder.finish().stages
        names = {name: f"{side}_{name}" for name in definitions(stage.body)}
        return Operand(tuple(rename(instr, names) for instr in stage.body), names[value.name])

    def contraction(
        self, rows: str, columns: str, reduced: str, factors: tuple[Operand, Operand], epilogue: Sequence[Instr]
    ) -> Contraction:
        """The whole."""
        how = self.how
        return Contraction(
            how.name,
            self.ranges("g"),
            self.ranges(*rows),
            self.ranges(*columns),
            self.ranges(*reduced),
            *factors,
            how.accumulate,
            "highest",
            "total",
            tuple(epilogue),
            None,
            how.call.origin,
        )

    def epilogue(self, out: Buffer, place: Sequence[Expr], bias: Buffer | None = None) -> tuple[Instr, ...]:
        """The sum, with a bias, in its place."""
        how = self.how
        builder = NestBuilder("epilogue", (), buffers=None)
        total = Value("total", how.accumulate)
        if bias is not None:
            added = builder.cast(builder.load_element(bias.name, (place[1],), how.dtype), how.accumulate)
            total = builder.op("add", total, added)
        builder.store_element(out.name, tuple(place), builder.cast(total, how.dtype))
        (stage,) = builder.finish().stages
        names = {name: f"after_{name}" for name in definitions(stage.body)}
        return tuple(rename(instr, names) for instr in stage.body)


def _size(builder: NestBuilder, size: Expr) -> Value:
    return builder.index_value(size) if size.constant is None else builder.const(size.constant, DType.I64)


def gathered(how: _Call, x: Buffer, w: Buffer, out: Buffer, bias: Buffer | None = None) -> Contraction:
    """``out`` as a convolution of ``x``, see Note [Three sums]. Weights are (all channels of the result, channels of
    the image in a group, taps)."""
    made = _Sum(how)
    g, n = made.group(), made.loop("n", out.sizes[0])
    at = made.along("y", out.sizes[2:])
    of_group = _share(out.sizes[1], how.groups)
    o = made.loop("o", of_group)
    taps = made.along("k", w.sizes[2:])
    c = made.loop("c", w.sizes[1])
    place = [n, g * w.sizes[1] + c]
    limits: dict[int, int] = {}
    for d, (axis, y, k) in enumerate(zip(how.axes, at, taps, strict=True), 2):
        place.append(y * axis.stride + k * axis.dilation - axis.pad)
        last = (out.sizes[d] - 1) * axis.stride + (w.sizes[d] - 1) * axis.dilation - axis.pad
        limits[d] = _limits(to_expr(-axis.pad), last, x.sizes[d], whole=axis.pad == 0)
    channel = g * of_group + o
    factors = made.operand("left", x, place, limits), made.operand("right", w, (channel, c, *taps), {})
    return made.contraction("ny", "o", "kc", factors, made.epilogue(out, (n, channel, *at), bias))


def by_weight(how: _Call, left: Buffer, right: Buffer, out: Buffer) -> Contraction:
    """``out`` as a gradient by weights, see Note [Three sums]."""
    made = _Sum(how)
    g = made.group()
    of_group = _share(out.sizes[0], how.groups)
    o, taps, c = made.loop("o", of_group), made.along("k", out.sizes[2:]), made.loop("c", out.sizes[1])
    n, at = made.loop("n", left.sizes[0]), made.along("y", left.sizes[2:])
    channel = g * of_group + o
    place = [n, g * out.sizes[1] + c]
    limits: dict[int, int] = {}
    for d, (axis, y, k) in enumerate(zip(how.axes, at, taps, strict=True), 2):
        place.append(y * axis.stride + k * axis.dilation - axis.pad)
        last = (left.sizes[d] - 1) * axis.stride + (out.sizes[d] - 1) * axis.dilation - axis.pad
        limits[d] = _limits(to_expr(-axis.pad), last, right.sizes[d], whole=axis.pad == 0)
    factors = made.operand("left", left, (n, channel, *at), {}), made.operand("right", right, place, limits)
    return made.contraction("o", "kc", "ny", factors, made.epilogue(out, (channel, c, *taps)))


@dataclass(frozen=True, slots=True)
class _Class:
    """Places ``first + stride*y`` of one dimension of a scattered sum, so many of them; their taps ``tap + step*k``,
    and what is read there: ``start + y - along*k``."""

    first: int
    count: Expr
    tap: int
    step: int
    taps: int | Expr
    start: int
    along: int


def scattered(how: _Call, x: Buffer, w: Buffer, out: Buffer, bias: Buffer | None = None) -> Parts:
    """``out`` as a transposed convolution of ``x``, in parts, see Note [Places of a scattered sum]. Weights are (all
    channels of ``x``, channels of the result in a group, taps)."""
    sizes = zip(how.axes, out.sizes[2:], w.sizes[2:], strict=True)
    classes = [_classes(axis, places, taps) for axis, places, taps in sizes]
    if any(not each for each in classes):
        return ()
    parts = [_part(how, x, w, out, bias, chosen) for chosen in itertools.product(*classes)]
    return tuple(part if len(parts) == 1 else _numbered(part, k) for k, part in enumerate(parts))


def _numbered(part: Contraction | LoopNest, number: int) -> Contraction | LoopNest:
    return replace(part, name=f"{part.name}_part_{number}")


def _classes(axis: _Axis, places: Expr, taps: Expr) -> list[_Class]:
    """The places of one dimension by remainder; none where that depends on how many taps there are."""
    if axis.stride == 1:
        return [_Class(0, places, 0, 1, taps, axis.pad, axis.dilation)]
    if taps.constant is None:
        return []
    common = math.gcd(axis.stride, axis.dilation)
    found: list[_Class] = []
    for remainder in range(axis.stride):
        first = (remainder - axis.pad) % axis.stride
        count = (places - first + axis.stride - 1) // axis.stride
        if count.constant is not None and count.constant <= 0:
            continue
        step = axis.stride // common
        tap = next((k for k in range(step) if (k * axis.dilation - remainder) % axis.stride == 0), taps.constant)
        own = max(0, -(-(taps.constant - tap) // step))
        start = (first + axis.pad - tap * axis.dilation) // axis.stride if own else 0
        found.append(_Class(first, count, tap, step, own, start, axis.dilation // common))
    return found


def _part(
    how: _Call, x: Buffer, w: Buffer, out: Buffer, bias: Buffer | None, classes: Sequence[_Class]
) -> Contraction | LoopNest:
    """The places of a scattered sum that have such remainders."""
    made = _Sum(how)
    g, n = made.group(), made.loop("n", out.sizes[0])
    at = made.along("y", (each.count for each in classes))
    o = made.loop("o", w.sizes[1])
    there = [axis.stride * y + each.first for axis, y, each in zip(how.axes, at, classes, strict=True)]
    place = (n, g * w.sizes[1] + o, *there)
    if any(each.taps == 0 for each in classes):
        return _nothing(made, out, place, bias)
    taps = made.along("k", (to_expr(each.taps) for each in classes))
    of_group = _share(w.sizes[0], how.groups)
    c = made.loop("c", of_group)
    read, weight = [n, g * of_group + c], [g * of_group + c, o]
    limits: dict[int, int] = {}
    for d, (each, y, k) in enumerate(zip(classes, at, taps, strict=True), 2):
        read.append(y - each.along * k + each.start)
        weight.append(each.step * k + each.tap)
        low = each.start - each.along * (to_expr(each.taps) - 1)
        limits[d] = _limits(low, each.count - 1 + each.start, x.sizes[d])
    factors = made.operand("left", x, read, limits), made.operand("right", w, weight, {})
    return made.contraction("ny", "o", "kc", factors, made.epilogue(out, place, bias))


def _nothing(made: _Sum, out: Buffer, place: Sequence[Expr], bias: Buffer | None) -> LoopNest:
    """Places that no tap reaches."""
    how = made.how
    builder = NestBuilder(how.name, made.ranges("g", "n", "y", "o"), how.call.origin, buffers=None)
    value = builder.const(0.0, how.dtype)
    if bias is not None:
        value = builder.load_element(bias.name, (place[1],), how.dtype)
    builder.store_element(out.name, tuple(place), value)
    return builder.finish()


def _by_bias(how: _Call, grad: Buffer, out: Buffer) -> LoopNest:
    """The gradient by a bias: what arrives, summed over images and places."""
    sizes = (grad.sizes[0], *grad.sizes[2:])
    names = ("n", *(f"y{d}" for d in range(len(sizes) - 1)))
    inner = tuple(map(Range, names, sizes))
    builder = NestBuilder(how.name, (Range("o", out.sizes[0]),), how.call.origin, buffers=None)
    builder.begin_stage(inner)
    value = builder.load_element(grad.name, (sym("n"), sym("o"), *map(sym, names[1:])), how.dtype)
    total = builder.reduce("sum", builder.cast(value, how.accumulate))
    builder.begin_stage(())
    builder.store_element(out.name, (sym("o"),), builder.cast(total, how.dtype))
    return builder.finish()


def _limits(low: Expr, high: Expr, size: Expr, *, whole: bool = False) -> int:
    """Where places between ``low`` and ``high`` may lie outside of a dimension: 1 below it, 2 above. ``whole``: of
    those that are not known none does."""
    below = low.constant is None or low.constant < 0
    over = high - size
    above = over.constant >= 0 if over.constant is not None else not whole
    return below + 2 * above


def _share(channels: Expr, groups: int) -> Expr:
    """The channels of one group."""
    return channels // groups if groups > 1 else channels


def is_convolution(node: Node) -> bool:
    """Whether a node is a call that :func:`lower_convolution` takes."""
    return node.target is torch.ops.aten.convolution.default
