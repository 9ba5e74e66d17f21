"""A cache miss: the compile of a graph of Dynamo. Everything that a cache hit does not need is imported from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from aotkit_aot_trace.callables import GraphFunction, floats_as_tensors
from aotkit_runtime_wrappers.synthetic_base import PreparedFunction

from ..artifact.frozen import FrozenArguments
from ..artifact.records import Artifact
from ..frontend.inputs import fake_inputs, has_float_symbols, lift_attributes
from ..options import Options
from ..recorder import Recorder
from .compile import capture_function, compile_captured
from .context import Captured, CompileContext
from .process import deep_recursion
from .recordings import with_recordings
from .refusals import REFUSALS
from .repeated_layers import NotAlike, asks_for_layers, repeated_layers
from .stages import own_stages
from .user_passes import GraphPasses

__all__ = ["GraphCompiler"]


class GraphCompiler:
    """Compiles one graph, for any arguments.

    ``graph`` is Dynamo's with its tensors as arguments, ``context`` the settings of a compile of it.
    ``static_inputs``: positions of arguments that Dynamo knows to keep their address. ``frozen``: those that become
    constants. ``store``: for object code. ``passes``: of the user's.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        options: Options,
        recorder: Recorder,
        name: str,
        *,
        store: Any = None,
        static_inputs: frozenset[int] = frozenset(),
        frozen: FrozenArguments | None = None,
        passes: GraphPasses | None = None,
    ) -> None:
        lifted = lift_attributes(gm)[0]
        self.graph = floats_as_tensors(lifted if passes is None else passes.prepare(lifted))
        self._changed = passes is not None  # then second derivatives would be those of another function
        stages = own_stages()
        keeps = options.lowering == "kernels"  # graphs that ATen runs are for looking at: nothing in them writes
        self.context = CompileContext(
            options,
            recorder,
            stages if passes is None else passes.stages(stages),
            name,
            store,
            keep_input_mutations=keeps,
            static_inputs=static_inputs,
            frozen=frozen,
        )

    def compile(self, args: Sequence[Any]) -> tuple[Artifact, CompileContext]:
        """Compile for ``args``, the graph's inputs and then the tensors that it holds. Raises :data:`.REFUSALS`.

        Returns the artifact and the settings of its compile.
        """
        with deep_recursion():
            try:
                return self._compile(args, fixed_floats=False)
            except REFUSALS:
                if not has_float_symbols(self.graph):
                    raise
            return self._compile(args, fixed_floats=True)

    def _compile(self, args: Sequence[Any], fixed_floats: bool) -> tuple[Artifact, CompileContext]:
        mode, fakes = fake_inputs(args, self.graph, fixed_floats=fixed_floats)
        ctx = with_recordings(replace(self.context, fake_mode=mode))
        captured = self._captured_by_layers(fakes, args, ctx) or capture_function(self.graph, fakes, args, ctx)
        return compile_captured(replace(captured, origin=None) if self._changed else captured, ctx), ctx

    def _captured_by_layers(self, fakes: Sequence[Any], args: Sequence[Any], ctx: CompileContext) -> Captured | None:
        """A capture in which equal layers are calls of one, or ``None`` where there are none."""
        if self._changed or not asks_for_layers(fakes, ctx):
            return None
        try:
            layers = repeated_layers(self.graph, fakes, ctx)
            if layers is None:
                return None
            captured = capture_function(layers.graph, fakes, args, ctx)
            if layers.writing and (captured.inputs.overlaps or len(captured.inputs.kept) != len(fakes)):
                raise NotAlike("layers write to their inputs, and inputs share memory")
        except (NotAlike, *REFUSALS) as refusal:
            ctx.recorder.event("layers.apart", {"graph": ctx.name, "reason": str(refusal)})
            return None
        ctx.recorder.event("layers.once", {"graph": ctx.name, "layers": layers.counts})
        assert captured.origin is not None
        function: Any = GraphFunction(self.graph)  # second derivatives are of the graph as it stands
        if isinstance(captured.origin.function, PreparedFunction):
            function = PreparedFunction(function, captured.origin.function.input_plan)
        origin = replace(captured.origin, function=function)
        return replace(captured, graph=layers.as_regions(captured.graph), origin=origin)
