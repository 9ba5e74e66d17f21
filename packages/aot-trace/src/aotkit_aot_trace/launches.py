"""Launches of the user's Triton kernels in Dynamo's graphs: which arguments share memory is looked at before each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from aotkit_functionalize.tracing import from_functional, is_functional, refuse_shared_memory

from .child_graphs import child_graphs, with_child_graphs

__all__ = ["checking_launches"]


def checking_launches(graph: GraphModule) -> GraphModule:
    """``graph`` where a launch whose arguments share memory that it writes to raises :class:`Unsupported`, also in the
    graphs that it calls; ``graph`` itself if nothing is launched."""
    children = child_graphs(graph)
    changed = {name: checking_launches(child) for name, child in children.items()}
    launches = any(map(_is_launch, graph.graph.nodes))
    if not launches and all(changed[name] is child for name, child in children.items()):
        return graph
    result = with_child_graphs(graph, changed)
    for node in list(result.graph.nodes):
        if _is_launch(node):
            with result.graph.inserting_before(node):
                check = result.graph.call_function(_check, kwargs=dict(node.kwargs))
                check.meta.update({key: node.meta[key] for key in ("stack_trace",) if key in node.meta})
    result.recompile()
    return result


def _is_launch(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "triton_kernel_wrapper_mutation"


def _check(
    *, kernel_idx: int, constant_args_idx: int, kwargs: Mapping[str, Any], tma_descriptor_metadata: Any, **_: Any
) -> None:
    """Takes what the launch takes, of which ``kwargs`` are the kernel's arguments."""
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors  # imports much

    def find_written() -> list[str]:
        plain = {name: from_functional(v) if is_functional(v) else v for name, v in kwargs.items()}
        return get_mutated_tensors(kernel_idx, constant_args_idx, plain, tma_descriptor_metadata)

    refuse_shared_memory("a Triton kernel", kwargs, find_written)
