"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import contextlib

import pytest
import torch

from aotkit_aot_trace import _torch_compat, capture

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
