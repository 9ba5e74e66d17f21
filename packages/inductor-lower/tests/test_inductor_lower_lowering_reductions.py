"""Reductions, softmax, losses and norms: eager's values, in the kernels that they should take."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions, lower_graph
from aotkit_inductor_lower.ir import DType, LoopNest, Reduce

aten = torch.ops.aten
F = torch.nn.functional


@pytest.mark.covers("F5g.8", "F5g.9", "F5g.10")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_reductions_over_any_dimensions_are_one_kernel(check, dims, keepdim):
    x = torch.randn(5, 7, 19)
    for f in (
        lambda x: x.sum(dims, keepdim),
        lambda x: x.mean(dims, keepdim),
        lambda x: x.amax(dims, keepdim),
        lambda x: x.var(dims, keepdim=keepdim),
        lambda x: torch.var_mean(x, dims, correction=0, keepdim=keepdim),
        lambda x: x.logsumexp(dims, keepdim),
        lambda x: torch.linalg.vector_norm(x, 2, dims, keepdim),
        lambda x: (x > 2).any(dims, keepdim) if len(dims) == 1 else aten.any.dims(x > 2, list(dims), keepdim),
    ):
        result = check(f, x)
        assert result.kernels == 1 and not result.externs


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_each_element_is_rounded_to_the_type_that_is_asked_for_before_it_is_added_up(check, given, dtype):
    rows = [[1e5, 0, 1, 1, 1], [1e5, -1e5, 3, 0, 1], [1 + 2**-11, 1 + 2**-9, 2**-13, 2**-24, 2049], [9, 0, 1, 1, 1]]
    x = torch.tensor(rows).to(given)
    result = check(
        lambda x: (
            *(f(x, 1, dtype=dtype) for f in (torch.sum, torch.prod, torch.mean, torch.cumsum, torch.cumprod)),
            x.sum(dtype=dtype),
        ),
        x,
    )
    assert not result.externs


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.int32, torch.bool], ids=str)
def test_products_of_truths_are_truths(check, given):
    x = torch.tensor([[0.0, 2, 0.5], [1, 3, -1], [0, 0, 0]]).to(given)
    result = check(lambda x: (x.prod(1, dtype=torch.bool), x.prod(dtype=torch.bool)), x)
    assert not result.externs


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_what_lies_in_several_runs_of_memory_is_added_up_before_it_is_rounded(check, order, dtype):
    """So eager does in sums, not in nansum. The ones cancel, and their rests add up if they are not rounded away."""
    even = (torch.arange(4).view(4, 1, 1) + torch.arange(3).view(3, 1) + torch.arange(16)) % 2 == 0
    x = torch.where(even, 1 + 2.0**-12, -1.0).permute(order)
    dims = ([0, 1], [0, 2], [1, 2], [0], [0, 1, 2])
    sums = lambda x: [f(x, dim, dtype=dtype) for dim in dims for f in (torch.sum, torch.nansum)]
    check(sums, x, tolerance=torch.finfo(dtype).eps, table=decompositions())


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_only_number_of_a_scalar_is_reduced_over_the_dimension_it_may_be_said_to_have(check, dtype, dim):
    x = torch.tensor(-1.5).to(dtype)
    for order in (2, 3, 0.5, torch.inf):
        check(lambda x, order=order: torch.linalg.vector_norm(x, order, dim), x)
    check(lambda x: (x.sum(dim), x.mean(dim), x.amax(dim), x.var(dim, correction=0), x.logsumexp(dim)), x)
    check(lambda x: (x.prod(dim), *x.max(dim), x.argmin(dim), x.softmax(dim), x.cumsum(dim)), x)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float16], ids=str
)
def test_reductions_accumulate_in_eagers_type(check, dtype):
    x = torch.randint(0, 2 if dtype is torch.bool else 100, (3, 50)).to(dtype)
    check(lambda x: (x.sum(), x.sum(1), x.amax(1), x.any(), x.all(1)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", [torch.log_softmax, torch.softmax], ids=lambda op: op.__name__)
def test_a_softmax_of_a_transposed_tensor_has_eagers_strides(check, op, dtype):
    x = torch.randn(2, 4, 4, 3).to(dtype)
    for laid_out in (x.permute(0, 3, 1, 2), x.transpose(0, 1), x[:, ::2]):
        for dim in (1, -1):
            check(lambda x, dim=dim: op(x, dim), laid_out)


@pytest.mark.parametrize("op", [aten.any.dims, aten.all.dims], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.float32], ids=str)
def test_whether_any_or_all_are_true_over_no_dimension_is_asked_of_each(check, op, dtype):
    x = torch.tensor([[0, 2, 3], [1, 0, 0]]).to(dtype)
    for dims in ([], None, [0], [0, 1]):
        check(lambda x, dims=dims: (op(x, dims), op(x * 2, dims, True)) if dtype.is_floating_point else op(x, dims), x)


def test_extrema_give_the_first_of_equals_and_nan(check):
    x = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 5.0, float("nan")], [-1.0, -1.0, -2.0]])
    check(lambda x: (*x.max(1), *x.min(0), x.argmax(1), x.argmin(), x.argmax(0, keepdim=True), x.amax(1)), x)


def test_products_and_counts(check):
    x = torch.rand(4, 6) + 0.5
    check(lambda x: (x.prod(), x.prod(1), (x > 1).sum(), x.sum(dtype=torch.float64)), x, tolerance=1e-5)


@pytest.mark.covers("F5h.4")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_and_its_derivative_are_one_kernel_each(check, dim, dtype):
    x = torch.randn(5, 6, 33).to(dtype)
    for f in (lambda x: x.softmax(dim), lambda x: x.log_softmax(dim)):
        result = check(f, x)
        assert result.kernels == 1 and not result.externs
    y = x.float().softmax(dim).to(dtype)
    for f in (
        lambda g, y: aten._softmax_backward_data(g, y, dim, y.dtype),
        lambda g, y: aten._log_softmax_backward_data(g, y, dim, y.dtype),
    ):
        result = check(f, x, y)
        assert result.kernels == 1 and not result.externs


def test_a_row_of_minus_infinity_gives_what_eager_gives(check):
    x = torch.tensor([[float("-inf")] * 3, [0.0, float("-inf"), 1.0], [float("inf"), 0.0, 1.0]])
    check(lambda x: (x.softmax(1), x.log_softmax(1), x.logsumexp(1)), x)


@pytest.mark.covers("F5g.18", "F5h.3")
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_is_one_kernel_and_its_derivative_two(check, affine):
    x = torch.randn(4, 6, 40)
    w, b = (torch.randn(40), torch.randn(40)) if affine else (None, None)
    parameters = (w, b) if affine else ()

    def forward(x, *wb):
        return aten.native_layer_norm(x, [40], *(wb or (None, None)), 1e-5)

    result = check(forward, x, *parameters)
    assert result.kernels == 1 and not result.externs
    _, mean, rstd = forward(x, *parameters)

    def backward(g, x, mean, rstd, *wb):
        mask = [True, affine, affine]
        results = aten.native_layer_norm_backward(g, x, [40], mean, rstd, *(wb or (None, None)), mask)
        return tuple(t for t in results if t is not None)

    result = check(backward, torch.randn_like(x), x, mean, rstd, *parameters, tolerance=2e-5)
    assert result.kernels == (2 if affine else 1) and not result.externs


def test_the_gradient_of_a_layer_norm_of_statistics_that_are_no_rows_is_atens(check):
    """Eager reads as many of them as there are rows, wherever they lie."""
    x, g, w = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(3, 4)

    def backward(g, x, w):
        return aten.native_layer_norm_backward(g, x, [3, 4], x, x, w, None, [True, True, False])[:2]

    check(backward, g, x, w, aten=("native_layer_norm_backward",), tolerance=2e-5)


@pytest.mark.covers("F5g.10")
def test_statistics_far_from_zero_are_as_exact_as_eagers(check):
    x = torch.randn(3, 4096) + 1e4
    check(lambda x: torch.var_mean(x, 1), x, tolerance=2e-4)


@pytest.mark.covers("F5g.18")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_and_its_derivative_equal_eager(check, layout, train):
    x = torch.randn(3, 5, 6, 7).to(memory_format=layout)
    w, b, mean, var = torch.randn(5), torch.randn(5), torch.randn(5), torch.rand(5) + 0.5

    def forward(x, w, b, mean, var):
        return aten._native_batch_norm_legit_functional(x, w, b, mean, var, train, 0.1, 1e-5)

    result = check(forward, x, w, b, mean, var, tolerance=1e-5)
    assert not result.externs and result.kernels <= (2 if train else 5)  # running statistics are copied, too
    saved = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, 0.1, 1e-5)[1:3]
    grad = torch.randn_like(x)

    def backward(g, x, w, mean, var, m, r):
        return aten.native_batch_norm_backward(g, x, w, mean, var, m, r, train, 1e-5, [True, True, True])

    result = check(backward, grad, x, w, mean, var, *saved, tolerance=2e-5)
    assert not result.externs and result.kernels <= 3


@pytest.mark.parametrize(
    ("dtype", "device", "wide"),
    [
        *((torch.float32, "cpu", DType.F64), (torch.bfloat16, "cpu", DType.F32), (torch.float64, "cpu", DType.F64)),
        *((torch.float32, "cuda", DType.F32), (torch.float16, "cuda", DType.F32)),  # double is slow there
    ],
)
def test_statistics_of_a_batch_are_summed_in_eagers_type(dtype, device, wide):
    with FakeTensorMode():
        x, channel = torch.empty(3, 5, 6, 7, dtype=dtype, device=device), torch.empty(5, device=device)
        graph = make_fx(
            lambda x, c: aten._native_batch_norm_legit_functional(x, c, c, c, c, True, 0.1, 1e-5), tracing_mode="fake"
        )(x, channel)
    nests = [step for step in lower_graph(graph).steps if isinstance(step, LoopNest)]
    sums = [i for nest in nests for stage in nest.stages for i in stage.body if isinstance(i, Reduce)]
    assert {i.dtype for i in sums} == {wide}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_batch_norm_of_halves_rounds_its_statistics_as_eager(check, half, layout):
    x = (torch.randn(4, 256, 5, 3) * 5).to(half).to(memory_format=layout)

    def fn(x):
        return aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 0.5)[1:]

    got, want = check(fn, x).compiled([x]), fn(x)
    assert [torch.equal(g, w) for g, w in zip(got, want, strict=True)] == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_multiplies_elements_that_lie_apart_in_eagers_order(check, dtype, train):
    x, stats = torch.randn(3, 5, 7, 22, dtype=dtype)[..., ::2], torch.rand(4, 5, dtype=dtype) + 0.5
    stats[0, 1], stats[0, 2] = torch.finfo(dtype).max / 2, float("inf")  # not all orders bear these weights

    def fn(x, weight, bias, mean, var):
        return aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, train, 0.1, 1e-5)[0]

    check(fn, x, *stats, tolerance=1e-5)  # its bits depend on the vectors that eager has
    assert fn(x, *stats).isfinite().sum() > 0.7 * x.numel()


def test_group_norm_is_one_kernel(check):
    x, w, b = torch.randn(3, 6, 4, 5), torch.randn(6), torch.randn(6)
    result = check(lambda x, w, b: aten.native_group_norm(x, w, b, 3, 6, 20, 2, 1e-5), x, w, b, tolerance=1e-5)
    assert result.kernels == 1 and not result.externs


@pytest.mark.covers("F5g.20")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [True, False])
def test_cross_entropy_and_its_gradient_equal_eager(check, reduction, weighted):
    x, weight = torch.randn(12, 7), torch.rand(7) if weighted else None
    target = torch.randint(0, 7, (12,))
    target[3] = -100

    def loss_and_gradient(x, target):
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x, target, weight, reduction=reduction)
        return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]

    if weighted:
        kind = {"none": 0, "mean": 1, "sum": 2}[reduction]
        log = x.log_softmax(1)
        result = check(lambda x, t, w: aten.nll_loss_forward(x, t, w, kind, -100), log, target, weight)
    else:
        result = check(loss_and_gradient, x, target, table=decompositions())
    assert not result.externs


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss], ids=lambda f: f.__name__)
def test_losses_are_one_kernel(check, loss):
    result = check(loss, torch.randn(9, 5), torch.randn(9, 5), table=decompositions())
    assert result.kernels == 1 and not result.externs


@pytest.mark.parametrize("order", [2, 3, 0.5, 0.9, -1, 0])
def test_the_norm_of_one_element_is_its_absolute_value(check, order):
    x = torch.tensor([[1e300], [-1e300], [-3e-200], [0.0]], dtype=torch.float64)
    check(lambda x: (torch.linalg.vector_norm(x, order, 1), torch.linalg.vector_norm(x[1], order)), x)


@pytest.mark.parametrize("value", [0.1, 0.8338774161811379, 1e150, 3.0])
def test_equal_doubles_have_no_variance_and_their_mean_is_each_of_them(check, value):
    x = torch.full((155, 7), value, dtype=torch.float64)
    x[:, 1:] = torch.randn(155, 6, dtype=torch.float64) + 3
    got, want = check(lambda x: torch.var_mean(x, 0), x).compiled([x]), torch.var_mean(x, 0)
    assert got[0][0] == want[0][0] == 0 and got[1][0] == want[1][0] == value
    torch.testing.assert_close(got[0], want[0], rtol=1e-13, atol=0)


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("length", [3, 768, 5456, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_norm_of_equal_numbers_divides_by_the_root_of_its_epsilon_alone(check, dtype, length, mode):
    values = torch.tensor([0.25734859704971313, 0.1, 8113.7, -3e-4, 1.0], dtype=dtype)
    x = values.view(5, 1, 1).expand(5, 2, length).contiguous()
    check(lambda x: aten.native_layer_norm(x, [x.shape[1]], None, None, 1e-12), x.view(10, length), mode=mode)
    check(lambda x: aten.native_group_norm(x, None, None, *x.shape, 1, 1e-12), x, mode=mode)


HASHED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", HASHED, ids=str)
def test_a_hash_has_the_bits_of_eagers(check, dtype):
    x = torch.randn(6, 5, 40) * 4
    x[0, 0, :4] = torch.tensor([math.inf, -math.inf, -0.0, 1e-40])
    x = x.to(dtype)

    def hashes(x):
        hash_ = torch.hash_tensor
        found = (hash_(x), hash_(x, 1), hash_(x, (0, 2)), hash_(x, -1, keepdim=True), hash_(x.mT, 0))
        return tuple(h.view(torch.int64) for h in found)

    check(hashes, x, aten=("view",))
    check(lambda x: torch.hash_tensor(x).view(torch.int64), x[0, 1, 2], aten=("view",))
    check(lambda x: torch.hash_tensor(x, 1).view(torch.int64), torch.randn(2, 70000).to(dtype), aten=("view",))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("processor", ["host", "interpreter", "triton-interpreter"])
@pytest.mark.parametrize("sizes", [(8, 33), (3, 3000), (2, 70000)], ids=str)
def test_a_hash_is_of_its_own_type_in_the_kernel_that_makes_its_elements(processor, sizes):
    def f(x):
        return torch.hash_tensor(x * 2 + 1, 1), torch.hash_tensor(x.int(), 1)

    x = torch.randn(sizes)
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(x), options=LowerOptions(processor=processor))
    for got, want in zip(compiled([x]), f(x), strict=True):
        assert got.dtype is torch.uint64
        assert torch.equal(got, want)
    assert not compiled.report().externs
    assert compiled.report().kernel_count == 2 or sizes[1] > 33  # without one for the product, sum or conversion


@pytest.mark.parametrize(("size", "mode"), [(5, 0), (5, 1), (0, 0)])
def test_hashes_that_eager_refuses_are_left_to_it(size, mode):
    graph = torch.fx.Graph()
    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(size)
        node = graph.call_function(aten.hash_tensor.default, (x,), {"mode": mode})
        node.meta["val"] = torch.empty((), dtype=torch.uint64)
    graph.output((node,))
    program = lower_graph(torch.fx.GraphModule({}, graph))
    assert any(isinstance(step, LoopNest) for step in program.steps) is (size == 5 and mode == 0)
