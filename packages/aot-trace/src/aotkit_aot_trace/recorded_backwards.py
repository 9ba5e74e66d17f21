"""Backwards of the user's autograd functions, as Dynamo records them: they can't be differentiated.

Note [Backwards that Dynamo recorded]
    Dynamo records the backward of a ``torch.autograd.Function`` as it runs where nobody wants its gradient: all of it
    without grad mode. Switches of grad mode in the user's code, and ``once_differentiable``, leave no trace in that.
    So the recorded operations don't say what the derivative of the gradient is: run as they are, they give one that
    depends on nothing, and with grad mode one that eager mode may not have. Where such a backward runs with grad mode
    on, its results are connected to what it was given by a function whose own backward refuses. A gradient that is
    handed on as it came needs none: it has the history that it came with. A backward that writes to what it was given
    refuses at once: others may look at that.

    Where gradients are captured to be differentiated, all of them are differentiated at once, whichever will be asked
    for. Those that depend on what such a backward computed (:func:`refused_results`) are left out of that, and refuse
    when they are differentiated; the others have derivatives.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node

from aotkit_functionalize import Unsupported

from .child_graphs import child_graphs, with_child_graphs

__all__ = ["refusal", "refused_results", "refusing_second_derivatives"]


def refusing_second_derivatives(graph: GraphModule) -> GraphModule:
    """``graph`` where it raises :class:`Unsupported` to differentiate the backwards of the user's autograd functions;
    ``graph`` itself if there are none."""
    own = [node for node in graph.graph.nodes if _is_user_function(node)]
    backwards = {str(body.target) for node in own if isinstance(body := node.args[1], Node)}
    children = child_graphs(graph)
    changed = {
        name: _refusing(child) if name in backwards else refusing_second_derivatives(child)
        for name, child in children.items()
    }
    if all(changed[name] is child for name, child in children.items()):
        return graph
    return with_child_graphs(graph, changed)


def refused_results(results: Sequence[torch.Tensor | None]) -> set[int]:
    """Positions of ``results`` whose derivatives would lead through a backward that Dynamo recorded."""
    users: dict[Any, list[Any]] = {}  # per backward function behind the results, those that hand gradients to it
    waiting = [result.grad_fn for result in results if result is not None and result.grad_fn is not None]
    for fn in waiting:
        users.setdefault(fn, [])
    while waiting:
        fn = waiting.pop()
        for parent, _ in fn.next_functions:
            if parent is None:
                continue
            if parent not in users:
                users[parent] = []
                waiting.append(parent)
            users[parent].append(fn)
    refused: set[Any] = set()
    waiting = [fn for fn in users if getattr(fn, "refuses_derivatives", False)]
    while waiting:
        fn = waiting.pop()
        if fn not in refused:
            refused.add(fn)
            waiting.extend(users[fn])
    return {number for number, result in enumerate(results) if result is not None and result.grad_fn in refused}


def refusal() -> Unsupported:
    """What is raised where such a derivative is asked for."""
    return Unsupported(
        "a gradient that the backward of a torch.autograd.Function computes is differentiated again",
        "Dynamo records such a backward without what its results depend on, so that a part of the derivative would "
        "be missing",
        "Leave the function out of the compiled region (torch.compiler.disable)",
    )


def _is_user_function(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "autograd_function_apply"


def _refusing(backward: GraphModule) -> GraphModule:
    graph = copy.deepcopy(backward.graph)
    given, output = graph.find_nodes(op="placeholder"), graph.output_node()
    with graph.inserting_after(given[-1]):
        wanted = graph.call_function(torch.is_grad_enabled)  # the body switches it off, and on at its end
        before = graph.call_function(_versions, tuple(given))
    with graph.inserting_before(output):
        output.args = (graph.call_function(_connected, (wanted, before, output.args[0], *given)),)
    result = GraphModule(backward, graph)
    result.meta.update(backward.meta)
    return result


def _versions(*sources: Any) -> list[int]:
    return [source._version if isinstance(source, torch.Tensor) else 0 for source in sources]


def _connected(wanted: bool, before: Sequence[int], gradients: Any, *sources: Any) -> Any:
    """``gradients``, connected to those of ``sources`` that they may depend on, if that is ``wanted``.

    ``before``: the versions of ``sources`` before the backward ran.
    """
    if isinstance(gradients, torch.Tensor):
        return _connected(wanted, before, (gradients,), *sources)[0]
    given = [s for s in sources if isinstance(s, torch.Tensor) and s.requires_grad]
    handed_on = {id(source) for source in sources}
    computed = [g for g in gradients if _is_smooth(g) and id(g) not in handed_on]
    if not wanted or not given:
        return gradients
    if _versions(*sources) != before:
        raise refusal()
    if not computed:
        return gradients
    with torch.enable_grad():
        connected = iter(_Refusing.apply(len(computed), *computed, *given))
    return tuple(next(connected) if _is_smooth(g) and id(g) not in handed_on else g for g in gradients)


def _is_smooth(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.refuses_derivatives = True
        return tuple(value.detach() for value in values[:count])  # results are tensors of their own

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise refusal()
