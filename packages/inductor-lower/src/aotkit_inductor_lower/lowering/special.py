"""Rarer elementwise functions. Those that ATen takes one element at a time are computed in float64, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import DType
from . import chebyshev as c
from .access import Value, ViewBuilder, broadcast_index
from .context import LoweringContext
from .pointwise import apply, rounded
from .promotion import compute_dtype, float_result, promote
from .registry import RuleTable, aten, prims
from .values import View

__all__ = ["TABLE"]

TABLE = RuleTable("special")
Formula = Callable[["_Doubles", Value], Value]


@TABLE.lowers(aten.linalg_cross.default)
def linalg_cross(ctx: LoweringContext, node: Node, a: View, b: View, *, dim: int = -1) -> View:
    """``a[i+1] b[i+2] - a[i+2] b[i+1]`` along ``dim``; eager's kernel rounds products of halves, and of other floats
    the second one only."""
    if a.dtype != b.dtype:
        raise Fallback("eager takes two vectors of one type")
    result = ctx.declare(node.name, node.meta["val"])
    nest = ctx.nest(result.buffer, node, result.sizes)
    dtype = compute_dtype(result.dtype)

    def element(x: View, step: int) -> Value:
        index = list(nest.index)
        index[dim] = (index[dim] + step) % 3
        return nest.cast(nest.load(x, broadcast_index(x.sizes, index)), dtype)

    def product(first: int, second: int) -> Value:
        return nest.round_to(apply(nest, "mul", element(a, first), element(b, second)), result.dtype)

    if result.dtype in (torch.float32, torch.float64):
        difference = nest.op("fma", element(a, 1), element(b, 2), nest.op("neg", product(2, 1)))
    else:
        difference = apply(nest, "sub", product(1, 2), product(2, 1))
    nest.store(result, nest.index, difference)
    ctx.add(nest)
    return result


@TABLE.lowers(aten.angle.default)
def angle(ctx: LoweringContext, node: Node, x: View) -> View:
    """Pi for what is below zero, else zero; nan stays."""

    def compute(nest: ViewBuilder, v: Value) -> Value:
        zero = nest.const(0.0, v.dtype)
        turned = nest.where(nest.op("lt", v, zero), nest.const(math.pi, v.dtype), zero)
        return nest.where(nest.op("isnan", v), v, turned)

    return ctx.pointwise(node, [x], compute, compute_dtype(float_result(x.dtype)))


# -- logarithms of which eager rounds each step in float16 ----------------------------------------------


def _stepwise(nest: ViewBuilder, dtype: torch.dtype) -> Callable[..., Value]:
    """An op whose result is rounded where ``dtype`` is float16 or bfloat16."""

    def op(name: str, *args: Value) -> Value:
        result = nest.op(name, *args)
        return nest.round_to(result, dtype) if dtype in (torch.float16, torch.bfloat16) else result

    return op


@TABLE.lowers(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
def xlogy(ctx: LoweringContext, node: Node, a: object, b: object) -> View:
    """``a * log(b)``: nan where ``b`` is, else 0 where ``a`` is 0."""
    return _times_logarithm(ctx, node, "log", a, b)


@TABLE.lowers(aten.special_xlog1py.default, aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar)
def xlog1py(ctx: LoweringContext, node: Node, a: object, b: object) -> View:
    """``a * log(1 + b)``, likewise."""
    return _times_logarithm(ctx, node, "log1p", a, b)


def _times_logarithm(ctx: LoweringContext, node: Node, logarithm: str, a: object, b: object) -> View:
    dtype = float_result(promote([a, b]))

    def compute(nest: ViewBuilder, x: Value, y: Value) -> Value:
        op, zero = _stepwise(nest, dtype), nest.const(0.0, x.dtype)
        x, y = rounded(nest, (x, y), (a, b), dtype)
        result = nest.where(nest.op("eq", x, zero), zero, op("mul", x, op(logarithm, y)))
        return nest.where(nest.op("isnan", y), y, result)

    return ctx.pointwise(node, [a, b], compute, compute_dtype(dtype))


@TABLE.lowers(aten.logit.default)
def logit(ctx: LoweringContext, node: Node, x: View, eps: float | None = None) -> View:
    """``log(x / (1 - x))``, of ``x`` kept at a distance from 0 and 1 where asked."""
    dtype = float_result(x.dtype)

    def compute(nest: ViewBuilder, v: Value) -> Value:
        op, one = _stepwise(nest, dtype), nest.const(1.0, v.dtype)
        if eps is not None:
            low = nest.round_to(nest.const(eps, v.dtype), dtype)
            high = op("sub", one, low)
            v = nest.where(nest.op("lt", v, low), low, nest.where(nest.op("gt", v, high), high, v))
        return nest.op("log", op("div", v, op("sub", one, v)))

    return ctx.pointwise(node, [x], compute, compute_dtype(dtype))


# -- in float64 ------------------------------------------------------------------------------------------


class _Doubles:
    """Writes formulas of float64 values; Python numbers among operands are constants."""

    def __init__(self, nest: ViewBuilder) -> None:
        self.nest = nest

    def value(self, number: Value | float) -> Value:
        """A value, or a constant."""
        return number if isinstance(number, Value) else self.nest.const(number, DType.F64)

    def op(self, name: str, *args: Value | float) -> Value:
        """An op of the table."""
        return self.nest.op(name, *map(self.value, args))

    def sum(self, *terms: Value | float) -> Value:
        """Added up from the left."""
        total = self.value(terms[0])
        for term in terms[1:]:
            total = self.op("add", total, term)
        return total

    def product(self, *factors: Value | float) -> Value:
        """Multiplied from the left."""
        total = self.value(factors[0])
        for factor in factors[1:]:
            total = self.op("mul", total, factor)
        return total

    def where(self, condition: Value, a: Value | float, b: Value | float) -> Value:
        """``a`` where the bool is true, else ``b``."""
        return self.nest.where(condition, self.value(a), self.value(b))

    def scaled(self, x: Value, factor: float, offset: float) -> Value:
        """``factor*x + offset``."""
        return self.op("fma", x, factor, offset)

    def polynomial(self, x: Value, *coefficients: float) -> Value:
        """From the lowest power on."""
        total = self.value(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            total = self.op("fma", total, x, coefficient)
        return total

    def series(self, coefficients: tuple[float, ...], t: Value) -> Value:
        """A Chebyshev series."""
        return c.series(self.nest, coefficients, t)


def _bessel_i(near: tuple[float, ...], far: tuple[float, ...], odd: bool) -> Formula:
    """``exp(-|x|) I(x)``."""

    def formula(d: _Doubles, x: Value) -> Value:
        size = d.op("abs", x)
        low = d.series(near, d.scaled(size, 0.25, -1.0))
        if odd:
            low = d.op("mul", low, size)
        high = d.series(far, d.op("sub", d.op("div", 16.0, size), 1.0))
        result = d.where(d.op("le", size, 8.0), low, d.op("div", high, d.op("sqrt", size)))
        return d.where(d.op("lt", x, 0.0), d.op("neg", result), result) if odd else result

    return formula


_i0e, _i1e = _bessel_i(c.I0_NEAR, c.I0_FAR, False), _bessel_i(c.I1_NEAR, c.I1_FAR, True)


def _unscaled(formula: Formula) -> Formula:
    return lambda d, x: d.op("mul", d.op("exp", d.op("abs", x)), formula(d, x))


def _bessel_k(order: int, scaled: bool) -> Formula:
    """``K(x)``, times ``exp(x)`` where ``scaled``: infinite at zero, nan below."""
    near, far = (c.K0_NEAR, c.K0_FAR) if order == 0 else (c.K1_NEAR, c.K1_FAR)
    other = _unscaled(_i0e if order == 0 else _i1e)

    def formula(d: _Doubles, x: Value) -> Value:
        smooth = d.series(near, d.op("fma", d.op("mul", x, x), 0.5, -1.0))
        logarithm = d.op("mul", d.op("log", d.op("mul", x, 0.5)), other(d, x))
        low = d.op("sub", smooth, logarithm) if order == 0 else d.op("add", logarithm, d.op("div", smooth, x))
        high = d.op("div", d.series(far, d.op("sub", d.op("div", 4.0, x), 1.0)), d.op("sqrt", x))
        if scaled:
            low = d.op("mul", low, d.op("exp", x))
        else:
            high = d.op("mul", high, d.op("exp", d.op("neg", x)))
        result = d.where(d.op("le", x, 2.0), low, high)
        result = d.where(d.op("eq", x, 0.0), math.inf, result)
        return d.where(d.op("lt", x, 0.0), math.nan, result)

    return formula


def _erfinv_ratio(d: _Doubles, w: Value) -> Value:
    """``erfinv(x) / x`` from ``w = -log(1 - x^2)``."""
    s = d.op("sqrt", w)
    near = d.series(c.ERFINV_NEAR, d.scaled(w, 0.32, -1.0))
    middle = d.series(c.ERFINV_MIDDLE, d.op("sub", s, 3.5))
    far = d.series(c.ERFINV_FAR, d.op("div", d.op("sub", s, 16.25), 11.75))
    return d.where(d.op("le", w, 6.25), near, d.where(d.op("le", s, 4.5), middle, far))


def _erfinv(d: _Doubles, x: Value) -> Value:
    inside = d.op("mul", d.op("sub", 1.0, x), d.op("add", 1.0, x))
    result = d.op("mul", x, _erfinv_ratio(d, d.op("neg", d.op("log", inside))))
    return d.where(d.op("eq", d.op("abs", x), 1.0), d.op("mul", x, math.inf), result)


def _ndtri(d: _Doubles, p: Value) -> Value:
    w = d.op("neg", d.op("log", d.product(4.0, p, d.op("sub", 1.0, p))))
    result = d.product(math.sqrt(2.0), d.scaled(p, 2.0, -1.0), _erfinv_ratio(d, w))
    result = d.where(d.op("eq", p, 0.0), -math.inf, result)
    return d.where(d.op("eq", p, 1.0), math.inf, result)


def _erfcx(d: _Doubles, x: Value) -> Value:
    size = d.op("abs", x)
    t = d.op("div", d.op("sub", size, 3.75), d.op("add", size, 3.75))
    t = d.where(d.op("isinf", size), 1.0, t)
    right = d.op("div", d.series(c.ERFCX, t), d.scaled(size, 2.0, 1.0))
    left = d.op("sub", d.product(2.0, d.op("exp", d.op("mul", x, x))), right)
    return d.where(d.op("lt", x, 0.0), left, right)


_SHIFT = 10  # asymptotic series are taken so far to the right


def _positive_digamma(d: _Doubles, x: Value) -> Value:
    far = d.op("add", x, float(_SHIFT))
    z = d.op("div", 1.0, d.op("mul", far, far))
    tail = d.polynomial(z, 1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
    start = d.op("sub", d.op("sub", d.op("log", far), d.op("div", 0.5, far)), d.op("mul", z, tail))
    steps = [d.op("div", 1.0, d.op("add", x, float(step))) for step in range(_SHIFT)]
    return d.op("sub", start, d.sum(*steps))


def _digamma(d: _Doubles, x: Value) -> Value:
    negative = d.op("lt", x, 0.0)
    right = _positive_digamma(d, d.where(negative, d.op("sub", 1.0, x), x))
    whole = d.op("trunc", x)
    turn = d.op("div", math.pi, d.op("tan", d.product(math.pi, d.op("sub", x, whole))))
    left = d.where(d.op("eq", x, whole), math.nan, d.op("sub", right, turn))
    pole = d.op("copysign", math.inf, d.op("neg", x))
    return d.where(d.op("eq", x, 0.0), pole, d.where(negative, left, right))


def _in_double(formula: Formula, halves: bool = True) -> Callable[..., View]:
    """``halves``: whether eager has the function for float16 and bfloat16."""

    def rule(ctx: LoweringContext, node: Node, x: View) -> View:
        if not halves and x.dtype in (torch.float16, torch.bfloat16):
            raise Fallback(f"eager has no {node.target} of float16 and bfloat16")
        return ctx.pointwise(node, [x], lambda nest, v: formula(_Doubles(nest), v), DType.F64)

    return rule


_FORMULAS: dict[str, Formula] = {
    "i0": _unscaled(_i0e),
    "special_i0e": _i0e,
    "special_i1": _unscaled(_i1e),
    "special_i1e": _i1e,
    "special_modified_bessel_i0": _unscaled(_i0e),
    "special_modified_bessel_i1": _unscaled(_i1e),
    "special_modified_bessel_k0": _bessel_k(0, scaled=False),
    "special_modified_bessel_k1": _bessel_k(1, scaled=False),
    "special_scaled_modified_bessel_k0": _bessel_k(0, scaled=True),
    "special_scaled_modified_bessel_k1": _bessel_k(1, scaled=True),
    "erfinv": _erfinv,
    "special_ndtri": _ndtri,
    "digamma": _digamma,
}
for _name, _formula in _FORMULAS.items():
    _halves = "modified_bessel" not in _name and _name != "special_ndtri"
    TABLE.add(getattr(aten, _name).default, _in_double(_formula, _halves))
TABLE.add(prims.erfcx.default, _in_double(_erfcx))


@TABLE.lowers(aten.polygamma.default)
def polygamma(ctx: LoweringContext, node: Node, order: int, x: View) -> View:
    """The digamma function; its derivatives are ATen's, whose float32 is far from exact below zero."""
    if order != 0:
        raise Fallback("derivatives of the digamma function are left to ATen")
    return _in_double(_digamma)(ctx, node, x)
