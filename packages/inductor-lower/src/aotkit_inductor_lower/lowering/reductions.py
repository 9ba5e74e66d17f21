"""Reductions: kept dimensions outside, reduced ones in a stage, the rest of the arithmetic once per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import DType
from ..symbolic import Expr, estimate, product, to_expr
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype
from .registry import RuleTable, aten
from .values import NodeValue, View

__all__ = ["HASHES", "TABLE", "RowNest"]

TABLE = RuleTable("reductions")
_ZERO = to_expr(0)
HASHES = frozenset((aten.hash_tensor.default,))  # rules that write uint64, of which there is no arithmetic


class RowNest:
    """A nest over the kept dimensions of a tensor, with stages over the reduced ones.

    ``dims`` are the reduced dimensions. :meth:`stage` gives the full index of the tensor inside a stage,
    :attr:`row` the index of a result with (``keepdim``) or without the reduced dimensions.
    """

    def __init__(self, ctx: LoweringContext, node: Node, name: str, sizes: Sequence[Expr], dims: Sequence[int]) -> None:
        rank = len(sizes)
        self.dims = sorted({dim % rank for dim in dims}) if rank else []
        self.sizes = tuple(sizes)
        self.kept = [dim for dim in range(rank) if dim not in self.dims]
        self.nest: ViewBuilder = ctx.nest(name, node, [self.sizes[dim] for dim in self.kept])
        self.count = product(self.sizes[dim] for dim in self.dims)

    def stage(self) -> tuple[Expr, ...]:
        """Begin a stage over the reduced dimensions; the index of the tensor in it."""
        inner = self.nest.stage([self.sizes[dim] for dim in self.dims])
        index = [_ZERO] * len(self.sizes)
        for dim, expr in zip(self.kept, self.nest.index, strict=True):
            index[dim] = expr
        for dim, expr in zip(self.dims, inner, strict=True):
            index[dim] = expr
        return tuple(index)

    def row(self, keepdim: bool) -> tuple[Expr, ...]:
        """The index of a row's result."""
        if not keepdim:
            return self.nest.index
        index = [_ZERO] * len(self.sizes)
        for dim, expr in zip(self.kept, self.nest.index, strict=True):
            index[dim] = expr
        return tuple(index)

    def count_value(self, dtype: DType) -> Value:
        """How many elements a row has."""
        return self.nest.scalar(self.count, dtype)


def all_dims(x: View, dims: object) -> list[int]:
    """The dimensions of a reduction: none given means all, and a tensor without any takes 0 and -1 for all, too."""
    if not x.sizes:
        return []
    if isinstance(dims, int):
        return [dims]
    if not dims:
        return list(range(len(x.sizes)))
    assert isinstance(dims, list | tuple)
    return [int(dim) for dim in dims]


@dataclass(frozen=True, slots=True)
class _Formula:
    """One reduction: ``after(reduce kind of before(x))``, with ``x`` converted to ``dtype``: one to compute in, or
    torch's type of the result, to which eager rounds each element first."""

    kind: str
    dtype: DType | torch.dtype
    before: Callable[[ViewBuilder, Value], Value] | None = None
    after: Callable[[RowNest, Value], Value] | None = None


def _reduce(ctx: LoweringContext, node: Node, x: View, dims: Sequence[int], keepdim: bool, formula: _Formula) -> View:
    result = ctx.declare(node.name, node.meta["val"])
    _reduce_into(ctx, node, result, x, dims, keepdim, formula)
    return result


def _reduce_into(
    ctx: LoweringContext, node: Node, result: View, x: View, dims: Sequence[int], keepdim: bool, formula: _Formula
) -> None:
    rows = RowNest(ctx, node, result.buffer, x.sizes, dims)
    index = rows.stage()
    nest, dtype = rows.nest, formula.dtype
    value = nest.load(x, index)
    value = nest.cast(value, dtype) if isinstance(dtype, DType) else nest.operand(value, dtype)
    if formula.before is not None:
        value = formula.before(rows.nest, value)
    total = rows.nest.reduce(formula.kind, value)
    rows.nest.stage()
    if formula.after is not None:
        total = formula.after(rows, total)
    rows.nest.store(result, rows.row(keepdim), total)
    ctx.add(rows.nest)


@TABLE.lowers(aten.sum.dim_IntList)
def sum_dims(ctx: LoweringContext, node: Node, x: View, dims: object, keepdim: bool = False, **_: object) -> View:
    """Sum; float16 and bfloat16 in f32, integers in the result's type (i64 unless asked)."""
    dtype = node.meta["val"].dtype
    exact = _reads_in_float32(x, all_dims(x, dims))
    return _reduce(ctx, node, x, all_dims(x, dims), keepdim, _Formula("sum", compute_dtype(dtype) if exact else dtype))


def _reads_in_float32(x: View, dims: Sequence[int]) -> bool:
    """Whether eager, asked for a sum in float16 or bfloat16, adds up the elements as they are, and does not round each
    to that type first: where what is added lies in memory in more than one run of equal steps."""
    steps = sorted(((x.strides[dim], x.sizes[dim]) for dim in dims if x.sizes[dim].constant != 1), key=_hint)
    runs: list[tuple[Expr, Expr]] = []
    for stride, size in steps:
        if runs and runs[-1][0] * runs[-1][1] == stride:
            runs[-1] = runs[-1][0], runs[-1][1] * size
        else:
            runs.append((stride, size))
    return len(runs) > 1


def _hint(step: tuple[Expr, Expr]) -> int:
    return estimate(step[0], 64)


@TABLE.lowers(aten.sum.default)
def sum_all(ctx: LoweringContext, node: Node, x: View, **_: object) -> View:
    """Sum of everything."""
    return sum_dims(ctx, node, x, None)


@TABLE.lowers(aten.mean.dim)
def mean_dims(ctx: LoweringContext, node: Node, x: View, dims: object, keepdim: bool = False, **_: object) -> View:
    """Sum over count; of float16 and bfloat16 both in f32, rounded once."""
    dtype = compute_dtype(node.meta["val"].dtype)

    def divide(rows: RowNest, total: Value) -> Value:
        return rows.nest.op("div", total, rows.count_value(dtype))

    return _reduce(ctx, node, x, all_dims(x, dims), keepdim, _Formula("sum", dtype, after=divide))


@TABLE.lowers(aten.mean.default)
def mean_all(ctx: LoweringContext, node: Node, x: View, **_: object) -> View:
    """Mean of everything."""
    return mean_dims(ctx, node, x, None)


@TABLE.lowers(aten.prod.default)
def prod_all(ctx: LoweringContext, node: Node, x: View, **_: object) -> View:
    """Product of everything."""
    return _reduce(ctx, node, x, all_dims(x, None), False, _product(node))


@TABLE.lowers(aten.prod.dim_int)
def prod_dim(ctx: LoweringContext, node: Node, x: View, dim: int, keepdim: bool = False, **_: object) -> View:
    """Product over one dimension."""
    return _reduce(ctx, node, x, [dim], keepdim, _product(node))


def _product(node: Node) -> _Formula:
    """A product of truths asks whether all are true."""
    dtype = node.meta["val"].dtype
    return _Formula("all" if dtype is torch.bool else "prod", dtype)


def _extremum(kind: str) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, x: View, dims: object = None, keepdim: bool = False) -> View:
        return _reduce(ctx, node, x, all_dims(x, dims), keepdim, _Formula(kind, compute_dtype(x.dtype)))

    return rule


TABLE.add(aten.amax.default, _extremum("max"))
TABLE.add(aten.amin.default, _extremum("min"))
TABLE.add(aten.max.default, _extremum("max"))
TABLE.add(aten.min.default, _extremum("min"))


def _any_all(kind: str) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, x: View, dims: object = None, keepdim: bool = False) -> View:
        dtype = compute_dtype(x.dtype)
        given = [dims] if isinstance(dims, int) else dims
        if isinstance(given, list | tuple) and not given:  # no dimension, where ``None`` is all of them
            return ctx.pointwise(node, [x], lambda nest, v: nest.cast(v, DType.BOOL), dtype)
        formula = _Formula(kind, dtype, lambda nest, v: nest.cast(v, DType.BOOL))
        return _reduce(ctx, node, x, all_dims(x, given), keepdim, formula)

    return rule


for _name in ("any", "all"):
    for _overload in ("default", "dim", "dims"):
        TABLE.add(getattr(getattr(aten, _name), _overload), _any_all(_name))


def _arg(kind: str) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, x: View, dim: int | None = None, keepdim: bool = False) -> View:
        dims = list(range(len(x.sizes))) if dim is None else [dim]
        return _reduce(ctx, node, x, dims, keepdim, _Formula(kind, compute_dtype(x.dtype)))

    return rule


TABLE.add(aten.argmax.default, _arg("argmax"))
TABLE.add(aten.argmin.default, _arg("argmin"))


@TABLE.lowers(aten.hash_tensor.default)
def hash_tensor(
    ctx: LoweringContext, node: Node, x: View, dims: object = (), *, keepdim: bool = False, mode: int = 0
) -> View:
    """The exclusive or of all elements' bits, of floats as float64. Kernels write it as int64."""
    reduced = all_dims(x, dims)
    if mode != 0 or not all(x.sizes[dim].constant for dim in reduced):
        raise Fallback("eager refuses other hashes, and those of nothing")

    def before(nest: ViewBuilder, v: Value) -> Value:
        return nest.op("bitcast", v, to=DType.I64) if v.dtype is DType.F64 else v

    val = node.meta["val"]
    result = ctx.declare(node.name, val, dtype=torch.int64)
    formula = _Formula("xor", DType.F64 if x.dtype.is_floating_point else DType.I64, before)
    _reduce_into(ctx, node, result, x, reduced, keepdim, formula)
    return replace(result, dtype=val.dtype)


def _with_index(kind: str) -> Callable[..., NodeValue]:
    def rule(ctx: LoweringContext, node: Node, x: View, dim: int, keepdim: bool = False) -> NodeValue:
        values = ctx.declare(f"{node.name}_values", node.meta["val"][0])
        indices = ctx.declare(f"{node.name}_indices", node.meta["val"][1])
        rows = RowNest(ctx, node, values.buffer, x.sizes, [dim] if x.sizes else [])
        index = rows.stage()
        value = rows.nest.cast(rows.nest.load(x, index), compute_dtype(x.dtype))
        best, where = rows.nest.reduce(kind, value), rows.nest.reduce(f"arg{kind}", value)
        rows.nest.stage()
        rows.nest.store(values, rows.row(keepdim and bool(x.sizes)), best)
        rows.nest.store(indices, rows.row(keepdim and bool(x.sizes)), where)
        ctx.add(rows.nest)
        return [values, indices]

    return rule


TABLE.add(aten.max.dim, _with_index("max"))
TABLE.add(aten.min.dim, _with_index("min"))


def mean_and_squares(
    rows: RowNest, load: Callable[[tuple[Expr, ...]], Value], careful: bool = False, exact: bool = False
) -> tuple[Value, Value]:
    """A row's mean and its sum of squared distances from it, in two passes: as exact as eager's Welford.

    ``careful``: see Note [Means of long rows]. ``exact``: without the squares of what the mean of the first pass is
    off, for numbers that are added up in their own precision; equal ones have no variance.
    """
    nest = rows.nest
    if careful and rows.count.constant not in (0, 1):
        return _careful_mean_and_squares(rows, load)
    total = nest.reduce("sum", load(rows.stage()))
    nest.stage()
    mean = nest.op("div", total, rows.count_value(total.dtype))
    value = load(rows.stage())
    distance = nest.op("sub", value, mean)
    squares = nest.reduce("sum", nest.op("mul", distance, distance))
    rest = nest.reduce("sum", distance) if exact else None
    nest.stage()
    if rest is None:
        return mean, squares
    off = nest.op("div", rest, rows.count_value(rest.dtype))
    corrected = _about_mean(nest, squares, nest.op("mul", off, rest), 1e-6)
    finite = nest.op("lt", squares, nest.const(math.inf, squares.dtype))
    return nest.where(finite, nest.op("add", mean, off), mean), nest.where(finite, corrected, squares)


def _about_mean(nest: ViewBuilder, squares: Value, wrong: Value, rounding: float) -> Value:
    """Squares about a mean that is a little off, without ``wrong``, the squares of what it is off. ``rounding``: up to
    which part of them both sums may be rounded; what is left of less is that of equal numbers, nothing."""
    equal = nest.op("ge", wrong, nest.op("mul", squares, nest.const(1 - rounding, squares.dtype)))
    return nest.where(equal, nest.const(0, squares.dtype), nest.op("sub", squares, wrong))


def _careful_mean_and_squares(rows: RowNest, load: Callable[[tuple[Expr, ...]], Value]) -> tuple[Value, Value]:
    """Note [Means of long rows]

    Eager updates a mean with every element, so the mean of equal elements is that element, and no sum overflows. A sum
    of thousands is some units in the last place off, which a norm multiplies by 1/std. The second pass adds up the
    distances from the mean of the first, and their mean is what it is off; its square goes out of the squares, which
    of equal elements leaves nothing. Where the length of a row is known, all sums are of elements made smaller by a
    power of two, which changes no digit.
    """
    nest, count = rows.nest, rows.count.constant
    power = None if count is None else 0.5 ** math.ceil(math.log2(count))

    def mean_of(total: Value) -> Value:
        shrunk_count = None if count is None or power is None else nest.const(count * power, total.dtype)
        return nest.op("div", total, shrunk_count or rows.count_value(total.dtype))

    def shrunk(value: Value) -> Value:
        return value if power is None else nest.op("mul", value, nest.const(power, value.dtype))

    total = nest.reduce("sum", shrunk(load(rows.stage())))
    nest.stage()
    mean = mean_of(total)
    distance = nest.op("sub", load(rows.stage()), mean)
    squares = nest.reduce("sum", nest.op("mul", distance, distance))
    off = nest.reduce("sum", shrunk(distance))
    nest.stage()
    off = mean_of(off)
    wrong = nest.op("mul", nest.op("mul", off, rows.count_value(off.dtype)), off)
    infinite = nest.const(math.inf, off.dtype)  # what is not a number is not less than it
    squares = nest.where(nest.op("lt", wrong, infinite), _about_mean(nest, squares, wrong, 1e-4), squares)
    finite = nest.op("lt", nest.op("abs", off), infinite)
    return nest.where(finite, nest.op("add", mean, off), mean), squares


def _variance(root: bool, with_mean: bool) -> Callable[..., NodeValue]:
    def rule(
        ctx: LoweringContext,
        node: Node,
        x: View,
        dims: object = None,
        *,
        correction: int | float | None = None,
        keepdim: bool = False,
    ) -> NodeValue:
        if not x.dtype.is_floating_point or not isinstance(correction, int | float | None):
            raise Fallback("this variance is left to ATen")
        vals = node.meta["val"] if with_mean else (node.meta["val"],)
        results = [ctx.declare(f"{node.name}_{k}" if with_mean else node.name, val) for k, val in enumerate(vals)]
        rows = RowNest(ctx, node, results[0].buffer, x.sizes, all_dims(x, dims))
        nest, dtype = rows.nest, compute_dtype(x.dtype)
        if ctx.capabilities.careful_variance:  # as in eager mode: squares of single precision overflow
            dtype = DType.F64
        mean, squares = mean_and_squares(
            rows,
            lambda index: nest.cast(nest.load(x, index), dtype),
            exact=ctx.capabilities.careful_variance and x.dtype is torch.float64,
        )
        free = nest.op("sub", rows.count_value(dtype), nest.const(1 if correction is None else correction, dtype))
        spread = nest.op("div", squares, nest.op("maximum", free, nest.const(0, dtype)))
        nest.store(results[0], rows.row(keepdim), nest.op("sqrt", spread) if root else spread)
        if with_mean:
            nest.store(results[1], rows.row(keepdim), mean)
        ctx.add(nest)
        return list(results) if with_mean else results[0]

    return rule


TABLE.add(aten.var.correction, _variance(root=False, with_mean=False))
TABLE.add(aten.std.correction, _variance(root=True, with_mean=False))
TABLE.add(aten.var_mean.correction, _variance(root=False, with_mean=True))
TABLE.add(aten.std_mean.correction, _variance(root=True, with_mean=True))


@TABLE.lowers(aten.logsumexp.default)
def logsumexp(ctx: LoweringContext, node: Node, x: View, dims: object, keepdim: bool = False) -> View:
    """``max + log(sum(exp(x - max)))``, with an infinite maximum taken as 0."""
    if not x.dtype.is_floating_point:
        raise Fallback("logsumexp of integers is left to ATen")
    result = ctx.declare(node.name, node.meta["val"])
    rows = RowNest(ctx, node, result.buffer, x.sizes, all_dims(x, dims))
    nest, dtype = rows.nest, compute_dtype(x.dtype)
    top = nest.reduce("max", nest.cast(nest.load(x, rows.stage()), dtype))
    nest.stage()
    shift = nest.where(nest.op("isinf", top), nest.const(0, dtype), top)
    value = nest.cast(nest.load(x, rows.stage()), dtype)
    total = nest.reduce("sum", nest.op("exp", nest.op("sub", value, shift)))
    nest.stage()
    nest.store(result, rows.row(keepdim), nest.op("add", nest.op("log", total), shift))
    ctx.add(nest)
    return result


@TABLE.lowers(aten.linalg_vector_norm.default)
def vector_norm(
    ctx: LoweringContext,
    node: Node,
    x: View,
    order: object = 2,
    dims: object = None,
    keepdim: bool = False,
    **_: object,
) -> View:
    """Norms of every order."""
    dtype = compute_dtype(node.meta["val"].dtype)
    if not isinstance(order, int | float) or order != order:
        raise Fallback(f"the norm of order {order} is left to ATen")
    if order != 0 and product(x.sizes[dim] for dim in all_dims(x, dims)) == 1:
        order = 1  # of one element every norm is its absolute value, which no power overflows
    kind = "max" if order == math.inf else "min" if order == -math.inf else "sum"

    def before(nest: ViewBuilder, v: Value) -> Value:
        if order == 2:
            return nest.op("mul", v, v)
        if order == 0:
            return nest.cast(nest.op("ne", v, nest.const(0, v.dtype)), v.dtype)
        size = nest.op("abs", v)
        return size if order == 1 or kind != "sum" else nest.op("pow", size, nest.const(order, v.dtype))

    def after(rows: RowNest, total: Value) -> Value:
        nest = rows.nest
        if order == 2:
            return nest.op("sqrt", total)
        plain = order in (0, 1) or kind != "sum"
        return total if plain else nest.op("pow", total, nest.const(1.0 / order, total.dtype))

    return _reduce(ctx, node, x, all_dims(x, dims), keepdim, _Formula(kind, dtype, before, after))
