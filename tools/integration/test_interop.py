"""Each of our parts inside torch's own stack, and torch's parts inside ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function as torch_aot_function
from functorch.compile import default_partition as torch_default_partition
from functorch.compile import make_boxed_func
from functorch.compile import min_cut_rematerialization_partition as torch_min_cut
from torch import nn

import aotkit
from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions
from aotkit_partition import default_partition, min_cut_rematerialization_partition


@pytest.fixture(autouse=True)
def _test_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def run_with_aten(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)


def lower(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return compile_graph(graph, inputs, options=LowerOptions(verify=True))


def check(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    torch.manual_seed(0)
    model = Block()
    reference = copy.deepcopy(model)
    names = list(dict(model.named_parameters()))

    def functional(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    compiled = make(functional)
    for _ in range(2):
        x = torch.randn(8, 16, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        compiled(x, *parameters).square().sum().backward()
        reference.zero_grad()
        reference(y).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        for got, want in zip(parameters, reference.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize("partitioner", [default_partition, min_cut_rematerialization_partition])
def test_our_partitioners_inside_torchs_aot_function(partitioner: Callable[..., Any]) -> None:
    check(lambda fn: torch_aot_function(fn, run_with_aten, partition_fn=partitioner))


def test_our_lowering_as_compiler_of_torchs_aot_function() -> None:
    check(lambda fn: torch_aot_function(fn, lower, decompositions=decompositions(), partition_fn=torch_min_cut))


@pytest.mark.parametrize("partitioner", [torch_default_partition, torch_min_cut])
def test_torchs_partitioners_inside_our_aot_function(partitioner: Callable[..., Any]) -> None:
    check(lambda fn: aotkit.aot_function(fn, run_with_aten, partition_fn=partitioner))


def test_torchs_partitioner_with_our_lowering_inside_our_aot_function() -> None:
    check(lambda fn: aotkit.aot_function(fn, lower, partition_fn=torch_min_cut, decompositions=decompositions()))


def test_inductors_compiler_inside_our_aot_function_for_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    # For one kernel: no pool of processes, each of which imports torch, and no compiled headers.
    monkeypatch.setattr(config, "compile_threads", 1)
    monkeypatch.setattr(config, "cpp_cache_precompile_headers", False)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * 2

    compiled = aotkit.aot_function(fn, compile_fx_inner, decompositions=select_decomp_table())
    x = torch.randn(9, 7)
    torch.testing.assert_close(compiled(x), fn(x))
