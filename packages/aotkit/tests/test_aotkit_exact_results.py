"""Arguments beside those of torch's own table of operators: signed zeros, windows that overlap far, float16 that
overflows on the way, what is not a number. Results, gradients, dtypes and strides are eager's, compared with float64
where eager itself rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import aotkit  # noqa: F401  registers the backend

Function = Callable[..., Any]
HALF_TYPES = (torch.float16, torch.bfloat16)
NAN, INF = math.nan, math.inf


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Seeded normal numbers that want a gradient."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()


def constant(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, dtype=dtype).requires_grad_()


def observe(fn: Function, args: tuple[Any, ...], wide: bool = False) -> list[Tensor]:
    """Results and gradients; ``wide``: of the arguments in float64."""

    def given(a: Any) -> Any:
        if not isinstance(a, Tensor) or not a.dtype.is_floating_point:
            return a
        a = a.detach().to(torch.float64 if wide else a.dtype).as_strided(a.shape, a.stride()) if wide else a.detach()
        return a.requires_grad_() if a.dtype.is_floating_point else a

    inputs = [given(a.clone(memory_format=torch.preserve_format) if isinstance(a, Tensor) else a) for a in args]
    results = tree_leaves(fn(*inputs))
    leaves = [a for a in inputs if isinstance(a, Tensor) and a.requires_grad]
    roots = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    g = torch.Generator().manual_seed(3)
    weights = [(torch.rand(r.shape, generator=g, dtype=torch.float64) + 0.5).to(r.dtype) for r in roots]
    gradients = torch.autograd.grad(roots, leaves, weights, allow_unused=True) if roots and leaves else ()
    return [*results, *gradients]


def bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """In which signed zeros differ and nan equals itself."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    x = x.detach().double()
    return torch.where(x.isnan(), NAN, x), torch.where(x.isnan(), False, x.signbit())


def check(fn: Function, *args: Any, exact: bool = False, dynamic: bool = False) -> None:
    """Compiled, ``fn`` is eager's or, unless ``exact``, as near to float64 as eager's to a unit in the last place."""
    torch._dynamo.reset()
    want = observe(fn, args)
    options = {"fallback": "error", "cache": False}
    got = observe(torch.compile(fn, backend="aotkit", fullgraph=True, dynamic=dynamic, options=options), args)
    truth = None
    for place, (g, w) in enumerate(zip(got, want, strict=True)):
        if w is None or g is None:
            assert g is w
            continue
        assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride()), place
        if exact or not w.dtype.is_floating_point:
            torch.testing.assert_close(bits(g), bits(w), rtol=0, atol=0, equal_nan=True)
            continue
        truth = truth or observe(fn, args, wide=True)
        true = truth[place].detach()
        unit = torch.finfo(w.dtype).eps * true.abs() + torch.finfo(w.dtype).tiny
        off, eager_off = (g.detach().double() - true).abs(), (w.detach().double() - true).abs()
        worst = eager_off[eager_off.isfinite()].max() if eager_off.isfinite().any() else 0.0
        fine = (off <= 2 * worst + 2 * unit) | (g == w) | (g.isnan() & w.isnan())
        assert bool(fine.all()), (place, g[~fine][:5], w[~fine][:5], true[~fine][:5])


def rows(*table: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments of ``parametrize`` for rows of (name, function, arguments...)."""
    return {"argnames": "row", "argvalues": [row[1:] for row in table], "ids": [row[0] for row in table]}


# -- windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(
    **rows(
        ("2d, 12 windows of 13", lambda x: F.avg_pool2d(x, 13, 1), draw(1, 2, 24, 24)),
        ("2d, 9 windows of 16", lambda x: F.avg_pool2d(x, 16, 1), draw(1, 2, 24, 20)),
        ("2d, padded, by 2", lambda x: F.avg_pool2d(x, (9, 3), (2, 1), (4, 1), ceil_mode=True), draw(1, 2, 10, 9)),
        ("1d", lambda x: F.avg_pool1d(x, 8, 1, 1), draw(1, 2, 9)),
        ("3d", lambda x: F.avg_pool3d(x, (3, 2, 7), 1), draw(1, 2, 4, 3, 8)),
        ("powers 1d", lambda x: F.lp_pool1d(x, 2, 8, 1), draw(1, 2, 9)),
        ("powers 2d", lambda x: F.lp_pool2d(x, 2, 7, 1), draw(1, 2, 9, 9)),
        ("powers 3d", lambda x: F.lp_pool3d(x, 2, 3, 1), draw(1, 2, 4, 4, 4)),
        ("maxima", lambda x: F.max_pool2d(x, 13, 1), draw(1, 2, 16, 16)),
        ("one window", lambda x: F.avg_pool2d(x, 5, 1), draw(1, 2, 5, 5)),
        ("folded", lambda x: F.fold(x, (6, 6), 5), draw(1, 50, 4)),
    )
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_element_in_more_windows_than_there_are_gets_its_whole_gradient(row, dynamic):
    check(*row, dynamic=dynamic)


# -- constants that compare equal --------------------------------------------------------------------------------------

ODD = torch.tensor([1.0, -2.0, 0.0, -0.0, INF, NAN, 3e38])


@pytest.mark.parametrize(
    **rows(
        ("product", lambda x: (x * 0.0, x * -0.0), ODD),
        ("quotient", lambda x: (x / 0.0, x / -0.0, x + 0.0, x + -0.0), ODD),
        ("choice", lambda x: (torch.where(x > 0, x, 0.0), torch.where(x > 0, x, -0.0)), ODD),
        ("filled", lambda x: (torch.full_like(x, 0.0), torch.full_like(x, -0.0), x.clamp(0.0), x.clamp(-0.0)), ODD),
        ("padded", lambda x: (F.pad(x, (1, 1), value=0.0), F.pad(x, (1, 1), value=-0.0)), ODD),
        ("of lengths", lambda x: [t * s for t in x.split([1, 2, 4]) for s in (0.0, -0.0)], ODD),
        ("numbers", lambda x: (x * True, x * 1, x * 1.0, x + True, x + 1, x + 1.0), torch.arange(4)),
        ("complex", lambda x: (x * complex(0.0, -0.0), x * complex(0.0, 0.0)), ODD.detach()),
        ("fills", lambda x: (torch.full((2,), True), torch.full((2,), 1), torch.full((2,), 1.0), x + 1), ODD),
    )
)
def test_constants_that_compare_equal_are_not_taken_for_one(row):
    check(*row, exact=True)


def test_a_sum_of_one_negative_zero_is_zero():
    x = torch.full((3, 1), -0.0)
    check(lambda x: (x.sum(1), x[:1].sum(), x.mean(1), x.nansum(1), x.cumsum(1), x.prod(1)), x, exact=True)


# -- means of float16 and bfloat16 ----------------------------------------------------------------------


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(
    "mean",
    [
        lambda x: x.mean((2, 3)),
        lambda x: x.mean(),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.l1_loss(x, torch.zeros_like(x)),
        lambda x: F.mse_loss(x / 10, torch.zeros_like(x)),
        lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    ],
    ids=["dims", "all", "pool", "l1", "mse", "smooth_l1"],
)
def test_a_mean_of_half_types_is_summed_and_divided_in_single_precision(mean, dtype):
    check(mean, constant(100.0, 1, 2, 70, 70, dtype=dtype))
    check(mean, draw(3, 5, 11, 13, dtype=dtype))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_a_mean_of_half_types_is_rounded_once(dtype):
    x = draw(30, 40, dtype=dtype).detach()
    check(lambda x: (x.mean(1), x.mean(0, keepdim=True), x.mean(), F.adaptive_avg_pool1d(x, 1)), x, exact=True)


# -- activations -------------------------------------------------------------------------------------------------------

STEEP = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 6.0, 3.0, -3.0, 1.0, -1.0, 0.5, -0.5, 1e38, -1e38, 100.0, -100.0])


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "f",
    [F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid, F.hardshrink, F.softshrink, F.elu, F.selu, F.celu, F.relu],
    ids=lambda f: f.__name__,
)
def test_gradients_at_the_corners_of_activations_and_at_nan_are_those_of_eagers_vectors(f, dtype):
    check(f, STEEP.repeat(8).to(dtype).requires_grad_(), exact=f not in (F.elu, F.selu, F.celu))
    check(f, draw(64, dtype=dtype))


# -- strides -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strides", [(3, 1, 77, 1), (1, 6, 5, 2), (6, 2, 0, 2), (3, 3, 3, 1)], ids=str)
def test_results_have_eagers_strides_where_dimensions_of_size_one_have_their_own(strides):
    x = torch.arange(60.0).as_strided((2, 1, 1, 3), strides)
    target = torch.zeros(2, 1, 3, dtype=torch.int64).transpose(1, 2).contiguous().transpose(1, 2)

    def f(x: Tensor, target: Tensor) -> list[Tensor]:
        y = [torch.logical_or(x > 0, x), x.angle(), F.logsigmoid(x), x.relu(), torch.xlogy(x, x[:, :1]), x * 2 + 1]
        losses = [F.nll_loss(x, target, reduction="none"), F.mse_loss(x, x + 1, reduction="none")]
        return [*y, *losses]

    torch._dynamo.reset()
    options = {"fallback": "error", "cache": False}
    got = torch.compile(f, backend="aotkit", fullgraph=True, options=options)(x, target)
    assert [g.stride() for g in got] == [w.stride() for w in f(x, target)]


# -- ranges, empty dimensions, logarithms, scatters --------------------------------------------------------------------


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("ends", [(-1.5, 7, 5), (0.5, 10, 4), (-3, -9.7, 7), (2, 2, 3), (7, -1.5, 6)], ids=str)
def test_linspace_of_integers_lies_between_the_whole_parts_of_the_ends(ends, dtype):
    check(lambda x: torch.linspace(*ends, dtype=dtype) + x, torch.zeros(1, dtype=dtype))


def test_linspace_of_large_integers_is_exact():
    check(lambda x: torch.linspace(0, 2**40, 7, dtype=torch.int64) + x, torch.zeros(1, dtype=torch.int64))


def test_buckets_without_boundaries_have_the_type_of_buckets():
    x = draw(3).detach()
    check(lambda x: [torch.bucketize(x, torch.empty(0)), torch.bucketize(x, torch.empty(0), out_int32=True)], x)


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_buckets_of_a_number_and_of_one_element(kind):
    """torch computes both by reading an element, which no graph can. They were refused."""
    bounds = torch.tensor([1, 4, 9], dtype=kind)
    hows: list[dict[str, bool]] = [{}, {"right": True}, {"out_int32": True}]
    check(lambda b: [torch.bucketize(x, b, **how) for how in hows for x in (0.5, 4, torch.tensor(4.0))], bounds)


MADE_OF_NUMBERS: dict[str, Function] = {
    "floats": lambda x: torch.Tensor([1.5, 2]) * x,
    "tuple": lambda x: torch.Tensor((1, 2)) - x,
    "nested": lambda x: torch.FloatTensor([[1, 2], [True, 4.5]]) * x,
    "empty": lambda x: torch.Tensor([]).sum() + x,
    "integers": lambda x: torch.LongTensor([3, 2**40]) + x.long(),
    "bools": lambda x: torch.BoolTensor([1, 0]) & (x > 0),
    "half": lambda x: torch.HalfTensor([1.1, 2]) + x,
    "size": lambda x: torch.Tensor([x.shape[0], 3]) * x,
    "written to": lambda x: torch.Tensor([1, 2]).add_(x),
    "of sizes": lambda x: torch.zeros_like(torch.Tensor(2, 1)) + x,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MADE_OF_NUMBERS)
def test_tensors_that_the_older_constructors_make_of_numbers(name, dynamic):
    """Dynamo leaves these calls in the graph. Such graphs ran eagerly."""
    x = draw(2)
    torch._dynamo.reset()
    options = {"fallback": "error", "cache": False}
    compiled = torch.compile(MADE_OF_NUMBERS[name], backend="aotkit", dynamic=dynamic, options=options)
    for found, wanted in zip(observe(compiled, (x,)), observe(MADE_OF_NUMBERS[name], (x,)), strict=True):
        assert found.dtype is wanted.dtype and torch.equal(found, wanted)


def test_a_channel_shuffle_that_moves_nothing_has_memory_of_its_own():
    x = torch.randn(1, 1, 1, 1)
    check(lambda x: F.channel_shuffle(x, 1), x)
    got = torch.compile(lambda x: F.channel_shuffle(x, 1), backend="aotkit")(x)
    assert got.data_ptr() != x.data_ptr()


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(
    **rows(
        ("index_select", lambda x: x.index_select(0, torch.empty(0, dtype=torch.int64)), draw(3, 4)),
        (
            "index_reduce",
            lambda x: x.detach().index_reduce(0, torch.empty(0, dtype=torch.int64), x.detach()[:0], "mean"),
            draw(3, 4),
        ),
        ("nothing to reduce", lambda x: x[:0].index_add(1, torch.arange(0), x[:0, :0]), draw(1, 2)),
        ("expanded", lambda x: x.expand(2, 0, 1).abs().mean(), draw(2, 1, 1)),
        ("copied", lambda x: torch.zeros(1).expand(2, 0, 1).clone().copy_(x.detach()), draw(2, 0, 1)),
        ("norm", lambda x: F.layer_norm(x, (0,)), draw(3, 0)),
        ("views", lambda x: (x.reshape(0, 4) * 2, x.t().reshape(-1) + 1, x.flatten().cumsum(0)), draw(0, 4)),
    )
)
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
def test_no_size_is_divided_by_at_compile_time(row, dtype):
    fn, x = row
    check(fn, x.detach().to(dtype).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
def test_logit_and_xlogy_round_where_eager_rounds(dtype):
    x, y = torch.rand(400).to(dtype), draw(400, dtype=dtype).detach()

    def f(x: Tensor, y: Tensor) -> list[Tensor]:
        x, y = x.detach(), y.detach()
        return [torch.logit(x), torch.logit(x, 1e-3), torch.logit(x, 0.3), torch.xlogy(y, x), torch.xlogy(2.3, x)]

    check(f, x, y, exact=dtype in HALF_TYPES)
    odd = torch.tensor([0.0, -0.0, 1.0, INF, -INF, NAN, 2.0, -1.0], dtype=dtype)
    check(lambda x: (torch.xlogy(x[:, None], x), torch.logit(x), torch.logit(x, 1e-3)), odd)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_the_gradient_of_a_variance_of_large_half_types_is_finite(dtype):
    check(lambda x: x.var(), constant(6e4, 8, dtype=dtype))
    check(lambda x: x.var(), (draw(40, dtype=dtype) * 2e4).detach().requires_grad_())


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("strides", [(1, 2), (1, 1), (0, 1), (2, 0)], ids=str)
@pytest.mark.parametrize(
    "scatter",
    [
        lambda x, s: torch.diagonal_scatter(x, s[0]),
        lambda x, s: torch.slice_scatter(x, s[:2], 0, 1, 3),
        lambda x, s: torch.select_scatter(x, s[0], 0, 1),
    ],
    ids=["diagonal", "slice", "select"],
)
def test_a_scatter_into_a_tensor_that_overlaps_itself_is_eagers(scatter, strides):
    x, source = torch.arange(20.0).as_strided((4, 4), strides), torch.rand(4, 4) + 50
    want = scatter(x, source)
    got = torch.compile(scatter, backend="aotkit", options={"fallback": "error", "cache": False})(x, source)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# -- what eager refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    **rows(
        ("target of one class", lambda x, t: F.cross_entropy(x, t), torch.ones(1, 1, 1), torch.tensor([[37]])),
        ("gather", lambda x, t: x.gather(1, t), torch.ones(3, 1), torch.tensor([[0], [1], [0]])),
        ("index", lambda x, t: x[:, t], torch.ones(3, 1), torch.tensor([5])),
        ("embedding", lambda x, t: F.embedding(t, x), torch.ones(1, 4), torch.tensor([5])),
        ("scatter", lambda x, t: x.scatter(1, t, 2.0), torch.ones(3, 1), torch.tensor([[0], [1], [0]])),
        ("minus a bool", lambda x: x - True, torch.ones(3)),
        ("bool minus", torch.rsub, torch.arange(3), torch.ones(3, dtype=torch.bool)),
        ("factor of integers", lambda x: torch.add(x, x, alpha=0.5), torch.arange(3)),
        ("bool factor", lambda x: torch.sub(x, x, alpha=True), torch.arange(3)),
        ("maximum of nothing", lambda x: x.max(), torch.ones(0)),
        ("place among bools", lambda x: x.argmax(), torch.ones(3, dtype=torch.bool)),
        ("integers divided", lambda x: torch.addcdiv(x, x, x), torch.arange(1, 4)),
        ("too large a number", lambda x: torch.full((2,), 2**40, dtype=torch.int32) + x, torch.arange(2)),
        ("not a number of float16", lambda x: x.masked_fill(x > 0, 1e300), torch.ones(2, dtype=torch.float16)),
        ("infinity as an integer", lambda x: x.scatter(0, torch.tensor([0]), INF), torch.arange(3)),
    )
)
def test_what_eager_refuses_is_refused(row):
    fn, *args = row
    torch._dynamo.reset()
    with pytest.raises((RuntimeError, IndexError)):
        fn(*args)
    with pytest.raises((RuntimeError, IndexError)):
        torch.compile(fn, backend="aotkit", options={"cache": False})(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_numbers_overflow_only_where_the_result_does(dtype):
    x = torch.tensor([89.0, -89.0, 89.3, 88.0, 100.0], dtype=dtype)
    check(lambda x: (x.sinh(), x.cosh()), x.detach())
    check(lambda x: (x.std(0).detach(), torch.std_mean(x, 1)[0].detach()), draw(6, 7, dtype=dtype).detach() * 1e38)


def test_sums_as_bools_and_bounds_that_are_nan_are_eagers():
    check(lambda x: [x.sum(dtype=torch.bool), x.sum(0, dtype=torch.bool)], torch.tensor([1, 2, 0], dtype=torch.int16))
    check(lambda x: F.hardtanh(x.detach(), -1, NAN), draw(8), exact=True)


# -- statistics --------------------------------------------------------------------------------------------------------


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, True)


def running_batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean, var = torch.zeros(4, dtype=weight.dtype), torch.ones(4, dtype=weight.dtype)
    return F.batch_norm(x, mean, var, weight, bias, True)


NORMS = {
    "batch": batch_norm,
    "batch, running": running_batch_norm,
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
    "layer": lambda x, w, b: F.layer_norm(x, (4,), w, b),
    "weight": lambda x, w, b: torch._weight_norm(x, x[:, :1, :1, :1].detach(), 0) + w + b,
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("half", HALF_TYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_half_types_far_from_zero_with_parameters_in_float32(half, name):
    x = (draw(5, 4, 3, 4) + 50).to(half).detach().requires_grad_()
    check(NORMS[name], x, draw(4, seed=1), draw(4, seed=2))


# -- sums over several dimensions --------------------------------------------------------------------------------------

POSITIVE = torch.rand(20, 5, 17, 13, generator=torch.Generator().manual_seed(1))[:, :, :16, :12]  # with gaps


@pytest.mark.parametrize(
    **rows(
        ("all", lambda x: x.sum()),
        ("planes", lambda x: x.mean((0, 2, 3))),
        ("columns", lambda x: x.sum((0, 1, 2))),
        ("divergence", lambda x: F.kl_div(x.contiguous().detach(), x, reduction="sum")),
    )
)
def test_sums_over_dimensions_of_unknown_sizes_are_no_less_exact_than_eagers(row):
    (fn,) = row
    torch._dynamo.reset()
    options = {"fallback": "error", "cache": False}
    got = torch.compile(fn, backend="aotkit", fullgraph=True, dynamic=True, options=options)(POSITIVE)
    true = fn(POSITIVE.double())
    assert ((got.double() - true).abs() <= 5e-7 * true.abs().max()).all()
