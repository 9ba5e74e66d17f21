"""Compiled autograd: what it needs to take a compiled graph's backward into the graph of a whole backward pass.

Note [Compiled autograd]
    With ``torch._dynamo.config.compiled_autograd`` the autograd engine does not run backward functions but records
    them into one graph, which Dynamo compiles. An ordinary ``autograd.Function`` is traced into by Dynamo,
    which cannot follow generated kernels. A function that says that it is compiled (``_aot_id``) is taken apart
    instead: a prologue that makes the backward graph's arguments of saved tensors and tangents, the backward graph as
    FX, which is pasted, and an epilogue for its results. Graphs with symbolic sizes keep what the prologue needs in the
    context, which it does not get, and so do those whose backward writes to inputs; for these Dynamo is told to
    leave our backward alone, and breaks its graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ._dynamo_frames import hide_from_dynamo
from ._torch_compat import (
    backward_can_be_pasted,
    dtype_from_name,
    lazy_backward_info,
    recorded_tangents,
)
from .plan import CallSpec, TangentSpec
from .runtime import coerce_tangent, zero_tangent

__all__ = ["cooperation"]

_numbers = itertools.count()


def cooperation(
    call: CallSpec, graph: torch.fx.GraphModule | Callable[[], torch.fx.GraphModule] | None
) -> dict[str, Any]:
    """Attributes of the autograd function of ``call`` by which compiled autograd takes it apart; see the note.

    ``graph`` is the backward graph, or makes it: saved integers, saved tensors and tangents in, one gradient per graph
    input out. Before torch 2.13 there are none: Dynamo leaves the backward alone there, too.
    """
    if not backward_can_be_pasted():
        return {}
    if graph is None or call.backward_symbols or call.num_saved_symints or call.backward_mutated_inputs:
        return {}
    return {
        "_aot_id": f"aotkit{next(_numbers)}",
        "_compiled_autograd_key": staticmethod(_key),
        "_lazy_backward_info": _Graph(graph),
        "_bw_prologue_fn": staticmethod(_prologue(call)),
        "_bw_epilogue_fn": staticmethod(_epilogue(call)),
        # What is asked of it is whether higher derivatives are wanted, which this recording cannot do.
        "metadata": SimpleNamespace(output_info=(SimpleNamespace(requires_grad=True),)),
        "maybe_subclass_metadata": None,
    }


def _key(ctx: Any) -> tuple[Any, ...]:
    return (ctx._autograd_function_id,)


class _Graph:
    """The backward graph, wrapped when compiled autograd looks at the class; it changes nodes, so it gets a copy."""

    def __init__(self, graph: torch.fx.GraphModule | Callable[[], torch.fx.GraphModule]) -> None:
        self._graph = graph

    def __get__(self, instance: Any, owner: Any) -> Any:
        if not isinstance(self._graph, torch.fx.GraphModule):
            self._graph = self._graph()
        copy = torch.fx.Graph()
        outputs = copy.graph_copy(self._graph.graph, {})
        copy.output(outputs)
        return lazy_backward_info(torch.fx.GraphModule(self._graph, copy))


hide_from_dynamo(_Graph.__get__)


def _prologue(call: CallSpec) -> Callable[..., list[Any]]:
    def arguments(saved: Sequence[Any], *others: Any) -> list[Any]:
        # Between the saved tensors and the tangents come integers and, in later versions of torch, opaque objects.
        by_output = dict(zip(call.differentiable_outputs, others[-1], strict=True))
        tangents = [_tangent(by_output[spec.forward_output], spec) for spec in call.tangents]
        return [*saved[: call.num_saved_tensors], *tangents]

    return arguments


def _tangent(value: Any, spec: TangentSpec) -> Any:
    sizes, strides = (tuple(int(d) for d in dims) for dims in (spec.meta.sizes, spec.meta.strides))
    if value is None:
        return zero_tangent(sizes, strides, dtype_from_name(spec.meta.dtype), torch.device(spec.meta.device))
    return coerce_tangent(value, spec.forward_output, sizes, strides)


def _epilogue(call: CallSpec) -> Callable[..., tuple[Any, ...]]:
    def results(grads: Sequence[Any], **_: Any) -> tuple[Any, ...]:
        incoming = recorded_tangents() if call.reached_by else None
        without: tuple[int, ...] = ()
        if incoming is not None:
            by_output = dict(zip(call.differentiable_outputs, incoming, strict=True))
            without = call.unreached([by_output[spec.forward_output] is None for spec in call.tangents])
        return (None, *(None if i in without else grads[i] for i in call.differentiable_inputs))

    return results
