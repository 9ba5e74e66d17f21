"""The gradients of a captured function, as a function that can be captured in turn: second and higher derivatives.

Note [Why the user's function is differentiated again]
    A joint graph could be differentiated itself, but that would not be eager's second derivative: below autograd
    nothing says any more what was detached, what ran without grad mode, or what belongs to a custom
    ``autograd.Function`` with a gradient of its own. So the function runs once more, under autograd, and its
    gradients are taken with ``create_graph``. That run costs no more than a first capture and happens when somebody
    asks for a second derivative. Doing the same to the result gives the third, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from aotkit_functionalize import GraphMetadata, Unsupported, collect_metadata, lazy_bits
from aotkit_functionalize.tracing import reentered_inputs

from . import _torch_compat as compat
from ._observer import SILENT, Observer
from .api import Capture, Origin, TraceOptions, capture
from .recorded_backwards import refusal, refused_results
from .saved_activations import SavedActivations, SavedValues, reuse_saved_activations, saved_values
from .state import AutocastState
from .zeros import gradients_in_memory

__all__ = ["GradientInputs", "SavedValues", "capture_gradients", "saved_values"]


class GradientFunction:
    """``function``'s gradients as a function of its inputs, saved values and tangents, in this order.

    Args:
        origin: what was captured as a joint graph.
        metadata: of that capture.
        activations: what its forward saved. These arguments are there only to be used in the place of nodes
            afterwards, see :func:`.reuse_saved_activations`.
        missing: numbers of the tangents that are not among the arguments: the loss does not depend on their outputs.

    A call returns one gradient or ``None`` per differentiable input. Raises :class:`Unsupported` if the function does
    not behave as it did when it was captured.

    Attributes:
        refused: after a call, positions of gradients that must not be differentiated, and why. They have no history.
    """

    is_gradient = True

    def __init__(
        self, origin: Origin, metadata: GraphMetadata, activations: SavedActivations, missing: Collection[int] = ()
    ) -> None:
        self.function, self.autocast, self.metadata = origin.function, origin.autocast, metadata
        self.missing = frozenset(missing)
        self.refused: Mapping[int, str] = {}
        inner = origin.function
        if hasattr(inner, "preferred_layer"):
            self.preferred_layer = inner.preferred_layer
        self.activations: tuple[SavedActivations, ...]
        self.activations = (*inner.activations, activations) if isinstance(inner, GradientFunction) else (activations,)

    def __call__(self, *values: Any) -> list[Any]:
        metadata = self.metadata
        count = len(metadata.inputs)
        outer, tangents = list(values[:count]), values[count + len(self.activations[-1].saved.nodes) :]
        for index in metadata.differentiable_inputs:
            # Where the gradients do not depend on an input, no derivative of them does: it arrives without one.
            if not outer[index].requires_grad:
                outer[index] = outer[index].detach().requires_grad_()
        inputs = reentered_inputs(outer, metadata.inputs)
        before = AutocastState.now()
        try:
            self.autocast.restore()
            with torch.enable_grad():
                outputs = list(self.function(*(i.value for i in inputs)))
                forward = collect_metadata(inputs, outputs, grad_mode=(True, torch.is_grad_enabled()), training=True)
        finally:
            before.restore()
        differentiable = [t.forward_output for t in metadata.tangents]
        if [t.forward_output for t in forward.metadata.tangents] != differentiable:
            raise Unsupported(
                "the function computes other differentiable values than when it was captured first",
                "its second derivative would not be that of what ran",
                "Compile a function that does the same at each call",
            )
        given = [position for number, position in enumerate(differentiable) if number not in self.missing]
        wanted = [forward.forward_values[position] for position in given]
        leaves = [outer[index] for index in metadata.differentiable_inputs]
        enabled = torch.enable_grad()
        with compat.without_autocast(), compat.without_compiled_autograd(), enabled, gradients_in_memory(wanted):
            found = torch.autograd.grad(wanted, leaves, tangents, create_graph=True, allow_unused=True)
        return self._without_refused(found)

    def _without_refused(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """See Note [Backwards that Dynamo recorded]. Raises :class:`Unsupported` if no derivative would be left."""
        refused = refused_results(found)
        self.refused = dict.fromkeys(sorted(refused), str(refusal()))
        if refused and not any(g.requires_grad for i, g in enumerate(found) if g is not None and i not in refused):
            raise refusal()
        detached = {id(found[i]): found[i].detach() for i in refused}  # type: ignore[union-attr]
        return [detached.get(id(gradient), gradient) for gradient in found]


@dataclass(frozen=True, slots=True)
class GradientInputs:
    """What the gradients of one call are a function of.

    Attributes:
        inputs: of the graph, as the call had them; for a lost one a tensor on the meta device.
        saved: tensors that the forward saved, in order.
        tangents: one per tangent of the joint graph that is not ``missing``.
        symbols: values of the graph's symbolic sizes.
        lost: inputs whose values are gone, and why.
        missing: numbers of tangents.
    """

    inputs: Sequence[Any]
    saved: Sequence[torch.Tensor]
    tangents: Sequence[torch.Tensor]
    symbols: Mapping[str, int]
    lost: Mapping[int, str]
    missing: tuple[int, ...] = ()


def capture_gradients(
    origin: Origin,
    metadata: GraphMetadata,
    saved: SavedValues,
    values: GradientInputs,
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    observer: Observer = SILENT,
) -> Capture:
    """Capture the gradients of what ``origin`` is, over inputs, saved values and tangents, for the sizes they have.

    ``metadata`` and ``saved`` are those of its joint graph. Values that the forward saved are used, not computed again.
    Raises :class:`Unsupported` also if the value of a lost input, or another draw of random numbers, would be needed.
    ``refused`` of the result are the gradients that whoever runs it has to keep from being differentiated.
    """
    activations = SavedActivations(saved, len(metadata.inputs), values.symbols)
    function = GradientFunction(origin, metadata, activations, values.missing)
    mode = FakeTensorMode()
    inputs = [_fake(value, mode) for value in values.inputs]
    for index in values.lost:
        described, record = values.inputs[index], metadata.inputs[index].meta
        assert record is not None
        with mode:
            sizes, strides = described.size(), described.stride()
            empty = torch.empty_strided(sizes, strides, dtype=described.dtype, device=record.device)
            inputs[index] = lazy_bits.with_lazy_bits(empty, record.conj, record.neg)
    for index in metadata.differentiable_inputs:
        inputs[index].requires_grad_(True)
    tangents = [_fake(t, mode).requires_grad_(t.requires_grad) for t in values.tangents]
    flat = [*inputs, *(_fake(s, mode) for s in values.saved), *tangents]
    options = TraceOptions(layer=origin.layer)
    with torch.enable_grad():
        captured = capture(function, flat, decompositions=decompositions, options=options, observer=observer)
    for node, value in zip(captured.graph.graph.find_nodes(op="placeholder"), flat, strict=False):
        node.meta.setdefault("val", value)
    reuse_saved_activations(captured, function.activations, values.lost)
    # What the function writes to are copies of the inputs, but their version counters are those of the inputs.
    unchanged = tuple(replace(info, version_steps=0) for info in captured.metadata.inputs)
    metadata = replace(captured.metadata, inputs=unchanged)
    return replace(captured, metadata=metadata, refused=function.refused)


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        return mode.from_tensor(value.detach(), static_shapes=True)
