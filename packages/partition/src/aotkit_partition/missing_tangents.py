"""A backward graph for calls in which some tangents are missing, because the loss does not depend on those outputs.

Note [Missing tangents]
    Autograd leaves out the tangent of an output that the loss does not depend on, and eager runs nothing of what comes
    behind it. A backward that was captured for all tangents would need a tensor of zeros and would compute with it:
    for a language model that returns its loss and its logits that is the largest tensor of the whole step. A backward
    is linear in its tangents, so what a missing tangent is multiplied with, viewed as or summed to is zero too and is
    not computed, and what it would be added to stays. Where an operator is not known to be linear, or a gradient is
    zero altogether, a tensor of zeros is made.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.fx

from ._torch_compat import copy_module

__all__ = ["without_tangents"]

aten = torch.ops.aten

_ONE_ARGUMENT = """
    view _unsafe_view reshape t transpose permute expand squeeze unsqueeze slice select alias clone neg sum mean detach
    slice_backward select_backward unsqueeze_copy embedding_dense_backward div
"""
_ANY_ARGUMENT = "mul mm bmm"


def _overloads(names: str) -> frozenset[Any]:
    packets = (getattr(aten, name) for name in names.split() if hasattr(aten, name))
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


#: Zero where the first argument is, or where any argument is.
_LINEAR_IN_FIRST, _LINEAR_IN_ANY = _overloads(_ONE_ARGUMENT), _overloads(_ANY_ARGUMENT)
#: Memory of an argument, though the schemas do not say so.
_VIEWS = _overloads("_unsafe_view reshape contiguous")


def without_tangents(
    backward: torch.fx.GraphModule, positions: Collection[int], unwanted: Collection[int] = ()
) -> torch.fx.GraphModule | None:
    """A copy of ``backward`` that does not read its inputs at these positions: the tangents there are zero.

    ``unwanted`` results are ``None``: gradients that come from these tangents only, which eager mode does not give.
    It has the same inputs and outputs; ``None`` may be given for the unread ones. Returns ``None`` where a tensor of
    zeros would be needed whose size is not known, and where a size might be read from the missing tangents.
    """
    copy = copy_module(backward)
    inputs = copy.graph.find_nodes(op="placeholder")
    missing = [inputs[position] for position in positions]
    if not all(_is_static(node) for node in missing):
        return None
    _return_none(copy.graph, unwanted)
    zeros = set(missing)
    for node in list(copy.graph.nodes):
        given = [arg for arg in node.all_input_nodes if arg in zeros]
        if node.op == "placeholder" or not given:
            continue
        if _is_zero(node, zeros):
            zeros.add(node)
            continue
        other = _unchanged_operand(node, zeros)
        if other is not None and _is_own_memory(other):
            node.replace_all_uses_with(other)
            continue
        if not all(_is_static(arg) for arg in given):
            return None
        for arg in given:
            with copy.graph.inserting_before(node):
                node.replace_input_with(arg, _zeros(copy.graph, arg.meta["val"]))
    copy.graph.eliminate_dead_code()
    copy.recompile()
    return copy


def _return_none(graph: torch.fx.Graph, unwanted: Collection[int]) -> None:
    """Do not compute these results."""
    output = graph.output_node()
    returned: Any = output.args[0]
    results = [None if number in unwanted else result for number, result in enumerate(returned)]
    output.args = (results,)
    graph.eliminate_dead_code()


def _is_zero(node: torch.fx.Node, zeros: set[torch.fx.Node]) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not _is_inexact(value):
        return False
    if node.target is aten._to_copy.default or node.target in _LINEAR_IN_FIRST:
        return node.args[0] in zeros
    if node.target in _LINEAR_IN_ANY:
        return any(arg in zeros for arg in node.args[:2])
    return node.target is aten.add.Tensor and all(arg in zeros for arg in node.args[:2])


def _unchanged_operand(node: torch.fx.Node, zeros: set[torch.fx.Node]) -> torch.fx.Node | None:
    """The other operand of a sum with zero, if the sum is just that."""
    if node.target is not aten.add.Tensor:
        return None
    first, second = node.args[:2]
    other = second if first in zeros else first
    if other is second and node.kwargs.get("alpha", 1) != 1:
        return None
    if not isinstance(other, torch.fx.Node):
        return None
    value, result = other.meta.get("val"), node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype != result.dtype or not _is_static(other):
        return None
    return other if value.shape == result.shape and value.stride() == result.stride() else None


def _is_own_memory(node: torch.fx.Node) -> bool:
    """Whether what may become a gradient is new memory, or a view of such; no input of the graph."""
    while isinstance(node.target, torch._ops.OpOverload):
        if all(result.alias_info is None for result in node.target._schema.returns) and node.target not in _VIEWS:
            return True
        if not node.args or not isinstance(node.args[0], torch.fx.Node):
            return False
        node = node.args[0]
    return False


def _is_inexact(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _is_static(node: torch.fx.Node) -> bool:
    """A tensor of known sizes and strides."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return all(type(number) is int for number in (*value.shape, *value.stride()))


def _zeros(graph: torch.fx.Graph, value: torch.Tensor) -> torch.fx.Node:
    """Zeros in the layout of ``value``."""
    options: dict[str, Any] = {
        "dtype": value.dtype,
        "layout": torch.strided,
        "device": value.device,
        "pin_memory": False,
    }
    sizes, strides = list(value.shape), list(value.stride())
    if value.is_contiguous():
        node = graph.call_function(aten.full.default, (sizes, 0), options)
    else:
        count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        memory = graph.call_function(aten.full.default, ([count], 0), options)
        memory.meta["val"] = value.new_empty((count,))
        node = graph.call_function(aten.as_strided.default, (memory, sizes, strides))
    node.meta["val"] = value
    return node
