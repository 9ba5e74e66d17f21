"""Python floats that are known when the graph runs: in kernels a load, for an ATen call the element of a tensor.

Note [Float arguments]
    Dynamo passes a float that may change as a tensor of one element and reads it with ``item()``. That float, and
    what is computed of it and of sizes, has a form in the loop IR (:class:`.values.FloatExpr`), so nothing has to stay
    outside of kernels for its sake: unless it is a result of the graph, or the tensor is on another device.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from ..target import on_host

__all__ = ["FLOAT_OPS", "floats_in_kernels", "is_float_item", "is_foreign_float"]

FLOAT_OPS = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.neg: "neg",
    torch.sym_max: "maximum",
    torch.sym_min: "minimum",
    torch.sym_sqrt: "sqrt",
    getattr(torch, "_sym_log2", None): "log2",
}


def is_float_item(node: Node) -> bool:
    """Whether the node reads the Python float that a tensor of one element on the CPU holds."""
    source = node.args[0] if node.target is torch.ops.aten._local_scalar_dense.default else None
    value = source.meta.get("val") if isinstance(source, Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 0
        and on_host(value)
        and value.dtype in (torch.float64, torch.float32)
    )


def is_foreign_float(node: Node) -> bool:
    """Whether the node computes a float of sizes or floats by a function that kernels do not have: a sine, say."""
    val = node.meta.get("val")
    return (
        isinstance(val, torch.SymFloat)
        and not val.node.expr.is_number
        and node.target not in FLOAT_OPS
        and node.target is not torch.sym_float
    )


def floats_in_kernels(gm: GraphModule) -> set[Node]:
    """The nodes that give such floats, where kernels and ATen calls can take all of them; else none."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if not isinstance(node.meta.get("val"), torch.SymFloat):
            continue
        operands = [used for used in node.all_input_nodes if isinstance(used.meta.get("val"), torch.SymFloat)]
        computed = node.target in FLOAT_OPS or node.target is torch.sym_float
        if not is_float_item(node) and not (computed and all(used in found for used in operands)):
            return set()
        if any(user.op == "output" for user in node.users):
            return set()
        found.add(node)
    return found
