"""What a bound artifact may have to ask for after its first call: a backward, second derivatives.

It is there on a cache hit too, so whatever compiles is imported when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from aotkit_runtime_wrappers.double_backward import GradientRequest

from ..artifact.records import Artifact, CompiledGraph, LiveCode
from ..artifact.torch_state import default_dtype
from ..errors import notify_eager
from ..frontend.structured_trace import as_part_of, current_compile_id
from ..frontend.written_out_regions import calls_regions, write_out_regions
from ..recorder import GraphRecord, Recorder
from .bugs import first_line, is_bug, is_refusal, note_bug
from .recordings import for_backward_of
from .shown import show_loaded
from .watched import watched

if TYPE_CHECKING:
    from aotkit_aot_trace.gradients import SavedValues

    from .ahead import BackwardAhead
    from .context import CompileContext

__all__ = ["CompileLater"]


@dataclass(frozen=True, slots=True)
class CompileLater:
    """Compiles later what belongs to one artifact.

    Attributes:
        context: gives the settings of the compile that made the artifact, or that would make it again.
        recorder: of the graph, for reports.
        name: of the graph, for reports.
        function: gives the function that was captured, where the artifact is not of this process.
        store: is given the artifact when its backward is there.
        specializes: whether there may be a backward for calls in which tangents are missing.
        compile_id: of the graph, which logs and traces of the backward name as well.
        default_dtype: torch's when the graph was captured, by which numbers and integers in it have types.
    """

    context: Callable[[], CompileContext]
    recorder: Recorder
    name: str
    function: Callable[[], torch.fx.GraphModule] | None = None
    store: Callable[[Artifact], None] | None = None
    specializes: bool = True
    compile_id: Any = field(default_factory=current_compile_id)
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def backward(self, artifact: Artifact, missing: tuple[bool, ...]) -> CompiledGraph | None:
        """Compile the backward for calls in which these tangents are ``missing``."""
        told = watched(f"{self.name}-backward", self.recorder)
        with as_part_of(self.compile_id), told, default_dtype(self.default_dtype):
            return self._backward(artifact, missing)

    def _backward(self, artifact: Artifact, missing: tuple[bool, ...]) -> CompiledGraph | None:
        ctx = for_backward_of(artifact.forward, self.context())
        assert artifact.graphs is not None
        whole = artifact.graphs.read_backward()
        graph: torch.fx.GraphModule | None = whole
        if any(missing):
            from aotkit_partition.missing_tangents import without_tangents

            call = artifact.plan.call
            first = call.num_saved_symints + call.num_saved_tensors
            positions = [first + i for i, is_missing in enumerate(missing) if is_missing]
            graph = without_tangents(whole, positions, call.unreached(missing))
        if graph is None:
            return None
        compiled = ctx.lower(graph, "backward")
        if not ctx.options.verify:
            return compiled
        from ..artifact.round_trip import reread_compiled

        return reread_compiled(compiled)

    def ahead(self, artifact: Artifact) -> BackwardAhead | None:
        """What begins the compile of the backward while the forward runs for the first time."""
        if self.function is not None or artifact.backward is not None:  # it was loaded, or all is there
            return None
        chosen = self.context().options
        if chosen.backward_ahead is False or chosen.verify or chosen.lowering == "none":
            return None
        from .ahead import backward_ahead

        return backward_ahead(artifact, partial(self.backward, artifact), chosen.backward_ahead)

    def finished(self, artifact: Artifact) -> None:
        """The backward of ``artifact`` is there."""
        if self.store is not None:
            self.store(artifact)
        if self.function is None:
            self.recorder.dump("seconds per stage, backward included", "timing", self.recorder.table)

    def loaded(self, artifact: Artifact) -> None:
        """Tell of a backward that was stored; one that was compiled here before it was needed has been told of."""
        assert artifact.backward is not None
        if self.function is None:
            return
        for name, report in artifact.backward.reports(f"{self.name}-backward"):
            self.recorder.add_graph(GraphRecord(name, report, loaded=True))
        with as_part_of(self.compile_id):
            show_loaded(artifact, "backward", self.name, self.recorder)

    def instead(self, artifact: Artifact, missing: tuple[bool, ...], error: Exception) -> CompiledGraph | None:
        """The backward graph run with ATen, after one notice; of one for ``missing`` tangents, nothing: the whole one
        is tried, which tells what is wrong. Raises ``error`` if the options say so or if it is the user's."""
        if self.context().options.fallback == "error" or not (is_bug(error) or is_refusal(error)):
            raise error
        if any(missing):
            return None
        from .lower import run_with_aten

        assert artifact.graphs is not None
        graph = artifact.graphs.read_backward()
        if is_refusal(error):
            self.recorder.add_fallback(str(error))
            notify_eager(f"(its backward) {error}")
        else:
            note_bug(error, first_line(graph), self.recorder)
        with default_dtype(self.default_dtype):
            return CompiledGraph(LiveCode(run_with_aten(graph), "its compile failed"))

    def gradients(
        self, artifact: Artifact, request: GradientRequest
    ) -> tuple[Artifact, CompileLater, Mapping[int, str]]:
        """Compile the gradients of ``artifact``, for second derivatives. See :meth:`.Later.gradients`."""
        from .compile import compile_gradients
        from .recordings import with_recordings

        assert artifact.origin is not None
        ctx = self.context()
        ctx = with_recordings(replace(ctx, name=f"{ctx.name}-gradients", recorder=ctx.recorder.part("gradients")))
        origin, saved = artifact.origin.live or self._read_origin(artifact)
        saved = _written_out(saved)
        with default_dtype(self.default_dtype):
            made, refused = compile_gradients(origin, artifact.metadata, saved, request, ctx)
            return made, CompileLater(lambda: ctx, ctx.recorder, ctx.name, specializes=self.specializes), refused

    def _read_origin(self, artifact: Artifact) -> tuple[Any, Any]:
        """What the process knew that captured the function: put together again from what the artifact says."""
        from aotkit_aot_trace import FunctionalLayer, Origin
        from aotkit_aot_trace.callables import AutocastState, GraphFunction
        from aotkit_aot_trace.gradients import saved_values
        from aotkit_runtime_wrappers import InputPlan
        from aotkit_runtime_wrappers.synthetic_base import PreparedFunction

        described = artifact.origin
        assert described is not None and self.function is not None and artifact.graphs is not None
        function: Any = GraphFunction(self.function())
        if described.inputs is not None:
            function = PreparedFunction(function, InputPlan.from_json(described.inputs))
        devices, cache_enabled, nesting = described.autocast
        autocast = AutocastState(
            tuple((device, enabled, getattr(torch, kind.removeprefix("torch."))) for device, enabled, kind in devices),
            cache_enabled,
            nesting,
        )
        origin = Origin(function, FunctionalLayer(described.layer), autocast)
        forward = artifact.graphs.read_forward()
        return origin, saved_values(forward, artifact.metadata.num_forward_outputs, described.saved_tensors)


def _written_out(saved: SavedValues) -> SavedValues:
    """What a forward saves, in a graph without regions: the function that is differentiated again has none."""
    forward = saved.graph.owning_module
    assert forward is not None
    if not calls_regions(forward):
        return saved
    whole, new = write_out_regions(forward)
    return replace(saved, graph=whole.graph, nodes=tuple(new[node] for node in saved.nodes))
