"""Pass: steps whose results no one uses go."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Alias, BufferKind, BufferRef, Contraction, ExternCall, LoopNest, Program, Step
from ..ir.walk import step_reads, step_writes
from ..ops.aten import call_counts
from ..passes import Pass, PassContext

__all__ = ["PASS", "drop_dead_steps"]


def drop_dead_steps(program: Program) -> Program:
    """Without steps whose results no one uses. Steps that write memory of the caller, and those that count, stay."""
    kinds = {b.name: b.kind for b in program.buffers}
    live = {out.name for out in program.outputs if isinstance(out, BufferRef)}
    aliases = {step.result for step in program.steps if isinstance(step, Alias)}
    kept: list[Step] = []
    for step in reversed(program.steps):
        writes = step_writes(step)
        keeps = isinstance(step, ExternCall) and (step.mutates or not step.results or call_counts(step.target))
        outside = isinstance(step, LoopNest | Contraction) and not aliases.isdisjoint(writes)
        if keeps or outside or any(name in live or kinds[name] is BufferKind.INPUT for name in writes):
            kept.append(step)
            live.update(step_reads(step))
    used = live | {name for step in kept for name in step_writes(step)} | set(program.inputs)
    buffers = tuple(b for b in program.buffers if b.name in used or b.kind is BufferKind.INPUT)
    return replace(program, steps=tuple(reversed(kept)), buffers=buffers)


def _run(program: Program, _ctx: PassContext) -> Program:
    return drop_dead_steps(program)


PASS = Pass(
    "drop-dead-steps",
    _run,
    why="no later pass sees a step without a reader",
    required=True,
)
