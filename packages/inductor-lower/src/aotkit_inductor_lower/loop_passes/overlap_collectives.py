"""Pass: collectives start early and are waited for late, so that other steps run while they do.

Note [Orders with collectives]
    A list scheduler walks over the program with a clock. Of the steps that may run it takes a start of a collective
    first, then what the next start needs, then what comes next in the program; a wait comes when its collective
    should have ended by the clock, or when nothing else may run. What would hold more than the bound has to wait its
    turn in the program. How far ahead a step may be taken is tried from everything down to a few steps; the order with
    the shortest time whose simulated peak is within the bound is taken, and the given one if none is shorter.

    The bound is the peak of the given order and a share of it, `LowerOptions.overlap_memory`, or the size below which
    no order is worth a search if a share is allowed at all. The clock is a rough
    model of a machine (the constants below, and the options' link): it decides orders only. Starts keep the order of
    the program, see Note [While a collective runs], so ranks agree whatever the model says.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..analysis.collectives import Collectives
from ..analysis.dependencies import Dependencies
from ..analysis.liveness import Lives
from ..analysis.nests import buffer_bytes
from ..ir import Alias, Buffer, ExternCall, LoopNest, Program, Step
from ..ir.walk import buffers_of, step_reads, step_writes
from ..ops.aten import collective_role
from ..options import LowerOptions
from ..passes import Decision, Pass, PassContext, fuses
from .order_steps import LEAST_BYTES

__all__ = ["PASS", "overlap_collectives"]

_AHEAD = (1 << 30, 64, 16, 4)  # so many steps ahead of the first that has not run
_LINK = (LowerOptions().link_latency, LowerOptions().link_bandwidth)  # seconds, and bytes per second
_MEMORY, _ARITHMETIC = 10e9, 100e9  # bytes and operations per second of a step
_OWN_ORDER = ("aten.", "mkldnn.", "prims.")  # whose effects, if any, other ranks don't see


@dataclass(frozen=True, slots=True)
class _Problem:
    """What an order is made from. ``seconds``: of each step, for a start those of its collective."""

    steps: Sequence[Step]
    needs: Sequence[set[int]]
    lives: Lives
    collectives: Collectives
    seconds: Sequence[float]
    bound: int

    def time(self, order: Iterable[int]) -> float:
        """When the last step of ``order`` has run, and the last collective has ended, by the clock."""
        clock = _Clock(self)
        for position in order:
            clock.run(position)
        return max(clock.now, clock.link)


class _Clock:
    """Collectives run one after the other beside the steps."""

    def __init__(self, problem: _Problem) -> None:
        self._problem = problem
        self._starts = frozenset(problem.collectives.starts)
        self._ends: dict[int, float] = {}
        self.now = self.link = 0.0

    def run(self, position: int) -> None:
        """A step runs now."""
        seconds = self._problem.seconds[position]
        if position in self._starts:
            self.link = self._ends[position] = max(self.now, self.link) + seconds
        elif position in self._problem.collectives.waits:
            self.now = max(self.now, self._end(position))
        else:
            self.now += seconds

    def has_ended(self, wait: int) -> bool:
        """Whether the wait takes no time now."""
        return self._end(wait) <= self.now

    def _end(self, wait: int) -> float:
        return self._ends.get(self._problem.collectives.waits[wait], 0.0)


def overlap_collectives(
    program: Program,
    share: float,
    decisions: list[Decision] | None = None,
    link: tuple[float, float] = _LINK,
    released: frozenset[str] = frozenset(),
) -> Program:
    """The program in the best order found, see Note [Orders with collectives].

    ``share``: how much the peak may grow. ``decisions`` gets one for each collective. ``link``: seconds of a collective
    without bytes, and bytes per second. ``released``: inputs that nobody else holds, as in :class:`.Lives`: an order
    that uses them later holds them longer.
    """
    collectives = Collectives.of(program.steps)
    if not collectives.starts:
        return program
    lives, given = Lives.of(program, released), range(len(program.steps))
    peak = lives.peak(given)
    buffers = buffers_of(program)
    problem = _Problem(
        program.steps,
        _needs(program),
        lives,
        collectives,
        [_seconds(step, buffers, link) for step in program.steps],
        max(peak + int(peak * share), LEAST_BYTES) if share else peak,
    )
    best: Sequence[int] = given
    too_large = 0
    for ahead in _AHEAD:
        order = _order(problem, ahead)
        if lives.peak(order) > problem.bound:
            too_large += 1
        elif problem.time(order) < problem.time(best):
            best = order
    starts = [position for position in best if position in frozenset(collectives.starts)]
    if starts != list(collectives.starts):
        raise AssertionError("collectives changed their order; this is a bug in the dependencies")
    if decisions is not None:
        held = f"the peak is {lives.peak(best)} bytes of at most {problem.bound}, before it was {peak}"
        decisions += _records(problem, best, held, too_large)
    return program if best is given else replace(program, steps=tuple(program.steps[position] for position in best))


def _needs(program: Program) -> list[set[int]]:
    """What must run before each step. Calls that may talk to other ranks themselves keep their place among starts."""
    needs = [set(before) for before in Dependencies.of(program).before]
    last: int | None = None
    for position, step in enumerate(program.steps):
        if not isinstance(step, ExternCall) or collective_role(step.target) == "wait":
            continue
        if step.target.startswith(_OWN_ORDER) and not step.mutates and any(step.results):
            continue
        if last is not None:
            needs[position].add(last)
        last = position
    known = Collectives.of(program.steps).waits
    for position, step in enumerate(program.steps):  # what they wait for is not here: they stay where they are
        if isinstance(step, ExternCall) and collective_role(step.target) == "wait" and position not in known:
            needs[position].update(range(position))
            for later in range(position + 1, len(program.steps)):
                needs[later].add(position)
    return needs


def _order(problem: _Problem, ahead: int) -> list[int]:
    after: list[list[int]] = [[] for _ in problem.needs]
    for position, before in enumerate(problem.needs):
        for need in before:
            after[need].append(position)
    waiting = [len(before) for before in problem.needs]
    ready = [position for position, count in enumerate(waiting) if count == 0]
    clock, memory, urgent = _Clock(problem), _Memory(problem.lives), _Urgent(problem)
    done = [False] * len(waiting)
    order: list[int] = []
    first = 0
    while ready:
        while done[first]:
            first += 1
        position = _next(problem, [p for p in ready if p <= first + ahead], clock, memory, urgent.steps(done))
        ready.remove(position)
        done[position] = True
        order.append(position)
        clock.run(position)
        memory.run(position)
        for later in after[position]:
            waiting[later] -= 1
            if waiting[later] == 0:
                bisect.insort(ready, later)
    return order


def _next(problem: _Problem, ready: Sequence[int], clock: _Clock, memory: _Memory, urgent: frozenset[int]) -> int:
    """Of the steps that may run, in the order of the program, the one that does."""
    waits = problem.collectives.waits
    room = [p for p in ready if memory.held + memory.adds(p) <= problem.bound]
    steps = [p for p in room if p not in waits]
    chosen = next((p for p in steps if p in urgent), None)
    if chosen is not None:
        return chosen
    for position in room:  # the earliest that makes nobody wait
        if position not in waits or clock.has_ended(position):
            return position
    return next((p for p in ready if p in waits), ready[0])


class _Memory:
    """What is held after the steps that have run."""

    def __init__(self, lives: Lives) -> None:
        self._lives, self._left, self._born = lives, lives.counts(), set(lives.given)
        self.held = lives.given_bytes

    def adds(self, position: int) -> int:
        """What the step needs beside what is held."""
        return sum(self._lives.nbytes[name] for name in self._lives.uses[position] if name not in self._born)

    def run(self, position: int) -> None:
        """The step runs now."""
        self.held += self.adds(position)
        for name in self._lives.uses[position]:
            self._born.add(name)
            self._left[name] -= 1
            if self._left[name] == 0 and name not in self._lives.kept:
                self.held -= self._lives.nbytes[name]


class _Urgent:
    """The next start that has not run, and what it needs."""

    def __init__(self, problem: _Problem) -> None:
        self._problem = problem
        self._left = list(reversed(problem.collectives.starts))
        self._found: frozenset[int] = frozenset()
        self._of = -1

    def steps(self, done: Sequence[bool]) -> frozenset[int]:
        """Their positions, some of which may have run."""
        while self._left and done[self._left[-1]]:
            self._left.pop()
        if self._left and self._left[-1] != self._of:
            self._of = self._left[-1]
            found, stack = {self._of}, [self._of]
            while stack:
                new = {need for need in self._problem.needs[stack.pop()] if not done[need]} - found
                found |= new
                stack += new
            self._found = frozenset(found)
        return self._found if self._left else frozenset()


def _seconds(step: Step, buffers: Mapping[str, Buffer], link: tuple[float, float]) -> float:
    """By the rough model; of a start, how long its collective takes."""
    if isinstance(step, Alias):
        return 0.0
    read, written = ([buffer_bytes(buffers[name]) for name in names] for names in (step_reads(step), step_writes(step)))
    if isinstance(step, ExternCall) and collective_role(step.target) is not None:
        latency, bandwidth = link
        started = collective_role(step.target) == "start"
        return latency + max(sum(read), sum(written)) / bandwidth if started else 0.0
    seconds = (sum(read) + sum(written)) / _MEMORY
    if isinstance(step, LoopNest) or len(read) < 2 or not written:
        return seconds
    # A product of matrices: the sizes of both and of the result multiply to the square of how often it multiplies.
    items = [size / 4 for size in (*sorted(read)[-2:], max(written))]
    return max(seconds, 2 * math.sqrt(math.prod(items)) / _ARITHMETIC)


def _records(problem: _Problem, order: Sequence[int], held: str, too_large: int) -> list[Decision]:
    """One decision for each collective."""
    steps, waits = problem.steps, problem.collectives.waits
    first_wait: dict[int, int] = {}
    for position in order:
        if position in waits:
            first_wait.setdefault(waits[position], position)
    place = {position: number for number, position in enumerate(order)}
    found = []
    for start in problem.collectives.starts:
        wait = first_wait.get(start)
        if wait is None:
            continue
        now = _computing(problem, order[place[start] : place[wait]])
        before = _computing(problem, range(start, wait))
        if now > before:
            reason = f"{now} steps run while it does, before it were {before}; {held}"
        else:
            why = f"{too_large} of {len(_AHEAD)} orders take more memory; {held}" if too_large else "no order is faster"
            reason = f"{now} steps run while it does: {why}"
        found.append(Decision("overlap", steps[start].name, steps[wait].name, now > before, reason))
    return found


def _computing(problem: _Problem, positions: Iterable[int]) -> int:
    """How many of the steps compute something."""
    beside = {*problem.collectives.starts, *problem.collectives.waits}
    return sum(not isinstance(problem.steps[p], Alias) and p not in beside for p in positions)


def _run(program: Program, ctx: PassContext) -> Program:
    """All of the order is one rewrite."""
    share = ctx.options.overlap_memory
    if share is None or ctx.fuel.left < 1:
        return program
    link = (ctx.options.link_latency, ctx.options.link_bandwidth)
    found = overlap_collectives(program, share, ctx.decisions, link, ctx.released)
    if found is not program:
        ctx.fuel.take()
    return found


PASS = Pass(
    "overlap-collectives",
    _run,
    why="other steps run while a collective does",
    after=("order-steps",),
    when=fuses,
)
