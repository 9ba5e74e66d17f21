"""Pass: loops that are read through reshapes are split, so that positions are plain sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..analysis.alignment import digit_env, expand_ranges
from ..analysis.alignment import split_loops as loops_to_split
from ..ir import Buffer, LoopNest, Program, Step
from ..ir.builder import NestBuilder
from ..ir.walk import buffers_of, expressions, instructions, ranges_within
from ..passes import Pass, PassContext, fuses
from ..symbolic import has_calls

__all__ = ["PASS", "split_loops"]


def split_loops(program: Program, ctx: PassContext) -> Program:
    """The program with each nest's loops split at the borders of what it reads."""
    buffers = buffers_of(program)
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, LoopNest) and any(map(has_calls, expressions(instructions(step.stages)))):
            step = _split_nest(step, buffers, ctx)
        steps.append(step)
    return replace(program, steps=tuple(steps))


def _split_nest(nest: LoopNest, buffers: Mapping[str, Buffer], ctx: PassContext) -> LoopNest:
    taken = {r.symbol for r in ranges_within(nest)}
    fresh = [name for name in (f"k{n}" for n in range(64)) if name not in taken]
    loops = loops_to_split(nest, fresh)
    if not loops or not ctx.fuel.take():
        return nest
    builder = NestBuilder(nest.name, expand_ranges(nest.outer, loops), nest.origin, buffers)
    builder.copy_stages(nest.stages, digit_env(loops), lambda ranges: expand_ranges(ranges, loops))
    return builder.finish()


PASS = Pass(
    "split-loops",
    split_loops,
    why="positions in reshaped tensors become plain sums, which fusion can align",
    after=("inline-producers", "fuse-concats"),
    when=fuses,
)
