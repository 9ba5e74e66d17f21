"""Exported programs as packages compile them: a graph that writes to its inputs itself, made of arguments that share
nothing.

Note [What a decomposed program writes]
    ``ExportedProgram.run_decompositions`` makes a graph functional: it returns the new values of the buffers and
    arguments that it writes to, before the user's results, and whoever runs the program copies them back. Compiled code
    writes itself, so these results become ``copy_`` calls at the end of the graph. Where there are several, the values
    are cloned first: the new value of one may be the old one of another. A result that is such a value is what it was
    copied to, as in the program's ``module()``; one that is an old value, or a view of it, is cloned before it is gone.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from ..errors import PackageError

__all__ = ["WrittenGraph", "apart", "written_graph"]

_WRITES = ("BUFFER_MUTATION", "PARAMETER_MUTATION", "USER_INPUT_MUTATION")  # the second is not in every torch


@dataclass(frozen=True, slots=True)
class WrittenGraph:
    """``module`` returns the user's results alone; ``results`` is what the program's signature says of them."""

    module: GraphModule
    results: Sequence[Any]


def written_graph(program: ExportedProgram) -> WrittenGraph:
    """The graph of ``program``, which does what it writes; see Note [What a decomposed program writes]. Raises
    :class:`PackageError` for a program with results of another kind, as a loss."""
    specs = program.graph_signature.output_specs
    for spec in specs:
        if spec.kind is not OutputKind.USER_OUTPUT and spec.kind.name not in _WRITES:
            raise PackageError(f"the program returns {spec.kind.name.lower()} {spec.arg}, which can't be packed")
    results = [spec.arg for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    if len(results) == len(specs):
        return WrittenGraph(program.graph_module, results)
    graph = Graph()
    copies: dict[Node, Node] = {}
    values: Any = graph.graph_copy(program.graph_module.graph, copies)
    places = _placeholders_by_target(program, copies)
    writes = [(places[spec.target or ""], value) for spec, value in zip(specs, values, strict=True) if _is_write(spec)]
    written = {value: place for place, value in writes}
    old = {place for place, _ in writes}
    returned = [value for spec, value in zip(specs, values, strict=True) if not _is_write(spec)]
    returned = [written[value] if value in written else _kept(graph, value, old) for value in returned]
    if len(writes) > 1:
        writes = [(place, _clone(graph, value)) for place, value in writes]
    for place, value in writes:
        _call(graph, torch.ops.aten.copy_.default, (place, value), place)
    graph.output(tuple(returned))
    return WrittenGraph(GraphModule(program.graph_module, graph), results)


def _kept(graph: Graph, value: Any, written: Set[Node]) -> Any:
    """A result that stays as it is when those inputs are ``written``."""
    return _clone(graph, value) if isinstance(value, Node) and _lies_in(value, written) else value


def _lies_in(value: Node, inputs: Set[Node]) -> bool:
    """Whether a value is one of those, or a view of one."""
    views = value.target is operator.getitem
    if isinstance(value.target, torch._ops.OpOverload):
        views = any(result.alias_info is not None for result in value.target._schema.returns)
    return value in inputs or (views and any(_lies_in(given, inputs) for given in value.all_input_nodes))


def _clone(graph: Graph, value: Node) -> Node:
    return _call(graph, torch.ops.aten.clone.default, (value,), value)


def _is_write(spec: Any) -> bool:
    return spec.kind is not OutputKind.USER_OUTPUT


def _call(graph: Graph, target: Any, arguments: tuple[Node, ...], like: Node) -> Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = like.meta.get("val")
    return node


def _placeholders_by_target(program: ExportedProgram, copies: Mapping[Node, Node]) -> dict[str, Node]:
    nodes = program.graph_module.graph.find_nodes(op="placeholder")
    return {
        node.name if spec.kind is InputKind.USER_INPUT else str(spec.target): copies[node]
        for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True)
    }


def apart(model: torch.nn.Module, arguments: Any) -> Any:
    """Example arguments of which no two are one tensor, nor one of them a weight: torch would make one input of both,
    and no call could tell them apart again."""
    seen = {id(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = id(value) in seen
        seen.add(id(value))
        return value.detach().clone() if known else value

    return tree_map(own, arguments)
