"""From the raw recording to the captured graph: order, names, tags, no no-ops, nothing mutable."""

from __future__ import annotations

import bisect
import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from aotkit_functionalize import Unsupported

from ._torch_compat import drop_dead_code
from .known_conditions import know_conditions
from .lazy_bits import bits_to_operators
from .record import Recording
from .runtime_checks import add_runtime_checks

__all__ = ["check_functional", "finish"]

aten = torch.ops.aten
_SAME_VALUE = frozenset({aten.detach.default, aten.alias.default, aten.lift.default, aten.lift_fresh.default})


def finish(recording: Recording, promises: ShapeEnv | None = None, *, keep_bits: bool = False) -> torch.fx.GraphModule:
    """Clean the recorded graph in place and return it.

    ``promises``: knows what the function promised about sizes that depend on data, if the graph does not check it yet.
    ``keep_bits``: the graph is going to be run by operators that mind lazy bits.
    """
    module, metadata = recording.graph, recording.metadata
    assert module is not None and metadata is not None
    graph = module.graph
    if metadata.is_training:
        tag_forward_and_backward(graph, recording)
        for placeholder, value in recording.needless:
            placeholder.replace_all_uses_with(value)
            graph.erase_node(placeholder)
        move_placeholders_first(graph)
    add_runtime_checks(graph, promises)
    remove_same_value_nodes(graph, metadata.num_mutated)
    if not keep_bits:
        bits_to_operators(module)
    recording.metadata = replace(metadata, repeated_outputs=repeated_outputs(graph, metadata.num_forward_outputs))
    know_conditions(module)
    drop_dead_code(graph)
    complete_values(graph)
    name_placeholders(graph, joint=metadata.is_training)
    check_functional(graph)
    module.recompile()
    return module


def repeated_outputs(graph: torch.fx.Graph, num_forward_outputs: int) -> tuple[int, ...]:
    """Positions of forward outputs that are an earlier one as it is, though the function's are different tensors.

    They need to be different tensors for autograd, which would else give each the gradients of both.
    """
    (output,) = graph.find_nodes(op="output")
    nodes = [_viewed_as_it_is(node) for node in list(output.args[0])[:num_forward_outputs]]
    return tuple(
        i
        for i, node in enumerate(nodes)
        if node in nodes[:i] and isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
    )


def _viewed_as_it_is(node: Any) -> Any:
    """The node that ``node`` is a view of, if by views that change nothing: a compiler may take both for one."""
    while isinstance(node, torch.fx.Node) and isinstance(node.target, torch._ops.OpOverload):
        first = next(iter(node.target._schema.arguments), None)
        if first is None or first.alias_info is None or first.alias_info.is_write or not node.args:
            break
        source, value = node.args[0], node.meta.get("val")
        before = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
        if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
            break
        if _layout(value) != _layout(before):
            break
        node = source
    return node


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, str(value.shape), str(value.stride())  # texts: comparing symbols would add guards


def tag_forward_and_backward(graph: torch.fx.Graph, recording: Recording) -> None:
    """``partitioner_tag`` on every node; backward nodes get the stack trace, and the modules, of the forward node that
    they belong to. A call within torch's own modules, as those of a ``Sequential``, has modules alone."""
    positions = [position for position, _ in recording.backward_marks]
    origin: dict[int, torch.fx.Node] = {}
    for index, node in enumerate(graph.nodes):
        if index < recording.num_forward_nodes:
            node.meta.setdefault("partitioner_tag", "is_forward")
            if "seq_nr" in node.meta and ("stack_trace" in node.meta or "nn_module_stack" in node.meta):
                origin.setdefault(node.meta["seq_nr"], node)
            continue
        node.meta["partitioner_tag"] = "is_backward"
        if node.op != "call_function":
            continue
        node.meta["autograd_backward"] = True
        mark = bisect.bisect_right(positions, index) - 1
        if mark < 0:
            continue
        number = recording.backward_marks[mark][1]
        node.meta["seq_nr"] = number
        source = origin.get(number)
        for name, found_as in (("stack_trace", "stack_trace"), ("nn_module_stack", "fwd_nn_module_stack")):
            if source is not None and name in source.meta:
                node.meta[found_as] = source.meta[name]


def complete_values(graph: torch.fx.Graph) -> None:
    """``meta["val"]`` of higher-order calls that were recorded without one, from the items taken of their results."""
    for node in graph.nodes:
        if (
            node.op != "call_function"
            or "val" in node.meta
            or not isinstance(node.target, torch._ops.HigherOrderOperator)
        ):
            continue
        items = {user.args[1]: user.meta.get("val") for user in node.users if user.target is operator.getitem}
        if items and len(items) == len(node.users):
            node.meta["val"] = tuple(items.get(position) for position in range(max(items) + 1))


def move_placeholders_first(graph: torch.fx.Graph) -> None:
    """Placeholders made in the middle of the recording go behind those at its beginning."""
    nodes = list(graph.nodes)
    body = next((n for n in nodes if n.op != "placeholder"), None)
    if body is None:
        return
    for node in nodes[nodes.index(body) :]:
        if node.op == "placeholder":
            body.prepend(node)


def remove_same_value_nodes(graph: torch.fx.Graph, num_mutated: int = 0) -> None:
    """Drop detach and alias nodes: below autograd, in a graph without mutation, they do nothing.

    Nor do copies of an input onto itself, if there is no view of the result: that view, as the new value of the input,
    would be copied onto the memory that it looks at. A copy that is returned, behind the values of inputs that are
    written to (``num_mutated``), is memory of its own.
    """
    (output,) = graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], list | tuple) else (output.args[0],)
    returned = set(results[num_mutated:])
    for node in list(graph.nodes):
        of_itself = node not in returned and _copies_input_to_itself(node)
        if node.op == "call_function" and (node.target in _SAME_VALUE or of_itself):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _copies_input_to_itself(node: torch.fx.Node) -> bool:
    if node.target is not aten.copy.default:
        return False
    source = node.args[1]
    if not isinstance(source, torch.fx.Node) or source.op != "placeholder" or source is not node.args[0]:
        return False
    if any(map(_is_view, node.users)):
        return False
    return _returned_as_it_is(source.meta["val"])


def _returned_as_it_is(value: torch.Tensor) -> bool:
    """Whether autograd returns an input of a function with its strides: it gives dimensions of size 1 others, and
    nothing is copied onto its own memory in another layout."""
    step: int | torch.SymInt = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if statically_known_true(size == 1) and not statically_known_true(stride == step):
            return False
        step = step * size
    return True


def _is_view(node: torch.fx.Node) -> bool:
    arguments: Any = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    return bool(arguments) and arguments[0].alias_info is not None


def name_placeholders(graph: torch.fx.Graph, *, joint: bool) -> None:
    """``primals_1 .. tangents_1 ..`` in a joint graph, ``arg0_1 ..`` in an inference graph."""
    number = 0
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        is_tangent = str(node.target).startswith("tangents_")
        if not is_tangent:
            name = f"primals_{number + 1}" if joint else f"arg{number}_1"
            number += 1
            if node.name != name:
                node._rename(name)
            node.target = node.name


def check_functional(graph: torch.fx.Graph) -> None:
    """Refuse a graph with an operation that writes to its arguments."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and (schema.is_mutable or writes_statistics(node)):
            raise Unsupported(
                f"operation {node.target} writes to its arguments and could not be made functional",
                "a captured graph holds functional operations only",
                "Register a functional variant of the operation",
                stack_trace=node.meta.get("stack_trace"),
            )


def writes_statistics(node: torch.fx.Node) -> bool:
    """Whether a batch norm updates running statistics in place, which its schema does not declare."""
    if node.target not in (
        aten.native_batch_norm.default,
        aten.cudnn_batch_norm.default,
        aten.miopen_batch_norm.default,
    ):
        return False
    return node.args[3] is not None and bool(node.args[5])
