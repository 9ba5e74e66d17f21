"""The layout pass: convolutional networks run with channels together, and nobody outside can tell but by the time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions
from aotkit_inductor_lower.driver import run_graph_passes

aten = torch.ops.aten
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
F = torch.nn.functional


class Net(nn.Module):
    """Two stages of convolution and norm, a residual, pooling, a head: everything the pass lets follow."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.point = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        x = F.relu(self.point(self.inner(x)) + x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, (2, 2)), 1))


def randomized(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    return model.eval()


def traced(model: nn.Module, *args: torch.Tensor, mode: str = "fake"):
    state = dict(model.named_parameters()) | dict(model.named_buffers())

    def run(state, *given):
        with torch.no_grad():
            return torch.func.functional_call(model, state, given)

    return make_fx(run, decompositions(), tracing_mode=mode)(state, *args), [*state.values()]


def image_layouts(graph: torch.fx.GraphModule) -> list[bool]:
    """Per convolution, whether its image has its channels together."""
    found = graph.graph.find_nodes(op="call_function", target=aten.convolution.default)
    return [node.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last) for node in found]


@pytest.mark.covers("F5c.6", "F5h.14")
@pytest.mark.parametrize("groups", [1, 8])
def test_a_convolutional_network_runs_with_its_channels_together(groups):
    model = randomized(Net(groups))
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    graph, state = traced(model, x)
    assert image_layouts(graph) == [False, False, False]
    passed = run_graph_passes(graph, LowerOptions())
    assert image_layouts(passed) == [True, True, True]
    wide = randomized(Net(groups)).double()(x.double())
    got = compile_graph(graph, options=LowerOptions(verify=True))([*state, x])[0]
    assert got.stride() == wide.stride()
    torch.testing.assert_close(got, wide.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.covers("F5c.6")
def test_groups_of_several_channels_are_no_reason_for_the_layout():
    model = randomized(nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4)))
    graph, _ = traced(model, torch.randn(2, 8, 12, 12))
    assert image_layouts(run_graph_passes(graph, LowerOptions())) == [False, False]


@pytest.mark.covers("F5c.6")
def test_convolutions_whose_weights_are_much_larger_than_their_images_keep_their_layout():
    """Weights are reordered in each call; weights of one tap lie the same either way."""
    late = (nn.Conv2d(8, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 200, 1), nn.Conv2d(200, 8, 1))
    model = randomized(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8), *late))
    x = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    graph, state = traced(model, x)
    assert image_layouts(run_graph_passes(graph, LowerOptions())) == [True, False, True, True]
    got = compile_graph(graph, options=LowerOptions(verify=True))([*state, x])[0]
    with torch.no_grad():
        expected = model(x)
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.covers("F5h.14")
def test_results_have_the_strides_that_they_had():
    model = randomized(nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))))
    x = torch.randn(2, 8, 12, 12)
    graph, state = traced(model, x)
    passed = run_graph_passes(graph, LowerOptions())
    assert all(image_layouts(passed)[1:])
    got = compile_graph(graph, options=LowerOptions(verify=True))([*state, x])[0]
    assert got.is_contiguous()
    # Another layout is another routine of the library: six of them in a row are as far from float64 as eager's are.
    eager, wide = model(x), model.double()(x.double())
    assert (got - wide).abs().max() <= 3 * (eager - wide).abs().max() + 1e-6 * wide.abs().max()


def test_one_convolution_between_contiguous_tensors_keeps_its_layout():
    graph, _ = traced(randomized(nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 12, 12))
    assert image_layouts(run_graph_passes(graph, LowerOptions())) == [False]


def test_outputs_that_share_memory_stop_the_pass():
    convolutions = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = convolutions

        def forward(self, x):
            y = self.inner(x)
            return y, y.permute(0, 2, 3, 1)

    x = torch.randn(2, 8, 12, 12)
    graph, state = traced(randomized(Twice()), x)
    assert not any(image_layouts(run_graph_passes(graph, LowerOptions())))
    one, other = compile_graph(graph)([*state, x])
    assert one.data_ptr() == other.data_ptr()


def test_dynamic_sizes_get_the_layout_without_new_guards():
    model = randomized(Net())
    graph, state = traced(model, torch.randn(2, 3, 16, 16), mode="symbolic")
    env = next(
        n.meta["val"].fake_mode.shape_env for n in graph.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)
    )
    before = len(env.guards)
    layouts = image_layouts(run_graph_passes(graph, LowerOptions()))
    assert any(layouts)
    assert all(layouts) or RELEASE < (2, 12)  # 2.11 can't tell the first one's strides apart
    assert len(env.guards) == before or RELEASE < (2, 12)
    compiled = compile_graph(graph)
    for batch in (2, 5):
        x = torch.randn(batch, 3, 16, 16)
        torch.testing.assert_close(compiled([*state, x])[0], model(x), rtol=1e-5, atol=1e-5)


def test_numbers_that_are_none_and_infinite_pass_as_they_do_in_eager():
    model = randomized(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2)))
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    x[0, 0, 3, 3], x[1, 1, 9, 9] = float("nan"), float("inf")
    graph, state = traced(model, x)
    assert all(image_layouts(run_graph_passes(graph, LowerOptions())))
    got, want = compile_graph(graph)([*state, x])[0], model(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
