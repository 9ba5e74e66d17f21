"""Pass: biases of convolutions, and their gradients, are operators of their own.

Before ``convolution(x, w, bias)``. After ``convolution(x, w, None) + bias``; and in the backward a sum of the gradient
in place of the third result of ``convolution_backward``. Requires a target whose library adds the bias in a kernel of
its own anyway (:attr:`~.target.Capabilities.apart_biases`): then it reads and writes the images once more, which a
kernel that goes on with them need not. The roundings are the same.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..passes import Pass, PassContext
from .node_facts import before_writes
from .patterns import emit
from .replace import replace_node
from .rewriting import rewriting

__all__ = ["PASS", "convolution_biases"]

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_OF_BIAS = 2


def convolution_biases(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of biases and gradients of biases."""
    found = 0
    for node in before_writes(graph):
        if found < fuel and node.target is _FORWARD:
            found += _add_apart(graph, node)
        elif found < fuel and node.target is _BACKWARD:
            found += _sum_apart(graph, node)
    return found


def _images(node: Any) -> torch.Tensor | None:
    """The fake value of images in a batch, of floats."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2 else None


def _add_apart(graph: Graph, node: Node) -> bool:
    x, w, bias, *others = node.args
    if not isinstance(bias, Node) or node.kwargs or (value := _images(node)) is None:
        return False

    def added(x: Any, w: Any, bias: Any) -> Any:
        channels = aten.view.default(bias, [1, -1, *[1] * (value.dim() - 2)])
        return aten.add.Tensor(_FORWARD(x, w, None, *others), channels)

    made = emit(graph, added, node, x=x, w=w, bias=bias)
    return made is not None and replace_node(node, made)


def _sum_apart(graph: Graph, node: Node) -> bool:
    grad, *_, wanted = node.args
    readers = [u for u in node.users if u.target is operator.getitem and u.args[1] == _OF_BIAS and u.users]
    value = _images(grad)
    if not isinstance(wanted, list | tuple) or not wanted[_OF_BIAS] or len(readers) != 1 or value is None:
        return False
    own = emit(graph, lambda grad: aten.sum.dim_IntList(grad, [0, *range(2, value.dim())]), node, grad=grad)
    if own is None or not replace_node(readers[0], own):
        return False
    node.args = (*node.args[:-1], [*wanted[:_OF_BIAS], False])
    node.meta["val"] = (*node.meta["val"][:_OF_BIAS], None)
    return True


def _adds_apart(ctx: PassContext) -> bool:
    return ctx.target.capabilities.apart_biases


PASS = Pass(
    "convolution-biases",
    rewriting(convolution_biases),
    why="the library adds a bias in a kernel of its own, and ours would add it on the way",
    after=("simplify",),
    when=_adds_apart,
)
