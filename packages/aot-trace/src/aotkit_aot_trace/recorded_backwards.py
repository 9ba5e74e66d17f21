"""Backwards of the user's autograd functions, as Dynamo records them: they can't be differentiated.

Note [Backwards that Dynamo recorded]
    Dynamo records the backward of a ``torch.autograd.Function`` as it runs where nobody wants its gradient: all of it
    without grad mode. Switches of grad mode in the user's code, and ``once_differentiable``, leave no trace in that.
    So the recorded operations don't say what the derivative of the gradient is: run as they are, they give one that
    depends on nothing, and with grad mode one that eager mode may not have. Where such a backward runs with grad mode
    on, its results are connected to what it was given by a function whose own backward refuses. A gradient that is
    handed on as it came needs none: it has the history that it came with.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node

from aotkit_functionalize import Unsupported

__all__ = ["refusing_second_derivatives"]


def refusing_second_derivatives(graph: GraphModule) -> GraphModule:
    """``graph`` where it raises :class:`Unsupported` to differentiate the backwards of the user's autograd functions;
    ``graph`` itself if there are none."""
    own = [node for node in graph.graph.nodes if _is_user_function(node)]
    backwards = {str(body.target) for node in own if isinstance(body := node.args[1], Node)}
    children = {name: child for name, child in graph.named_children() if isinstance(child, GraphModule)}
    changed = {
        name: _refusing(child) if name in backwards else refusing_second_derivatives(child)
        for name, child in children.items()
    }
    if all(changed[name] is child for name, child in children.items()):
        return graph
    result = GraphModule(graph, copy.deepcopy(graph.graph))
    result.meta.update(graph.meta)
    for name, child in changed.items():
        setattr(result, name, child)
    return result


def _is_user_function(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "autograd_function_apply"


def _refusing(backward: GraphModule) -> GraphModule:
    graph = copy.deepcopy(backward.graph)
    given, output = graph.find_nodes(op="placeholder"), graph.output_node()
    with graph.inserting_after(given[-1]):
        wanted = graph.call_function(torch.is_grad_enabled)  # the body switches it off, and on at its end
    with graph.inserting_before(output):
        output.args = (graph.call_function(_connected, (wanted, output.args[0], *given)),)
    result = GraphModule(backward, graph)
    result.meta.update(backward.meta)
    return result


def _connected(wanted: bool, gradients: Any, *sources: Any) -> Any:
    """``gradients``, connected to those of ``sources`` that they may depend on, if that is ``wanted``."""
    if isinstance(gradients, torch.Tensor):
        return _connected(wanted, (gradients,), *sources)[0]
    given = [s for s in sources if isinstance(s, torch.Tensor) and s.requires_grad]
    computed = [g for g in gradients if _is_computed(g)]
    if not wanted or not given or not computed:
        return gradients
    with torch.enable_grad():
        connected = iter(_Refusing.apply(len(computed), *computed, *given))
    return tuple(next(connected) if _is_computed(g) else g for g in gradients)


def _is_computed(value: Any) -> bool:
    """Whether it is a tensor that an operation of the backward made; one that it was given is connected already."""
    smooth = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return smooth and not value.requires_grad


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.detach() for value in values[:count])  # results are tensors of their own

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise Unsupported(
            "a gradient that the backward of a torch.autograd.Function computes is differentiated again",
            "Dynamo records such a backward without what its results depend on, so that a part of the derivative would "
            "be missing",
            "Leave the function out of the compiled region (torch.compiler.disable)",
        )
