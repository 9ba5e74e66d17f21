"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from aotkit_aot_trace import Unsupported, _torch_compat, capture

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_operators_with_subgraphs_must_be_told_the_fake_mode_before_torch_2_12(monkeypatch):
    monkeypatch.setattr(_torch_compat, "fake_mode_of_subgraphs", lambda mode: contextlib.nullcontext())

    told = pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="fake modes")

    def fn(p, x):
        return torch.cond(p, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))

    def backend(graph, examples):
        capture(graph, examples)
        return graph

    torch._dynamo.reset()
    with told if RELEASE < (2, 12) else contextlib.nullcontext():
        torch.compile(fn, backend=backend, fullgraph=True)(torch.tensor(True), torch.randn(4, requires_grad=True))


def test_graphs_hold_generators_from_torch_2_13_on():
    assert _torch_compat.graphs_hold_generators() == (RELEASE >= (2, 13))

    def fn(x, generator):
        return [x + torch.rand(3, generator=generator)]

    refused = pytest.raises(Unsupported, match="an operation takes a Generator: graphs of torch")
    with contextlib.nullcontext() if RELEASE >= (2, 13) else refused:
        capture(fn, [torch.ones(3), torch.Generator()])


def test_fakes_of_what_is_scattered_into_repeated_elements_keep_them_before_torch_2_12():
    x, part = torch.arange(3.0).expand(4, 3), torch.ones(3)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        result = torch.select_scatter(fake, mode.from_tensor(part), 0, 1)
        assert (result.stride() == (0, 1)) == (RELEASE < (2, 12))
        assert _torch_compat.scattered_strides(fake, result) == (3, 1)
    captured = capture(lambda x, y: [x.select_scatter(y, 0, 1)], [x, part])
    assert captured.graph.graph.output_node().args[0][0].meta["val"].stride() == (3, 1)
    torch.testing.assert_close(captured.graph(x, part)[0], torch.select_scatter(x, part, 0, 1))


def test_fakes_tell_how_spectra_lie_in_memory_from_torch_2_12_on():
    x = torch.ones(5, 6, 7, dtype=torch.complex64)
    with FakeTensorMode() as mode:
        fake = torch.ops.aten._fft_c2c.default(mode.from_tensor(x), [2, 1], 0, True)
    right = fake.stride() == torch.ops.aten._fft_c2c.default(x, [2, 1], 0, True).stride()
    assert right == _torch_compat.spectra_are_laid_out() == (RELEASE >= (2, 12))


def test_torch_takes_checks_of_linear_algebra_for_dead_code_before_torch_2_13():
    program = """
import torch
nodes = []
for check in (torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_async.default):
    graph = torch.fx.Graph()
    nodes.append(graph.call_function(check, (graph.placeholder("x"),)))
before = [node.is_impure() for node in nodes]
import aotkit_aot_trace._torch_compat
print(before, [node.is_impure() for node in nodes])
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"{[RELEASE >= (2, 13), False]} [True, True]"


def test_a_check_whose_result_nobody_uses_stays_in_the_graph():
    captured = capture(lambda x: [torch.linalg.inv(x) * 2], [torch.eye(3)])
    with pytest.raises(torch.linalg.LinAlgError):
        captured.graph(torch.zeros(3, 3))

    def fn(x):
        torch._assert_async(x.sum())
        return [x * 2]

    captured = capture(fn, [torch.ones(3)])
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        captured.graph(torch.zeros(3))
