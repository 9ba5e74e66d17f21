"""What can't be recorded, and why: inputs at a call, nodes of an FX graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .dispatch import tensors_in
from .reasons import SkipKind, SkipReason

# Operators that wait for the device, look at data on the host, or keep host state that a replay would not update.
_INCOMPATIBLE_OPS = frozenset(
    {
        "aten._local_scalar_dense",
        "aten._assert_scalar",
        "aten._fused_moving_avg_obs_fq_helper",
        "aten._fused_moving_avg_obs_fq_helper_functional",
        "fbgemm.dense_to_jagged",
        "fbgemm.jagged_to_padded_dense",
        "run_and_save_rng_state",
        "run_with_rng_state",
    }
)
_STORAGE_OPS = frozenset({"aten.set_", "aten.resize_", "aten.set", "aten.resize", "inductor.resize_storage_bytes_"})
_COLLECTIVES = ("c10d.", "_c10d_functional.", "c10d_functional.")
_CONTROL_FLOW_OPS = frozenset({"cond", "while_loop"})
_INDEX_PUT_OPS = frozenset({"aten.index_put", "aten.index_put_", "aten._unsafe_index_put"})


def check_inputs(inputs: Sequence[object], device: torch.device) -> tuple[SkipReason, ...]:
    """Reasons why a call with these inputs can't be recorded on `device`; none means it can."""
    found: list[SkipReason] = []
    tensors = 0
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            tensors += 1
            reason = _check_tensor(f"input {index}", value, device)
        elif value is None or type(value) is int or type(value) is bool:
            reason = None
        else:
            reason = SkipReason(SkipKind.NON_TENSOR_INPUT, f"input {index} is a {type(value).__name__}")
        if reason is not None:
            found.append(reason)
    if tensors == 0:
        found.append(SkipReason(SkipKind.NO_DEVICE_TENSOR, f"no input is a tensor on {device}"))
    return tuple(found)


def check_outputs(leaves: Sequence[object], device: torch.device) -> tuple[SkipReason, ...]:
    """Reasons why these results (flat) can't come from a recording."""
    found: list[SkipReason] = []
    for index, value in enumerate(leaves):
        if isinstance(value, torch.Tensor):
            reason = _check_tensor(f"output {index}", value, device)
        elif value is None or type(value) is int or type(value) is bool:
            reason = None
        else:
            reason = SkipReason(SkipKind.NON_TENSOR_OUTPUT, f"output {index} is a {type(value).__name__}")
        if reason is not None:
            found.append(reason)
    return tuple(found)


def _check_tensor(name: str, tensor: torch.Tensor, device: torch.device) -> SkipReason | None:
    if tensor.layout is not torch.strided:
        return SkipReason(SkipKind.SPARSE, f"{name} has layout {tensor.layout}")
    if is_traceable_wrapper_subclass(tensor):
        return SkipReason(SkipKind.TENSOR_SUBCLASS, f"{name} is a {type(tensor).__name__}")
    if tensor.is_conj() or tensor.is_neg():
        # A recording knows memory and layouts; a pending conjugation or negation is neither.
        return SkipReason(SkipKind.LAZY_VIEW, f"{name} is lazily conjugated or negated")
    if tensor.device != device:
        if tensor.device.type == "cpu":
            return SkipReason(SkipKind.CPU_DEVICE, f"{name} is on the CPU")
        return SkipReason(SkipKind.MULTIPLE_DEVICES, f"{name} is on {tensor.device}, others on {device}")
    if tensor.requires_grad and torch.is_grad_enabled():
        return SkipReason(SkipKind.REQUIRES_GRAD, f"{name} requires gradients and gradients are enabled")
    return None


def input_device(inputs: Iterable[object]) -> torch.device | None:
    """The first tensor's device that is not the CPU, else the CPU if there is a tensor at all, else None."""
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), devices[0] if devices else None)


def has_fake(inputs: Iterable[object]) -> bool:
    """Whether an input is a fake tensor, so that nothing can run yet."""
    return any(isinstance(value, FakeTensor) for value in inputs)


def check_graph(
    graph: torch.fx.GraphModule | torch.fx.Graph, device: torch.device | None = None
) -> tuple[SkipReason, ...]:
    """Reasons why an FX graph of ATen calls can't be recorded, one per offending node, with the user's line.

    Nodes' example values are read from `node.meta["val"]`, user lines from `node.meta["stack_trace"]`; where these are
    missing, less is known and less is found (the capture itself still refuses what it can't record).
    What a higher-order operator calls is looked at as well: an operator that it is given, and graphs, but those of
    control flow, which is a reason itself. With `device`, tensors elsewhere are a reason; without, those on the CPU,
    and those on several devices.
    """
    nodes = (graph.graph if isinstance(graph, torch.fx.GraphModule) else graph).nodes
    found = list(check_nodes(graph, device).values())
    devices = sorted({str(value.device) for node in nodes for value in tensors_in(node.meta.get("val"))} - {"cpu"})
    if device is None and len(devices) > 1:
        found.append(SkipReason(SkipKind.MULTIPLE_DEVICES, f"the graph works on {', '.join(devices)}"))
    return tuple(found)


def check_nodes(
    graph: torch.fx.GraphModule | torch.fx.Graph, device: torch.device | None = None
) -> dict[str, SkipReason]:
    """The reason of each node, by its name, that can't be part of a recording; see `check_graph`."""
    nodes = (graph.graph if isinstance(graph, torch.fx.GraphModule) else graph).nodes
    return {node.name: reason for node in nodes if (reason := _check_node(node, device)) is not None}


def _check_node(node: torch.fx.Node, device: torch.device | None) -> SkipReason | None:
    line = _user_line(node)
    if node.op == "call_function":
        reason = _check_call(node, node.target, line)
        if reason is None and isinstance(node.target, torch._ops.HigherOrderOperator):
            reason = _check_called(node, device, line)
        if reason is not None:
            return reason
    if node.op in ("call_function", "placeholder", "get_attr"):
        return _check_value(node, line, device)
    return None


def _check_called(node: torch.fx.Node, device: torch.device | None, line: str | None) -> SkipReason | None:
    """The first reason in what a higher-order operator calls: a custom operator whose writes are made functional, or a
    graph."""
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, torch._ops.OpOverload):
            reason = _check_call(node, value, line)
            if reason is not None:
                return reason
        graph = _graph_of(value)
        for inner in () if graph is None else graph.graph.nodes:
            reason = _check_node(inner, device)
            if reason is not None:
                return reason
    return None


def _graph_of(value: object) -> torch.fx.GraphModule | None:
    if not isinstance(value, torch.fx.Node) or value.op != "get_attr" or value.graph.owning_module is None:
        return None
    try:
        found = operator.attrgetter(str(value.target))(value.graph.owning_module)
    except AttributeError:
        return None
    return found if isinstance(found, torch.fx.GraphModule) else None


def _check_call(node: torch.fx.Node, target: Any, line: str | None) -> SkipReason | None:
    name = _op_name(target)
    if name in _CONTROL_FLOW_OPS:
        return SkipReason(SkipKind.CONTROL_FLOW, f"{node.name} is torch.{name}", line)
    if name in _INCOMPATIBLE_OPS:
        return SkipReason(SkipKind.INCOMPATIBLE_OP, f"{node.name} calls {name}", line)
    if name.startswith(_COLLECTIVES):
        return SkipReason(SkipKind.COLLECTIVE, f"{node.name} calls {name}", line)
    if name in _STORAGE_OPS:
        return SkipReason(SkipKind.STORAGE_MUTATION, f"{node.name} calls {name}", line)
    if torch.Tag.cudagraph_unsafe in getattr(target, "tags", ()):
        return SkipReason(SkipKind.UNSAFE_TAG, f"{node.name} calls {name}, tagged cudagraph_unsafe", line)
    if name in _INDEX_PUT_OPS and _has_boolean_index(node):
        return SkipReason(SkipKind.BOOLEAN_INDEX, f"{node.name} writes through a boolean mask", line)
    return None


def _check_value(node: torch.fx.Node, line: str | None, device: torch.device | None) -> SkipReason | None:
    for value in tensors_in(node.meta.get("val")):
        if value.layout is not torch.strided:
            return SkipReason(SkipKind.SPARSE, f"{node.name} has layout {value.layout}", line)
        if value.device.type == "cpu" and (device is None or device.type != "cpu"):
            return SkipReason(SkipKind.CPU_DEVICE, f"{node.name} is on the CPU", line)
        if device is not None and value.device != device:
            return SkipReason(SkipKind.MULTIPLE_DEVICES, f"{node.name} is on {value.device}, not {device}", line)
        unbacked = [str(size) for size in value.shape if _is_unbacked(size)]
        if unbacked:
            return SkipReason(SkipKind.UNBACKED_SIZE, f"{node.name} has the data-dependent size {unbacked[0]}", line)
    return None


def _is_unbacked(size: object) -> bool:
    # Symbols of data-dependent sizes have no hint: nobody has seen a value for them.
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


def _op_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return str(getattr(target, "__name__", target))


def _has_boolean_index(node: torch.fx.Node) -> bool:
    indices = node.args[1] if len(node.args) > 1 else node.kwargs.get("indices", ())
    values = [index.meta.get("val") for index in indices if isinstance(index, torch.fx.Node)]  # type: ignore[union-attr]
    return any(isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8) for value in values)


def _user_line(node: torch.fx.Node) -> str | None:
    """`file:line: source` of the innermost frame in the node's stack trace."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    for position in range(len(lines) - 1, -1, -1):
        if lines[position].startswith('File "'):
            file, number = lines[position].removeprefix('File "').split('", line ')[:2]
            source = lines[position + 1] if position + 1 < len(lines) else ""
            return f"{file}:{number.split(',')[0]}: {source}".rstrip(": ")
    return None
