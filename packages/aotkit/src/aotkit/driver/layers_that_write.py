"""Layers that write to their inputs, as those of a language model write to a cache: captured once, and put into the
graph for each layer.

Note [Layers that write]
    The step of a model with a cache has a layer's worth of nodes for each layer, and its capture takes longer than
    anything else in its compile. One layer is captured, as in Note [A layer compiled once]; the capture gives the new
    values of what was written beside the results. Its call gives them too, and copies them to the inputs, which the
    capture of the whole sees. Afterwards the layer's nodes stand in the place of each call: what is lowered is the
    graph that a capture of the whole would have given, and nothing of a layer is called when it runs.

    This holds where a layer knows all that it writes to: each input that it writes to is an input of the graph, whose
    memory no other input of the layer shows, and it is written once, so that its version moves by one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils._mode_utils import no_dispatch

from aotkit_functionalize import GraphMetadata
from aotkit_functionalize.records import InputInfo, MutationKind

from ..frontend.plain_fakes import new_fake_like
from ..frontend.repeats import Layers

__all__ = ["NotAlike", "check_memory_of_writes", "put_layer", "renamed_modules", "writes_of"]


class NotAlike(Exception):
    """Layers that can't be calls of one graph."""


# -- what a layer writes -----------------------------------------------------------------------------------


def writes_of(metadata: GraphMetadata) -> tuple[tuple[int, int], ...]:
    """Pairs of an input that a layer writes to and the result that is its new value. Raises :class:`NotAlike` for a
    layer that does more to its inputs."""
    changed = [i for i in metadata.inputs if i.mutation is not MutationKind.NONE or i.version_steps]
    if changed and (metadata.is_training or not all(map(_is_written_once, changed))):
        raise NotAlike("a layer writes to its inputs")
    return tuple((info.index, info.updated_output) for info in changed if info.updated_output is not None)


def _is_written_once(info: InputInfo) -> bool:
    if info.mutation is not MutationKind.DATA or info.version_steps != 1 or info.updated_output is None:
        return False
    return info.storage is None and info.new_view is None and info.sets_requires_grad is None


def check_memory_of_writes(group: Layers, written: Sequence[int]) -> None:
    """Raise :class:`NotAlike` where a layer writes to what is no input of the graph, or to memory that another of its
    inputs shows. ``written``: positions among the inputs of a layer."""
    for inputs in group.inputs:
        storages = [node.meta["example_value"].untyped_storage()._cdata for node in inputs]
        for place in written:
            if inputs[place].op != "placeholder":
                raise NotAlike("a layer writes to what is no input of the graph")
            if storages.count(storages[place]) != 1:
                raise NotAlike("inputs of a layer share memory that it writes to")


# -- a layer in the place of its call ----------------------------------------------------------------------


def renamed_modules(group: Layers, number: int) -> dict[str, tuple[str, Any]]:
    """For each module that the first layer's nodes are in, by its key in ``nn_module_stack``, that of another layer."""
    renamed: dict[str, tuple[str, Any]] = {}
    for first, node in zip(group.layers[0], group.layers[number], strict=True):
        stacks = (of.meta.get("nn_module_stack") or {} for of in (first, node))
        for key, entry in zip(*stacks, strict=False):
            renamed[key] = entry, node.meta["nn_module_stack"][entry]
    return renamed


def put_layer(graph: Graph, call: Node, layer: GraphModule, renamed: Mapping[str, tuple[str, Any]]) -> None:
    """Put the nodes of ``layer`` in the place of ``call``, whose first argument are its inputs."""
    inputs: Any = call.args[0]
    new: dict[Node, Node] = {}
    memory = _Memory()
    with graph.inserting_before(call):
        for node, given in zip(layer.graph.find_nodes(op="placeholder"), inputs, strict=True):
            new[node] = given
            memory.note(node.meta["val"], given.meta["val"])
        for node in layer.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            new[node] = graph.node_copy(node, lambda used: new[used])
            new[node].meta = _meta(node, memory, renamed)
    made: Any = map_arg(layer.graph.output_node().args[0], lambda used: new[used])
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(made[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
    for result in dict.fromkeys(made):
        if memory.is_new(result.meta["val"]):
            _drop_copies(graph, result)


def _drop_copies(graph: Graph, result: Node) -> None:
    """What writes a result over all of an input gives a copy in the input's layout: often the result as it is."""
    for user in list(result.users):
        is_copy = user.target is torch.ops.aten.copy.default and user.args[1] is result and user.args[0] is not result
        if is_copy and _layout(user.meta["val"]) == _layout(result.meta["val"]):
            user.replace_all_uses_with(result)
            graph.erase_node(user)


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, value.device, value.shape, value.stride(), value.is_conj(), value.is_neg()


def _meta(node: Node, memory: _Memory, renamed: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    meta = dict(node.meta)
    if "val" in meta:
        meta["val"] = memory.twin(meta["val"])
    if meta.get("nn_module_stack"):
        meta["nn_module_stack"] = dict(renamed.get(key, (key, held)) for key, held in meta["nn_module_stack"].items())
    return meta


class _Memory:
    """Fakes of a layer's values, which share memory where those of the first layer's do."""

    def __init__(self) -> None:
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._new: set[int] = set()

    def note(self, value: Any, twin: Any) -> None:
        """``twin`` stands for ``value`` and its memory."""
        self._twins[value.untyped_storage()._cdata] = value, twin

    def is_new(self, twin: Tensor) -> bool:
        """Whether the layer itself makes the memory of a value, so that it is not an input's."""
        return twin.untyped_storage()._cdata in self._new

    def twin(self, value: Any) -> Any:
        """What stands for a value in this layer."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.twin, value))
        if not isinstance(value, FakeTensor):
            return value
        known = self._twins.get(value.untyped_storage()._cdata)
        if known is None:
            made = new_fake_like(value)
            self.note(value, made)
            self._new.add(made.untyped_storage()._cdata)
            return made
        was, now = known
        begins = value.storage_offset() * value.itemsize - was.storage_offset() * was.itemsize
        offset = now.storage_offset() * now.itemsize + begins
        with no_dispatch():  # type: ignore[no-untyped-call]
            meta = torch.empty(0, dtype=value.dtype, device="meta")
            meta.set_(now.untyped_storage(), offset // value.itemsize, value.shape, value.stride())
            return FakeTensor(value.fake_mode, meta, value.device)
