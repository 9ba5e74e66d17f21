"""Put values that a forward has saved in the place of the nodes of a later graph that would compute them again.

Note [Telling that two nodes compute the same]
    The graph of a second derivative begins with the same run of the same function as the first graph did. A node of
    one and a node of the other are the same value if they apply the same operator to the same values, down to the
    inputs and constants. Of random operators that is not enough: two dropouts of one tensor differ. There the name
    has to be the same too: names count the calls of an operator, and both runs begin with the same calls. Sizes are
    compared as numbers, because the later graph is made for the sizes of one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotkit_functionalize import Unsupported

from . import _torch_compat as compat
from .api import Capture

__all__ = ["SavedActivations", "SavedValues", "reuse_saved_activations", "saved_values"]

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SavedValues:
    """What a forward graph returns behind its own outputs.

    ``inputs``: per saved tensor the graph input that it is, or -1.
    """

    graph: torch.fx.Graph
    nodes: tuple[torch.fx.Node, ...]
    inputs: tuple[int, ...]


def saved_values(forward: torch.fx.GraphModule, first: int, count: int) -> SavedValues:
    """The ``count`` saved tensors that follow the first ``first`` outputs of ``forward``."""
    placeholders = {node: i for i, node in enumerate(forward.graph.find_nodes(op="placeholder"))}
    outputs: Any = forward.graph.output_node().args[0]
    nodes = tuple(outputs[first : first + count])
    return SavedValues(forward.graph, nodes, tuple(placeholders.get(node, -1) for node in nodes))


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Saved values that a later graph gets as its inputs number ``first``, ``first + 1``, ..

    ``symbols``: what the symbolic sizes of the earlier graph are now.
    """

    saved: SavedValues
    first: int
    symbols: Mapping[str, int]


def reuse_saved_activations(later: Capture, activations: Sequence[SavedActivations], lost: Mapping[int, str]) -> None:
    """Replace nodes of ``later``, in place, by those of its inputs that hold their values.

    Args:
        later: captured over the inputs of an earlier graph, then one input per tensor that it saved, then others.
        activations: of the earlier graph; before that, of those it comes from itself.
        lost: inputs whose values are gone, and why.

    Raises:
        Unsupported: a random operator would have to be drawn again, or a lost input is needed.
    """
    graph = later.graph.graph
    for values in activations:
        _replace(graph, values)
    _remove_dead(graph)
    _check_needs(graph, lost)
    later.graph.recompile()


def _replace(graph: torch.fx.Graph, values: SavedActivations) -> None:
    inputs = graph.find_nodes(op="placeholder")
    numbering = _Numbering()
    earlier = numbering.of(values.saved.graph, values.symbols)
    known: dict[int, torch.fx.Node] = {}
    for offset, node in enumerate(values.saved.nodes):
        known.setdefault(earlier[node], inputs[values.first + offset])
    for node, number in numbering.of(graph, {}).items():
        value = known.get(number)
        if value is None or value is node:
            continue
        wanted, given = node.meta.get("val"), value.meta.get("val")
        if not isinstance(wanted, torch.Tensor) or not isinstance(given, torch.Tensor) or _same_layout(wanted, given):
            node.replace_all_uses_with(value)
        elif compat.is_dense(wanted):
            node.replace_all_uses_with(_laid_out_like(node, wanted, value))


def _laid_out_like(node: torch.fx.Node, wanted: torch.Tensor, value: torch.fx.Node) -> torch.fx.Node:
    """A saved value in the layout that the later graph counts on: the earlier one may have been given another."""
    order = sorted(range(wanted.dim()), key=lambda dim: (wanted.stride(dim), wanted.size(dim)), reverse=True)
    back = [order.index(dim) for dim in range(wanted.dim())]
    steps: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.aten.permute.default, (order,)),
        (torch.ops.aten.clone.default, ()),
        (torch.ops.aten.permute.default, (back,)),
    ]
    place = node if node.op != "placeholder" else next(n for n in node.graph.nodes if n.op != "placeholder")
    for target, args in steps:
        dense: dict[str, Any] = {"memory_format": torch.contiguous_format} if not args else {}
        with node.graph.inserting_before(place), torch.no_grad():
            made = node.graph.call_function(target, (value, *args), dense)
            made.meta["val"] = target(value.meta["val"], *args, **dense)
        value = made
    return value


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and all(
        m == n for size, m, n in zip(a.shape, a.stride(), b.stride(), strict=True) if size > 1
    )


def _check_needs(graph: torch.fx.Graph, lost: Mapping[int, str]) -> None:
    inputs = graph.find_nodes(op="placeholder")
    for index, reason in lost.items():
        if inputs[index].users:
            raise Unsupported(
                f"a second derivative needs the value of input {index} of the graph",
                reason,
                "Keep the tensor alive and unchanged until the gradient of the gradient is computed",
            )
    for node in graph.nodes:
        if node.op == "call_function" and compat.is_random(node.target):
            raise Unsupported(
                f"a second derivative needs the result of the random operation {node.target}",
                "it was not saved by the forward, and drawing again gives other numbers",
                "Leave the operation out of the compiled region",
                stack_trace=node.meta.get("stack_trace"),
            )


def _remove_dead(graph: torch.fx.Graph) -> None:
    """Random operators too: torch keeps them for the sake of the generator, which the first forward has moved."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: torch.fx.Node) -> bool:
    return node.is_impure() and not compat.is_random(node.target)


class _Numbering:
    """Numbers for what nodes compute: nodes of the same number, of whatever graph, compute the same."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}

    def of(self, graph: torch.fx.Graph, symbols: Mapping[str, int]) -> dict[torch.fx.Node, int]:
        """The number of each node of ``graph``; ``symbols`` are the values of its symbolic sizes."""
        found: dict[torch.fx.Node, int] = {}

        def plain(argument: Any) -> Any:
            if isinstance(argument, torch.fx.Node):
                size = compat.evaluate_symint(argument.meta.get("val"), symbols)
                return ("node", found[argument]) if size is None else size
            if isinstance(argument, list | tuple):
                return tuple(plain(item) for item in argument)
            if isinstance(argument, dict):
                return tuple((name, plain(item)) for name, item in argument.items())
            if isinstance(argument, slice):
                return ("slice", plain(argument.start), plain(argument.stop), plain(argument.step))
            return (type(argument).__name__, str(argument))

        inputs = 0
        for node in graph.nodes:
            if node.op == "output":
                continue
            key: Key
            if node.op == "placeholder":
                key, inputs = ("input", inputs), inputs + 1
            elif node.op == "get_attr":
                key = ("constant", *_constant(graph, str(node.target)))
            else:
                key = (node.op, str(node.target), plain(node.args), plain(node.kwargs))
                if compat.is_random(node.target):
                    key = (*key, node.name)
            copied = _copied(node)
            found[node] = found[copied] if copied is not None else self._numbers.setdefault(key, len(self._numbers))
        return found


def _copied(node: torch.fx.Node) -> torch.fx.Node | None:
    """What ``node`` is a copy of, if it is one: a partitioner saves copies of inputs that are overwritten, and images
    get other layouts in a training step."""
    if node.target is not torch.ops.aten.clone.default or len(node.args) != 1:
        return None
    source: Any = node.args[0]
    return source


def _constant(graph: torch.fx.Graph, name: str) -> Key:
    value: Any = graph.owning_module
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor):
        return ("object", id(value))
    return (value.data_ptr(), value.dtype, tuple(value.size()), tuple(value.stride()))
