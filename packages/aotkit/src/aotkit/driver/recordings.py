"""Whether a compile records CUDA graphs; what does is loaded where it is used."""

from __future__ import annotations

from .context import CompileContext

__all__ = ["with_recordings"]


def with_recordings(ctx: CompileContext) -> CompileContext:
    """``ctx`` for one compile, with recordings of its own if the options want them."""
    if not ctx.options.cudagraphs:
        return ctx
    from .cudagraphs import record_graphs

    return record_graphs(ctx)
