"""Gradients that are tensor subclasses where the backward was compiled for plain tensors.

Note [Foreign gradients]
    A plain result that is multiplied with a wrapper in the loss gets a gradient that is a wrapper, and what eager mode
    makes of it is the wrapper's affair. Kernels read memory and cannot do that, but the backward graph can be run on
    it operator by operator, where the wrapper has its say. That is done if its class does not convert itself to a
    plain tensor, and the backward graph is at hand. Where such a gradient would end up inside of another wrapper, which
    is put together of plain tensors, there is no such run, and the backward is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._torch_compat import autocast_enabled, is_transformed
from .boxed import BoxedCallable
from .contract import SubclassBoundary
from .dims import evaluate_all
from .errors import MetadataMismatchError
from .lazy_backward import LazyBackward
from .packed import unpacked
from .plan import CallSpec
from .runtime import coerce_tangent, without_autocast
from .subclasses.bind import AdaptedBackward
from .tangents import filled

__all__ = ["is_foreign", "take_tangent", "with_foreign_tangents"]

BackwardGraph = torch.fx.GraphModule | Callable[[], torch.fx.GraphModule]


def is_foreign(tangent: Tensor) -> bool:
    """Whether :func:`take_tangent` gave back a wrapper, or a gradient inside of a transform."""
    if type(tangent) is Tensor:
        return is_transformed(tangent)
    return hasattr(tangent, "__tensor_flatten__")


def take_tangent(tangent: Tensor, position: int, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """:func:`.coerce_tangent`, but wrappers that do not convert themselves, and what a transform wraps, stay as is."""
    if is_transformed(tangent):
        return tangent
    try:
        return coerce_tangent(tangent, position, sizes, strides)
    except MetadataMismatchError:
        if not is_foreign(tangent) or tuple(tangent.size()) != tuple(sizes):
            raise
        return tangent


def with_foreign_tangents(
    call: CallSpec, backward: LazyBackward, graph: BackwardGraph | None
) -> Callable[[Any, list[Tensor | None], Sequence[bool]], tuple[Tensor | None, ...]]:
    """The function that emitted backwards call when a tangent is foreign; see Note [Foreign gradients].

    ``graph`` is the backward graph, or makes it; ``backward`` what is compiled.
    """

    def run(ctx: Any, tangents: list[Tensor | None], missing: Sequence[bool]) -> tuple[Tensor | None, ...]:
        symbols = dict(zip((b.symbol for b in call.backward_symbols), getattr(ctx, "symbols", ()), strict=True))
        given = filled(call, tangents, symbols)
        refuses = graph is None or call.backward_mutated_inputs or torch.is_grad_enabled()
        if refuses and any(map(is_transformed, given)):
            raise MetadataMismatchError(
                "the gradients of a compiled graph are those of many backwards at once (is_grads_batched, vectorize), "
                "or of one inside of a transform of torch.func, and it draws random numbers, writes to memory in its "
                "backward, or a gradient of these is wanted; "
                "compute them one after the other, or compile the function that transforms"
            )
        for number, spec in enumerate(call.tangents):
            tangent = given[number]
            if not spec.nested and tangent is not None:
                sizes, strides = (evaluate_all(dims, symbols) for dims in (spec.meta.sizes, spec.meta.strides))
                given[number] = (coerce_tangent if refuses else take_tangent)(
                    tangent, spec.forward_output, sizes, strides
                )
        assert graph is not None
        boundary = None if call.subclasses is None else call.subclasses.boundary
        interpreted = _interpreted(graph, boundary)
        if isinstance(backward, AdaptedBackward):
            interpreted = backward.around(interpreted)
        saved = unpacked(ctx) if call.num_saved_tensors else ()
        box = [*getattr(ctx, "symints", ()), *saved[: call.num_saved_tensors], *given]
        ctx.maybe_clear_saved_tensors()
        grads = without_autocast(interpreted, box) if autocast_enabled() else interpreted(box)
        without = call.unreached(missing)
        return (None, *(None if i in without else grads[i] for i in call.differentiable_inputs))

    return run


def _interpreted(graph: BackwardGraph, boundary: SubclassBoundary | None) -> BoxedCallable:
    made = graph if isinstance(graph, torch.fx.GraphModule) else graph()
    subclass_value = (
        [] if boundary is None else [g for g in boundary.gradients if g is not None and g.subclass is not None]
    )
    inside = {part.index for gradient in subclass_value for part in gradient.parts}

    def interpreted(box: list[Any]) -> list[Any]:
        values = list(box)
        box.clear()
        grads = list(made(*values))
        for number in inside:
            if is_foreign(grads[number]):
                raise MetadataMismatchError(
                    f"a {type(grads[number]).__name__} is the gradient of a plain output where the backward was "
                    "compiled for a plain tensor, and would become part of the gradient of a tensor subclass; convert "
                    "it to a plain tensor before it reaches the compiled graph"
                )
        return grads

    interpreted._boxed_call = True  # type: ignore[attr-defined]
    return interpreted
