"""Gradients of activations read results that are kept anyway: less is kept, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aotkit
from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.driver import prepare_joint_graph

aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")
Function = Callable[[torch.Tensor], torch.Tensor]


def image(dtype: torch.dtype = torch.float32, channels_last: bool = False) -> torch.Tensor:
    """An image with numbers at and beside the bounds of activations."""
    x = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0)) * 4
    edges = torch.tensor([0.0, -0.0, 6.0, 1.0, -1.0, NAN, INF, -INF, 1e-45, -1e-45, 5.9999995, 6.0000005])
    x.view(-1)[: len(edges) * 8] = edges.repeat(8)
    x = x.to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def joint_of(f: Function, x: torch.Tensor) -> torch.fx.GraphModule:
    """The graph of a forward and its backward."""
    return aotkit.stages(f).capture(x.detach().clone().requires_grad_()).graph


def eager(f: Function, x: torch.Tensor, tangent: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """The result, the gradient by the image, and what the result's gradient was."""
    x = x.detach().clone().requires_grad_()
    y = f(x)
    tangent = torch.arange(1.0, y.numel() + 1).reshape(y.shape).to(y.dtype) if tangent is None else tangent
    (gradient,) = torch.autograd.grad(y, x, tangent)
    return y.detach(), gradient, tangent


def convolved(x: torch.Tensor) -> torch.Tensor:
    """Through a weight of small whole numbers, which needs no input of its own."""
    weight = torch.arange(4 * 3 * 3 * 3, dtype=x.dtype).remainder(5).sub(2).view(4, 3, 3, 3)
    return F.conv2d(x, weight)


def targets(graph: torch.fx.GraphModule, target: Any) -> list[torch.fx.Node]:
    return list(graph.graph.find_nodes(op="call_function", target=target))


ACTIVATIONS: dict[str, tuple[Function, Any]] = {
    "relu6": (F.relu6, aten.hardtanh_backward.default),
    "hardtanh": (F.hardtanh, aten.hardtanh_backward.default),
    "of one bound": (lambda x: F.hardtanh(x, 1.0, 1.0), aten.hardtanh_backward.default),
    "leaky": (F.leaky_relu, aten.leaky_relu_backward.default),
    "leaky of slope 0": (lambda x: F.leaky_relu(x, 0.0), aten.leaky_relu_backward.default),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gradient_reads_the_result_of_its_activation(name: str, dtype: torch.dtype) -> None:
    activation, gradient = ACTIVATIONS[name]
    x = image(dtype)

    def f(x: torch.Tensor) -> torch.Tensor:
        return activation(x * 1) * 2

    joint = joint_of(f, x)
    prepared = prepare_joint_graph(joint)
    (node,) = targets(prepared, gradient)
    assert node.args[1].target in (aten.hardtanh.default, aten.leaky_relu.default)  # type: ignore[union-attr]
    want = eager(f, x)
    for got, expected in zip(prepared(x, want[2]), want, strict=False):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("pads", [(0, 1, 0, 1), (2, 0, 1, 3), (0, 0, 0, 0), (1, 1), (0, 0, 2, 1)])
@pytest.mark.parametrize("activation", [F.relu6, F.relu], ids=["relu6", "relu"])
def test_a_gradient_reads_the_inside_of_a_kept_pad(
    activation: Function, pads: tuple[int, ...], channels_last: bool
) -> None:
    x = image(channels_last=channels_last).nan_to_num(1.0, 2.0, -2.0)

    def f(x: torch.Tensor) -> torch.Tensor:
        return convolved(F.pad(activation(x * 1), pads))

    prepared = prepare_joint_graph(joint_of(f, x), LowerOptions(disable=("channels-last",)))
    (node,) = [*targets(prepared, aten.hardtanh_backward.default), *targets(prepared, aten.threshold_backward.default)]
    read: Any = node.args[1]
    while read.target is aten.slice.Tensor:
        read = read.args[0]
    assert read.target is aten.constant_pad_nd.default
    want = eager(f, x)
    for got, expected in zip(prepared(x, want[2]), want, strict=False):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert got.stride() == expected.stride()


def returned(x: torch.Tensor) -> Any:
    y = F.relu6(x * 1)
    return y, y * 2


def returned_pad(x: torch.Tensor) -> Any:
    y = F.pad(F.relu(x * 1), (0, 1, 0, 1))
    return y, convolved(y)


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (returned, torch.float32),
        (returned_pad, torch.float32),
        (lambda x: F.hardtanh(x * 1, -0.1, 0.1) * 2, torch.bfloat16),  # a tenth is no bfloat16
        (lambda x: F.leaky_relu(x * 1, -0.5) * 2, torch.float32),
        (lambda x: torch.clamp(x * 1, 0.0, 6.0) * 2, torch.float32),  # lets gradients through at its bounds
        (lambda x: convolved(F.pad(F.relu(x * 1), (-1, 1))), torch.float32),
    ],
    ids=["returned", "returned pad", "rounded bounds", "negative slope", "clamp", "cropped"],
)
def test_what_says_less_than_what_it_was_made_of_is_left_alone(f: Any, dtype: torch.dtype) -> None:
    joint = joint_of(f, image(dtype))
    assert prepare_joint_graph(joint, LowerOptions(disable=("channels-last",))) is joint


def test_results_that_a_caller_writes_to_are_not_read_in_the_backward() -> None:
    x = image()
    grads = []
    for run in (returned, torch.compile(returned, backend="aotkit", options={"fallback": "error"})):
        given = x.clone().requires_grad_()
        y, z = run(given)
        with torch.no_grad():
            y.fill_(7.0)
        z.sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def normed(pads: tuple[int, ...]) -> nn.Module:
    """A layer of a MobileNet: what is normed is bounded and padded, then comes a convolution."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU6(), nn.ZeroPad2d(pads), nn.Conv2d(8, 8, 3, 2, groups=8)
    )


@pytest.mark.parametrize("pads", [(0, 1, 0, 1), (1, 1, 1, 1)])
def test_of_norm_activation_and_pad_one_is_kept(pads: tuple[int, ...]) -> None:
    model, x = normed(pads), image().nan_to_num(1.0, 2.0, -2.0)
    split = aotkit.stages(model).capture(x).partition()
    kept = [node.meta["val"] for node in split.forward.graph.output_node().args[0][1:]]
    whole = [value for value in kept if value.dim() == 4 and value.shape[1] == 8 and value.shape[-1] >= x.shape[-1]]
    height, width = x.shape[2:]
    assert sorted(tuple(value.shape[2:]) for value in whole) == sorted(
        [(height, width), (height + pads[2] + pads[3], width + pads[0] + pads[1])]
    )


@pytest.mark.parametrize("layout", ["always", "never"])
def test_a_compiled_layer_is_as_near_to_float64_as_eager_mode(layout: str) -> None:
    x = image().nan_to_num(1.0, 2.0, -2.0)

    def values(model: nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        x = x.clone().requires_grad_()
        y = call(x)
        (y * torch.arange(y.numel()).reshape(y.shape).remainder(7)).sum().backward()
        return [each.detach().double() for each in (y, x.grad, *(p.grad for p in model.parameters()))]

    exact = values(model := normed((0, 1, 0, 1)).double(), model, x.double())
    plain = values(model := normed((0, 1, 0, 1)), model, x)
    options = {"fallback": "error", "channels_last_training": layout}
    compiled = values(model := normed((0, 1, 0, 1)), torch.compile(model, backend="aotkit", options=options), x)
    most = max(float(each.norm()) for each in exact)
    for want, theirs, ours in zip(exact, plain, compiled, strict=True):
        # The gradient of a bias before a norm is 0, so an error is a share of at least a part of the largest value.
        scale = max(float(want.norm()), 1e-4 * most)
        assert float((ours - want).norm()) / scale <= 3 * (float((theirs - want).norm()) / scale + 2e-6)


POOLS: dict[str, Function] = {
    "apart": lambda x: F.max_pool2d(x, 2),
    "overlapping": lambda x: F.max_pool2d(x, 3, 2, 1),
    "dilated": lambda x: F.max_pool2d(x, 2, 1, dilation=2),
    "past the end": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("activation", [F.relu, F.relu6], ids=["relu", "relu6"])
def test_gradients_are_masked_by_what_was_pooled(activation: Function, pool: str, channels_last: bool) -> None:
    x = image(channels_last=channels_last)
    # Which gradient eager mode gives a nan depends on where in a vector it lies.
    x = x if activation is F.relu else x.nan_to_num(1.0)

    def f(x: torch.Tensor) -> torch.Tensor:
        return POOLS[pool](activation(x * 1)) * 2

    prepared = prepare_joint_graph(joint_of(f, x))
    (pooling,) = targets(prepared, aten.max_pool2d_with_indices_backward.default)
    assert pooling.args[0].target in (  # type: ignore[union-attr]
        aten.threshold_backward.default,
        aten.hardtanh_backward.default,
    )
    want = eager(f, x)
    compiled = torch.compile(f, backend="aotkit", options={"fallback": "error"})
    for results in (prepared(x, want[2]), eager(compiled, x, want[2])):
        for got, expected in zip(results, want[:2], strict=False):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
            assert got.stride() == expected.stride()


def test_an_activation_before_a_pool_is_not_kept() -> None:
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    split = aotkit.stages(lambda x: F.max_pool2d(F.relu(x * 1), 2) ** 2).capture(x).partition()
    kept = [node.meta["val"] for node in split.forward.graph.output_node().args[0]]
    assert [tuple(value.shape) for value in kept if value.dtype is torch.float32] == [(2, 3, 8, 8)] * 2


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.max_pool2d(F.leaky_relu(x * 1), 2) * 2,  # scales gradients, whose sum rounds otherwise
        lambda x: F.max_pool2d(F.relu(x * 1), 2),  # a caller may write to what was pooled
        lambda x: (y := F.relu(x * 1)).sum() + F.max_pool2d(y, 2).sum(),
    ],
    ids=["leaky", "returned", "read elsewhere"],
)
def test_other_gradients_of_pools_read_the_whole_activation(f: Any) -> None:
    prepared = prepare_joint_graph(joint_of(f, image()))
    (pooling,) = targets(prepared, aten.max_pool2d_with_indices_backward.default)
    assert not {node.target for node in pooling.all_input_nodes} & {
        aten.threshold_backward.default,
        aten.leaky_relu_backward.default,
        aten.new_empty_strided.default,
    }


def test_fuel_and_names_leave_the_passes_out() -> None:
    x = image()
    names = ("gradients-of-results", "mask-pooled-gradients", "keep-pool-offsets")
    for f in (lambda x: F.relu6(x * 1) * 2, lambda x: F.max_pool2d(F.relu(x * 1), 2) * 2):
        joint = joint_of(f, x)
        assert prepare_joint_graph(joint) is not joint
        for options in (LowerOptions(disable=names), LowerOptions(fuel=0)):
            assert prepare_joint_graph(joint, options) is joint


@pytest.mark.parametrize("largest", [torch.amax, torch.amin])
def test_the_gradient_of_a_largest_number_finds_it_again(largest: Callable[..., torch.Tensor]) -> None:
    """The softmax that it is the largest of was computed anew in the backward, with other last bits: nothing equalled
    it, and the gradient was 0 / 0."""
    scores = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(0))

    def f(x: torch.Tensor) -> torch.Tensor:
        return largest(scores.softmax(-1) * x, -1, keepdim=True)

    x = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (want,) = torch.autograd.grad(f(x).sum(), x)
    compiled = torch.compile(f, backend=aotkit.make_backend(aotkit.Options(fallback="error", cache=False)))
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(got, want)
