"""Whether a compile records CUDA graphs; what does is loaded where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..artifact.records import CompiledGraph, RecordedGraph

if TYPE_CHECKING:
    from .context import CompileContext

__all__ = ["for_backward_of", "with_recordings"]


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
