"""Pooling: windows with padding, dilation and ceil mode, ties, nan, gradients, both memory formats."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, decompositions, lower_graph
from aotkit_inductor_lower.ir import Load, LoopNest

aten = torch.ops.aten
F = torch.nn.functional

WINDOWS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0), "ceil_mode": True},
    {"kernel_size": 3, "stride": 3, "ceil_mode": True},
    {"kernel_size": 4, "stride": 1, "padding": 2},
    {"kernel_size": (6, 7), "stride": 1},  # an element is in more windows than there are
]


def image(*shape, dtype=torch.float32, channels_last=False):
    torch.manual_seed(0)
    x = torch.randn(*shape).to(dtype)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def with_gradient(pool):
    def f(x, g):
        x = x.detach().requires_grad_()
        y = pool(x)
        y = y[0] if isinstance(y, tuple) else y
        return y, torch.autograd.grad(y, x, g[tuple(slice(0, n) for n in y.shape)])[0]

    return f


@pytest.mark.covers("F5g.15")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_average_pooling_and_its_gradient_equal_eager(check, window, count_include_pad, channels_last):
    x = image(2, 3, 7, 10, channels_last=channels_last)
    pool = with_gradient(lambda x: F.avg_pool2d(x, **window, count_include_pad=count_include_pad))
    assert not check(pool, x, image(2, 3, 12, 12), table=decompositions()).externs


@pytest.mark.covers("F5g.15")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_average_pooling_in_other_ranks_and_types_equals_eager(check, dtype):
    table = decompositions()
    check(lambda x: F.avg_pool1d(x, 3, 2, 1), image(2, 3, 11, dtype=dtype), table=table)
    if dtype is torch.bfloat16:
        return
    pool = with_gradient(lambda x: F.avg_pool3d(x, 2, 2, 1, divisor_override=5))
    check(pool, image(2, 3, 5, 4, 6, dtype=dtype), image(2, 3, 6, 6, 6, dtype=dtype), table=table)


@pytest.mark.covers("F5g.15")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("window", [*WINDOWS, {"kernel_size": 3, "dilation": 2, "padding": 1}], ids=str)
def test_max_pooling_its_indices_and_its_gradient_equal_eager(check, window, channels_last):
    x = (image(2, 3, 7, 10, channels_last=channels_last) * 2).round()  # many ties
    if window.get("padding", 0) in (1, 0, (1, 0)) or window["kernel_size"] == 4:
        result = check(lambda x: F.max_pool2d(x, **window, return_indices=True), x)
        assert not result.externs
    pool = with_gradient(lambda x: F.max_pool2d(x, **window, return_indices=True))
    assert not check(pool, x, image(2, 3, 12, 12)).externs


def test_max_pooling_of_nan_and_of_nothing_but_minus_infinity_points_where_eager_points(check):
    x = image(1, 2, 6, 6)
    x[0, 0, 1, 1] = x[0, 0, 0, 1] = x[0, 1, 3, 3] = float("nan")
    x[0, 1, :2, :2] = float("-inf")
    check(lambda x: F.max_pool2d(x, 2, padding=1, return_indices=True), x)
    check(lambda x: F.max_pool2d(x, 3, 2, padding=1, return_indices=True), x)


@pytest.mark.covers("F5g.15")
def test_three_dimensional_max_pooling_equals_eager(check):
    x = image(2, 2, 5, 4, 6)
    pool = with_gradient(lambda x: F.max_pool3d(x, 2, 2, 1, return_indices=True))
    assert not check(pool, x, image(2, 2, 6, 6, 6)).externs


@pytest.mark.covers("F5g.15")
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (7, 10), (3, 4), (9, 3)])
def test_adaptive_pooling_and_its_gradient_equal_eager(check, size):
    x, grad = image(2, 3, 7, 10), image(2, 3, 9, 10)
    assert not check(with_gradient(lambda x: F.adaptive_avg_pool2d(x, size)), x, grad, table=decompositions()).externs
    pool = with_gradient(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True))
    assert not check(pool, x, grad).externs


@pytest.mark.parametrize("window", WINDOWS[:3], ids=str)
def test_an_image_without_a_batch_is_pooled_too(check, window):
    check(with_gradient(lambda x: F.avg_pool2d(x, **window)), image(3, 7, 10), image(3, 12, 12), table=decompositions())
    check(with_gradient(lambda x: F.max_pool2d(x, **window, return_indices=True)), image(3, 7, 10), image(3, 12, 12))


@pytest.mark.parametrize(
    ("pool", "masked"),
    [
        (lambda x: aten._adaptive_avg_pool2d(x, [2, 5]), False),
        (lambda x: aten._adaptive_avg_pool2d(x, [3, 5]), True),
        (lambda x: aten._adaptive_avg_pool2d(x, [2, 3]), True),
        (lambda x: aten.avg_pool2d(x, 2), False),
        (lambda x: aten.avg_pool2d(x, 3), False),  # what no window reaches is left out
        (lambda x: aten.avg_pool2d(x, 3, [], 1), True),
        (lambda x: aten.avg_pool2d(x, 2, [], 0, True), False),
        (lambda x: aten.avg_pool2d(x, 3, [], 0, True), True),
        (lambda x: aten.max_pool2d_with_indices(x, 3, 1)[0], False),
        (lambda x: aten.max_pool2d_with_indices(x, 3, 1, 1)[0], True),
        (lambda x: aten.max_pool2d_with_indices(x, 2, 1, 0, 3)[0], False),
    ],
)
def test_only_windows_that_reach_beyond_the_input_are_masked(check, pool, masked):
    x = image(2, 3, 8, 10)
    check(pool, x)
    nests = [s for s in lower_graph(make_fx(pool, tracing_mode="fake")(x)).steps if isinstance(s, LoopNest)]
    loads = [i for nest in nests for stage in nest.stages for i in stage.body if isinstance(i, Load)]
    assert any(load.mask is not None for load in loads) == masked


def test_a_pool_takes_in_what_is_computed_before_it(check):
    result = check(lambda x: F.avg_pool2d(x.relu(), 2) + 1, image(2, 3, 8, 8))
    assert result.kernels <= 2 and not result.externs


def kept(images, mode, padding):
    """All images, or one for each padding of the bicubic mode, whose kernels take a second each to compile."""
    return [images[["zeros", "border", "reflection"].index(padding)]] if mode == "bicubic" else images


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_places_outside_of_an_image_do_not_see_its_first_pixel(mode, padding, corners):
    torch.manual_seed(0)
    x, grid = torch.randn(2, 3, 6, 5), torch.rand(2, 4, 7, 2) * 7 - 3.5
    x[:, :, 0, 0], x[:, :, 0, 1] = float("inf"), float("nan")

    def sampled(x, grid):
        return (F.grid_sample(x, grid, mode, padding, align_corners=corners),)

    layouts = [x, x.contiguous(memory_format=torch.channels_last), x[:, :, 1:2, 1:2]]
    for image in kept(layouts, mode, padding):
        args = (image, grid)
        (want,) = sampled(*args)
        (got,) = compile_graph(make_fx(sampled, decompositions())(*args))(list(args))
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=2e-6)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_places_at_infinity_or_nan_are_eagers(mode, padding, corners):
    places = torch.tensor([0.0, 0.3, float("inf"), float("-inf"), float("nan")])
    grid = torch.cartesian_prod(places, places).view(1, 5, 5, 2)

    def sampled(x, grid):
        return (F.grid_sample(x, grid, mode, padding, align_corners=corners),)

    images = [torch.arange(1.0, 7.0).view(1, 1, 2, 3), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 3).double()]
    for x in kept(images, mode, padding):
        args = (x, grid.to(x.dtype))
        (want,) = sampled(*args)
        (got,) = compile_graph(make_fx(sampled, decompositions())(*args))(list(args))
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=2e-6)


def test_gradients_of_averages_over_overlapping_windows_of_large_contiguous_rows_are_atens() -> None:
    x = torch.randn(2, 32, 96, 97)
    last = x.contiguous(memory_format=torch.channels_last)
    for given, stride, expected in ((x, 2, True), (x, 1, False), (last, 2, False)):
        pool = with_gradient(functools.partial(F.avg_pool2d, kernel_size=3, stride=stride, padding=1))
        args = [given, torch.randn(2, 32, 96, 97)]
        run = compile_graph(make_fx(pool, decompositions(), tracing_mode="fake")(*args))
        names = str(run.report().externs)
        assert ("avg_pool2d_backward" in names) is expected and "avg_pool2d." not in names
        wanted = pool(*args)
        for got, want in zip(run(list(args)), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
