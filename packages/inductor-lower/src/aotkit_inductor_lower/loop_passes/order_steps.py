"""Pass: the order of the steps in which the call needs the least memory.

Note [Orders tried]
    Steps come in the order of the graph. Where that needs more memory than any order must, three others are tried:
    *greedy*, of the steps that may run the one that adds least to what is held; *in order*, but what adds nothing runs
    as soon as it may; and *depth first*, each step right behind what it needs, what reads most first. Each takes time
    in proportion to the number of accesses (the first two times a logarithm). Each is tried once more with what adds
    something *late*: right before the first step that waits for it, since the least that could be added may be for a
    step far away. The best one is taken if it saves something worth moving kernels for. What must come before what is
    :class:`.Dependencies`; calls that may have effects keep their order. In a backward, what was saved for it counts
    until its last use: gradients of weights wait where they are larger than what they are made of.

    What is held when is the business of :class:`.Lives`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..analysis.dependencies import Dependencies
from ..analysis.liveness import Lives
from ..ir import ExternCall, Program, Step
from ..ops.aten import is_random
from ..passes import Pass, PassContext, fuses

__all__ = ["PASS", "order_by_memory", "simulated_peak"]

LEAST_BYTES = 1 << 20  # below this no order is worth a search
_LEAST_GAIN = 32  # an order is changed to save one part in so many


def simulated_peak(program: Program, released: frozenset[str] = frozenset()) -> int:
    """The most bytes that temporaries and results of a program hold at once, see Note [Orders tried]."""
    return Lives.of(program, released).peak(range(len(program.steps)))


def order_by_memory(
    program: Program, least_bytes: int = LEAST_BYTES, released: frozenset[str] = frozenset()
) -> Program:
    """The program with its steps in the best of the orders tried; never one that holds more than the one given.
    ``released``: inputs whose memory goes with their last use, as in :class:`.Lives`."""
    if len(program.steps) < 3:
        return program
    lives = Lives.of(program, released)
    given = lives.peak(range(len(program.steps)))
    wanted = given - given // _LEAST_GAIN
    if given < least_bytes or lives.bound() >= wanted:
        return program
    needs = _needs(program)
    after: list[list[int]] = [[] for _ in needs]
    for position, before in enumerate(needs):
        for need in before:
            after[need].append(position)
    greedy, in_order = (_by_key(lives, needs, after, key) for key in (_adds_least, _frees_or_next))
    tried = [greedy, in_order, _depth_first(lives, needs, after)]
    tried += [_late(lives, after, order) for order in tried]
    best = min(tried, key=lives.peak)
    if lives.peak(best) >= wanted:
        return program
    return replace(program, steps=tuple(program.steps[position] for position in best))


def _needs(program: Program) -> list[set[int]]:
    """What must run before each step. Calls that may have effects wait for each other."""
    needs = [set(before) for before in Dependencies.of(program).before]
    last: int | None = None
    for position, step in enumerate(program.steps):
        if _may_have_effects(step):
            if last is not None:
                needs[position].add(last)
            last = position
    return needs


def _may_have_effects(step: Step) -> bool:
    if not isinstance(step, ExternCall):
        return False
    known = step.target.startswith(("aten.", "mkldnn.", "prims."))
    return not known or is_random(step.target) or bool(step.mutates) or not any(step.results)


def _adds_least(adds: int, position: int) -> tuple[int, int]:
    """What adds least; the earliest of several."""
    return adds, position


def _frees_or_next(adds: int, position: int) -> tuple[int, int]:
    """The earliest that adds nothing, else the earliest."""
    return int(adds > 0), position


def _by_key(
    lives: Lives,
    needs: Sequence[set[int]],
    after: Sequence[Sequence[int]],
    key: Callable[[int, int], tuple[int, int]],
) -> list[int]:
    """Of the steps that may run, always the one with the least ``key`` of what it adds and its position."""
    left = lives.counts()
    users: dict[str, list[int]] = {name: [] for name in lives.nbytes}
    for position, names in enumerate(lives.uses):
        for name in names:
            users[name].append(position)
    last_user = {name: sum(at) for name, at in users.items()}  # once one is left: the sum of those left
    adds = [0] * len(needs)
    for name, at in users.items():
        once = len(at) == 1 and name not in lives.kept
        first = 0 if name in lives.given else lives.nbytes[name]
        for position in at:
            adds[position] += first - lives.nbytes[name] if once else first
    waiting = [len(before) for before in needs]
    ready = [(key(adds[p], p), p) for p, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    done = [False] * len(needs)
    born: set[str] = set(lives.given)
    order: list[int] = []
    while ready:
        _, position = heapq.heappop(ready)
        if done[position]:  # whenever it came to add less it was put in again, before the older entries
            continue
        done[position] = True
        order.append(position)
        changed: set[int] = set()
        for name in lives.uses[position]:
            left[name] -= 1
            last_user[name] -= position
            if name not in born:
                born.add(name)
                for user in users[name]:
                    adds[user] -= lives.nbytes[name]
                changed.update(users[name])
            if left[name] == 1 and name not in lives.kept:
                adds[last_user[name]] -= lives.nbytes[name]
                changed.add(last_user[name])
        for later in after[position]:
            waiting[later] -= 1
            changed.add(later)
        for user in changed:
            if not done[user] and waiting[user] == 0:
                heapq.heappush(ready, (key(adds[user], user), user))
    return order


def _depth_first(lives: Lives, needs: Sequence[set[int]], after: Sequence[Sequence[int]]) -> list[int]:
    """Each step right behind what it needs: first what itself needs most memory, which it may set free."""
    born: set[str] = set(lives.given)
    size: list[int] = []
    for names in lives.uses:
        size.append(sum(lives.nbytes[name] for name in names if name in born))
        born.update(names)
    done = [False] * len(needs)
    order: list[int] = []
    for goal in range(len(needs)):
        if after[goal] or done[goal]:
            continue
        stack = [(goal, False)]
        while stack:
            position, entered = stack.pop()
            if done[position]:
                continue
            if entered:
                done[position] = True
                order.append(position)
                continue
            stack.append((position, True))
            missing = [need for need in needs[position] if not done[need]]
            stack.extend((need, False) for need in sorted(missing, key=lambda need: (size[need], -need)))
    return order


def _late(lives: Lives, after: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """The order, with each step that adds more than it frees right before the first that waits for it, if any does."""
    left, born = lives.counts(), set(lives.given)
    adds: list[int] = []
    for position in order:
        names = lives.uses[position]
        adds.append(sum(lives.nbytes[name] for name in names if name not in born))
        born.update(names)
        for name in names:
            left[name] -= 1
            adds[-1] -= lives.nbytes[name] if left[name] == 0 and name not in lives.kept else 0
    place = {position: k for k, position in enumerate(order)}
    anchor = dict(place)  # where the step is that this one stands before, or its own place
    for position in reversed(order):
        if adds[place[position]] > 0 and after[position]:
            anchor[position] = min(anchor[later] for later in after[position])
    return sorted(order, key=lambda position: (anchor[position], place[position]))


def _run(program: Program, ctx: PassContext) -> Program:
    """All of the order is one rewrite."""
    ordered = order_by_memory(program, released=ctx.released)
    return ordered if ordered is not program and ctx.fuel.take() else program


PASS = Pass(
    "order-steps",
    _run,
    why="a call needs less memory where large values die early",
    after=("localize-temporaries",),
    when=fuses,
)
