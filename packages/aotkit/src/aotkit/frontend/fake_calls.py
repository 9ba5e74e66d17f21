"""Compiled pieces of a graph that a frontend cut: what they return when it runs them on fake tensors.

Dynamo's optimizer for data-parallel models compiles one piece after the other, and asks each, by a call with fake
tensors, what the next one gets. It asks only what counts itself as a compile of torch's own ahead-of-time stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from aotkit_functionalize import GraphMetadata, symbols
from aotkit_runtime_wrappers import WrapperPlan
from aotkit_runtime_wrappers.refinements import plan_fake_results

__all__ = ["strides_asked_for", "with_fake_results"]


def with_fake_results(
    plan: WrapperPlan, metadata: GraphMetadata, graph: torch.fx.GraphModule, strides: Sequence[Any] | None
) -> WrapperPlan:
    """``plan``, which answers fake calls if Dynamo is going to make one.

    The results have the strides that they have in ``graph``, unless its compiler said others: ``strides``.
    """
    if not _fake_call_follows():
        return plan
    values = _results(graph)
    if any(free_unbacked_symbols(v) for v in values if isinstance(v, torch.Tensor | torch.SymInt)):
        return plan  # sizes that only real data gives
    known = strides or [None] * len(values)
    described = [_described(value, said) for value, said in zip(values, known, strict=True)]
    torch._dynamo.utils.counters["aot_autograd"]["total"] += 1
    return plan_fake_results(plan, metadata, described)


def strides_asked_for(graph: torch.fx.GraphModule, strides: Sequence[Any] | None) -> Sequence[Any] | None:
    """The strides that a compiler said the results of ``graph`` have, if it did and somebody will ask."""
    return list(strides) if strides and _fake_call_follows() and len(strides) == len(_results(graph)) else None


def _fake_call_follows() -> bool:
    context = TracingContext.try_get()
    return context is not None and context.fakify_first_call


def _results(graph: torch.fx.GraphModule) -> list[Any]:
    (output,) = graph.graph.find_nodes(op="output")
    return [r.meta.get("val") if isinstance(r, torch.fx.Node) else r for r in output.args[0]]


def _described(value: Any, strides: Sequence[Any] | None) -> Any:
    if isinstance(value, torch.Tensor):
        with_strides = value if strides is None else value.as_strided(value.shape, tuple(strides))
        return symbols.tensor_meta(with_strides, requires_grad=False)
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return symbols.dim(value)
    return None
