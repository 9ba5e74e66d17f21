"""Pass: small kernels come together where nothing needs them in between, so that they share a launch.

Note [Where small kernels go]
    What is computed of inputs alone (weights that are cast for products) comes together at the place of the first that
    is. Everything else that is small waits until something large needs it, or until what waits holds 32 MiB: casts of
    gradients and last sums of partial ones wait until the end. What waits for something that waits is behind it, so
    a chain of two has two launches, however many chains there are. See Note [Launches that are shared] in
    :mod:`..analysis.launch_groups`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..analysis.dependencies import Dependencies
from ..analysis.launch_groups import MOST_MEMBERS, shares_launch
from ..analysis.nests import buffer_bytes
from ..ir import Alias, Buffer, BufferKind, LoopNest, Program
from ..ir.walk import buffers_of
from ..passes import Decision, Pass, PassContext, fuses

__all__ = ["PASS", "gather_launches"]

_HELD = 32 << 20  # bytes that wait


def gather_launches(program: Program, ctx: PassContext) -> Program:
    """The program with small kernels next to each other, where that takes little memory."""
    buffers = buffers_of(program)
    if sum(isinstance(step, LoopNest) and shares_launch(step, buffers) for step in program.steps) < 2:
        return program
    found = _with_late_ones(_with_early_ones(program, buffers), buffers)
    if found.steps == program.steps or not ctx.fuel.take():
        return program
    moved = sum(a is not b for a, b in zip(program.steps, found.steps, strict=True))
    reason = f"small kernels share a launch: {moved} steps of {len(program.steps)} are in another place"
    ctx.decisions.append(Decision("gather", program.name, program.name, False, reason))
    return found


def _with_early_ones(program: Program, buffers: Mapping[str, Buffer]) -> Program:
    """What needs nothing but inputs, at the place of the first of as many as hold little."""
    needs = Dependencies.of(program).before
    groups: list[list[int]] = []
    held = 0
    for k, step in enumerate(program.steps):
        if needs[k] or not isinstance(step, LoopNest) or not shares_launch(step, buffers):
            continue
        more = sum(buffer_bytes(buffers[name]) for name in step.writes)
        if not groups or held + more > _HELD or len(groups[-1]) == MOST_MEMBERS:
            groups.append([])
            held = 0
        groups[-1].append(k)
        held += more
    first = {group[0]: group for group in groups}
    moved = {k for group in groups for k in group}
    order: list[int] = []
    for k in range(len(program.steps)):
        order += first.get(k, [] if k in moved else [k])
    return replace(program, steps=tuple(program.steps[k] for k in order))


@dataclass(slots=True)
class _Waiting:
    """Steps that wait, by how many of those that wait each is behind."""

    needs: Sequence[set[int]]
    order: list[int] = field(default_factory=list)
    level: dict[int, int] = field(default_factory=dict)
    held: int = 0

    def behind(self, step: int) -> int:
        """How many steps that wait come before ``step``, at most, one after the other."""
        return max((self.level[k] for k in self.needs[step] if k in self.level), default=-1)

    def release(self, steps: Iterable[int]) -> None:
        """Run ``steps``, which wait, and what these need."""
        wanted: set[int] = set()
        pending = [k for k in steps if k in self.level]
        while pending:
            k = pending.pop()
            if k not in wanted:
                wanted.add(k)
                pending += [before for before in self.needs[k] if before in self.level]
        self.order += sorted(wanted, key=lambda k: (self.level[k], k))
        for k in wanted:
            del self.level[k]


def _with_late_ones(program: Program, buffers: Mapping[str, Buffer]) -> Program:
    """What else is small, as late as it can be, unless that holds much."""
    waiting = _Waiting(Dependencies.of(program).before)
    for k, step in enumerate(program.steps):
        behind = waiting.behind(k)
        if isinstance(step, Alias) and behind >= 0:
            waiting.level[k] = behind
        elif waiting.needs[k] and isinstance(step, LoopNest) and shares_launch(step, buffers):
            held = sum(buffer_bytes(buffers[name]) for name in step.reads if _dies(buffers[name]))
            if waiting.held + held > _HELD:
                waiting.release(list(waiting.level))
                waiting.held, behind = 0, -1
            waiting.held += held
            waiting.level[k] = behind + 1
        else:
            waiting.release(waiting.needs[k])
            waiting.order.append(k)
    waiting.release(list(waiting.level))
    return replace(program, steps=tuple(program.steps[k] for k in waiting.order))


def _dies(buffer: Buffer) -> bool:
    return buffer.kind not in (BufferKind.INPUT, BufferKind.CONSTANT)


def _pays(ctx: PassContext) -> bool:
    return fuses(ctx) and ctx.target.capabilities.shares_launches


PASS = Pass(
    "gather-launches",
    gather_launches,
    why="small kernels that stand together are one launch",
    after=("order-steps", "split-reductions"),
    when=_pays,
)
