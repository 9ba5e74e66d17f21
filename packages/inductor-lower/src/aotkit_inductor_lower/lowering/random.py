"""Random ops: ATen calls in program order, which keeps eager's bits, or with ``rng="fast"`` numbers that kernels make.

Note [Generated random numbers]
    Number ``i`` of an op is ``mix(seed + i * golden)``: the generator SplitMix64 (Steele, Lea, Flood: Fast Splittable
    Pseudorandom Number Generators, 2014; the constants are Stafford's "mix 13"), entered anywhere. It needs no state,
    so a kernel makes each number where it is used, and neither threads nor layouts change it. The seeds of a graph come
    from the device's generator in one call where the first of its random ops stands: ``manual_seed`` makes all of them
    reproducible, and two calls differ. A float takes as many of the upper bits as its type has digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import Arg, DType, ExternCall, Literal
from ..symbolic import to_expr
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype
from .registry import RuleTable, aten
from .values import NodeValue, View

__all__ = ["TABLE"]

TABLE = RuleTable("random")

_GOLDEN = 0x9E3779B97F4A7C15
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
_MOST_INTEGERS = 1 << 31


def _bits(nest: ViewBuilder, seeds: View, position: int) -> Value:
    """64 random bits for the element at the nest's index. The nest's loops must be the result's."""
    number = nest.index_value(to_expr(0))
    if nest.index:
        flat = to_expr(0)
        for extent, index in zip(nest.sizes, nest.index, strict=True):
            flat = flat * extent + index
        number = nest.index_value(flat)
    state = nest.op("mul", number, nest.const(_GOLDEN, DType.I64))
    state = nest.op("add", state, nest.load(seeds, (to_expr(position),)))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
        state = nest.op("bitwise_xor", state, _upper(nest, state, 64 - shift))
        if factor is not None:
            state = nest.op("mul", state, nest.const(factor, DType.I64))
    return state


def _upper(nest: ViewBuilder, bits: Value, count: int) -> Value:
    """The ``count`` upper bits as a number that is not negative."""
    shifted = nest.op("shr", bits, nest.const(64 - count, DType.I64))
    return nest.op("bitwise_and", shifted, nest.const((1 << count) - 1, DType.I64))


def _share(nest: ViewBuilder, bits: Value, digits: int, *, middle: bool = False) -> Value:
    """``bits`` as a number in [0, 1); ``middle``: the middle of its interval, which is neither 0 nor 1."""
    dtype = DType.F64 if digits == 53 else DType.F32
    digits -= middle  # one digit for the half
    value = nest.cast(_upper(nest, bits, digits), dtype)
    if middle:
        value = nest.op("add", value, nest.const(0.5, dtype))
    return nest.op("mul", value, nest.const(2.0**-digits, dtype))


def _first_result(node: Node) -> torch.Tensor:
    val = node.meta["val"]
    result = val[0] if isinstance(val, list | tuple) else val
    assert isinstance(result, torch.Tensor)
    return result


class _Draws:
    """What a rule draws for the element that its kernel computes."""

    def __init__(self, ctx: LoweringContext, node: Node) -> None:
        self.seeds, self.position = _seeds(ctx, node)
        self.digits = _DIGITS.get(_first_result(node).dtype, 24)
        self.dtype = DType.F64 if self.digits == 53 else DType.F32

    def bits(self, nest: ViewBuilder, second: bool = False) -> Value:
        return _bits(nest, self.seeds, self.position + second)

    def uniform(self, nest: ViewBuilder) -> Value:
        """In [0, 1), also when it is rounded to the result's type."""
        return _share(nest, self.bits(nest), self.digits)

    def below(self, nest: ViewBuilder, probability: float) -> Value:
        """True with this probability, to 24 digits at least."""
        share = _share(nest, self.bits(nest), max(self.digits, 24))
        return nest.op("lt", share, nest.const(probability, self.dtype))

    def normal(self, nest: ViewBuilder) -> Value:
        """By Box and Muller: a radius and an angle."""
        digits = max(self.digits, 24)
        radius = _share(nest, self.bits(nest), digits, middle=True)
        radius = nest.op("sqrt", nest.op("mul", nest.op("log", radius), nest.const(-2.0, self.dtype)))
        angle = _share(nest, self.bits(nest, second=True), digits)
        return nest.op("mul", radius, nest.op("cos", nest.op("mul", angle, nest.const(math.tau, self.dtype))))

    def exponential(self, nest: ViewBuilder) -> Value:
        """Of rate 1; never 0 or infinite."""
        share = _share(nest, self.bits(nest), max(self.digits, 24), middle=True)
        return nest.op("neg", nest.op("log", share))


def _seeds(ctx: LoweringContext, node: Node) -> tuple[View, int]:
    """The seeds of the graph, and the position of the first of two for this node. See Note [Generated random numbers].

    They are drawn at the first node that asks, as many as there are random nodes from there on."""
    if ctx.random_seeds is None:
        count = 2 * sum(other.target in _GENERATED for other in node.graph.nodes)
        ctx.random_seeds = ctx.declare_dense("random_seeds", (to_expr(count),), torch.int64)
        low, high = (Literal("int", bound) for bound in (-(1 << 63), (1 << 63) - 1))
        args: tuple[Arg, ...] = (low, high, (Literal("int", count),))
        name = ctx.random_seeds.buffer
        kwargs = (("dtype", Literal("dtype", "torch.int64")), ("device", Literal("device", ctx.capabilities.device)))
        reason = "one draw of seeds from the process's generator per graph"
        ctx.steps.append(ExternCall(name, "aten.randint.low", args, kwargs, (name,), (), reason, ctx.origin(node)))
    ctx.random_nodes += 1
    return ctx.random_seeds, 2 * (ctx.random_nodes - 1)


_Draw = Callable[..., NodeValue]
_GENERATED: set[object] = set()


def _generates(*overloads: Any) -> Callable[[_Draw], _Draw]:
    """Registers a rule that gets ``(ctx, node, draws, *args)`` where numbers may be generated."""

    def register(rule: _Draw) -> _Draw:
        def guarded(ctx: LoweringContext, node: Node, *args: object, **kwargs: object) -> NodeValue:
            val = _first_result(node)
            if not ctx.generates_random or not ctx.capabilities.owns(val.device) or kwargs.get("generator") is not None:
                raise Fallback("random numbers are drawn by ATen, so that they are eager's")
            return rule(ctx, node, lambda: _Draws(ctx, node), *args)

        for overload in overloads:
            TABLE.add(overload, guarded)
            _GENERATED.add(overload)
        return rule

    return register


def _left_to_aten(ctx: LoweringContext, node: Node, *_: object, **__: object) -> NodeValue:
    raise Fallback("random numbers are drawn by ATen, so that they are eager's")


def _filled(ctx: LoweringContext, node: Node, draws: _Draws, draw: Callable[[ViewBuilder], Value]) -> View:
    return ctx.pointwise(node, [], draw, draws.dtype)


@_generates(aten.rand.default, aten.rand_like.default)
def _rand(ctx: LoweringContext, node: Node, draw: Callable[[], _Draws], *_: object) -> View:
    draws = draw()
    return _filled(ctx, node, draws, draws.uniform)


@_generates(aten.randn.default, aten.randn_like.default)
def _randn(ctx: LoweringContext, node: Node, draw: Callable[[], _Draws], *_: object) -> View:
    draws = draw()
    return _filled(ctx, node, draws, draws.normal)


@_generates(aten.uniform.default)
def _uniform(
    ctx: LoweringContext, node: Node, draw: Callable[[], _Draws], x: View, low: float = 0.0, high: float = 1.0
) -> View:
    draws = draw()

    def compute(nest: ViewBuilder) -> Value:
        span, start = nest.const(high - low, draws.dtype), nest.const(low, draws.dtype)
        return nest.op("add", nest.op("mul", draws.uniform(nest), span), start)

    return _filled(ctx, node, draws, compute)


@_generates(aten.normal_functional.default)
def _normal(
    ctx: LoweringContext, node: Node, draw: Callable[[], _Draws], x: View, mean: float = 0.0, std: float = 1.0
) -> View:
    if std < 0:
        raise Fallback("a negative deviation is eager's error")
    draws = draw()

    def compute(nest: ViewBuilder) -> Value:
        scaled = nest.op("mul", draws.normal(nest), nest.const(std, draws.dtype))
        return nest.op("add", scaled, nest.const(mean, draws.dtype))

    return _filled(ctx, node, draws, compute)


@_generates(aten.exponential.default)
def _exponential(ctx: LoweringContext, node: Node, draw: Callable[[], _Draws], x: View, rate: float = 1.0) -> View:
    if rate <= 0:
        raise Fallback("a rate that is not positive is eager's error")
    draws = draw()
    return _filled(
        ctx, node, draws, lambda nest: nest.op("div", draws.exponential(nest), nest.const(rate, draws.dtype))
    )


@_generates(aten.bernoulli.p)
def _bernoulli_p(
    ctx: LoweringContext, node: Node, draw: Callable[[], _Draws], x: View, probability: float = 0.5
) -> View:
    if not 0 <= probability <= 1:
        raise Fallback("a probability outside of 0 to 1 is eager's error")
    draws = draw()

    def compute(nest: ViewBuilder) -> Value:
        return nest.cast(draws.below(nest, probability), compute_dtype(x.dtype))

    return ctx.pointwise(node, [], compute, compute_dtype(x.dtype))


@_generates(aten.native_dropout.default)
def _dropout(
    ctx: LoweringContext, node: Node, draw: Callable[[], _Draws], x: View, probability: float, train: bool | None
) -> NodeValue:
    """The result, and which elements were kept."""
    if train is False or not 0 <= probability <= 1:
        raise Fallback("dropout without training, or by a share outside of 0 to 1, is left to ATen")
    draws, dtype = draw(), compute_dtype(x.dtype)
    result, kept = (ctx.declare(f"{node.name}_{k}", val) for k, val in enumerate(node.meta["val"]))
    nest = ctx.nest(result.buffer, node, result.sizes)
    hit = draws.below(nest, 1 - probability)
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    factor = nest.where(hit, nest.const(scale, dtype), nest.const(0, dtype))
    nest.store(result, nest.index, nest.op("mul", nest.cast(nest.load(x, nest.index), dtype), factor))
    nest.store(kept, nest.index, hit)
    ctx.add(nest)
    return [result, kept]


@_generates(aten.randint.default, aten.randint_like.default)
def _randint(ctx: LoweringContext, node: Node, draw: Callable[[], _Draws], first: object, *rest: object) -> View:
    """``randint(high, size)``, ``randint_like(x, high)``."""
    high = rest[0] if isinstance(first, View) else first
    return _integers(ctx, node, draw, 0, high)


@_generates(aten.randint.low, aten.randint_like.low_dtype)
def _randint_low(ctx: LoweringContext, node: Node, draw: Callable[[], _Draws], first: object, *rest: object) -> View:
    """``randint(low, high, size)``, ``randint_like(x, low, high)``."""
    low, high = rest[:2] if isinstance(first, View) else (first, rest[0])
    return _integers(ctx, node, draw, low, high)


def _integers(ctx: LoweringContext, node: Node, draw: Callable[[], _Draws], low: object, high: object) -> View:
    """``low + floor(u * (high - low))`` with 32 bits of ``u``, in integers."""
    if not isinstance(low, int) or not isinstance(high, int) or not 0 < high - low <= _MOST_INTEGERS:
        raise Fallback("random integers of a wide or unknown range are drawn by ATen")
    least, most = _integer_range(node.meta["val"].dtype)
    if low < least or high - 1 > most:
        raise Fallback("a range beyond the type is eager's error")
    draws = draw()

    def compute(nest: ViewBuilder) -> Value:
        scaled = nest.op("mul", _upper(nest, draws.bits(nest), 32), nest.const(high - low, DType.I64))
        return nest.op("add", _upper(nest, scaled, 32), nest.const(low, DType.I64))

    return ctx.pointwise(node, [], compute, DType.I64)


def _integer_range(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the largest integer of those that a type holds without gaps."""
    if dtype is torch.bool:
        return 0, 1
    if dtype in _DIGITS:
        return -(1 << _DIGITS[dtype]), 1 << _DIGITS[dtype]
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


for _name in ("rand", "randn", "rand_like", "randn_like", "bernoulli", "native_dropout"):
    _packet = getattr(aten, _name)
    for _overload in _packet.overloads():
        if not _overload.endswith("out") and getattr(_packet, _overload) not in _GENERATED:
            TABLE.add(getattr(_packet, _overload), _left_to_aten)
