"""Whether a compile records CUDA graphs; what does is loaded where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._notices import warn_user
from ..artifact.recorded import RecordedGraph
from ..artifact.records import CompiledGraph

if TYPE_CHECKING:
    from .context import CompileContext

__all__ = ["for_backward_of", "tell_of_the_cpu", "with_recordings"]


def with_recordings(ctx: CompileContext) -> CompileContext:
    """``ctx`` for one compile, with recordings of its own if the options want them."""
    if not ctx.options.cudagraphs:
        return ctx
    from .cudagraphs import record_graphs

    return record_graphs(ctx)


def for_backward_of(forward: CompiledGraph, ctx: CompileContext) -> CompileContext:
    """``ctx`` for the backward of a graph, which is recorded if the ``forward`` is, compiled here or loaded."""
    if not isinstance(forward.code, RecordedGraph):
        return ctx
    from .cudagraphs import record_backward

    return record_backward(ctx, forward.code)


def tell_of_the_cpu(name: str) -> None:
    """The notice about a graph that can't be recorded because it runs on the CPU."""
    from aotkit_cudagraphs import CudagraphNotice, SkipKind, SkipReason

    warn_user(
        f"runs without a CUDA graph: {SkipReason(SkipKind.CPU_DEVICE, f'{name} runs on the CPU')}", CudagraphNotice
    )
