"""Elementwise arithmetic, comparison and logic, with eager's promotion and rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from .. import _torch_compat
from ..errors import Fallback
from ..ir import DType
from ..ops.scalar import OP_TABLE, expansion
from . import activations
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype, float_result, ir_dtype, promote, refuse_narrowing, refuse_overflow
from .registry import RuleTable, aten
from .values import FloatExpr, View

__all__ = ["TABLE", "rounded"]

TABLE = RuleTable("pointwise")
activations.register(TABLE)

# ATen name -> op of the table; integers are converted to the default float type first.
_UNARY_FLOAT: tuple[str, ...] = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "sin",
    "cos",
)
_UNARY_FLOAT += ("tan", "asin", "acos", "atan", "tanh", "asinh", "acosh", "atanh", "erf", "erfc")
_UNARY_FLOAT += ("sigmoid", "lgamma")
_UNARY_SAME = ("neg", "abs")
_ROUNDING = ("floor", "ceil", "trunc", "round")  # identities on integers
_BINARY_SAME = ("minimum", "maximum", "fmin", "fmax", "bitwise_and", "bitwise_or", "bitwise_xor")
_BINARY_FLOAT = ("atan2", "hypot", "copysign")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_BOOL_FORM = {"add": "logical_or", "mul": "logical_and"}


def apply(nest: ViewBuilder, op: str, *args: Value) -> Value:
    """One op of the table, or :class:`Fallback` if it does not take this type."""
    if args[-1].dtype is DType.BOOL:
        op = _BOOL_FORM.get(op, op)
    if args[-1].dtype not in OP_TABLE[op].domain:
        raise Fallback(f"{op} of {args[-1].dtype.value} is left to ATen")
    return nest.op(op, *args)


def _overload(name: str, overload: str = "default") -> object | None:
    packet = getattr(aten, name, None)
    return getattr(packet, overload, None) if packet is not None else None


def _add_all(names: Sequence[str], overloads: tuple[str, ...], make: Callable[[str], Callable[..., View]]) -> None:
    for name in names:
        for overload in overloads:
            found = _overload(name, overload)
            if found is not None:
                TABLE.add(found, make(name))


def _unary_float(op: str) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, x: View) -> View:
        dtype = compute_dtype(float_result(x.dtype))
        return ctx.pointwise(node, [x], lambda nest, v: apply(nest, op, v), dtype)

    return rule


def _unary_wide(op: str) -> Callable[..., View]:
    """In double precision: those of single precision overflow before their results do."""

    def rule(ctx: LoweringContext, node: Node, x: View) -> View:
        return ctx.pointwise(node, [x], lambda nest, v: apply(nest, op, v), DType.F64)

    return rule


def _unary_same(op: str) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, x: View) -> View:
        return ctx.pointwise(node, [x], lambda nest, v: apply(nest, op, v))

    return rule


def _rounding(op: str) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, x: View) -> View:
        if not x.dtype.is_floating_point:
            return ctx.pointwise(node, [x], lambda nest, v: v)
        return ctx.pointwise(node, [x], lambda nest, v: apply(nest, op, v))

    return rule


def _binary(op: str, to_float: bool = False, exact: tuple[int, ...] = ()) -> Callable[..., View]:
    """``exact``: the positions where eager takes a number as it is, see Note [Numbers beside float16]."""

    def rule(ctx: LoweringContext, node: Node, a: object, b: object) -> View:
        dtype = promote([a, b])
        if to_float:
            dtype = float_result(dtype)

        def compute(nest: ViewBuilder, *values: Value) -> Value:
            return apply(nest, op, *rounded(nest, values, (a, b), dtype, exact))

        return ctx.pointwise(node, [a, b], compute, compute_dtype(dtype))

    return rule


def rounded(
    nest: ViewBuilder,
    values: Sequence[Value],
    operands: Sequence[object],
    dtype: torch.dtype,
    exact: tuple[int, ...] = (),
) -> list[Value]:
    """The operands as eager reads them where the common type is float16 or bfloat16.

    Note [Numbers beside float16]
        Eager converts every operand to the common type before it computes, so a number or an integer beside float16
        is rounded to it: ``x == 0.1`` is true for the float16 next to 0.1. Only products and divisors that are numbers
        (or tensors without dimensions) are taken in float32.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return list(values)
    result = []
    for position, (value, operand) in enumerate(zip(values, operands, strict=True)):
        own = operand.dtype if isinstance(operand, View) else None
        scalar = not isinstance(operand, View) or not operand.sizes
        keep = own is dtype or (position in exact and scalar)
        result.append(value if keep else nest.round_to(value, dtype))
    return result


def _reflected(op: str) -> Callable[..., View]:
    rule = _binary(op)
    return lambda ctx, node, a, b: rule(ctx, node, b, a)


def _logical(op: str) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, *operands: View) -> View:
        return ctx.pointwise(
            node,
            operands,
            lambda nest, *vs: nest.op(op, *(nest.cast(v, DType.BOOL) for v in vs)),
            compute_dtype(promote(operands)),
        )

    return rule


def _test(op: str) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, x: View) -> View:
        if x.dtype.is_floating_point:
            return ctx.pointwise(node, [x], lambda nest, v: apply(nest, op, v))
        if op == "signbit" and x.dtype.is_signed:
            return ctx.pointwise(node, [x], lambda nest, v: nest.op("lt", v, nest.const(0, v.dtype)))
        return ctx.pointwise(node, [x], lambda nest, v: nest.const(False, DType.BOOL))

    return rule


_BOTH = ("Tensor", "Scalar")
_add_all(_UNARY_FLOAT, ("default",), _unary_float)
_add_all(("sinh", "cosh"), ("default",), _unary_wide)
_add_all(_UNARY_SAME, ("default",), _unary_same)
_add_all(_ROUNDING, ("default",), _rounding)
_add_all(_BINARY_SAME, ("default", "Tensor", "Scalar", "Scalar_Tensor"), _binary)
_add_all(_BINARY_FLOAT, ("default", "Tensor", "Scalar"), lambda op: _binary(op, to_float=True))
_add_all(_COMPARE, _BOTH, _binary)
_add_all(["logical_and", "logical_or", "logical_xor", "logical_not"], ("default",), _logical)
_add_all(["isnan", "isinf", "signbit"], ("default",), _test)
for _name, _op in (("bitwise_left_shift", "shl"), ("bitwise_right_shift", "shr")):
    for _kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor"):
        TABLE.add(_overload(_name, _kind), _binary(_op))
for _kind in ("Tensor", "Scalar"):
    TABLE.add(_overload("__lshift__", _kind), _binary("shl"))
    TABLE.add(_overload("__rshift__", _kind), _binary("shr"))
    TABLE.add(_overload("remainder", _kind), _binary("mod"))
    TABLE.add(_overload("fmod", _kind), _binary("fmod"))
    TABLE.add(_overload("mul", _kind), _binary("mul", exact=(0, 1)))
TABLE.add(aten.bitwise_not.default, _unary_same("bitwise_not"))
TABLE.add(aten.remainder.Scalar_Tensor, _binary("mod"))


@TABLE.lowers(aten.add.Tensor, aten.add.Scalar)
def add(ctx: LoweringContext, node: Node, a: object, b: object, alpha: object = 1) -> View:
    """``a + alpha*b``; eager rounds that once where ``alpha`` is not 1."""
    if alpha == 1:
        return _binary("add")(ctx, node, a, b)
    return _add_scaled(ctx, node, a, b, alpha, 1)


@TABLE.lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: LoweringContext, node: Node, a: object, b: object, alpha: object = 1) -> View:
    """``a - alpha*b``."""
    if alpha == 1:
        return _binary("sub")(ctx, node, a, b)
    return _add_scaled(ctx, node, a, b, alpha, -1)


@TABLE.lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: LoweringContext, node: Node, a: object, b: object, alpha: object = 1) -> View:
    """``b - alpha*a``."""
    return sub(ctx, node, b, a, alpha)


def _add_scaled(ctx: LoweringContext, node: Node, a: object, b: object, alpha: object, sign: int) -> View:
    dtype = promote([a, b])

    def compute(nest: ViewBuilder, *values: Value) -> Value:
        x, y = rounded(nest, values, (a, b), dtype)
        return _scaled(nest, x, y, alpha, sign, dtype)

    return ctx.pointwise(node, [a, b], compute, compute_dtype(dtype))


def _scaled(nest: ViewBuilder, x: Value, y: Value, alpha: object, sign: int, dtype: torch.dtype) -> Value:
    scale = nest.scalar(alpha, x.dtype)
    if sign < 0:
        scale = nest.const(-alpha, x.dtype) if isinstance(alpha, int | float) else apply(nest, "neg", scale)
    (scale,) = rounded(nest, [scale], [alpha], dtype)
    if x.dtype in (DType.F32, DType.F64):
        return nest.op("fma", y, scale, x)
    return apply(nest, "add", x, apply(nest, "mul", y, scale))


@TABLE.lowers(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(ctx: LoweringContext, node: Node, a: object, b: object) -> View:
    """True division: integers become floats."""
    return _binary("div", to_float=True, exact=(1,))(ctx, node, a, b)


@TABLE.lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: LoweringContext, node: Node, a: object, b: object, rounding_mode: str | None = None) -> View:
    """Division rounded towards zero or down."""
    if rounding_mode is None:
        return div(ctx, node, a, b)
    if isinstance(b, View) and b.sizes and promote([a, b]) in (torch.float16, torch.bfloat16):
        return _half_div_mode(ctx, node, a, b, rounding_mode)
    return _binary("truncdiv" if rounding_mode == "trunc" else "floordiv", exact=(1,))(ctx, node, a, b)


def _half_div_mode(ctx: LoweringContext, node: Node, a: object, b: View, rounding_mode: str) -> View:
    """Rounded division of float16 or bfloat16, with a rounding to it after each of eager's steps."""
    dtype = promote([a, b])
    body = expansion("truncdiv" if rounding_mode == "trunc" else "floordiv", DType.F32)
    assert body is not None

    def compute(nest: ViewBuilder, *values: Value) -> Value:
        return body(_Steps(nest, dtype), *rounded(nest, values, (a, b), dtype))  # type: ignore[no-any-return]

    return ctx.pointwise(node, [a, b], compute, compute_dtype(dtype))


class _Steps:
    """Writes an op's expansion step by step, as eager computes it: what sums, products and quotients give is rounded to
    ``common`` before it is used."""

    __slots__ = ("common", "exact", "nest")

    def __init__(self, nest: ViewBuilder, common: torch.dtype) -> None:
        self.nest, self.common = nest, common
        self.exact: set[str] = set()  # values that are not rounded yet

    def __call__(self, op: str, *args: Value | float) -> Value:
        types = [a.dtype for a in args if isinstance(a, Value) and a.dtype is not DType.BOOL]  # none: a == b
        values = [self._used(a) if isinstance(a, Value) else self.nest.const(a, types[0]) for a in args]
        result = self.nest.op(op, *values)
        if op in ("add", "sub", "mul", "div"):
            self.exact.add(result.name)
        return result

    def _used(self, value: Value) -> Value:
        return rounded(self.nest, [value], [None], self.common)[0] if value.name in self.exact else value


@TABLE.lowers(aten.floor_divide.default)
def floor_divide(ctx: LoweringContext, node: Node, a: object, b: object) -> View:
    """Division rounded down."""
    return div_mode(ctx, node, a, b, "floor")


@TABLE.lowers(aten.nextafter.default)
def nextafter(ctx: LoweringContext, node: Node, a: View, b: View) -> View:
    """The neighbour of ``a`` towards ``b`` in their own type."""
    if promote([a, b]) in (torch.float16, torch.bfloat16):
        return _half_nextafter(ctx, node, a, b)
    return _binary("nextafter", to_float=True)(ctx, node, a, b)


def _half_nextafter(ctx: LoweringContext, node: Node, a: View, b: View) -> View:
    """The neighbouring bit pattern."""
    half = ir_dtype(promote([a, b]))

    def compute(nest: ViewBuilder, x: Value, y: Value) -> Value:
        wide_x, wide_y = nest.cast(x, DType.F32), nest.cast(y, DType.F32)
        zero, one = nest.const(0, DType.I16), nest.const(1, DType.I16)
        bits = nest.op("bitcast", x, to=DType.I16)
        # Patterns of positive numbers grow with them, of negative ones with their size.
        up = nest.op("eq", nest.op("lt", wide_x, wide_y), nest.op("ge", bits, zero))
        moved = nest.where(up, nest.op("add", bits, one), nest.op("sub", bits, one))
        lowest = nest.const(-32768, DType.I16)
        least = nest.where(nest.op("signbit", wide_y), nest.op("add", lowest, one), one)
        moved = nest.where(nest.op("eq", wide_x, nest.const(0.0, DType.F32)), least, moved)
        result = nest.op("bitcast", moved, to=half)
        result = nest.where(nest.op("eq", wide_x, wide_y), y, result)
        nan = nest.op("logical_or", nest.op("isnan", wide_x), nest.op("isnan", wide_y))
        return nest.where(nan, nest.const(math.nan, half), result)

    return ctx.pointwise(node, [a, b], compute, half)


@TABLE.lowers(aten.special_spherical_bessel_j0.default)
def spherical_bessel_j0(ctx: LoweringContext, node: Node, x: View) -> View:
    """``sin(x) / x``; of integers as of floats."""
    if x.dtype in (torch.float16, torch.bfloat16):
        raise Fallback("eager has no spherical Bessel function of float16 and bfloat16")
    return _unary_float("spherical_bessel_j0")(ctx, node, x)


@TABLE.lowers(aten.sign.default)
def sign(ctx: LoweringContext, node: Node, x: View) -> View:
    """-1, 0 or 1; of bools the value itself."""
    if x.dtype is torch.bool:
        return ctx.pointwise(node, [x], lambda nest, v: v)
    return _unary_same("sign")(ctx, node, x)


@TABLE.lowers(aten.square.default)
def square(ctx: LoweringContext, node: Node, x: View) -> View:
    """``x*x``."""
    return ctx.pointwise(node, [x], lambda nest, v: apply(nest, "mul", v, v))


@TABLE.lowers(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: LoweringContext, node: Node, x: View, exponent: object) -> View:
    """Powers; the exponents that eager computes by multiplication or roots likewise. Eager rounds between those
    multiplications of bfloat16, and has them for float16 only where no rounding tells."""
    common = promote([x, exponent])
    dtype = compute_dtype(common)
    refuse_overflow(common, exponent)

    def compute(nest: ViewBuilder, v: Value) -> Value:
        (v,) = rounded(nest, [v], [x], common)
        if isinstance(exponent, int | float):
            found = _simple_power(nest, v, exponent, common)
            if found is not None:
                return found
        return apply(nest, "pow", v, *rounded(nest, [nest.scalar(exponent, dtype)], [exponent], common))

    if isinstance(exponent, int) and exponent < 0 and dtype not in (DType.F32, DType.F64):
        raise Fallback("eager refuses negative integer powers of integers")
    return ctx.pointwise(node, [x], compute, dtype)


def _simple_power(nest: ViewBuilder, v: Value, exponent: float, common: torch.dtype) -> Value | None:
    """The powers that eager has no logarithm for; of float16 where no rounding tells."""
    if v.dtype not in (DType.F32, DType.F64):
        return apply(nest, "mul", v, v) if exponent == 2 else None
    if common is torch.float16 and exponent not in (1, 2):
        return None
    if exponent == 1:
        return v
    if abs(exponent) == 0.5:  # also of -0.0 and -inf, where this is no power
        return nest.op("sqrt" if exponent > 0 else "rsqrt", v)
    body = expansion("pow", v.dtype, (None, exponent))
    return body(_Steps(nest, common), v, v) if body is not None else None


TABLE.add(aten.pow.Tensor_Tensor, _binary("pow"))
TABLE.add(aten.pow.Scalar, _binary("pow"))


@TABLE.lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(ctx: LoweringContext, node: Node, condition: View, a: object, b: object) -> View:
    """Select; float16 and bfloat16 are selected as they are, without a conversion."""
    refuse_overflow(node.meta["val"].dtype, a, b)
    dtype = compute_dtype(node.meta["val"].dtype)

    def compute(nest: ViewBuilder, c: Value) -> Value:
        return nest.where(nest.cast(c, DType.BOOL), _as(ctx, nest, a, dtype), _as(ctx, nest, b, dtype))

    return ctx.pointwise(node, [condition], compute, compute_dtype(condition.dtype))


def _as(ctx: LoweringContext, nest: ViewBuilder, operand: object, dtype: DType) -> Value:
    return ctx.operand(nest, operand, dtype)


@TABLE.lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: LoweringContext, node: Node, x: View, mask: View, value: object) -> View:
    """``value`` where the mask is true."""
    refuse_narrowing(x.dtype, value)
    return where(ctx, node, mask, value, x)


@TABLE.lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(ctx: LoweringContext, node: Node, x: View, low: object = None, high: object = None) -> View:
    """``min(max(x, low), high)``; nan of any operand comes through, of a lone number where eager's does."""
    bounds = [bound for bound in (low, high) if bound is not None]
    operands = [x, *bounds]
    lone = len(bounds) == 1 and not isinstance(bounds[0], View)
    nan_counts = not lone or _torch_compat.lone_nan_bound_counts()
    ignored = bounds[0] != bounds[0] and not nan_counts

    def compute(nest: ViewBuilder, v: Value, *given: Value) -> Value:
        if ignored:
            return v
        rest = list(given)
        if low is not None:
            v = _bounded(nest, "maximum", v, rest.pop(0), low, nan_counts)
        if high is not None:
            v = _bounded(nest, "minimum", v, rest.pop(0), high, nan_counts)
        return v

    return ctx.pointwise(node, operands, compute)


def _bounded(nest: ViewBuilder, op: str, v: Value, bound: Value, given: object, nan_counts: bool = True) -> Value:
    """``maximum`` or ``minimum``; by comparison where the bound is a number, so that -0.0 is kept as by eager.
    ``nan_counts``: a number that the graph learns when it runs gives nan if it is that."""
    if isinstance(given, View) or given != given or v.dtype not in (DType.F32, DType.F64):
        return apply(nest, op, v, bound)
    result = nest.where(nest.op("lt" if op == "maximum" else "gt", v, bound), bound, v)
    late = isinstance(given, FloatExpr) and nan_counts
    return nest.where(nest.op("isnan", bound), bound, result) if late else result


def _one_bound(op: str) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, x: View, bound: object) -> View:
        return ctx.pointwise(node, [x, bound], lambda nest, v, b: _bounded(nest, op, v, b, bound))

    return rule


for _name, _op in (("clamp_min", "maximum"), ("clamp_max", "minimum")):
    for _kind in ("default", "Tensor"):
        TABLE.add(_overload(_name, _kind), _one_bound(_op))


@TABLE.lowers(aten.logaddexp.default)
def logaddexp(ctx: LoweringContext, node: Node, a: View, b: View) -> View:
    """``log(exp(a) + exp(b))`` from the larger one; equal infinities stay."""

    def compute(nest: ViewBuilder, x: Value, y: Value) -> Value:
        top = nest.op("maximum", x, y)
        low = nest.op("neg", nest.op("abs", nest.op("sub", x, y)))
        result = nest.op("add", top, nest.op("log1p", nest.op("exp", low)))
        infinite = nest.op("logical_and", nest.op("isinf", x), nest.op("eq", x, y))
        return nest.where(infinite, x, result)

    return ctx.pointwise(node, [a, b], compute, compute_dtype(float_result(promote([a, b]))))


@TABLE.lowers(aten.isfinite.default)
def isfinite(ctx: LoweringContext, node: Node, x: View) -> View:
    """Neither infinite nor nan."""

    def compute(nest: ViewBuilder, v: Value) -> Value:
        if v.dtype not in (DType.F32, DType.F64):
            return nest.const(True, DType.BOOL)
        return nest.op("lt", nest.op("abs", v), nest.const(math.inf, v.dtype))

    return ctx.pointwise(node, [x], compute)


@TABLE.lowers(aten.round.decimals)
def round_decimals(ctx: LoweringContext, node: Node, x: View, *, decimals: int = 0) -> View:
    """Rounded after scaling by a power of ten, in the type that eager computes in."""
    if not x.dtype.is_floating_point:
        raise Fallback("rounding integers to decimals is left to ATen")

    def compute(nest: ViewBuilder, v: Value) -> Value:
        if decimals == 0:
            return apply(nest, "round", v)
        scale, back = ("mul", "div") if decimals > 0 else ("div", "mul")
        power = nest.const(10.0 ** abs(decimals), v.dtype)
        return apply(nest, back, apply(nest, "round", apply(nest, scale, v, power)), power)

    return ctx.pointwise(node, [x], compute)
