"""What is certain of sizes that change from call to call.

Note [Sizes that are the same]
    A comparison of symbolic sizes that Python decides (``a == b`` in an ``if``) is decided by the sizes at hand, and
    adds a guard; under a pass, where guards are no longer taken, it adds none, and what happens to be equal now passes
    for equal always. So :func:`~..ops.positions.same_number` compares sizes by what they are made of, and by what the
    guards that there are say of them. Two sizes of which this says nothing are different.

    Fake kernels that a pass runs for its new nodes decide by the sizes at hand all the same. In what passes around
    attention write, these decisions depend on whether a size is 1 (views of heads that lie line by line), and whether
    it is 0; so a symbolic size is only ``usable`` if it is more than 1 at hand, where a view is taken as one that
    needs a copy, which is right for all other sizes as well.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..ops.positions import Number, lies_in_order, same_number, same_sizes

__all__ = [
    "concrete",
    "dense_order",
    "is_concrete",
    "is_dense",
    "is_usable",
    "same_count",
    "share_sizes",
    "written_size",
]


def same_count(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have as many elements in every call."""
    return same_sizes(a.shape, b.shape) or same_number(a.numel(), b.numel())


def is_usable(size: Number) -> bool:
    """Whether a size is never 0, and, where it is symbolic, known at hand and more than 1 there."""
    if isinstance(size, int):
        return size > 0
    return size.node.has_hint() and size.node.hint > 1 and statically_known_true(size >= 1)


def concrete(size: Number) -> int | None:
    """A size that is the same number in every call."""
    return size if isinstance(size, int) else None


def dense_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions of a tensor without gaps, the one with the largest steps first; ``None`` where it may have gaps,
    or what its order is isn't known."""
    dims = [dim for dim in range(value.dim()) if concrete(value.shape[dim]) != 1]
    for order in itertools.permutations(dims):
        if lies_in_order(value, order):
            return (*(dim for dim in range(value.dim()) if dim not in dims), *order)
    return None


def is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor has its elements in memory as it counts them, in every call."""
    return lies_in_order(value, range(value.dim()))


def is_concrete(value: torch.Tensor) -> bool:
    """Whether the sizes and strides of a tensor are numbers."""
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


def written_size(tensor: Any, dim: int) -> Any:
    """The size of a tensor that a pass writes calls with, as an argument of such a call: a number, or a node for it."""
    size = tensor.node.meta["val"].shape[dim]
    return size if isinstance(size, int) else torch.ops.aten.sym_size.int(tensor, dim)


def share_sizes(graph: Graph) -> None:
    """Let who reads the size of a tensor read an equal number that there is before, so that no tensor is needed for its
    sizes alone."""
    known: dict[Any, Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            first = known.setdefault(value.node.expr, node)
            if first is not node and node.target is torch.ops.aten.sym_size.int:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
