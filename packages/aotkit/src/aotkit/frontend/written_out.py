"""Dynamo's graphs with ``torch.nn.attention.flex_attention`` on the CPU written out in operators.

Dynamo records that call as a higher-order operator with the graphs of its functions. Traced here, it is operators that
every later stage knows (see Note [Flex attention on the CPU]), and that a cache key can name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._guards import tracing
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..attention import attend
from .changed_graphs import change_calls

__all__ = ["write_out_flex_attention"]

_NAME = "flex_attention"
_KEPT = ("stack_trace", "nn_module_stack", "source_fn_stack")


def write_out_flex_attention(gm: GraphModule) -> GraphModule:
    """``gm``, or where it or a graph in it holds such calls on the CPU, a copy without them."""
    return change_calls(gm, _is_call, _write_out)


def _is_call(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name() != _NAME:
        return False
    query: Any = node.args[0]
    value = query.meta.get("example_value") if isinstance(query, Node) else None
    return isinstance(value, torch.Tensor) and value.device.type in ("cpu", "cuda")


def _write_out(gm: GraphModule, call: Node) -> None:
    args: tuple[Any, ...] = call.args
    device = args[0].meta["example_value"].device.type
    score_graph, mask, scale = args[3], args[4], args[5]
    beside_score, beside_mask = args[7], args[8]
    functions = [getattr(gm, str(each.target)) for each in (score_graph, mask[-1])]
    dtype = call.meta["example_value"][0].dtype  # autocast's, within one

    def run(given: Sequence[torch.Tensor], scale: float, *beside: Sequence[Any]) -> Any:
        score_mod, mask_mod = (partial(_at_place, *each) for each in zip(functions, beside))
        query, key, value = (each.to(dtype) for each in given)
        result, lse, largest = attend(query, key, value, score_mod, mask_mod, scale)
        return result, lse / math.log(2), largest / math.log(2)  # the operator counts in powers of two

    given = (args[:3], scale, beside_score, beside_mask)
    graph = gm.graph
    with graph.inserting_before(call):
        # Within autocast, too, scores are as wide as `attend` says; Dynamo's call is one operator to it.
        off = graph.call_function(torch.amp.autocast_mode._enter_autocast, (device, None, False, None))
        results = _inline(gm, _traced(run, given, device), given, call)
        graph.call_function(torch.amp.autocast_mode._exit_autocast, (off,))
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)


def _at_place(function: Callable[..., Any], beside: Sequence[Any], *place: Any) -> Any:
    """A function of a place, which reads other tensors ``beside`` it."""
    return function(*place, *beside)


def _traced(run: Callable[..., Any], given: Any, device: str) -> GraphModule:
    """The operators that ``run`` calls, on the fake values that Dynamo left."""
    values = torch.fx.map_arg(given, lambda node: node.meta["example_value"])
    fakes = [value for value in pytree.tree_leaves(values) if isinstance(value, FakeTensor)]
    # Dynamo goes on with another fake mode than its nodes' values have; without a context these are asked for theirs.
    with tracing(None), torch.no_grad(), torch.autocast(device, enabled=False), fakes[0].fake_mode:
        return make_fx(run)(*values)


def _inline(gm: GraphModule, traced: GraphModule, given: Any, call: Node) -> Any:
    """Copy ``traced`` before ``call``; what it returns."""
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), pytree.tree_leaves(given)))
    for node in traced.graph.nodes:
        if node.op == "output":
            return torch.fx.map_arg(node.args[0], copies.__getitem__)
        if node.op == "placeholder":
            continue
        copy = copies[node] = gm.graph.node_copy(node, copies.__getitem__)
        _place_number(copy, call)
        copy.meta = {name: call.meta[name] for name in _KEPT if name in call.meta}
        if "val" in node.meta and copy.target is node.target:  # torch 2.11 leaves none at numbers
            copy.meta["example_value"] = node.meta["val"]
        if node.op == "get_attr":  # a tensor that a function of the user's makes
            copy.target = _free_name(gm, str(node.target))
            setattr(gm, copy.target, getattr(traced, str(node.target)))
    raise AssertionError("a graph without an output")


def _place_number(node: Node, call: Node) -> None:
    """A number that ``vmap`` made a tensor of the CPU is one of the call's device: kernels read it there."""
    if node.target is torch.ops.aten._to_copy.default and isinstance(node.args[0], int | float):
        node.target = torch.ops.aten.full.default
        node.args, node.kwargs = ([], node.args[0]), {**node.kwargs, "device": _device(call)}


def _device(call: Node) -> torch.device:
    device: torch.device = call.meta["example_value"][0].device
    return device


def _free_name(gm: GraphModule, name: str) -> str:
    return next(f"{name}_{number}" for number in itertools.count() if not hasattr(gm, f"{name}_{number}"))
