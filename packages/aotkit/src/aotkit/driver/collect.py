"""The products of one compile, picked up on the way, as one artifact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext

from aotkit_cache import Uncacheable
from aotkit_functionalize import Unsupported

from ..artifact.records import Artifact, StoredGraph, packed
from .around import asks_for_history
from .custom_ops import operators_to_check

if TYPE_CHECKING:
    from aotkit_functionalize import GraphMetadata
    from aotkit_runtime_wrappers import WrapperPlan

    from .freezing import FrozenArguments

__all__ = ["Collector"]

_MOST_CONSTANT_BYTES = 64 << 20
_DEVICES = ("cpu", "cuda")


@dataclass
class Collector:
    """Gathers one artifact. An inference is complete when it is compiled, training when its backward is.

    ``save(artifact)`` is called once, after :meth:`seal`; ``bypass(reason)`` if there will be no artifact. Of
    ``frozen`` arguments the key holds the values, so those that are constants as they are need not be kept.
    """

    save: Callable[[Artifact], None]
    bypass: Callable[[str], None]
    frozen: FrozenArguments | None = None
    _graphs: dict[str, StoredGraph] = field(default_factory=dict)
    _ready: Artifact | None = None
    _guards: list[Any] | None = None
    _given_up: bool = False

    def add_graph(self, name: str, graph: torch.fx.GraphModule, compiled: Any) -> None:
        """What became of the stage that ``name`` ends in (``-inference``, ``-forward``, ``-backward``)."""
        kind = name.rpartition("-")[2]
        if not hasattr(compiled, "compiled"):
            self.give_up("the graph is compiled in pieces, around calls that stay as they are")
            return
        borrowed = {} if self.frozen is None else self.frozen.positions_of(compiled.constants)
        kept = [value for name, value in compiled.constants.items() if name not in borrowed]
        size = sum(t.untyped_storage().nbytes() for t in kept if t.layout is torch.strided)
        if not all(type(t) is torch.Tensor and t.device.type in _DEVICES and t.layout is torch.strided for t in kept):
            self.give_up("the graph holds a constant that is no plain tensor on the CPU or on CUDA")
        elif size > _MOST_CONSTANT_BYTES:
            self.give_up(f"the graph holds {size} bytes of constants")
        else:
            checked = sorted(str(operator) for operator in operators_to_check(graph))
            self._graphs[kind] = StoredGraph.of(compiled, asks_for_history(graph), checked, borrowed)

    def add_inference(self, plan: WrapperPlan, metadata: GraphMetadata) -> None:
        """The graph of an inference is compiled."""
        frozen = () if self.frozen is None else sorted(self.frozen.used)
        self._complete(lambda: Artifact(plan.to_json(), metadata.to_json(), self._graphs["inference"], frozen=frozen))

    def add_training(
        self, plan: WrapperPlan, metadata: GraphMetadata, captured: Any, parts: Any, missing: tuple[bool, ...] = ()
    ) -> None:
        """Forward and backward are compiled, the backward for calls in which these tangents are ``missing``."""
        from aotkit_partition import PartitionError, dump_graph

        def artifact() -> Artifact:
            try:
                texts = {"forward": packed(dump_graph(parts.forward)), "backward": packed(dump_graph(parts.backward))}
            except PartitionError as error:
                raise Uncacheable(f"the graph has no text: {error}") from error
            return Artifact(
                plan.to_json(),
                metadata.to_json(),
                self._graphs["forward"],
                self._graphs["backward"],
                texts,
                _origin(captured, parts),
                missing=missing,
            )

        self._complete(artifact)

    def give_up(self, reason: str) -> None:
        """There will be no artifact."""
        if not self._given_up:
            self._given_up = True
            self.bypass(reason)

    def seal(self, guards: Callable[[], list[Any]]) -> None:
        """The compile of what runs first is over: what it assumes about sizes is known."""
        try:
            self._guards = guards()
        except Uncacheable as error:
            self.give_up(error.reason)
        self._write()

    def _complete(self, artifact: Callable[[], Artifact]) -> None:
        context = TracingContext.try_get()
        if context is not None and context.fakify_first_call:
            self.give_up("the frontend asks the compiled graph for fake results")
        if self._given_up:
            return
        try:
            self._ready = artifact()
        except Uncacheable as error:
            self.give_up(error.reason)
        except Unsupported as error:  # a tensor subclass that can't be written down
            self.give_up(str(error))
        self._write()

    def _write(self) -> None:
        if self._ready is not None and self._guards is not None and not self._given_up:
            ready, self._ready = self._ready, None
            self._given_up = True  # once
            self.save(replace(ready, guards=self._guards))


def _origin(captured: Any, parts: Any) -> dict[str, Any] | None:
    origin = captured.origin
    if origin is None or captured.metadata.subclasses is not None:
        return None
    autocast = origin.autocast
    return {
        "layer": origin.layer.value,
        "autocast": [
            [[device, enabled, str(dtype)] for device, enabled, dtype in autocast.devices],
            autocast.cache_enabled,
            autocast.nesting,
        ],
        "inputs": captured.inputs.to_json() if hasattr(origin.function, "input_plan") else None,
        "saved_tensors": parts.num_saved_tensors,
    }
