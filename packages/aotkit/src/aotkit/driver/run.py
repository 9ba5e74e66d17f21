"""A compile and its binding at once, for callers that keep no artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from aotkit_runtime_wrappers import unboxed

from ..artifact.records import Artifact
from .bind import bind
from .compile import capture_function, compile_captured
from .context import Captured, CompileContext
from .later import CompileLater
from .recordings import with_recordings

__all__ = ["bind_compiled", "compile_and_bind", "run_captured"]


def compile_and_bind(
    fn: Callable[..., Any], fakes: Sequence[Any], examples: Sequence[Any], ctx: CompileContext
) -> Callable[..., Any]:
    """Compile ``fn`` of flat arguments, and bind it: a callable of the same flat arguments giving a list.

    ``fakes`` are fake versions of ``examples``. Raises what :func:`.compile_function` raises.
    """
    ctx = with_recordings(ctx)
    return bind_compiled(compile_captured(capture_function(fn, fakes, examples, ctx), ctx), ctx)


def run_captured(captured: Captured, ctx: CompileContext) -> Callable[..., Any]:
    """The same for what was captured before. Second derivatives are refused: the graph may have been changed."""
    ctx = with_recordings(ctx)
    return bind_compiled(compile_captured(replace(captured, origin=None), ctx), ctx)


def bind_compiled(
    artifact: Artifact, ctx: CompileContext, store: Callable[[Artifact], None] | None = None
) -> Callable[..., Any]:
    """Bind what was compiled just now. ``store`` is given a training artifact when its backward is compiled."""
    specializes = ctx.stages.specializes and not ctx.options.cudagraphs
    later = CompileLater(lambda: ctx, ctx.recorder, ctx.name, store=store, specializes=specializes)
    with ctx.recorder.stage("bind"):
        bound = bind(
            artifact,
            later,
            observer=ctx.recorder,
            arenas=ctx.arenas,
            arguments=None if ctx.frozen is None else ctx.frozen.tensors,
            redzones=ctx.options.redzones,
            name=ctx.name,
            trees=ctx.trees,
        )
    return unboxed(bound)
