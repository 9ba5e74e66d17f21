"""Elementwise ops: eager's values, promotion and rounding, through every stage."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, decompositions
from aotkit_inductor_lower.lowering.promotion import promote
from aotkit_inductor_lower.lowering.values import FloatExpr, View
from aotkit_inductor_lower.symbolic import Symbol, SymbolKind, to_expr

aten = torch.ops.aten
F = torch.nn.functional
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
_UNARY = """
    exp expm1 log1p sqrt rsqrt reciprocal sin cos tanh sigmoid erf neg abs sign floor ceil trunc round relu isnan isinf
    isfinite square atan asinh exp2
"""
_INTEGER = "add sub mul floor_divide remainder fmod bitwise_and bitwise_xor maximum eq lt"
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def values(dtype, *shape):
    torch.manual_seed(len(shape))
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -9, 10, shape).to(dtype)


def specials(dtype):
    info = torch.finfo(dtype)
    return torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, math.inf, -math.inf, math.nan, info.max, info.tiny], dtype=dtype
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_operands_promote_as_torch_promotes_them(count):
    tensors = [torch.empty(size, dtype=d) for d in (*FLOATS, *INTS, torch.bool) for size in ((), (3,))]
    operands: dict[object, object] = {
        View("b", x.dtype, tuple(map(to_expr, x.shape)), (), (), to_expr(0)): x for x in tensors
    }
    operands |= {"yes": True, 7: 7, 2.5: 2.5, to_expr(Symbol("s0", SymbolKind.SIZE)): 5, FloatExpr("sqrt", (2.0,)): 2.5}
    for chosen in itertools.product(operands, repeat=count):
        mine = [True if operand == "yes" else operand for operand in chosen]
        theirs = [operands[operand] for operand in chosen]
        _, want = elementwise_dtypes(*theirs, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
        assert promote(mine) == want, chosen


@pytest.mark.covers("F5g.1")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "name",
    _UNARY.split(),
)
def test_unary_ops_equal_eager_on_ordinary_and_special_values(check, name, dtype):
    op = getattr(torch, name)
    x = torch.cat((values(dtype, 67), specials(dtype)))
    result = check(op, x)
    assert result.kernels == 1 and not result.externs


@pytest.mark.covers("F5g.2")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("name", _INTEGER.split())
def test_integer_ops_wrap_and_round_as_eager(check, name, dtype):
    a, b = values(dtype, 37), values(dtype, 37)
    b = torch.where(b == 0, torch.ones_like(b), b)
    check(getattr(torch, name), a, b)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_unary_ops_of_integers_equal_eager(check, dtype):
    def f(x):
        tests = (x.isnan(), x.isinf(), x.isfinite(), x.signbit(), x.isposinf(), x.isneginf(), x.logical_not())
        floats = (x.exp(), x.sqrt(), x.sigmoid(), x.reciprocal(), x.log1p(), x.tanh(), x.erf())
        return (*tests, *floats, *(() if dtype is torch.bool else (x.abs(), x.sign(), x.square(), x.floor(), x.relu())))

    check(f, values(dtype, 29), table=decompositions())


@pytest.mark.covers("F5g.1")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("left", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("right", [torch.float64, torch.float16, torch.int64, torch.int8, torch.bool], ids=str)
def test_mixed_operands_promote_as_eager(check, left, right):
    check(
        lambda a, b: (a + b, a * b, a / b.double(), a == b, torch.where(b > 0, a, b)),
        values(left, 3, 5),
        values(right, 5),
    )


@pytest.mark.covers("F5g.1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_python_numbers_and_zero_dimensional_tensors_do_not_widen(check, dtype):
    scalar = torch.tensor(1.5, dtype=torch.float64)
    check(lambda x, s: (x + 2, x * 0.1, 3 - x if x.dtype != torch.bool else x, x + s, x / 3), values(dtype, 9), scalar)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "f",
    [
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        F.silu,
        F.leaky_relu,
        F.hardtanh,
        F.hardsigmoid,
        F.hardswish,
        F.softplus,
        F.elu,
        F.mish,
    ],
)
def test_activations_are_one_kernel(check, f, dtype):
    x = torch.cat((values(dtype, 61), specials(dtype)[:9]))
    if f is F.gelu:
        x = x[~x.isinf()]  # eager's vector code (AVX-512) gives nan for inf, its scalar code inf
    result = check(f, x)
    assert result.kernels == 1 and not result.externs


@pytest.mark.parametrize("count", [1, 7, 40])
def test_gelu_of_infinity_is_infinity_at_every_length(count):
    compiled = compile_graph(make_fx(F.gelu, tracing_mode="fake")(torch.ones(count)))
    assert not compiled.report().externs
    assert compiled([torch.full((count,), float("inf"))])[0].isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_derivatives_of_activations_equal_eager(check, dtype):
    g, x = values(dtype, 41), values(dtype, 41).flip(0)
    y = x.float().sigmoid().to(dtype)
    result = check(
        lambda g, x, y: (
            aten.gelu_backward(g, x),
            aten.gelu_backward(g, x, approximate="tanh"),
            aten.silu_backward(g, x),
            aten.sigmoid_backward(g, y),
            aten.tanh_backward(g, y),
            aten.threshold_backward(g, x, 0),
            aten.hardtanh_backward(g, x, -1, 1),
            aten.softplus_backward(g, x, 1, 20),
            aten.elu_backward(g, 1.5, 2.0, 0.5, False, x),
            aten.elu_backward(g, 1.5, 2.0, 0.5, True, y - 0.5),
            aten.leaky_relu_backward(g, x, 0.2, False),
            aten.hardsigmoid_backward(g, x * 4),
            aten.hardswish_backward(g, x * 4),
        ),
        g,
        x,
        y,
    )
    assert not result.externs


def test_powers_clamps_and_blends_equal_eager(check):
    x, y = values(torch.float32, 33), values(torch.float32, 33).abs()
    check(
        lambda x, y: (
            x**2, x**3, y**0.5, y**-0.5, x**-1, x**-2, y**1.7, 2.0**x, y**x,
            x.clamp(-0.5, 0.5), x.clamp(min=y), x.clamp_max(0.1), torch.lerp(x, y, 0.3), torch.lerp(x, y, y),
            torch.addcmul(x, y, y, value=2), torch.addcdiv(x, y, y + 1), torch.add(x, y, alpha=3),
            torch.sub(x, y, alpha=0.5), torch.logaddexp(x, y), torch.div(x, y + 1, rounding_mode="floor"),
            torch.div(x, y + 1, rounding_mode="trunc"), torch.copysign(x, y), torch.atan2(x, y), torch.fmin(x, y),
        ),
        x,
        y,
    )  # fmt: skip


@pytest.mark.covers("F5g.4")
def test_masks_and_logic_equal_eager(check):
    a, b = values(torch.bool, 21), values(torch.bool, 21).flip(0)
    x = values(torch.float16, 21)
    check(
        lambda a, b, x: (
            a & b, a | ~b, a ^ b, a.logical_not(), x.logical_and(a), a + b, a * b, x.masked_fill(a, -3.0),
            torch.where(a, 1, x), torch.where(a, x, 2.5), a.to(torch.float16) * x,
        ),
        a,
        b,
        x,
    )  # fmt: skip


@pytest.mark.covers("F5g.5")
@pytest.mark.parametrize("source", [*FLOATS, torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_casts_between_all_types_equal_eager(check, source):
    x = values(source, 29)
    targets = [*FLOATS, *INTS, torch.bool]
    check(lambda x: tuple(x.to(t) for t in targets if t != source), x)


@pytest.mark.covers("F5c.13")
def test_half_results_are_rounded_after_every_op(check):
    x, y = values(torch.bfloat16, 500), values(torch.bfloat16, 500).flip(0)

    def chain(x, y):
        return ((x * y + y).tanh() * 3 - x) / (y * y + 1)

    result = check(chain, x, y)
    assert result.kernels == 1
    assert torch.equal(result.compiled([x, y])[0], chain(x, y))


def test_shifts_at_and_over_the_width_equal_eager(check):
    x = torch.tensor([1, -1, 5, 7, -8], dtype=torch.int32)
    n = torch.tensor([0, 31, 32, 33, 2], dtype=torch.int32)
    check(lambda x, n: (x << n, x >> n), x, n)


@pytest.mark.parametrize("dtype", [*INTS, torch.bool], ids=str)
def test_bits_of_a_number_and_a_tensor_equal_eager(check, dtype):
    def f(x):
        shifts = (1 << x, -9 >> x) if dtype is not torch.bool else ()
        return (*shifts, aten.bitwise_and(True, x), aten.bitwise_or(True, x), aten.bitwise_xor(5, x))

    check(f, torch.arange(40).to(dtype))


def test_integer_division_by_zero_raises_as_eager(check):
    a = torch.tensor([4, 2])
    graph = make_fx(lambda a, b: torch.div(a, b, rounding_mode="floor"), tracing_mode="fake")(a, a.clone())
    compiled = compile_graph(graph)
    assert not compiled.report().externs
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        compiled([a, torch.tensor([2, 0])])
    assert compiled([a, torch.tensor([3, 1])])[0].tolist() == [1, 2]


def test_kernels_and_values_that_differ_in_the_sign_of_a_zero_are_two(check):
    x = torch.tensor([1.0, -2.0, 0.0, -0.0, float("inf")])
    check(lambda x: (x * 0.0, x * -0.0, x / 0.0, x / -0.0), x)
    check(lambda x: (x * 0.0 + 1 / (x * -0.0), torch.where(x > 0, x, -0.0), torch.where(x > 0, x, 0.0)), x)
    got = compile_graph(make_fx(lambda x: (x * 0.0, x * -0.0))(x))([x])
    assert not torch.equal(got[0].signbit(), got[1].signbit())


def test_a_sum_of_one_element_is_never_negative_zero(check):
    x = torch.full((3, 1), -0.0)
    check(lambda x: [1 / v for v in (x.sum(1), x.mean(1), x.cumsum(1), x[:1].sum())], x)


def test_thresholds_of_integers_keep_every_digit(check):
    x = torch.tensor([16777217, -5, 0, 3, 2147483647], dtype=torch.int32)
    check(lambda x: (aten.threshold(x, -1.0, 0.1), aten.threshold(x.long() << 31, 3.7, -2)), x, table=decompositions())


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_gradients_of_a_smooth_loss_are_nan_where_the_distance_is(check, reduction):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.3, -7.0, float("inf")])
    y, grad = torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0, float("inf")]), torch.tensor(2.0)
    check(lambda g, x, y: aten.smooth_l1_loss_backward(g, x, y, reduction, 1.0), grad, x, y, table=decompositions())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [1, -0.7])
def test_a_sum_with_a_product_is_rounded_as_often_as_in_eager_mode(dtype, value):
    x, y, z = (values(dtype, size).view(-1, 7) for size in (700, 700, 700))
    y, z = y.flip(0), z.flip(1)

    def blend(x, y, z):
        return (torch.addcmul(x, y, z, value=value),)

    assert torch.equal(compile_graph(make_fx(blend)(x, y, z))([x, y, z])[0], blend(x, y, z)[0])
    x, y, z = torch.tensor([-math.inf] * 9), torch.full((9,), 2.5), torch.full((9,), 2.0**127)
    check = compile_graph(make_fx(blend)(x, y, z))([x, y, z])[0]
    assert torch.equal(check, blend(x, y, z)[0])  # only a product that is rounded is infinite


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exponents_that_are_integers_are_added_to_those_of_floats(dtype):
    x = torch.tensor([0.0, -0.0, 1e-3, 1.0, 3.0, -2.0, math.inf, math.nan], dtype=dtype)

    def scaled(x, n):
        return (torch.ldexp(x, n), torch.ldexp(x, n.to(torch.float32)))

    for n in (-2000, -20, 3, 100, 200, 2000):
        exponents = torch.full((8,), n)
        graph = make_fx(scaled, decompositions())(x, exponents)
        for got, want in zip(compile_graph(graph)([x, exponents]), scaled(x, exponents), strict=True):
            assert torch.equal(got.isnan(), want.isnan()), n
            torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_the_spherical_bessel_function_equals_eager(check, dtype):
    unbounded = (math.inf, -math.inf, math.nan)
    wide = torch.tensor([0.0, -0.0, 1e-40, 0.25, -0.4999, 0.5, -0.5, 1.0, 3.14159, -20.0, 1e5, *unbounded] * 3)
    x = torch.cat([wide, torch.randn(90) * 2]) if dtype.is_floating_point else torch.arange(40) % 7
    check(lambda x: torch.special.spherical_bessel_j0(x), x.to(dtype))
    check(lambda x: torch.special.spherical_bessel_j0(x.t()).sum(0) + 1, x.to(dtype)[:30].reshape(5, 6))
