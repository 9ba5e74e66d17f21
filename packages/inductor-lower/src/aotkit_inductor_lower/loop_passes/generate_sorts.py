"""Pass: stable sorts of long rows become kernels, where the target has a form for them, see Note [A sort as a nest].

It comes after all passes that fuse and split nests, as attention does: a sort takes nothing in.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import ExternCall, Program, Step
from ..ir.walk import buffers_of
from ..lowering.sort_nests import STABLE_SORT, sort_of
from ..passes import Pass, PassContext
from .take_choice import listed, take_choice

__all__ = ["PASS", "generate_sorts"]


def generate_sorts(program: Program, ctx: PassContext) -> Program:
    """The program with the calls of stable sorts that the target computes as nests."""
    if not any(isinstance(step, ExternCall) and step.target == STABLE_SORT for step in program.steps):
        return program
    buffers, made = dict(buffers_of(program)), list(program.buffers)
    steps: list[Step] = []
    for step in program.steps:
        sort = None
        if isinstance(step, ExternCall):
            sort = sort_of(step, buffers, ctx.target.capabilities.device)
        if sort is None:
            steps.append(step)
            continue
        nest, room = sort.nest(buffers)
        choice = ctx.target.choose_sort(nest, {**buffers, **{buffer.name: buffer for buffer in room}})
        what = f"{sort.call.target} {sort.x.dtype} {listed(sort.x.sizes)} along {sort.dim}"
        if take_choice(ctx, choice, sort.call.name, sort.call, what):
            steps.append(nest)
            made += room
            buffers |= {buffer.name: buffer for buffer in room}
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps), buffers=tuple(made))


PASS = Pass(
    "generate-sorts",
    generate_sorts,
    why="sorting digit by digit takes less time than ATen's comparisons",
    after=("split-reductions",),
)
