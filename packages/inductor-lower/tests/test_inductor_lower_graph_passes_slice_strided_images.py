"""Gradients by weights of 1x1 convolutions that step over pixels: never by the kernel of oneDNN that is wrong."""

import os
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, decompositions
from aotkit_inductor_lower.driver import run_graph_passes
from aotkit_inductor_lower.graph_passes.slice_strided_images import slice_strided_images
from aotkit_inductor_lower.options import LowerOptions
from aotkit_inductor_lower.passes import PassContext

aten = torch.ops.aten
LAST = torch.channels_last


def gradients(stride: list[int], wanted: list[bool], bias: bool = False):
    def run(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        sizes = [w.shape[0]] if bias else None
        every = aten.convolution_backward(grad, x, w, sizes, stride, [0, 0], [1, 1], False, [0, 0], 1, wanted)
        return [each for each in every if each is not None]

    return run


def operands(images: int, channels: int, results: int, size: int, stride: list[int], dtype: torch.dtype):
    x = torch.randn(images, channels, size, size, dtype=dtype).to(memory_format=LAST)
    w = torch.randn(results, channels, 1, 1, dtype=dtype)
    places = [(size - 1) // step + 1 for step in stride]
    return torch.randn(images, results, *places, dtype=dtype).to(memory_format=LAST), x, w


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(
    "wanted", [[False, True, False], [True, True, False], [True, True, True], [True, False, False]]
)
@pytest.mark.parametrize("stride", [[2, 2], [1, 3], [1, 1]])
def test_the_same_gradients(stride: list[int], wanted: list[bool], mode: str) -> None:
    run = gradients(stride, wanted, bias=wanted[2])
    args = operands(3, 8, 16, 13, stride, torch.float32)
    graph = make_fx(run, decompositions(), tracing_mode=mode)(*args)
    results = compile_graph(graph)(list(args))
    wide = run(*(arg.double() for arg in args))
    for ours, theirs, exact in zip(results, run(*args), wide, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)  # sums of up to 507 in float32


@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format])
@pytest.mark.parametrize("stride", [[2, 2], [1, 1]])
def test_no_call_with_a_step_and_weights_is_left(stride: list[int], layout: torch.memory_format) -> None:
    grad, x, w = operands(3, 8, 16, 12, stride, torch.float32)
    args = grad, x.contiguous(memory_format=layout), w
    graph = make_fx(gradients(stride, [True, True, False]), tracing_mode="fake")(*args).graph
    before = len(graph.nodes)
    slice_strided_images(graph, PassContext.of())
    calls = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    if layout is LAST and stride != [1, 1]:
        assert [(c.args[4], c.args[-1]) for c in calls] == [
            ([1, 1], [False, True, False]),
            (stride, [True, False, False]),
        ]
    else:
        assert len(graph.nodes) == before


@pytest.mark.parametrize("known", ["steps", "pads"])
def test_steps_and_pads_that_are_known_at_run_time_only(known: str) -> None:
    """As Dynamo's sizes that are dynamic give them: attributes of modules are then arguments, too."""

    def run(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, number: torch.Tensor) -> list[torch.Tensor]:
        size = number.shape[0]
        stride, pad = ([2, 2], [size - 2, size - 2]) if known == "steps" else ([size, size], [0, 0])
        return list(
            aten.convolution_backward(grad, x, w, None, stride, pad, [1, 1], False, [0, 0], 1, [True, True, False])
        )[:2]

    args = (*operands(3, 8, 16, 13, [2, 2], torch.float64), torch.zeros(2))
    graph = make_fx(run, decompositions(), tracing_mode="symbolic")(*args)
    for ours, theirs in zip(compile_graph(graph)(list(args)), run(*args), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_it_cannot_be_left_out() -> None:
    args = operands(3, 8, 16, 12, [2, 2], torch.float32)
    graph = make_fx(gradients([2, 2], [False, True, False]), tracing_mode="fake")(*args)
    changed = run_graph_passes(graph, LowerOptions(fuel=0))
    assert any(node.target is aten.slice.Tensor for node in changed.graph.nodes)


#: The call of the note, of which eager mode writes beside its memory; it ends the process or it does not, so only ours
#: is asked for.
ON_TWO_THREADS = """
import torch, aotkit_inductor_lower as lower
from torch.fx.experimental.proxy_tensor import make_fx
torch.set_num_threads(2)
torch.manual_seed(0)
last = torch.channels_last
for _ in range(20):
    x = torch.randn(17, 8, 12, 12).to(memory_format=last)
    w, grad = torch.randn(16, 8, 1, 1), torch.randn(17, 16, 6, 6).to(memory_format=last)
    def by_weights(grad, x, w):
        how = None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
        return [torch.ops.aten.convolution_backward(grad, x, w, *how)[1]]
    run = lower.compile_graph(make_fx(by_weights, tracing_mode="fake")(grad, x, w))
    (got,) = run([grad, x, w])
    want = torch.einsum("noyx,ncyx->oc", grad.double(), x[:, :, ::2, ::2].double())
    torch.testing.assert_close(got[:, :, 0, 0].double(), want, rtol=1e-5, atol=1e-4)  # sums of 612 in float32
"""


def test_on_two_threads_nothing_is_written_beside_the_results() -> None:
    checked = {**os.environ, "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "85"}
    subprocess.run([sys.executable, "-c", ON_TWO_THREADS], check=True, timeout=300, env=checked)
