"""Activation functions and their derivatives as one scalar body each: f32 inside, one rounding at the end.

Kept whole rather than decomposed: fewer graph nodes to trace and schedule, and the rounding of eager's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from ..errors import Fallback
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import promote, refuse_overflow
from .registry import RuleTable, aten
from .values import View

__all__ = ["register"]

_SQRT1_2 = math.sqrt(0.5)
_2_SQRTPI = 2 / math.sqrt(math.pi)
_TANH_BETA = math.sqrt(2.0) * _2_SQRTPI * 0.5
_TANH_KAPPA = 0.044715
_SIXTH = 0.1666666716337204  # to single precision, for doubles too


class _Math:
    """Operators on values of one nest, so that formulas read as formulas."""

    __slots__ = ("nest",)

    def __init__(self, nest: ViewBuilder) -> None:
        self.nest = nest

    def __call__(self, op: str, *args: Value | float) -> Value:
        dtype = next(a.dtype for a in args if isinstance(a, Value))
        return self.nest.op(op, *(a if isinstance(a, Value) else self.nest.const(a, dtype) for a in args))

    def where(self, condition: Value, a: Value | float, b: Value | float) -> Value:
        dtype = next(v.dtype for v in (a, b) if isinstance(v, Value))
        parts = [v if isinstance(v, Value) else self.nest.const(v, dtype) for v in (a, b)]
        return self.nest.where(condition, *parts)


def _relu(m: _Math, x: Value) -> Value:
    return m.where(m("lt", x, 0.0), 0.0, x)  # -0.0 and nan stay


def _threshold_backward(m: _Math, grad: Value, x: Value, threshold: float) -> Value:
    return m.where(m("le", x, threshold), 0.0, grad)


def _gelu(m: _Math, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        cube = m("mul", m("mul", x, x), x)
        inner = m("mul", m("add", x, m("mul", cube, _TANH_KAPPA)), _TANH_BETA)
        return m("mul", m("mul", x, 0.5), m("add", m("tanh", inner), 1.0))
    return m("mul", m("mul", x, 0.5), m("add", m("erf", m("mul", x, _SQRT1_2)), 1.0))


def _gelu_backward(m: _Math, grad: Value, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        square = m("mul", x, x)
        inner = m("mul", m("add", x, m("mul", m("mul", square, x), _TANH_KAPPA)), _TANH_BETA)
        t = m("tanh", inner)
        left = m("mul", x, 0.5)
        inner_slope = m("mul", m("add", m("mul", square, 3 * _TANH_KAPPA), 1.0), _TANH_BETA)
        tanh_slope = m("sub", 1.0, m("mul", t, t))
        right_slope = m("mul", m("mul", left, tanh_slope), inner_slope)
        return m("mul", grad, m("add", m("mul", m("add", t, 1.0), 0.5), right_slope))
    cdf = m("mul", m("add", m("erf", m("mul", x, _SQRT1_2)), 1.0), 0.5)
    pdf = m("mul", m("exp", m("mul", m("mul", x, x), -0.5)), _2_SQRTPI * _SQRT1_2 * 0.5)
    return m("mul", grad, m("add", cdf, m("mul", x, pdf)))


def _silu(m: _Math, x: Value) -> Value:
    return m("div", x, m("add", m("exp", m("neg", x)), 1.0))


def _silu_backward(m: _Math, grad: Value, x: Value) -> Value:
    s = m("div", 1.0, m("add", m("exp", m("neg", x)), 1.0))
    return m("mul", m("mul", grad, s), m("add", m("mul", x, m("sub", 1.0, s)), 1.0))


def _sigmoid_backward(m: _Math, grad: Value, y: Value) -> Value:
    return m("mul", m("mul", grad, m("sub", 1.0, y)), y)


def _tanh_backward(m: _Math, grad: Value, y: Value) -> Value:
    return m("mul", grad, m("sub", 1.0, m("mul", y, y)))


def _leaky_relu(m: _Math, x: Value, slope: float = 0.01) -> Value:
    return m.where(m("gt", x, 0.0), x, m("mul", x, slope))


def _leaky_relu_backward(m: _Math, grad: Value, x: Value, slope: float, _is_result: bool) -> Value:
    return m.where(m("gt", x, 0.0), grad, m("mul", grad, slope))


def _hardtanh(m: _Math, x: Value, low: float = -1.0, high: float = 1.0) -> Value:
    raised = m.where(m("lt", x, low), low, x)
    return m.where(m("gt", raised, high), high, raised)  # comparisons let nan and -0.0 through


def _hardtanh_backward(m: _Math, grad: Value, x: Value, low: float, high: float) -> Value:
    inside = m("logical_and", m("gt", x, low), m("lt", x, high))
    return m.where(inside, grad, 0.0)  # none at nan, as in eager's vectors


def _hardsigmoid(m: _Math, x: Value) -> Value:
    return m("div", m("minimum", m("maximum", m("add", x, 3.0), 0.0), 6.0), 6.0)


def _hardsigmoid_backward(m: _Math, grad: Value, x: Value) -> Value:
    inside = m("logical_and", m("gt", x, -3.0), m("lt", x, 3.0))
    return m.where(inside, m("mul", grad, _SIXTH), 0.0)


def _hardswish(m: _Math, x: Value) -> Value:
    return m("div", m("mul", x, m("minimum", m("maximum", m("add", x, 3.0), 0.0), 6.0)), 6.0)


def _hardswish_backward(m: _Math, grad: Value, x: Value) -> Value:
    middle = m("mul", grad, m("add", m("div", x, 3.0), 0.5))
    return m.where(m("le", x, -3.0), 0.0, m.where(m("ge", x, 3.0), grad, middle))


def _softplus(m: _Math, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    scaled = m("mul", x, beta)
    return m.where(m("gt", scaled, threshold), x, m("div", m("log1p", m("exp", scaled)), beta))


def _softplus_backward(m: _Math, grad: Value, x: Value, beta: float, threshold: float) -> Value:
    scaled = m("mul", x, beta)
    z = m("exp", scaled)
    return m.where(m("gt", scaled, threshold), grad, m("div", m("mul", grad, z), m("add", z, 1.0)))


def _elu(m: _Math, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    negative = m("mul", m("expm1", m("mul", x, input_scale)), alpha * scale)
    return m.where(m("lt", x, 0.0), negative, m("mul", x, scale))


def _elu_backward(
    m: _Math, grad: Value, x: Value, alpha: float, scale: float, input_scale: float, of_result: bool
) -> Value:
    negative = m("mul", grad, input_scale)
    if of_result:
        negative = m("mul", negative, m("add", x, alpha * scale))
    else:  # in eager's order, in which a huge gradient times the exponential's 0 is nan
        negative = m("mul", m("mul", negative, alpha * scale), m("exp", m("mul", x, input_scale)))
    return m.where(m("gt", x, 0.0), m("mul", grad, scale), negative)


def _mish(m: _Math, x: Value) -> Value:
    return m("mul", x, m("tanh", m("log1p", m("exp", x))))


def _log_sigmoid_forward(m: _Math, x: Value) -> Value:
    return m("sub", m("minimum", x, 0.0), m("log1p", m("exp", m("neg", m("abs", x)))))


def _mse_loss_backward_terms(m: _Math, grad: Value, x: Value, y: Value) -> Value:
    return m("mul", m("sub", x, y), grad)


def _shrink_backward(m: _Math, grad: Value, x: Value, threshold: Value | float) -> Value:
    return m.where(m("gt", m("abs", x), threshold), grad, 0.0)


def _softshrink(m: _Math, x: Value, threshold: float = 0.5) -> Value:
    inside = m.where(m("isnan", x), x, 0.0)
    below = m.where(m("lt", x, -threshold), m("add", x, threshold), inside)
    return m.where(m("gt", x, threshold), m("sub", x, threshold), below)


# (ATen overload name, number of tensor operands, formula)
_FORMULAS: tuple[tuple[str, int, Callable[..., Value]], ...] = (
    ("relu.default", 1, _relu),
    ("threshold_backward.default", 2, _threshold_backward),
    ("gelu.default", 1, _gelu),
    ("gelu_backward.default", 2, _gelu_backward),
    ("silu.default", 1, _silu),
    ("silu_backward.default", 2, _silu_backward),
    ("sigmoid_backward.default", 2, _sigmoid_backward),
    ("tanh_backward.default", 2, _tanh_backward),
    ("leaky_relu.default", 1, _leaky_relu),
    ("leaky_relu_backward.default", 2, _leaky_relu_backward),
    ("hardtanh.default", 1, _hardtanh),
    ("hardtanh_backward.default", 2, _hardtanh_backward),
    ("hardsigmoid.default", 1, _hardsigmoid),
    ("hardsigmoid_backward.default", 2, _hardsigmoid_backward),
    ("hardswish.default", 1, _hardswish),
    ("hardswish_backward.default", 2, _hardswish_backward),
    ("softplus.default", 1, _softplus),
    ("softplus_backward.default", 2, _softplus_backward),
    ("elu.default", 1, _elu),
    ("elu_backward.default", 2, _elu_backward),
    ("mish.default", 1, _mish),
    ("softshrink.default", 1, _softshrink),
    ("softshrink_backward.default", 2, _shrink_backward),
    ("hardshrink_backward.default", 2, _shrink_backward),
)


def _rule(count: int, formula: Callable[..., Value]) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, *args: object, **kwargs: object) -> View:
        tensors, numbers = args[:count], args[count:]
        if formula is _elu_backward:  # its second tensor is the last argument
            tensors, numbers = (args[0], args[-1]), args[1:-1]
        if not all(isinstance(t, View) and t.dtype.is_floating_point for t in tensors):
            if formula is _relu and isinstance(args[0], View):
                return ctx.pointwise(node, [args[0], 0], lambda nest, v, zero: nest.op("maximum", v, zero))
            raise Fallback("activations of integers are left to ATen")
        plain = [n for n in numbers if isinstance(n, int | float)]
        if len(plain) != len(numbers):
            raise Fallback("activation parameters that are not plain numbers are left to ATen")
        dtype = promote(tensors)
        refuse_overflow(dtype if formula is _hardtanh or dtype is torch.float64 else torch.float32, *plain)

        def compute(nest: ViewBuilder, *values: Value) -> Value:
            given: list[Value | float] = [*plain]
            if formula is _shrink_backward:  # eager compares in the tensors' own type
                given = [nest.round_to(nest.const(n, values[1].dtype), dtype) for n in plain]
            return formula(_Math(nest), *values, *given, **kwargs)

        return ctx.pointwise(node, tensors, compute)

    return rule


def register(table: RuleTable) -> None:
    """Enter the activations into ``table``."""
    for name, count, formula in _FORMULAS:
        packet, overload = name.split(".")
        table.add(getattr(getattr(aten, packet), overload), _rule(count, formula))
