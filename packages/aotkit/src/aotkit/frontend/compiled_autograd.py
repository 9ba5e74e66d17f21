"""Graphs of whole backward passes, as compiled autograd makes them, as graphs of tensors alone.

They have lists among their inputs, and nodes that add to the ``.grad`` of a parameter, which the captured function
cannot show to its caller. Lists are spread out; gradients are returned, and added when the graph has run.

Note [Gradients that a hook reads]
    Hooks that run behind an accumulation (DDP's, which sums gradients over all ranks) read what it made, so it can't
    wait until the graph has run. What it does to dense tensors is written out instead: a first gradient is copied into
    memory that is laid out as its parameter, a later one is added in place. Dynamo's code sets ``.grad`` to the result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import CompileError
from .inputs import ACCUMULATIONS

__all__ = ["Accumulations", "defer_accumulations", "without_lists"]

Flatten = Callable[[Sequence[Any]], list[Any]]


def without_lists(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Any], Flatten]:
    """``gm`` with one placeholder per element of its lists, its inputs, and what makes them of the caller's.

    Raises :class:`CompileError` if the graph does anything with a list but take elements of it.
    """
    lengths = [len(value) if isinstance(value, list | tuple) else None for value in example_inputs]
    graph = torch.fx.Graph()
    known: dict[torch.fx.Node, Any] = {}
    for node, length in zip(gm.graph.find_nodes(op="placeholder"), lengths, strict=True):
        if length is None:
            known[node] = graph.node_copy(node)
        else:
            known[node] = [graph.placeholder(f"{node.name}_{i}") for i in range(length)]
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        lists = [used for used in node.all_input_nodes if isinstance(known[used], list)]
        if not lists:
            known[node] = graph.node_copy(node, lambda used: known[used])
        elif node.target is operator.getitem and isinstance(node.args[1], int):
            known[node] = known[lists[0]][node.args[1]]
            known[node].meta.update(node.meta)
        else:
            raise CompileError(f"{node.format_node()} uses a list of inputs otherwise than by taking an element of it")

    def flatten(args: Sequence[Any]) -> list[Any]:
        flat: list[Any] = []
        for value, length in zip(args, lengths, strict=True):
            flat += [value] if length is None else value
        return flat

    return torch.fx.GraphModule(gm, graph), flatten(example_inputs), flatten


@dataclass(frozen=True, slots=True)
class _Result:
    """Stands for one of the extra outputs of a changed graph."""

    position: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One call: the function, its arguments, and the outputs that (an element of) its result is."""

    function: Callable[..., Any]
    arguments: Any
    element: int | None
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Accumulations:
    """Calls taken out of a graph, which had ``num_outputs`` outputs before."""

    num_outputs: int
    calls: tuple[_Call, ...]

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """Make the calls with the results of the changed graph; what is left is for the caller."""
        outputs, extra = list(results[: self.num_outputs]), results[self.num_outputs :]
        for call in self.calls:
            arguments = pytree.tree_map_only(_Result, lambda stand_in: extra[stand_in.position], call.arguments)
            result = call.function(*arguments)
            for place in call.places:
                outputs[place] = result if call.element is None else result[call.element]
        return outputs


def defer_accumulations(gm: torch.fx.GraphModule) -> Accumulations:
    """Take calls that accumulate gradients, and whose results are used by nobody but the caller, out of ``gm``.

    Others are written out, see Note [Gradients that a hook reads].
    """
    output = gm.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    extra: list[torch.fx.Node] = []
    calls = []

    def stand_in(node: torch.fx.Node) -> _Result:
        extra.append(node)
        return _Result(len(extra) - 1)

    for node in list(gm.graph.nodes):
        if getattr(node.target, "__name__", "") not in ACCUMULATIONS or node.kwargs:
            continue
        element, result = _element(node)
        if set(result.users) - {output} or (result is not node and len(node.users) > 1):
            _write_out(node, result)
            outputs = list(output.args[0])  # type: ignore[arg-type]
            continue
        places = tuple(i for i, value in enumerate(outputs) if value is result)
        calls.append(_Call(node.target, _with_stand_ins(node.args, stand_in), element, places))
        outputs = [None if value is result else value for value in outputs]
        output.args = (tuple(outputs),)
        for gone in (result, node) if result is not node else (node,):
            gm.graph.erase_node(gone)
    output.args = ((*outputs, *extra),)
    gm.recompile()
    return Accumulations(len(outputs), tuple(calls))


def _write_out(node: torch.fx.Node, result: torch.fx.Node) -> None:
    """Put in the place of ``result`` what the accumulation ``node`` does, if it is about dense tensors."""
    if getattr(node.target, "__name__", "") != "AccumulateGrad" or result is node or len(node.args) < 3:
        return
    given, variable, old = node.args[:3]
    (grad,) = given if isinstance(given, list | tuple) else (None,)
    if not all(map(_is_dense, (grad, variable) if old is None else (grad, variable, old))):
        return
    graph = node.graph
    with graph.inserting_before(node):
        if old is None:
            fresh = graph.call_function(torch.empty_like, (variable,), {"requires_grad": False})
            new = graph.call_method("copy_", (fresh, grad))
        else:
            new = graph.call_method("add_", (old, grad))
    new.meta.update(result.meta)
    result.replace_all_uses_with(new)
    for gone in (result, node):
        graph.erase_node(gone)


def _is_dense(given: Any) -> bool:
    """Whether it is a plain tensor whose elements all are in memory."""
    value = given.meta.get("example_value") if isinstance(given, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
        return False
    return value.layout == torch.strided


def _element(node: torch.fx.Node) -> tuple[int | None, torch.fx.Node]:
    """The result of ``node`` that is used: itself, or the one element that is taken of it."""
    users = list(node.users)
    if users and users[0].target is operator.getitem and isinstance(users[0].args[1], int):
        return users[0].args[1], users[0]
    return None, node


def _with_stand_ins(value: Any, stand_in: Callable[[torch.fx.Node], _Result]) -> Any:
    if isinstance(value, torch.fx.Node):
        return stand_in(value)
    if isinstance(value, list | tuple):
        return tuple(_with_stand_ins(item, stand_in) for item in value)
    return value
