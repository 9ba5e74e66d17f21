"""Bugs found by running torch's own operator samples through the compiler; each test is one of them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, _torch_compat, compile_graph, decompositions

aten = torch.ops.aten


def compiled(f, *args, aten=()):
    """What a compiled function returns, always as a list; no ATen calls but those."""
    graph = make_fx(lambda *given: f(*given), decompositions(), tracing_mode="fake")(*args)
    copies = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a) for a in args]
    made = compile_graph(graph, options=LowerOptions(verify=True))
    assert {call.target.split(".")[1] for call in made.report().externs} == set(aten), "what is left to ATen"
    return made(copies)


def check(f, *args, rtol=0.0, atol=0.0, aten=()):
    """Compiled and eager agree in values (exactly unless told), types, sizes and strides."""
    got = compiled(f, *args, aten=aten)
    want = f(*args)
    for result, expected in zip(got, want if isinstance(want, tuple | list) else [want], strict=True):
        assert result.dtype == expected.dtype and result.shape == expected.shape
        if expected.numel():
            assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, equal_nan=True)


def test_a_sum_over_a_dimension_of_size_1_fuses_with_the_sum_of_its_result():
    check(lambda g: g.sum(0).sum(0).view(2, 2).sum(0), torch.arange(12.0).reshape(1, 3, 4))
    check(lambda g: (g.sum(0) + 1).amax(0), torch.arange(12.0).reshape(1, 3, 4))
    check(lambda g: g.softmax(0).sum(1), torch.arange(12.0).reshape(1, 3, 4), atol=1e-6)


@pytest.mark.parametrize("repeats", [(0, 2), (1, 1), (3, 1)])
def test_repeats_of_an_empty_tensor_are_empty(repeats):
    check(lambda x: x.repeat(*repeats), torch.randn(0), aten=("repeat",))


def test_reductions_over_a_known_empty_dimension_give_their_start_values():
    def f(x):
        return (
            x.sum(0),
            x.prod(0),
            x.any(0),
            x.mean(0),
            *torch.var_mean(x, 0, correction=0),
            torch.linalg.vector_norm(x, dim=0),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the variance of nothing
        check(f, torch.randn(0, 5))
        check(f, torch.randn(0))
    check(lambda x: (x.sum(0) + 1, x.sum(1)), torch.randn(0, 5))


def test_a_gather_by_an_empty_index_of_another_rank_is_empty():
    check(lambda x, i: x.gather(0, i), torch.randn(5), torch.empty(2, 0, dtype=torch.int64), aten=("gather",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_rounded_division_of_halves_has_eagers_bits(dtype, mode):
    torch.manual_seed(0)
    x, y = (torch.randn(2000) * 20).to(dtype), torch.randn(2000).to(dtype)
    check(lambda x, y: torch.div(x, y, rounding_mode=mode), x, y)
    check(lambda x, y: torch.div(x, y, rounding_mode=mode), x, y[0])
    check(lambda x: torch.div(x, 0.3, rounding_mode=mode), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_beside_halves_are_rounded_where_eager_rounds_them(dtype):
    torch.manual_seed(0)
    x = torch.randn(2048) * 3
    x[:4] = torch.tensor([0.1, -0.1, 1.0, 0.7])
    x = x.to(dtype)
    check(lambda x: (x == 0.1, x != 0.1, x <= 0.1, x >= 0.1, x < 0.1, x > 0.1), x)
    check(lambda x: (x + 0.1, x - 0.1, 0.7 - x, x * 0.1, x / 0.1, 0.7 / x, torch.div(0.7, x)), x)
    check(lambda x: (torch.fmod(x, 0.1), torch.remainder(x, 0.1), torch.remainder(0.7, x)), x)
    check(lambda x: torch.rsub(x, 0.7), x)
    check(lambda x, y: (x + y, x * y, x / y, x == y), x, torch.arange(2048) - 1000)


# Note [What eager rounds twice]
# Some of eager's operators have a loop over vectors and one over single elements that round at other places. The
# second is taken where the elements do not lie side by side, and always under ATEN_CPU_CAPABILITY=default. Kernels
# round as the loop over vectors does, once at the end, wherever the elements lie; so they are compared with float64,
# not with whichever loop eager takes here.


def rounded_once(got: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> None:
    """The nearest half, or one of two that are about as near; `size` is that of the float32 numbers on the way."""
    nearest = exact.to(got.dtype).double()
    off, wanted = (got.double() - exact).abs(), (nearest - exact).abs()
    alike = (got.double() == nearest) | (got.isnan() & exact.isnan())
    assert (alike | (off <= wanted + 4 * torch.finfo(torch.float32).eps * size)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [1, 2])
def test_sums_of_multiples_of_halves_are_rounded_once(dtype, step):
    """See Note [What eager rounds twice]."""
    x = (torch.randn(2048) * 3).to(dtype)[::step]
    y = x.flip(0)
    got = compiled(
        lambda x, y: (torch.add(x, 0.7, alpha=3), torch.add(x, y, alpha=0.3), torch.sub(x, y, alpha=0.3)), x, y
    )
    for result, other, factor in zip(got, (torch.tensor(0.7), y, y), (3, 0.3, -0.3), strict=True):
        assert result.dtype is dtype and result.shape == x.shape
        term = other.to(dtype).double() * torch.tensor(factor, dtype=dtype).double()  # numbers become halves first
        rounded_once(result, x.double() + term, x.double().abs() + term.abs())


def halves(dtype: torch.dtype) -> torch.Tensor:
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 0.5, 2.5]
    return torch.cat([torch.tensor(special), torch.randn(2048) * 3])[:2048].to(dtype)


EXPONENTS = [0, 0.5, 1, 2, 3, 4, -0.5, -1, -2, 1.7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_powers_of_halves_round_as_eager(dtype, exponent):
    if (dtype, exponent) == (torch.bfloat16, -0.5):  # see Note [What eager rounds twice]
        for x in (halves(dtype), halves(dtype)[::2]):
            check(lambda x: (x**exponent, 0.7**x), x[:5])
            (got,) = compiled(lambda x: x**exponent, x)
            rounded_once(got, x.double() ** exponent, x.double() ** exponent)
    else:
        check(lambda x: (x**exponent, 0.7**x), halves(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nextafter_of_halves_is_the_neighbouring_half(dtype):
    x = torch.tensor([0.0, 1.0, -2.5, float("inf")], dtype=dtype)
    check(torch.nextafter, x, x.flip(0))


def test_negative_zero_keeps_its_sign():
    x = torch.tensor([-0.0, 0.0] * 20)

    def f(x):
        return 1 / torch.relu(x), 1 / torch.tanh(x), 1 / x.clamp(min=0.0), 1 / torch.nn.functional.relu6(x)

    check(f, x)
    check(f, x[:3])
    check(f, x.bfloat16())


def test_a_lerp_between_cancelling_ends_rounds_once():
    """See Note [What eager rounds twice]."""
    x, y, w = torch.randn(3, 2048)
    x[0], y[0], w[0] = 0.001, -1.0, 0.001
    weights = (w, torch.tensor(0.3), torch.tensor(0.7))
    got = compiled(lambda x, y, w: (torch.lerp(x, y, w), torch.lerp(x, y, 0.3), torch.lerp(x, y, 0.7)), x, y, w)
    for result, weight in zip(got, weights, strict=True):
        near = weight.abs() < 0.5
        end, factor = torch.where(near, x, y), torch.where(near, weight, weight - 1)
        # The difference and the factor are float32 numbers, whose product and sum with an end are exact in float64.
        assert torch.equal(result, (end.double() + factor.double() * (y - x).double()).float())


def test_results_of_aten_calls_that_differ_from_their_fake_values_are_conformed():
    """torch's fake kernel of this op claims float32 statistics for bfloat16 ones."""
    torch.manual_seed(0)
    x, stats = torch.randn(3, 5, 2).bfloat16(), [torch.rand(5).bfloat16() for _ in range(4)]

    def f(x, *stats):
        results = aten._batch_norm_with_update_functional(x, *stats, 0.1, 1e-5)
        return results[4].to(torch.bfloat16) + 1

    check(f, x, *stats)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_numbers_out_of_an_integer_types_range_wrap(dtype):
    x = torch.arange(-60, 60).to(dtype)
    check(lambda x: (x + 300, x * 70000, x == 300, x < 300, x - 2**33, 300 - x, x + -300), x)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_bounds_and_exponents_out_of_an_integer_types_range_are_what_they_are_in_eager(dtype):
    """Refused, but negative numbers wrap in unsigned types; from torch 2.15 on bounds that let all pass do so."""
    x, refused = torch.arange(5).to(dtype), 0
    for f in (
        lambda x: x.clamp(-(2**40), 2**40),
        lambda x: x.clamp(min=-(2**40)),
        lambda x: x.clamp(min=-1),
        lambda x: x.clamp(min=2**40),
        lambda x: x.clamp(3, 2**40),
        lambda x: torch._foreach_clamp_max([x], -1)[0],
        lambda x: torch._foreach_clamp_min([x], -(2**40))[0],
        lambda x: torch.nn.functional.hardtanh(x, -1, 3),
        lambda x: x ** (2**40),
        lambda x: x.masked_fill(x > 1, 2**40),
    ):
        try:
            wanted = f(x)
        except RuntimeError:
            refused += 1
            with pytest.raises(RuntimeError, match=r"without overflow|outside the representable range|unsigned type"):
                compile_graph(make_fx(f, decompositions(), tracing_mode="fake")(x))([x])
        else:
            got = compile_graph(make_fx(lambda x: [f(x)], decompositions(), tracing_mode="fake")(x))([x])  # noqa: B023
            assert torch.equal(got[0], wanted)
    assert refused >= 3


def test_running_statistics_of_inference_have_the_strides_of_their_fake_values():
    """They are inputs of the backward graph, which is compiled for those strides."""
    x, mean, var = torch.randn(3, 2, 4), torch.rand(4)[::2], torch.rand(4)[::2] + 0.5
    graph = make_fx(
        lambda x, m, v: aten._native_batch_norm_legit_functional(x, None, None, m, v, False, 0.1, 1e-5),
        tracing_mode="fake",
    )(x, mean, var)
    result = compile_graph(graph)([x, mean, var])
    assert result[3].stride() == result[4].stride() == (1,)
    assert result[3].tolist() == mean.tolist() and result[4].tolist() == var.tolist()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_integers_in_rules_for_floats_raise_eagers_error_and_kill_nothing(dtype):
    """The division of a mean by no weights was a trap of the processor, the root of an integer one of LLVM."""
    x, target, stats = torch.ones(3, 4).to(dtype), torch.full((3,), -100), torch.ones(4).to(dtype)

    def loss(x):
        return aten.nll_loss_forward(x, target, None, 1, -100)[0]

    def norm(x):
        return aten._native_batch_norm_legit_no_training(x, None, None, stats, stats, 0.1, 1e-5)[0]

    for f in (loss, norm):
        compiled = compile_graph(make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(x))
        with pytest.raises(NotImplementedError, match="not implemented for"):
            f(x)
        with pytest.raises(NotImplementedError, match="not implemented for"):
            compiled([x])


def test_loops_over_nothing_are_not_joined():
    check(
        lambda x, i, y: aten.index_reduce(x, 2, i, y, "mean"),
        *(torch.zeros(1, 0, 0), torch.zeros(0, dtype=torch.int64), torch.zeros(1, 0, 0)),
    )


def test_a_reshape_that_is_no_view_is_a_tensor_of_its_own():
    x = torch.arange(6.0)[:, None, None].expand(6, 4, 3)
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    out = [graph.call_function(aten.reshape.default, (node, [size])) for size in (72,)]
    out.append(graph.call_function(aten.flatten.using_ints, (node,)))
    graph.output(tuple(out))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    for result in compile_graph(module, [x])([x]):
        assert torch.equal(result, x.flatten())
        assert result.is_contiguous() and result.untyped_storage()._cdata != x.untyped_storage()._cdata


_INDEX = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, n: aten.full([2], n, dtype=x.dtype),
        lambda x, n: aten.full_like(x, n),
        lambda x, n: aten.new_full(x, [3], n, dtype=x.dtype),
        lambda x, n: aten.fill.Scalar(x, n),
        lambda x, n: aten.index_fill.int_Scalar(x, 0, _INDEX, n),
        lambda x, n: aten.scatter.value(x, 0, _INDEX, n),
        lambda x, n: aten.constant_pad_nd(x, [1, 1], n),
        lambda x, n: aten.where.ScalarOther(x > 0, x, n),
        lambda x, n: aten.clamp_max(x, n),
        lambda x, n: aten.clamp(x, n),
        lambda x, n: aten.elu(x, n),
        lambda x, n: aten.leaky_relu(x, n),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int64])
def test_numbers_are_refused_where_eager_refuses_them(f, dtype):
    x = torch.ones(2, dtype=dtype)
    for number in (1e300, 3e38, float("inf"), float("nan"), 2**40, 300, -1, 70000.0):
        try:
            want = f(x, number)
        except RuntimeError as error:
            if "overflow" not in str(error):
                return  # the operator has no kernel for the type
            with pytest.raises(RuntimeError, match="overflow"):
                _run_with(f, x, number)
        else:
            torch.testing.assert_close(_run_with(f, x, number), want, rtol=1e-6, atol=0, equal_nan=True)


def _run_with(f, x, number):
    graph = make_fx(lambda x: f(x, number), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    return compile_graph(graph)([x])[0]


@pytest.mark.parametrize("bounds", [{"min": float("nan")}, {"max": float("nan")}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_a_lone_nan_bound_is_what_it_is_in_this_torch(dtype, bounds, monkeypatch):
    x = torch.arange(-20, 20).to(dtype)
    check(lambda a: a.clamp(**bounds), x)
    assert _torch_compat.lone_nan_bound_counts() == bool(x.clamp(**bounds).isnan().all())
    monkeypatch.setattr(_torch_compat, "lone_nan_bound_counts", lambda: False)  # as in torch 2.11
    (got,) = compiled(lambda a: [a.clamp(**bounds)], x)
    assert torch.equal(got, x.to(got.dtype))
