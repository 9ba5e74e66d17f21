"""The outer graph: calls that stay, and between them one ``call_module`` per stretch of ordinary nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import lazy_graph_module
from ..ops.aten import is_view
from .split_ops import carried_symbols, symbols_in

__all__ = ["OuterGraph", "Part", "split"]


@dataclass(slots=True)
class Part:
    """A stretch of ordinary nodes as a graph of its own.

    ``checked``: positions of inputs that a call outside of kernels made, so that they may have other strides than
    their fake values say.
    """

    graph: GraphModule
    checked: tuple[int, ...]


@dataclass(slots=True)
class OuterGraph:
    """``make`` gives what stands for a part in the outer graph, or ``None`` to leave its nodes as they are."""

    source: GraphModule
    staying: Mapping[Node, str]
    make: Callable[[Part], torch.nn.Module | None]
    graph: Graph = field(default_factory=Graph)
    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    new: dict[Node, Node] = field(default_factory=dict)
    symbol_sources: dict[Any, tuple[Node, str, int]] = field(default_factory=dict)

    def keep(self, node: Node) -> None:
        """Copy one node, and remember which symbols its value tells."""
        copied = self.new[node] = self.graph.node_copy(node, lambda used: self.new[used])
        for symbol, kind, dim in carried_symbols(node):
            self.symbol_sources.setdefault(symbol, (copied, kind, dim))

    def carry(self, symbol: Any) -> Node | None:
        """A node of the outer graph whose value is ``symbol``."""
        if symbol not in self.symbol_sources:
            return None
        node, kind, dim = self.symbol_sources[symbol]
        if kind == "int":
            return node
        target = torch.ops.aten.sym_size.int if kind == "size" else torch.ops.aten.sym_stride.int
        return self.graph.call_function(target, (node, dim))

    def add_piece(self, nodes: Sequence[Node]) -> None:
        """Put a stretch of nodes into a module of its own, unless there is nothing in it to compile."""
        if all(node.op == "get_attr" or is_view(node) for node in nodes) or not self._add_module(nodes):
            for node in nodes:
                self.keep(node)

    def _add_module(self, nodes: Sequence[Node]) -> bool:
        inside = set(nodes)
        inputs = list(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside))
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        if not outputs:
            return False
        symbols = set().union(*(symbols_in(n.meta.get("val")) for n in (*nodes, *inputs)))
        told = {symbol for node in inputs for symbol, _, _ in carried_symbols(node)}
        extra = [(symbol, self.carry(symbol)) for symbol in sorted(symbols - told, key=str)]
        if any(carrier is None for _, carrier in extra):
            return False
        checked = tuple(i for i, node in enumerate(inputs) if node in self.staying)
        part = Part(self._inner_graph(nodes, inputs, outputs, [s for s, _ in extra]), checked)
        module = self.make(part)
        if module is None:
            return False
        name = f"piece_{len(self.modules)}"
        self.modules[name] = module
        call = self.graph.call_module(name, (*(self.new[n] for n in inputs), *(c for _, c in extra if c is not None)))
        for position, node in enumerate(outputs):
            self.new[node] = self.graph.call_function(operator.getitem, (call, position))
            for symbol, kind, dim in carried_symbols(node):
                self.symbol_sources.setdefault(symbol, (self.new[node], kind, dim))
        return True

    def _inner_graph(
        self, nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node], extra: Sequence[Any]
    ) -> GraphModule:
        graph = Graph()
        new: dict[Node, Node] = {}
        for node in inputs:
            new[node] = graph.placeholder(node.name)
            new[node].meta = dict(node.meta)
        sizes = {s: v for n in (*nodes, *inputs) for v in _symints(n.meta.get("val")) for s in v.node.expr.free_symbols}
        for number, symbol in enumerate(extra):
            some = sizes[symbol]
            placeholder = graph.placeholder(f"size_{number}")
            placeholder.target = placeholder.name  # an input may be called so
            placeholder.meta["val"] = some.node.shape_env.create_symintnode(symbol, hint=None)
        for node in nodes:
            new[node] = graph.node_copy(node, lambda used: new[used])
        graph.output(tuple(new[node] for node in outputs))
        return lazy_graph_module(self.source, graph)


def split(gm: GraphModule, staying: Mapping[Node, str], make: Callable[[Part], torch.nn.Module | None]) -> OuterGraph:
    """Build the outer graph of ``gm``; inner graphs are handed to ``make``, in order."""
    outer = OuterGraph(gm, staying, make)
    stretch: list[Node] = []
    for node in gm.graph.nodes:
        if node.target is operator.getitem and node not in staying:
            continue  # came with the node whose result it takes apart
        if node.op in ("placeholder", "output") or node in staying:
            if stretch and node.op != "placeholder" and node.op != "get_attr":
                outer.add_piece(stretch)
                stretch = []
            outer.keep(node)
        else:
            stretch.append(node)
            stretch.extend(user for user in node.users if user.target is operator.getitem)
    return outer


def _symints(val: object) -> list[torch.SymInt]:
    if isinstance(val, torch.SymInt):
        return [val]
    if isinstance(val, list | tuple):
        return [s for v in val for s in _symints(v)]
    if not isinstance(val, torch.Tensor):
        return []
    return [n for n in (*val.shape, *val.stride(), val.storage_offset()) if isinstance(n, torch.SymInt)]
