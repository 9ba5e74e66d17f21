"""``create_graph=True``: gradients that are connected to what they depend on, and refuse to be differentiated.

Note [A refusal has to be connected]
    A compiled backward has no derivative of its own here. If its gradients simply did not require grad,
    ``torch.autograd.grad(.., allow_unused=True)`` would answer ``None`` for a second derivative that is not
    zero. So they get a node whose backward raises, with edges to everything the gradients may depend on: the
    tangents, and the differentiable inputs. The graph does not hold on to the inputs, but their edges lead to
    leaves (``AccumulateGrad.variable``), and an input that is no leaf was remembered by a weak reference: if
    it is gone, nobody can ask for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._torch_compat import autocast_enabled
from .errors import CallingConventionError, DoubleBackwardError
from .plan import CallSpec
from .runtime import without_autocast

__all__ = ["second_derivative_of"]


class _RefuseSecondDerivative(torch.autograd.Function):
    """Hands gradients on; its backward raises."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], *sources: Tensor) -> tuple[Tensor, ...]:
        # detach: a gradient may be a saved tensor or a tangent itself, which must not be given this node.
        return tuple(grad.detach() for grad in grads if grad is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise DoubleBackwardError(
            "a gradient that a compiled graph computed was differentiated again (a second derivative, e.g. of a "
            "gradient penalty). Compiled graphs have first derivatives only; run this part of the model in eager "
            "(torch.compiler.disable), or leave out create_graph=True if no second derivative is needed"
        )


def second_derivative_of(call: CallSpec) -> Callable[..., tuple[Tensor | None, ...]]:
    """The function that emitted backwards call when grad mode is on; see Note [A refusal has to be connected]."""

    def run_connected(
        ctx: Any, run: Callable[[list[Any]], Any], box: list[Any], tangents: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = run(box) if not autocast_enabled() else without_autocast(run, box)
        if len(grads) != len(call.graph_inputs):
            raise CallingConventionError(
                f"this graph was compiled for {len(call.graph_inputs)} gradients, but there are {len(grads)}"
            )
        kept = [grads[i] for i in call.differentiable_inputs]
        sources = [t for t in tangents if t is not None and t.requires_grad]
        sources += _differentiable_sources(ctx.next_functions, getattr(ctx, "weak_inputs", ()))
        connected = iter(_RefuseSecondDerivative.apply(kept, *sources))
        return (None, *(None if grad is None else next(connected) for grad in kept))

    return run_connected


def _differentiable_sources(edges: Iterable[tuple[Any, int]], weak_inputs: Iterable[Callable[[], Any]]) -> list[Tensor]:
    """Living non-leaf inputs, and every leaf that the edges lead to."""
    alive = [tensor for tensor in (reference() for reference in weak_inputs) if tensor is not None]
    sources = [tensor for tensor in alive if tensor.requires_grad]
    seen: set[Any] = set()
    pending = [node for node, _ in edges if node is not None]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            sources.append(variable)
        pending += [following for following, _ in node.next_functions if following is not None]
    return sources
