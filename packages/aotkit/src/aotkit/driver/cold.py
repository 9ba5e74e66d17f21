"""Compiling a graph of the frontend that no cache has: everything that a hit does not need is imported from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from aotkit_aot_trace import Unsupported, floats_as_tensors
from aotkit_functionalize import OverlappingMutation
from aotkit_inductor_lower import LoweringError
from aotkit_inductor_lower import errors as lowering_errors
from aotkit_partition import PartitionError
from aotkit_runtime_wrappers import GradientRequest, WrapperError

from ..artifact.records import Artifact
from ..frontend.inputs import fake_inputs, has_float_symbols
from ..frontend.lift import lift_attributes
from ..options import Options
from ..recorder import Recorder
from .collect import Collector
from .compile import CompileContext, capture_flat, compile_captured, compile_flat, own_stages
from .freezing import FrozenArguments
from .recursion import deep_recursion
from .user_passes import GraphPasses

__all__ = ["REFUSALS", "ColdCompiler", "OptionErrors"]

REFUSALS = (Unsupported, OverlappingMutation, LoweringError, PartitionError, WrapperError)
"""What a compile raises on purpose; anything else is a bug."""

OptionErrors = lowering_errors.UnknownPassError
"""What it raises where an option means nothing."""


class ColdCompiler:
    """Compiles one graph, for any arguments, and its second derivatives.

    ``graph`` is the frontend's with its tensors as arguments. ``fixed``: positions of arguments that the frontend
    knows to keep their address. ``frozen``: those that become constants. ``store``: for object code. ``passes``:
    of the user's.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        options: Options,
        recorder: Recorder,
        name: str,
        *,
        store: Any = None,
        fixed: frozenset[int] = frozenset(),
        frozen: FrozenArguments | None = None,
        passes: GraphPasses | None = None,
    ) -> None:
        lifted = lift_attributes(gm)[0]
        self.graph = floats_as_tensors(lifted if passes is None else passes.prepare(lifted))
        self._passes = passes
        keeps = options.lowering == "kernels"  # graphs that ATen runs are for looking at: nothing in them writes
        self._context = CompileContext(
            options, recorder, name, store, keep_input_mutations=keeps, fixed_arguments=fixed, frozen=frozen
        )

    def compile(self, args: Sequence[Any], collector: Collector | None = None) -> Any:
        """Compile for ``args``, the graph's inputs and then the tensors that it holds. Raises :data:`REFUSALS`."""
        ctx = self._context if collector is None else replace(self._context, collector=collector)
        with deep_recursion():
            try:
                return self._compile(args, ctx, fixed_floats=False)
            except REFUSALS:
                if not has_float_symbols(self.graph):
                    raise
            return self._compile(args, ctx, fixed_floats=True)

    def _compile(self, args: Sequence[Any], ctx: CompileContext, fixed_floats: bool) -> Any:
        mode, fakes = fake_inputs(args, self.graph, fixed_floats=fixed_floats)
        ctx, stages = replace(ctx, fake_mode=mode), own_stages()
        if self._passes is None:
            return compile_flat(self.graph, fakes, args, ctx, stages)
        stages = self._passes.stages(stages)
        return compile_captured(capture_flat(self.graph, fakes, args, ctx, stages), ctx, stages)

    def backward(self, graph: torch.fx.GraphModule) -> Any:
        """Compile a backward graph that was partitioned before."""
        return own_stages().backward(graph, f"{self._context.name}-backward", self._context)

    def gradients(self, artifact: Artifact, request: GradientRequest) -> Any:
        """Compile the gradients of what ``artifact`` is."""
        from .later import stored_gradient_compiler

        return stored_gradient_compiler(self.graph, artifact, self._context)(request)
