"""Pooling as gathers: each output element loops over its window, each input gradient over the windows that cover it.

Note [Windows]
    Along one dimension, output ``o`` sees the inputs ``low(o) .. high(o) - 1``. Forward and backward of plain and
    adaptive pooling differ in these two bounds only, so a dimension is a :class:`_Axis` that gives, for a place on one
    side, the first place on the other side, how many there may be at most, and which of those really take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..errors import Fallback
from ..ir import DType
from ..ops.dtypes import int_bounds
from ..symbolic import Expr, floordiv, product, smax, smin, to_expr
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype, ir_dtype
from .registry import RuleTable, aten
from .values import NodeValue, View

__all__ = ["TABLE"]

TABLE = RuleTable("pooling")
_Reached = tuple[Expr, list[Value]]  # a place on the other side, and conditions under which it takes part


@dataclass(frozen=True, slots=True)
class _Axis:
    """One pooled dimension: ``size`` inputs, ``count`` outputs, windows of ``kernel`` every ``stride`` from ``-pad``;
    adaptive if ``kernel`` is 0. ``whole``: the op counts whole windows only."""

    size: Expr
    count: Expr
    kernel: int = 0
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    whole: bool = False

    @property
    def exact(self) -> bool:
        """Whether every window is whole."""
        if self.pad or self.whole or self.size.constant is None or self.count.constant is None:
            return self.whole and not self.pad
        if not self.kernel:
            return self.size.constant % self.count.constant == 0
        return (self.count.constant - 1) * self.stride + (self.kernel - 1) * self.dilation < self.size.constant

    @property
    def _ends_inside(self) -> bool:
        """Whether no window goes past the last input, though some may begin before the first."""
        size, count = self.size.constant, self.count.constant
        last = -self.pad + (self.kernel - 1) * self.dilation
        return bool(self.kernel) and size is not None and count is not None and (count - 1) * self.stride + last < size

    @property
    def _number(self) -> DType:
        """The type in which places are compared: as narrow as their products with the sizes let it be."""
        size, count = self.size.constant, self.count.constant
        if size is None or count is None:
            return DType.I64
        most = (size + count + 2) * (count + self.stride) + (self.kernel + 1) * self.dilation + self.pad
        return DType.I32 if max(most, size * count) < 1 << 31 else DType.I64

    @property
    def may_miss(self) -> bool:
        """Whether all places of a window may lie around the input, some before it and the others behind."""
        return self.dilation > 1 and self.pad > 0 and (self.size.constant or 0) < self.dilation

    def low(self, out: Expr) -> Expr:
        """The first input of a window, maybe a padded one."""
        return out * self.stride - self.pad if self.kernel else floordiv(out * self.size, self.count)

    def high(self, out: Expr) -> Expr:
        """One past the last input of a window, maybe padded ones."""
        if self.kernel:
            return self.low(out) + (self.kernel - 1) * self.dilation + 1
        return floordiv((out + 1) * self.size + (self.count - 1), self.count)

    @property
    def longest(self) -> Expr:
        """How many inputs a window has at most."""
        if self.kernel:
            return to_expr(self.kernel)
        if self.exact:
            return floordiv(self.size, self.count)
        return smin(floordiv(self.size + (self.count - 1), self.count) + 1, self.size)

    def reads(self, nest: ViewBuilder, out: Expr, step: Expr) -> tuple[Expr, list[Value]]:
        """Input number ``step`` of a window, and conditions under which it is one."""
        at = self.low(out) + step * self.dilation
        if self.exact:
            return at, []
        place = nest.index_value(at, self._number)
        conditions = []
        if not self._ends_inside:
            conditions.append(nest.op("lt", place, nest.index_value(self.size, self._number)))
        if self.pad:
            conditions.append(nest.op("ge", place, nest.const(0, self._number)))
        if not self.kernel:
            conditions.append(nest.op("lt", place, nest.index_value(self.high(out), self._number)))
        return at, conditions

    @property
    def _overlap(self) -> int:
        """How many windows begin in the length of one."""
        return (self.kernel - 1) // self.stride + 1

    @property
    def few(self) -> int | None:
        """The number of windows, if it is known and there are not more than may overlap: each may cover an input."""
        count = self.count.constant
        return count if count is not None and count <= self._overlap else None

    @property
    def most_windows(self) -> Expr:
        """In how many windows an input is at most."""
        if self.kernel:
            return to_expr(self._overlap if self.few is None else self.few)
        if self.exact:
            return to_expr(1)
        return smin(floordiv(self.count + (self.size - 1), self.size) + 1, self.count)

    def windows(self, nest: ViewBuilder, at: Expr, step: Expr) -> tuple[Expr, list[Value]]:
        """Window number ``step`` that an input may be in, and conditions under which it is."""
        begun = False  # whether the window certainly begins before the input
        if self.kernel and self.few is not None:
            out = step  # the last window that begins before an input may be far beyond the last there is
        elif self.kernel:
            out, begun = floordiv(at + self.pad, self.stride) - step, True
        elif self.exact:
            return floordiv(at * self.count, self.size), []
        else:
            out = floordiv(at * self.count, self.size) + step
        place, window = nest.index_value(at, self._number), nest.index_value(out, self._number)
        inside = [
            nest.op("lt", window, nest.index_value(self.count, self._number)),
            nest.op("lt", place, nest.index_value(self.high(out), self._number)),
            *([] if begun else [nest.op("ge", place, nest.index_value(self.low(out), self._number))]),
        ]
        return out, [*inside, nest.op("ge", window, nest.const(0, self._number))]

    def elements(self, out: Expr, count_padding: bool) -> Expr:
        """By how many a window's sum is divided."""
        if self.kernel and (self.exact or (self.whole and count_padding)):
            return to_expr(self.kernel)
        if self.exact:
            return floordiv(self.size, self.count)
        if not self.kernel:
            return self.high(out) - self.low(out)
        if count_padding:
            return smin(self.high(out), self.size + self.pad) - self.low(out)
        return smin(self.high(out), self.size) - smax(self.low(out), to_expr(0))


def _all(nest: ViewBuilder, conditions: Sequence[Value]) -> Value | None:
    mask = None
    for condition in conditions:
        mask = condition if mask is None else nest.op("logical_and", mask, condition)
    return mask


def _numbers(given: object, count: int) -> list[int]:
    values = list(given) if isinstance(given, list | tuple) else [given]
    values = values * count if len(values) == 1 else values
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) != count:
        raise Fallback("pooling with sizes that are not plain numbers is left to ATen")
    return numbers


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pooling: its axes, which are the last dimensions."""

    axes: tuple[_Axis, ...]

    @staticmethod
    def plain(
        x: Sequence[Expr],
        out: Sequence[Expr],
        kernel: object,
        stride: object,
        pad: object,
        dilation: object = 1,
        ceil: bool = False,
    ) -> _Pool:
        """Windows of fixed size over the last dimensions, as many as the name of the op says. ``ceil``: the last ones
        may reach beyond the input."""
        count = len(kernel) if isinstance(kernel, list | tuple) and len(kernel) > 1 else len(x) - 2
        kernels = _numbers(kernel, count)
        strides = _numbers(stride, count) if stride else kernels
        parts = zip(x[-count:], out[-count:], kernels, strides, _numbers(pad, count), strict=True)
        dilations = _numbers(dilation, count)
        return _Pool(tuple(_Axis(*part, step, not ceil) for part, step in zip(parts, dilations, strict=True)))

    @staticmethod
    def adaptive(x: Sequence[Expr], out: Sequence[Expr], count: int) -> _Pool:
        """Windows that share the input out."""
        if any(e.constant is None or e.constant == 0 for e in (*x, *out)):
            raise Fallback("adaptive pooling of dynamic or empty sizes is left to ATen")
        return _Pool(tuple(_Axis(a, b) for a, b in zip(x[-count:], out[-count:], strict=True)))

    def window(self, nest: ViewBuilder, out: Sequence[Expr]) -> tuple[list[Expr], Value | None]:
        """Begin a stage over a window; the input index in it, and where it is valid."""
        return self._other_side(nest, out, [axis.longest for axis in self.axes], _Axis.reads)

    def covering(self, nest: ViewBuilder, at: Sequence[Expr]) -> tuple[list[Expr], Value | None]:
        """Begin a stage over the windows that an input is in; the output index in it, and where it is valid."""
        return self._other_side(nest, at, [axis.most_windows for axis in self.axes], _Axis.windows)

    def _other_side(
        self, nest: ViewBuilder, place: Sequence[Expr], counts: Sequence[Expr], across: Callable[..., _Reached]
    ) -> tuple[list[Expr], Value | None]:
        """A stage over what ``across`` reaches from ``place`` along each axis, see Note [Windows]."""
        steps = nest.stage(counts)
        conditions: list[Value] = []
        index = list(place[: -len(self.axes)])
        for axis, here, step in zip(self.axes, place[-len(self.axes) :], steps, strict=True):
            there, more = across(axis, nest, here, step)
            index.append(there)
            conditions += more
        return index, _all(nest, conditions)

    def divide(self, nest: ViewBuilder, value: Value, out: Sequence[Expr], count_padding: bool) -> Value:
        """A sum over a window, divided by its size."""
        known, computed = 1, []
        for axis, place in zip(self.axes, out[-len(self.axes) :], strict=True):
            elements = axis.elements(place, count_padding)
            if elements.constant is None:
                computed.append(nest.index_value(elements))
            else:
                known *= elements.constant
        if not computed:
            return nest.op("div", value, nest.const(known, value.dtype))
        total = nest.const(known, DType.I64)
        for count in computed:  # not as one expression, which would be a sum of many products
            total = nest.op("mul", total, count)
        return nest.op("div", value, nest.cast(total, value.dtype))


def _require_float(x: View) -> None:
    if not x.dtype.is_floating_point:
        raise Fallback("pooling of integers is left to ATen")


LARGE = 1 << 19  # elements of an image that no cache near a core holds


def _leave_overlapping_rows(ctx: LoweringContext, x: View, kernel: object, stride: object) -> None:
    """On the CPU, of the gradients of windows that overlap, and step by several pixels of a contiguous row, vectors are
    gathered element by element, several times each: ATen's loop over the pixels of a window is faster."""
    windows = _numbers(kernel, 2)
    steps = _numbers(stride, 2) if stride else windows
    overlapping = any(window > step for window, step in zip(windows, steps, strict=True))
    row, size = x.strides[-1], product(x.sizes).constant
    if ctx.capabilities.device != "cpu" or not overlapping or steps[-1] == 1 or row != 1 or x.sizes[-1] == 1:
        return
    if size is not None and size >= LARGE:
        raise Fallback("gradients of averages over overlapping windows of long rows are left to ATen")


# -- averages --------------------------------------------------------------------------------------------


def _average(
    ctx: LoweringContext, node: Node, x: View, make: Callable[[View], _Pool], divisor: object, count_padding: bool
) -> View:
    _require_float(x)
    result = ctx.declare(node.name, node.meta["val"])
    pool = make(result)
    nest = ctx.nest(result.buffer, node, result.sizes)
    index, mask = pool.window(nest, nest.index)
    dtype = compute_dtype(x.dtype)
    total = nest.reduce("sum", nest.cast(nest.load(x, index, mask=mask), dtype))
    nest.stage()
    if isinstance(divisor, int):
        mean = nest.op("div", total, nest.const(divisor, dtype))
    else:
        mean = pool.divide(nest, total, nest.index, count_padding)
    nest.store(result, nest.index, mean)
    ctx.add(nest)
    return result


def _average_backward(
    ctx: LoweringContext, node: Node, grad: View, pool: _Pool, divisor: object, count_padding: bool
) -> View:
    _require_float(grad)
    result = ctx.declare(node.name, node.meta["val"])
    nest = ctx.nest(result.buffer, node, result.sizes)
    out, mask = pool.covering(nest, nest.index)
    dtype = compute_dtype(grad.dtype)
    value = nest.cast(nest.load(grad, out, mask=mask), dtype)
    if isinstance(divisor, int):
        value = nest.op("div", value, nest.const(divisor, dtype))
    else:
        value = pool.divide(nest, value, out, count_padding)
        value = value if mask is None else nest.where(mask, value, nest.const(0, dtype))
    total = nest.reduce("sum", value)
    nest.stage()
    nest.store(result, nest.index, total)
    ctx.add(nest)
    return result


@TABLE.lowers(aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    ctx: LoweringContext,
    node: Node,
    x: View,
    kernel: object,
    stride: object = (),
    padding: object = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: object = None,
) -> View:
    """Means over windows."""

    def make(out: View) -> _Pool:
        return _Pool.plain(x.sizes, out.sizes, _spatial(node, kernel), stride, padding, 1, ceil_mode)

    return _average(ctx, node, x, make, divisor_override, count_include_pad)


def _spatial(node: Node, kernel: object) -> object:
    """The kernel with one number per pooled dimension, which the op's name tells."""
    name = str(node.target)
    return _numbers(kernel, 3 if "3d" in name else 2)


@TABLE.lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    ctx: LoweringContext,
    node: Node,
    grad: View,
    x: View,
    kernel: object,
    stride: object,
    padding: object,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: object,
) -> View:
    """Each input's share of the windows it is in."""
    if "2d" in str(node.target):
        _leave_overlapping_rows(ctx, x, kernel, stride)
    pool = _Pool.plain(x.sizes, grad.sizes, _spatial(node, kernel), stride, padding, 1, ceil_mode)
    return _average_backward(ctx, node, grad, pool, divisor_override, count_include_pad)


@TABLE.lowers(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(ctx: LoweringContext, node: Node, x: View, _: object) -> View:
    """Means over windows that share the input out."""
    count = 3 if "3d" in str(node.target) else 2
    return _average(ctx, node, x, lambda out: _Pool.adaptive(x.sizes, out.sizes, count), None, True)


@TABLE.lowers(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(ctx: LoweringContext, node: Node, grad: View, x: View) -> View:
    """Each input's share of the windows it is in."""
    count = 3 if "3d" in str(node.target) else 2
    return _average_backward(ctx, node, grad, _Pool.adaptive(x.sizes, grad.sizes, count), None, True)


# -- maxima ----------------------------------------------------------------------------------------------


@TABLE.lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool(
    ctx: LoweringContext,
    node: Node,
    x: View,
    kernel: object,
    stride: object = (),
    padding: object = 0,
    dilation: object = 1,
    ceil_mode: bool = False,
) -> NodeValue:
    """Maxima over windows, and where they were: the first of equals, or the last nan, as a place in the input's last
    dimensions taken together."""
    _require_float(x)
    values, indices = (ctx.declare(f"{node.name}_{k}", val) for k, val in enumerate(node.meta["val"]))
    pool = _Pool.plain(x.sizes, values.sizes, _spatial(node, kernel), stride, padding, dilation, ceil_mode)
    if any(axis.may_miss for axis in pool.axes):
        raise Fallback("where the maximum of a window is that lies around the input is ATen's to say")
    return _maxima(ctx, node, x, pool, values, indices)


@TABLE.lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(ctx: LoweringContext, node: Node, x: View, _: object) -> NodeValue:
    """Maxima over windows that share the input out, and where they were."""
    _require_float(x)
    values, indices = (ctx.declare(f"{node.name}_{k}", val) for k, val in enumerate(node.meta["val"]))
    pool = _Pool.adaptive(x.sizes, values.sizes, 3 if "3d" in str(node.target) else 2)
    return _maxima(ctx, node, x, pool, values, indices)


def _maxima(ctx: LoweringContext, node: Node, x: View, pool: _Pool, values: View, indices: View) -> NodeValue:
    nest = ctx.nest(values.buffer, node, values.sizes)
    dtype = compute_dtype(x.dtype)
    pixels = product(axis.size for axis in pool.axes).constant
    number = DType.I32 if pixels is not None and pixels < 2**31 else DType.I64  # as wide as most elements

    def element() -> tuple[Value, Value, Value | None]:
        index, mask = pool.window(nest, nest.index)
        place = to_expr(0)
        for axis, at in zip(pool.axes, index[-len(pool.axes) :], strict=True):
            place = place * axis.size + at
        loaded = nest.load(x, index, mask=mask, other=float("-inf") if mask is not None else 0)
        return nest.cast(loaded, dtype), nest.index_value(place, number), mask

    top = nest.reduce("max", element()[0])
    value, place, mask = element()
    here = nest.op("eq", value, top)
    here = here if mask is None else nest.op("logical_and", here, mask)
    first = nest.reduce("min", nest.where(here, place, nest.const(int_bounds(number)[1], number)))
    last_nan = nest.reduce("max", nest.where(nest.op("isnan", value), place, nest.const(-1, number)))
    nest.stage()
    nest.store(values, nest.index, top)
    is_nan = nest.op("ge", last_nan, nest.const(0, number))
    nest.store(indices, nest.index, nest.cast(nest.where(is_nan, last_nan, first), DType.I64))
    ctx.add(nest)
    return [values, indices]


@TABLE.lowers(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
)
def max_pool_backward(ctx: LoweringContext, node: Node, grad: View, x: View, *rest: object) -> View:
    """Each gradient is added to where its maximum was."""
    indices = rest[-1]
    assert isinstance(indices, View)
    result = ctx.declare(node.name, node.meta["val"])
    start = ctx.nest(f"{result.buffer}_start", node, result.sizes)
    start.store(result, start.index, start.const(0, ir_dtype(result.dtype)))
    ctx.add(start)
    nest = ctx.nest(result.buffer, node, grad.sizes)
    count = 3 if "3d" in str(node.target) else 2
    total = to_expr(1)
    for size in x.sizes[-count:]:
        total = total * size
    flat = nest.check_index(nest.load(indices, nest.index), total)
    place: list[Expr] = []
    for size in reversed(x.sizes[-count:]):
        place.insert(0, flat % size if len(place) < count - 1 else flat)
        flat = floordiv(flat, size)
    nest.store(result, [*nest.index[:-count], *place], nest.load(grad, nest.index), mode="add")
    ctx.add(nest)
    return result
