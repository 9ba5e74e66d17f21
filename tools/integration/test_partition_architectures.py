"""Our partitioner as ``partition_fn`` of torch's aot_function and of ours, on the five architectures, against eager."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function as torch_aot_function
from functorch.compile import make_boxed_func

import aotkit
from aotkit_partition import PartitionOptions, min_cut_rematerialization_partition

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES, make_batch, make_model


def run_with_aten(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)


MAKERS = {
    "torch's aot_function": lambda fn, split: torch_aot_function(fn, run_with_aten, partition_fn=split),
    "our aot_function": lambda fn, split: aotkit.aot_function(fn, run_with_aten, partition_fn=split),
}
OPTIONS = {
    "cut": PartitionOptions(),
    "budget 0.3": PartitionOptions(memory_budget=0.3),
    "lowest peak": PartitionOptions(strategy="min-peak"),
}


@pytest.mark.covers("F3.7")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_and_buffers_equal_eager(name: str, maker: str, how: str) -> None:
    model = make_model(name).train()
    reference = copy.deepcopy(model)
    batch = make_batch(name, 2)
    batch.pop("attention_mask", None)  # all ones; reading it depends on data, which only dynamo can specialise
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    values = [*model.parameters(), *model.buffers()]

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        state = dict(zip(names, tensors, strict=False))
        given = dict(zip(batch, tensors[len(names) :], strict=True))
        found = torch.func.functional_call(model, state, (), given)
        return found.loss  # type: ignore[no-any-return]

    split = functools.partial(min_cut_rematerialization_partition, options=OPTIONS[how])
    MAKERS[maker](loss, split)(*values, *batch.values()).backward()
    reference(**batch).loss.backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        expected = torch.zeros_like(want) if want.grad is None else want.grad
        found = torch.zeros_like(got) if got.grad is None else got.grad
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
    for got_buffer, want_buffer in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(got_buffer, want_buffer)
