"""Pass: elementwise ops on tensors of one repeated value.

Before ``mul(full(s, 2), full(s, 3))``. After ``full(s, 6)``. The value is computed by eager's own op on one element, so
types, rounding and nan are eager's. Requires elementwise ops without randomness, of plain strided CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.refusals import fits
from ..passes import Pass
from ..target import on_host
from .node_facts import is_random
from .rewriting import rewriting

__all__ = ["PASS", "fold_uniform_values"]

aten = torch.ops.aten

_FILLS: dict[object, Callable[[Node], object]] = {
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.zeros.default: lambda node: 0,
    aten.zeros_like.default: lambda node: 0,
    aten.ones.default: lambda node: 1,
    aten.ones_like.default: lambda node: 1,
    aten.scalar_tensor.default: lambda node: node.args[0],
    aten._to_copy.default: lambda node: node.args[0],  # of a number, as `vmap` leaves them
}
_SPREADING = frozenset(
    (aten.expand.default, aten.view.default, aten.clone.default, aten.permute.default, aten.unsqueeze.default)
)


def fold_uniform_values(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of nodes replaced."""
    values: dict[Node, torch.Tensor] = {}
    folded = 0
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if node.op != "call_function" or not isinstance(val, torch.Tensor) or not _plain(val):
            continue
        value = _uniform(node, val, values)
        if value is None:
            continue
        values[node] = value
        if node.target in _FILLS or node.target in _SPREADING or folded >= fuel:
            continue
        with graph.inserting_before(node):
            fill = graph.call_function(
                aten.full.default,
                (list(val.shape), value.item()),
                {"dtype": val.dtype, "layout": torch.strided, "device": val.device, "pin_memory": False},
            )
        fill.meta.update(node.meta)
        node.replace_all_uses_with(fill)
        graph.erase_node(node)
        values[fill] = value
        folded += 1
    return folded


def _plain(val: torch.Tensor) -> bool:
    sizes = all(isinstance(size, int) for size in (*val.shape, *val.stride()))
    return sizes and val.layout is torch.strided and not val.is_complex() and on_host(val) and val.is_contiguous()


def _uniform(node: Node, val: torch.Tensor, values: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    """The repeated value as a tensor of one element with as many dimensions, or ``None``."""
    fill = _FILLS.get(node.target)
    if fill is not None:
        number = fill(node)
        if not isinstance(number, bool | int | float) or not fits(number, val.dtype):
            return None
        return torch.full([1] * val.dim(), number, dtype=val.dtype)
    if node.target in _SPREADING:
        source = values.get(node.args[0])  # type: ignore[arg-type]
        return None if source is None else source.reshape([1] * val.dim())
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_random(node) or torch.Tag.pointwise not in target.tags:
        return None
    if not node.all_input_nodes or any(source not in values for source in node.all_input_nodes):
        return None
    args: Any = torch.fx.map_arg(node.args, lambda n: values[n])
    kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: values[n])
    try:
        result = target(*args, **kwargs)
    except RuntimeError:  # integers divided by zero: an error when the graph runs, and none where there are no elements
        return None
    return result if isinstance(result, torch.Tensor) and result.dtype == val.dtype and result.numel() == 1 else None


PASS = Pass(
    "fold-uniform",
    rewriting(fold_uniform_values),
    why="tensors of one repeated value are computed once, while compiling",
    after=("remove-noops",),
)
