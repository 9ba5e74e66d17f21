"""Training steps of networks of convolutions: channels of an image lie together inside, and nobody outside can tell."""

from __future__ import annotations

import copy
import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import aotkit
from aotkit.driver.stages import prepared_joint
from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.driver import prepare_joint_graph
from aotkit_inductor_lower.graph_passes import channels_last
from aotkit_inductor_lower.target import HOST

aten = torch.ops.aten
#: Passes that change the same joint graphs.
OTHERS = ("keep-pool-offsets", "gradients-of-results", "mask-pooled-gradients")
ON: dict[str, Any] = {"channels_last_training": "always"}


class Net(nn.Module):
    """Stem, norms, a depthwise and a strided convolution, pads, pools, a residual, resampling, a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.depthwise, self.inner = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16)
        self.point = nn.Conv2d(16, 16, 1)
        self.down, self.grouped = nn.Conv2d(16, 24, 3, 2), nn.Conv2d(24, 24, 3, padding=2, dilation=2, groups=2)
        self.up = nn.ConvTranspose2d(24, 16, 2, 2)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(16 * 4, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, and images from the middle."""
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(x))), 3, 1, 1)
        x = functional.relu6(self.point(functional.silu(self.inner(self.depthwise(x))))) + x
        y = self.grouped(self.down(functional.pad(x, (0, 1, 0, 1))))
        y = functional.interpolate(self.up(functional.gelu(y)), x.shape[2:], mode="bilinear")
        y = self.dropout(functional.avg_pool2d(y + x, 2, ceil_mode=True))
        return self.head(functional.adaptive_avg_pool2d(y, (2, 2)).flatten(1)), y


def step(module: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Results and gradients of one step."""
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    scores, images = module(x)
    (scores.square().mean() + images.sin().mean()).backward()
    assert x.grad is not None
    named = {name: p.grad for name, p in module.named_parameters()} if isinstance(module, nn.Module) else {}
    return {"scores": scores.detach(), "images": images.detach(), "x": x.grad, **named}


def layouts(graph: torch.fx.GraphModule) -> list[bool]:
    """For each gradient of a convolution, whether its images have their channels together."""
    found = graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    return [
        all(arg.meta["val"].is_contiguous(memory_format=torch.channels_last) for arg in node.args[:2]) for node in found
    ]


def compiled(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend="aotkit", options={"fallback": "error", **ON, **options})


@pytest.mark.covers("F5c.6", "F5h.14")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("size", [24, 27])
def test_a_training_step_has_eagers_values_gradients_and_strides(size: int, last: bool) -> None:
    torch.manual_seed(0)
    eager, x = Net(), torch.randn(2, 3, size, size + 2)
    if last:
        eager, x = eager.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    want, got, true = step(eager, x), step(compiled(ours, verify=True), x), step(exact, x.double())
    got = {name.removeprefix("_orig_mod."): value for name, value in got.items()}
    for name, value in want.items():
        assert got[name].stride() == value.stride(), name
        scale = float(true[name].abs().max()) + 1e-3
        error, allowed = (float((each[name].double() - true[name]).abs().max()) for each in (got, want))
        assert error <= 3 * (allowed + 2e-6 * scale), name
    for (name, a), b in zip(eager.named_buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6, msg=name)


def joint_graph(module: nn.Module, x: torch.Tensor) -> Any:
    """What is captured of a training step, before anything is laid out."""
    return aotkit.stages(module).capture(x).graph


@pytest.mark.covers("F5c.6")
def test_forward_and_backward_agree_on_channels_together() -> None:
    graph = joint_graph(Net(), torch.randn(2, 3, 24, 26))
    assert layouts(graph) == [False] * 6
    prepared = prepare_joint_graph(graph)
    assert layouts(prepared) == [True] * 6
    assert layouts(graph) == [False] * 6  # it stays as it is
    before, after = (list(g.graph.output_node().args[0]) for g in (graph, prepared))
    assert [n.meta["val"].stride() for n in before if n is not None] == [
        n.meta["val"].stride() for n in after if n is not None
    ]


def test_the_layout_can_be_left_out_and_takes_fuel() -> None:
    graph = joint_graph(Net(), torch.randn(2, 3, 24, 26))
    others = frozenset(OTHERS)
    base = aotkit.Options(channels_last_training="always", disable=others)
    assert prepared_joint(graph, base.patch(channels_last_training="never")) is graph
    for options in (base.patch(disable=others | {"channels-last"}), base.patch(fuel=0), base.patch(lowering="none")):
        assert prepared_joint(graph, options) is graph
    assert layouts(prepared_joint(graph, base.patch(fuel=1))) == [True] * 6


def test_one_convolution_between_contiguous_images_keeps_its_layout() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(8, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    graph = joint_graph(One(), torch.randn(2, 8, 12, 12, requires_grad=True))
    assert prepare_joint_graph(graph) is graph


def test_nan_and_infinite_pixels_reach_what_they_reach_in_eager() -> None:
    torch.manual_seed(0)
    eager, x = Net().eval(), torch.randn(2, 3, 24, 26)
    x[0, 1, 3, 4], x[1, 0, 20, 2] = float("nan"), float("inf")
    ours = copy.deepcopy(eager)
    want, got = step(eager, x), step(compiled(ours), x)
    for name, value in want.items():
        other = got.get(name, got.get(f"_orig_mod.{name}"))
        assert other is not None
        torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_sizes_that_vary_get_the_layout_without_new_graphs() -> None:
    torch.manual_seed(0)
    eager = Net()
    ours = copy.deepcopy(eager)
    run = torch.compile(ours, backend="aotkit", dynamic=True, options={"fallback": "error", **ON})
    for batch, size in ((2, 24), (3, 32), (5, 28)):
        x = torch.randn(batch, 3, size, size)
        eager.zero_grad(), ours.zero_grad()
        want, got = step(eager, x), step(run, x)
        for name, value in want.items():
            other = got.get(name, got.get(f"_orig_mod.{name}"))
            assert other is not None and other.stride() == value.stride()
            torch.testing.assert_close(other, value, rtol=2e-4, atol=2e-5)


@pytest.mark.nightly("test_aotkit_double_backward.py has second derivatives, this file first ones in these layouts")
def test_second_derivatives_use_what_the_forward_saved_in_its_own_layout() -> None:
    torch.manual_seed(0)
    eager, x = Net(dropout=0.3), torch.randn(2, 3, 24, 26)

    def penalty(module: Any) -> torch.Tensor:
        given = x.clone().requires_grad_()
        torch.manual_seed(7)
        scores, _ = module(given)
        (gradient,) = torch.autograd.grad(scores.square().sum(), given, create_graph=True)
        gradient.square().sum().backward()
        assert given.grad is not None
        return given.grad

    ours = copy.deepcopy(eager)
    torch.testing.assert_close(penalty(compiled(ours)), penalty(eager), rtol=1e-3, atol=1e-4)


class Wide(nn.Module):
    """Two convolutions of as many channels as are given, or depthwise ones."""

    def __init__(self, channels: int, groups: int = 1) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images, and their mean."""
        x = self.two(functional.relu(self.one(x)))
        return x.mean(), x


def test_the_layout_is_left_where_little_is_gained_by_it() -> None:
    products, tiles = replace(HOST, contraction_forms=("fma",)), replace(HOST, contraction_forms=("fma", "amx-f32x6"))
    for channels, groups, target, expected in (
        (64, 1, tiles, True),
        (64, 1, products, False),
        (16, 1, tiles, False),
        (16, 1, replace(products, wide_convolutions=True), True),
        (16, 16, products, True),
    ):
        graph = joint_graph(Wide(channels, groups), torch.randn(2, channels, 9, 9)).graph
        assert channels_last.gains_in_training(graph, target) == expected, (channels, groups, target)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = joint_graph(Wide(16), torch.randn(2, 16, 9, 9)).graph
    assert channels_last.gains_in_training(narrow, replace(products, narrow_convolutions=True))
    assert not channels_last.gains_in_training(narrow, tiles)


@pytest.mark.parametrize("groups", [1, 16])
def test_a_step_in_bfloat16_has_eagers_layouts_and_values(groups: int) -> None:
    torch.manual_seed(0)
    eager, x = Wide(16, groups), torch.randn(3, 16, 20, 24)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    run = compiled(ours)

    def narrow(module: Any) -> Any:
        def call(x: torch.Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return module(x)

        return call

    want, got, true = step(narrow(eager), x), step(narrow(run), x), step(exact, x.double())
    for module, values in ((eager, want), (ours, got), (exact, true)):
        values |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    for name, value in want.items():
        assert got[name].stride() == value.stride() and got[name].dtype == value.dtype, name
        scale = float(true[name].abs().max()) + 1e-3
        error, allowed = (float((each[name].double() - true[name]).abs().max()) for each in (got, want))
        assert error <= 3 * (allowed + 2e-3 * scale), name


def test_statistics_of_narrow_images_keep_their_type() -> None:
    """ATen's fake kernels of batch norms give statistics the type of the images; a backward then read bfloat16 as
    float32, and gradients were nan."""
    with torch.autocast("cpu", torch.bfloat16):
        joint = joint_graph(Net(), torch.randn(2, 3, 24, 20))
    laid_out = prepare_joint_graph(joint, LowerOptions(disable=OTHERS))
    assert any(layouts(laid_out))
    for before, after in zip(
        joint.graph.nodes, (n for n in laid_out.graph.nodes if n.target is not aten.clone.default)
    ):
        assert types_of(before.meta.get("val")) == types_of(after.meta.get("val")), after
    for node in laid_out.graph.find_nodes(op="call_function", target=operator.getitem):
        source, place = node.args
        assert types_of(node.meta["val"]) == types_of(source.meta["val"][place]), node


def types_of(value: Any) -> Any:
    """Types and sizes of tensors, of those in tuples too."""
    if isinstance(value, list | tuple):
        return [types_of(each) for each in value]
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else None


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_batch_norms_of_narrow_images_train(weights: torch.dtype) -> None:
    torch.manual_seed(0)
    eager, x = Net(), torch.randn(2, 3, 24, 20)
    if weights is torch.bfloat16:
        eager, x = eager.to(weights), x.to(weights)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    run = compiled(ours)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights is torch.float32):
        want, got = step(eager, x), step(run, x)
    true = step(exact, x.double())
    for module, values in ((eager, want), (ours, got), (exact, true)):
        values |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        values |= {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    for name, value in want.items():
        assert got[name].stride() == value.stride() and got[name].dtype == value.dtype, name
        size = float(true[name].abs().max()) + 1e-3
        error, allowed = (float((each[name].double() - true[name]).norm()) for each in (got, want))
        assert error <= 3 * (allowed + 2e-3 * size * true[name].numel() ** 0.5), name


def test_a_number_that_varies_between_convolutions() -> None:
    """Elementwise operators have no layout from it."""

    def f(x: torch.Tensor, w: torch.Tensor, number: float) -> torch.Tensor:
        y = torch.nn.functional.conv2d(x, w, padding=1).div(2 * number).add(number).clamp(0, number)
        return torch.nn.functional.conv2d(y, w, padding=1)

    x, w = torch.randn(2, 16, 16, 16), torch.randn(16, 16, 3, 3)
    run = torch.compile(f, backend="aotkit", dynamic=True, options={"fallback": "error"})
    for number in (3.5, 0.25):
        torch.testing.assert_close(run(x, w, number), f(x, w, number), rtol=1e-4, atol=1e-4)
