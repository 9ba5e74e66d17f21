"""Arguments at the edge of what is generated, and what else than tensors of one type a graph may hold."""

from __future__ import annotations

import math
import random
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions, lower_graph
from aotkit_inductor_lower.lowering.sorting import LONGEST_NETWORK, LONGEST_WIDE
from aotkit_inductor_lower.ops.aten import is_random

aten = torch.ops.aten
HALVES = [torch.float16, torch.bfloat16]


def rows(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


@pytest.mark.parametrize("correction", [0, 1, 2, 3, 2.5])
def test_a_variance_of_fewer_elements_than_are_taken_off_is_no_number_below_zero(check, correction):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*degrees of freedom")
        check(lambda x: aten.var.correction(x, [1], correction=correction), rows(5, 2))
        check(lambda x: aten.var_mean.correction(x, [1], correction=correction), rows(3, 1))


@pytest.mark.parametrize(
    ("op", "numbers"),
    [
        (aten.elu.default, ()), (aten.elu.default, (2.0, 1.5, 0.5)), (aten.softplus.default, ()),
        (aten.softplus.default, (2.0, 1.0)), (aten.mish.default, ()), (aten.hardswish.default, ()),
        (aten.hardsigmoid.default, ()), (aten.softshrink.default, (0.3,)), (aten.leaky_relu.default, (0.2,)),
        (aten.hardtanh.default, (-0.5, 0.25)), (aten.gelu.default, ()), (aten.silu.default, ()),
        (aten.relu.default, ()),
    ],
    ids=str,
)  # fmt: skip
def test_an_activation_of_one_tensor_is_generated(check, op, numbers):
    check(lambda x: op(x, *numbers), rows(7, 9))


@pytest.mark.parametrize(
    "op", [aten.elu_backward.default, aten.softplus_backward.default, aten.hardswish_backward.default], ids=str
)
def test_the_gradient_of_an_activation_takes_two_tensors(check, op):
    numbers = {"aten.elu_backward.default": (1.5, 1.0, 2.0, False), "aten.softplus_backward.default": (2.0, 1.0)}
    given = numbers.get(str(op), ())
    if str(op) == "aten.elu_backward.default":
        check(lambda g, x: op(g, *given, x), rows(7, 9), rows(63).reshape(7, 9))
    else:
        check(lambda g, x: op(g, x, *given), rows(7, 9), rows(63).reshape(7, 9))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_a_batch_norm_shifts_by_what_it_is_given_and_else_by_nothing(check, weighted, gaps):
    x = rows(3, 4, 10)

    def normed(x, mean, variance, weight=None, bias=None):
        x = x[:, :, ::2] if gaps else x
        return aten._native_batch_norm_legit_no_training(x, weight, bias, mean, variance, 0.1, 1e-5)[0]

    check(normed, x, rows(4), rows(4).abs() + 0.5, *([rows(4), rows(2, 4)[1]] if weighted else []))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, *HALVES], ids=str
)
def test_short_rows_of_every_type_are_sorted_as_in_eager_mode(check, dtype):
    x = torch.randperm(72, generator=torch.Generator().manual_seed(0)).reshape(6, 12).to(dtype)
    check(lambda x: tuple(x.sort(-1)), x)
    check(lambda x: tuple(x.topk(3, -1)), x, aten=("topk",) if dtype is torch.uint8 else ())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_elements_that_differ_in_their_last_bits_alone_are_sorted(check, dtype):
    x = torch.randperm(72, generator=torch.Generator().manual_seed(0)).reshape(6, 12).to(dtype)
    if dtype is torch.int64:
        x = x + (1 << 60)
    else:
        x = x / 7 * 1e-12 + 1.0
    check(lambda x: tuple(x.sort(-1)), x, tolerance=0)


@pytest.mark.parametrize(("dtype", "longest"), [(torch.float32, LONGEST_NETWORK), (torch.int64, LONGEST_WIDE)], ids=str)
def test_rows_up_to_the_longest_network_are_sorted_by_one(check, dtype, longest):
    def middle(x):
        return tuple(x.kthvalue(x.shape[1] // 2, -1))

    for count, left in ((longest, ()), (longest + 1, ("kthvalue",))):
        x = torch.randperm(3 * count, generator=torch.Generator().manual_seed(0)).reshape(3, count).to(dtype)
        check(middle, x, aten=left)


def test_an_index_under_a_mask_may_lie_outside(check):
    index, mask = torch.tensor([0, 2, 7, -9]), torch.tensor([[True], [True], [False], [False]])
    check(lambda x, m, i: aten._unsafe_masked_index(x, m, [i], 0.5), rows(3, 5), mask, index)


def test_an_index_into_nothing_is_left_to_aten_with_and_without_a_mask():
    index, mask = torch.tensor([0, 2]), torch.zeros(2, 1, dtype=torch.bool)
    cases = {
        "there is nothing near an index into nothing": lambda x: aten._unsafe_masked_index(x, mask, [index], 0.5),
        "nothing is indexed": lambda x: aten.index(x, [index[:0]]),
    }
    for words, f in cases.items():
        graph = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(rows(0, 5))
        assert [extern.reason for extern in compile_graph(graph).report().externs] == [words]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_a_number_beside_a_half_is_rounded_to_it_before_its_logarithm_is_taken(check, dtype):
    x = rows(64, dtype=dtype).abs() * 100
    check(lambda x: aten.xlogy.Scalar_Other(x, 0.1), x)
    check(lambda x: aten.xlogy.Scalar_Self(0.1, x), x)
    check(lambda x: aten.xlogy.Tensor(x, x.flip(0)), x)
    check(lambda x: aten.special_xlog1py.other_scalar(x, 0.1), x)
    check(lambda x: aten.special_xlog1py.self_scalar(1e-40 if dtype is torch.float16 else 0.1, x - 5), x)
    check(lambda x: aten.special_xlog1py.default(x, x.flip(0)), x)


def test_what_a_norm_adds_to_an_infinite_product_of_a_finite_weight_remains(check):
    weight, bias = torch.tensor([3e38, -3e38, 3e38, 1.0]), torch.tensor([-math.inf, math.inf, -3e38, 1.0])
    x = torch.tensor([[3.0, -3.0, 2.0, -2.0], [2.0, 3.0, -3.0, -2.0]])
    check(lambda x, w, b: aten.native_layer_norm(x, [4], w * 1.0, b, 1e-5)[0], x, weight, bias)


def test_as_strided_with_other_sizes_or_strides_is_no_copy_of_its_argument(check):
    x = rows(4, 4)
    check(lambda x: aten.as_strided(x, (2, 4), (4, 1)) + 1, x)
    check(lambda x: aten.as_strided(x, (4, 4), (1, 4)) + 1, x)
    check(lambda x: aten.as_strided(x, (4, 4), (4, 1)) + 1, x)
    check(lambda x: aten.as_strided(x, (3, 4), (4, 1), 4) + 1, x)


def test_a_graph_may_return_nothing_numbers_and_sizes(check):
    check(lambda x: (x + 1, None, 3, 0), rows(4))


def test_sizes_that_only_tensors_tell_are_found(check):
    def sized(x, y):
        return x * x.shape[0] + y.sum(0), x.new_full((y.shape[0],), 2.0)

    check(sized, rows(4, 5), rows(7, 5), mode="symbolic")


def test_random_calls_of_aten_are_told_from_others():
    assert is_random("aten.bernoulli.p") and is_random("aten.randperm.default") and is_random("aten.normal.float_float")
    assert not is_random("aten.mm.default") and not is_random("aten.sort.default")


def test_two_seeds_are_drawn_for_each_random_node_of_a_graph():
    graph = make_fx(lambda x: (torch.rand_like(x) + x.sin().cos().exp() * 2, torch.randn(3)))(rows(4))
    program = lower_graph(graph, LowerOptions(rng="fast"))
    (seeds,) = [buffer for buffer in program.buffers if buffer.name == "random_seeds"]
    assert [size.constant for size in seeds.sizes] == [4]


def test_random_integers_between_sizes_are_left_to_aten():
    def drawn(x):
        return torch.randint(x.shape[0], 100, (3,)), torch.randint(0, 50 + x.shape[0], (3,))

    graph = make_fx(drawn, tracing_mode="symbolic")(rows(4))
    made = compile_graph(graph, options=LowerOptions(rng="fast"))
    assert {extern.target for extern in made.report().externs} == {"aten.randint.low"}
    first, second = made([rows(4)])
    assert first.min() >= 4 and first.max() < 100 and second.min() >= 0 and second.max() < 54


@pytest.mark.parametrize(("dtype", "number"), [(torch.bfloat16, 1.001), (torch.float16, 1.0001)], ids=str)
def test_a_number_that_a_half_rounds_to_one_has_no_logarithm(check, dtype, number):
    x = rows(64, dtype=dtype) * 100
    made = check(lambda x: aten.xlogy.Scalar_Other(x, number), x)
    assert made.compiled([x])[0].eq(0).all()


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_step_that_is_a_size_is_known_to_be_positive(check, steps):
    check(lambda x, y: x[:: y.shape[0]] + 1, rows(12, 2), rows(steps, 4), mode="symbolic")


def test_a_slice_with_a_step_that_is_a_size_is_put_into_a_tensor(check):
    def put(x, y):
        step = y.shape[0]
        return torch.slice_scatter(x, x[::step] * 2, 0, None, None, step)

    check(put, rows(12, 2), rows(3, 4), mode="symbolic")


@pytest.mark.parametrize("place", [(0, slice(None), None), (0, None), (0, slice(2)), (1,)], ids=str)
def test_what_is_put_into_a_tensor_has_the_sizes_of_its_place(place):
    graph, x = torch.fx.Graph(), rows(2, 3)
    given, put = graph.placeholder("x"), graph.placeholder("src")
    graph.output((graph.call_function(aten.select_scatter.default, (given, put, 0, 0)),))
    made = compile_graph(torch.fx.GraphModule({}, graph), [x, x[place]])
    refused = [] if place == (1,) else ["a tensor of other sizes than what it is put into is left to ATen"]
    assert [extern.reason for extern in made.report().externs] == refused


@pytest.mark.parametrize("sizes", [(33,), (2, 5, 33), (5, 1)], ids=str)
def test_a_soft_margin_loss_whose_target_is_larger_is_refused_as_in_eager_mode(sizes):
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return aten.soft_margin_loss.default(x, target, 0)

    x, target = rows(1, 33), rows(*sizes).sign()
    graph = make_fx(loss, decompositions(), tracing_mode="fake")(x, target)
    if sizes == (33,):
        torch.testing.assert_close(compile_graph(graph, [x, target])([x, target])[0], loss(x, target))
        return
    for call in (loss, lambda *args: compile_graph(graph, list(args))(list(args))):
        with pytest.raises(RuntimeError, match="broadcast shape"):
            call(x, target)


def test_complex_numbers_between_two_ends_are_eagers():
    graph = make_fx(lambda: torch.linspace(3, -3, 100, dtype=torch.complex64), decompositions(), tracing_mode="fake")()
    (result,) = compile_graph(graph, [])([])
    assert torch.equal(result, torch.linspace(3, -3, 100, dtype=torch.complex64))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize("sizes", [(2, 0, 4), (0, 4), (0, 3, 4), (2, 3, 0), (2, 0, 4, 4), (0, 3, 4, 4), (2, 3, 4, 0)])
def test_pads_of_nothing_are_refused_where_eager_refuses_them(kind, sizes):
    rank = 1 if len(sizes) < 4 else 2
    op = getattr(aten, f"{kind}_pad{rank}d").default
    for pads in ([0] * 2 * rank, [1] * 2 * rank):
        x = torch.ones(sizes)

        def compiled(x: torch.Tensor, pads: list[int] = pads) -> torch.Tensor:
            graph = make_fx(lambda x: op(x, pads), decompositions(), tracing_mode="fake")(x)
            return compile_graph(graph, [x])([x])[0]

        try:
            want = op(x, pads)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                compiled(x)
        else:
            assert compiled(x).shape == want.shape


RESIZED = {
    "nearest": lambda x: aten.upsample_nearest2d(x, [4, 6]),
    "exact": lambda x: aten._upsample_nearest_exact2d(x, [4, 6]),
    "bilinear": lambda x: aten.upsample_bilinear2d(x, [4, 6], False),
    "reflection": lambda x: aten.reflection_pad2d(x, [0, 0, 0, 0]),
    "replication": lambda x: aten.replication_pad2d(x, [1, 1, 1, 1]),
    "trilinear": lambda x: aten.upsample_trilinear3d(x, [2, 4, 6], False),
    "replication of volumes": lambda x: aten.replication_pad3d(x, [1, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("name", RESIZED)
def test_images_of_odd_strides_are_resized_into_eagers_memory_format(name):
    rng, fn = random.Random(name), RESIZED[name]
    rank = 5 if name in ("trilinear", "replication of volumes") else 4
    for _ in range(8):
        sizes = [rng.choice((1, 1, 2, 3)) for _ in range(rank)]
        strides, step = [0] * rank, 1
        for dim in reversed([0, *range(2, rank), 1] if rng.random() < 0.7 else range(rank)):
            strides[dim], step = step, step * sizes[dim]
            if sizes[dim] == 1 and rng.random() < 0.6:
                strides[dim] = rng.choice((1, 7, 100))
        x = torch.rand(800).as_strided(sizes, strides)
        want = fn(x)
        (got,) = compile_graph(make_fx(lambda x: (fn(x),), decompositions(), tracing_mode="fake")(x))([x])
        kept = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (want, got)]
        assert kept[0] == kept[1], (sizes, strides)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_gradients_of_losses_of_nothing_are_nothing(reduction):
    x, y = torch.empty(3, 0), torch.empty(3, 0)
    grad = torch.empty(3, 0) if reduction == 0 else torch.ones(())
    losses = (aten.smooth_l1_loss_backward, [1.0]), (aten.huber_loss_backward, [1.0]), (aten.mse_loss_backward, [])
    for op, rest in losses:
        graph = make_fx(lambda *a, op=op, rest=rest: op(*a, reduction, *rest), decompositions())(grad, x, y)
        assert compile_graph(graph)([grad, x, y])[0].shape == (3, 0)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_large_margins_are_as_exact_as_in_eager_mode(dtype, reduction):
    x, target = torch.linspace(-40, 40, 65).to(dtype), torch.ones(65, dtype=dtype)
    target[::2] = -1
    grad = torch.ones(65 if reduction == 0 else (), dtype=dtype)
    graph = make_fx(lambda *a: aten.soft_margin_loss_backward(*a, reduction), decompositions())(grad, x, target)
    (result,) = compile_graph(graph)([grad, x, target])
    want = aten.soft_margin_loss_backward(grad, x, target, reduction)
    rtol = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(result, want, rtol=rtol, atol=0)


def test_targets_without_a_sign_are_negated_as_in_eager_mode():
    x, target = rows(6), torch.tensor([0, 1, 16, 255, 2, 3], dtype=torch.uint8)
    for op, args in (
        (aten.soft_margin_loss, (x, target, 0)),
        (aten.soft_margin_loss_backward, (torch.ones(6), x, target, 0)),
    ):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        graph = make_fx(lambda *a, op=op: op(*a, 0), decompositions())(*tensors)
        torch.testing.assert_close(compile_graph(graph)(tensors)[0], op(*args), equal_nan=True)
