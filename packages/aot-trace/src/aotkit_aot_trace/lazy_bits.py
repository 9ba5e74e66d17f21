"""Conjugation and negation as operators of the graph, instead of bits that every reader of a tensor has to mind.

Note [Bits become operators]
    While a function is captured, operators that do not know a lazy bit are given a clone of the tensor, and the others
    the tensor as it is. In the graph every value stands for its elements as they are meant: ``_conj`` and ``_neg_view``
    go, views that were taken of them are taken of the memory instead, and whoever uses such a value gets a
    ``conj_physical`` or ``neg`` of that memory, which is a kernel like any other. The graph takes the memory of inputs
    that have bits; see Note [Lazy bits] of :mod:`aotkit_functionalize.lazy_bits`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from aotkit_functionalize import lazy_bits as bits

__all__ = ["bits_to_operators", "without_bits_first"]

aten = torch.ops.aten
_UNDOES: dict[Any, Any] = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
_FLIPS = frozenset(_UNDOES)
_OTHER_ELEMENTS = aten.view.dtype
_NAMES = ("partitioner_tag", "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "autograd_backward")


def without_bits_first() -> dict[Any, Callable[..., Any]]:
    """For a decomposition table: views that tensors with these bits do not have, of a copy of one that was given the
    bit by a write."""

    def guarded(op: Any, refuses: Callable[[torch.Tensor], bool]) -> Callable[..., Any]:
        def view(value: torch.Tensor, *rest: Any) -> Any:
            return op(value.resolve_conj().resolve_neg(), *rest) if refuses(value) else NotImplemented

        return view

    refused = {aten.view_as_real.default: torch.is_conj, aten.view.dtype: bits.has_lazy_bits}
    return {op: guarded(op, refuses) for op, refuses in refused.items()}


def bits_to_operators(module: GraphModule) -> None:
    """Rewrite the graph, and those that it calls; see Note [Bits become operators]."""
    for part in module.modules():
        if isinstance(part, GraphModule) and any(map(_has_to_do_with_bits, part.graph.nodes)):
            _Rewriter(part.graph).run()
            part.recompile()


def _has_to_do_with_bits(node: Node) -> bool:
    if node.target in _FLIPS:
        return True
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and bits.has_lazy_bits(value)


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a value is: the elements of ``node``, conjugated and negated."""

    node: Node
    conj: bool = False
    neg: bool = False

    @property
    def is_plain(self) -> bool:
        return not self.conj and not self.neg


@dataclass(slots=True)
class _Rewriter:
    graph: Graph
    known: dict[Node, _Memory] = field(default_factory=dict)
    made: dict[_Memory, Node] = field(default_factory=dict)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            first = node.args[0] if node.args else None
            source = self.known.get(first) if isinstance(first, Node) else None
            if node.target in _FLIPS and not isinstance(first, Node):
                self._become_number(node)
            elif node.target in _FLIPS:
                self.known[node] = self._flipped(node, source or _Memory(node.args[0]))
            elif source is not None and _is_view(node, source):
                self.known[node] = replace(source, node=self._viewed(node, source.node))
            elif source is not None and node.target is aten.clone.default and self._is_plain_copy(node, source):
                self._become_operator(node, source)
            else:
                self._use_values(node)
            if "val" in node.meta and node not in self.known:
                node.meta["val"] = tree_map(_without_bits, node.meta["val"])
        for node in reversed(self.known):
            self.graph.erase_node(node)

    def _become_number(self, node: Node) -> None:
        """Autograd takes the conjugate of a Python number; what it gives is a tensor."""
        number: Any = node.args[0]
        like = node.meta["val"]
        value = -number if node.target is aten._neg_view.default else complex(number).conjugate()
        node.target, node.args = aten.scalar_tensor.default, (value,)
        node.kwargs = {"dtype": like.dtype, "device": like.device}

    def _flipped(self, node: Node, memory: _Memory) -> _Memory:
        flips_conj = node.target is aten._conj.default
        written, before = memory.node, _UNDOES[node.target]
        source: Any = written.args[0] if written.args else None
        if memory.is_plain and written.target is before and _same_layout(written, source):
            return self.known.get(source, _Memory(source))  # of a value that got its bit back
        return replace(memory, conj=memory.conj ^ flips_conj, neg=memory.neg ^ (not flips_conj))

    def _viewed(self, view: Node, memory: Node) -> Node:
        """The same view of ``memory``."""
        target: Any = view.target
        with self.graph.inserting_before(view):
            made = self.graph.call_function(target, (memory, *view.args[1:]), dict(view.kwargs))
        made.meta = dict(view.meta)
        made.meta["val"] = tree_map(_without_bits, view.meta["val"])
        return made

    def _use_values(self, node: Node) -> None:
        def value(used: Node) -> Node:
            memory = self.known.get(used)
            if memory is None:
                return used
            return (self._viewed_again(used, memory) if node.op == "output" else None) or self._value(memory, node)

        node.args = torch.fx.node.map_arg(node.args, value)
        node.kwargs = torch.fx.node.map_arg(node.kwargs, value)

    def _viewed_again(self, result: Node, memory: _Memory) -> Node | None:
        """For a result with gaps, which no operator gives, but that was taken of a value: the same views of that."""
        if memory.is_plain:
            return None
        views, found, conj, neg = [], result, False, False
        while found in self.known:
            conj ^= found.target is aten._conj.default
            neg ^= found.target is aten._neg_view.default
            views += [found] if found.target not in _FLIPS else []
            found = found.args[0]  # type: ignore[assignment]
        laid_out = _strides(_computed(self._operators(memory)[-1], memory.node.meta["val"]))
        if conj or neg or laid_out == _strides(result.meta["val"]):
            return None
        for view in reversed(views):
            found = self._viewed(view, found)
        return found

    def _value(self, memory: _Memory, user: Node) -> Node:
        """A node for what ``memory`` means, for the first time before ``user``."""
        if memory.is_plain:
            return memory.node
        if memory not in self.made:
            found = memory.node
            with self.graph.inserting_before(user):
                for op in self._operators(memory):
                    found = self._call(op, found, user)
            self.made[memory] = found
        return self.made[memory]

    def _operators(self, memory: _Memory) -> list[Any]:
        return [aten.conj_physical.default] * memory.conj + [aten.neg.default] * memory.neg

    def _call(self, op: Any, of: Node, user: Node) -> Node:
        made = self.graph.call_function(op, (of,))
        made.meta = {name: user.meta[name] for name in _NAMES if name in user.meta}
        made.meta["val"] = _computed(op, of.meta["val"])
        return made

    def _is_plain_copy(self, clone: Node, memory: _Memory) -> bool:
        """Whether a clone is laid out as the operator's result is."""
        if memory.is_plain:
            return False
        op = self._operators(memory)[-1]
        return _strides(_computed(op, memory.node.meta["val"])) == _strides(clone.meta["val"])

    def _become_operator(self, clone: Node, memory: _Memory) -> None:
        *before, last = self._operators(memory)
        found = memory.node
        with self.graph.inserting_before(clone):
            for op in before:
                found = self._call(op, found, clone)
        clone.target, clone.args, clone.kwargs = last, (found,), {}


def _is_view(node: Node, source: _Memory) -> bool:
    """Whether the node views the memory ``source``, and what it is a view of does not matter to the elements."""
    if node.target is operator.getitem:
        return True
    if node.target is aten.view_as_real.default:
        return not source.conj
    if node.target is _OTHER_ELEMENTS or not isinstance(node.target, torch._ops.OpOverload):
        return False
    info = node.target._schema.arguments[0].alias_info
    return info is not None and not info.is_write


def _without_bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not bits.has_lazy_bits(value):
        return value
    with _mode(value), torch.no_grad():
        return bits.without_lazy_bits(value)


def _computed(op: Any, value: torch.Tensor) -> torch.Tensor:
    with _mode(value), torch.no_grad():
        result: torch.Tensor = op(value)
    return result


def _mode(value: Any) -> Any:
    return value.fake_mode


def _same_layout(one: Node, other: Any) -> bool:
    return isinstance(other, Node) and _strides(one.meta["val"]) == _strides(other.meta["val"])


def _strides(value: torch.Tensor) -> str:
    return str(value.stride())  # comparing symbols would add guards
