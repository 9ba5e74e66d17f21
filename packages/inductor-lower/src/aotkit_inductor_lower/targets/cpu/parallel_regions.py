"""Which calls of a segment run in one parallel region, and where threads wait for each other in it.

Note [Parallel regions]
    Entering and leaving a parallel region takes a microsecond with two threads, a token of a language model has ten
    kernels a layer that would, and most of them take less than a hundred. So calls that follow each other are one
    region: each thread goes through all of them, with its share of the units of each, and the first thread alone does
    what is too small to be shared. Threads wait for each other only before a call that needs it: the products of
    queries, keys and values, which read one row and write three, are computed without.

    A thread must wait before a call if another one may still read or write what the call writes, or write what it
    reads: since they last waited. Two buffers of the arena are the same memory if the one is dead when the other one's
    life begins, whatever their offsets; where a kernel may write over what it reads last, from that kernel on. Calls
    of the first thread alone need not wait for each other. What may report an error ends what runs at once: nothing
    behind it begins before it is done.

    Only what is known when the code is written takes part: calls whose units are known, and none that take long while
    all threads but one wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...ir import Buffer, LoopNest, Program
from ...ir.in_place import may_write_over
from ...ir.walk import buffers_of, step_reads, step_writes
from ...kernel_ir.launches import Combo, Region
from ...memory.storage import Storage

__all__ = ["COMBO_WORK", "GRAIN", "Lives", "most_threads", "with_regions"]

GRAIN = 32768  # work below which another thread does not pay
COMBO_WORK = 1 << 20  # work from which threads share a combo: its members were small enough for one
LONGEST_ALONE = 1 << 20  # work of one thread for which the others wait in a region
LEAST_SHARED = 2  # calls of several threads that make a region
MOST_AT_ONCE = 8  # calls between two waits


@dataclass(frozen=True, slots=True)
class Lives:
    """The positions of a program's nests, and of the first and last step that use each buffer's memory."""

    buffers: Mapping[str, Buffer]
    storage: Storage
    kinds: Mapping[str, str]
    nests: Mapping[str, int]
    spans: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(program: Program, storage: Storage) -> Lives:
        """Those of a scheduled program."""
        spans: dict[str, tuple[int, int]] = {}
        for position, step in enumerate(program.steps):
            for name in map(storage.root, (*step_reads(step), *step_writes(step))):
                spans[name] = (spans.get(name, (position,))[0], position)
        nests = {step.name: position for position, step in enumerate(program.steps) if isinstance(step, LoopNest)}
        return Lives(buffers_of(program), storage, storage.kinds, nests, spans)

    def apart(self, earlier: LoopNest, later: LoopNest) -> bool:
        """Whether the two may run at once."""
        read, written = self._roots(step_reads(earlier)), self._roots(earlier.writes)
        reads, writes = self._roots(step_reads(later)), self._roots(later.writes)
        if written & (reads | writes) or read & writes:
            return False
        used = read | written
        kinds = [{self.kinds.get(name) for name in names} for names in (used, writes)]
        if all("large" in found for found in kinds):
            return False
        shared = [{name for name in names if self.kinds.get(name) == "arena"} for names in (used, writes)]
        return not any(self._same_place(before, after, later) for before in shared[0] for after in shared[1])

    def _roots(self, names: Iterable[str]) -> set[str]:
        return {self.storage.root(name) for name in names}

    def _same_place(self, before: str, after: str, nest: LoopNest) -> bool:
        """Whether ``after``, which ``nest`` writes, may lie where ``before`` does."""
        last, first = self.spans[before][1], self.spans[after][0]
        if last == first == self.nests[nest.name]:
            return may_write_over(nest, before, after, self.buffers)
        return last < first


def most_threads(call: Combo) -> int:
    """How many threads pay for a call whose units are known."""
    units = work = 0
    for member in call.members:
        units += member.kernel.units.constant or 0
        work += member.kernel.work.constant or 0
    several = len(call.members) > 1
    if not call.members[0].kernel.parallel or call.in_order or (several and work < COMBO_WORK):
        return 1
    return max(1, min(work // GRAIN, units))


def with_regions(calls: Sequence[Combo], nests: Sequence[LoopNest], lives: Lives) -> list[Combo | Region]:
    """The calls of a segment, those that one parallel region runs together. ``nests``: of all their members."""
    made: list[Combo | Region] = []
    start = 0
    for run in _runs(calls):
        count = sum(len(call.members) for call in run)
        made += _with_region(run, nests[start : start + count], lives)
        start += count
    return made


def _runs(calls: Sequence[Combo]) -> Iterator[list[Combo]]:
    """The calls, cut where one may not be in a region with others."""
    run: list[Combo] = []
    for call in calls:
        if _fits(call):
            run.append(call)
            continue
        yield from ([run] if run else [])
        yield [call]
        run = []
    yield from ([run] if run else [])


def _fits(call: Combo) -> bool:
    kernels = [member.kernel for member in call.members]
    if any(k.short is not None or k.units.constant is None or k.work.constant is None for k in kernels):
        return False
    return most_threads(call) > 1 or sum(k.work.constant or 0 for k in kernels) <= LONGEST_ALONE


def _with_region(run: list[Combo], nests: Sequence[LoopNest], lives: Lives) -> list[Combo | Region]:
    """A run of calls, as a region from the first that threads share to the last such."""
    shared = [k for k, call in enumerate(run) if most_threads(call) > 1 and _fits(call)]
    if len(shared) < LEAST_SHARED:
        return list(run)
    first, end = shared[0], shared[-1] + 1
    own = iter(nests)
    of_call = [[next(own) for _ in call.members] for call in run]
    waits = tuple(_waits(run[first:end], of_call[first:end], lives))
    return [*run[:first], Region(tuple(run[first:end]), waits), *run[end:]]


def _waits(calls: Sequence[Combo], nests: Sequence[Sequence[LoopNest]], lives: Lives) -> Iterator[bool]:
    """Whether all threads wait for each other before each call."""
    since: list[int] = []
    for k, call in enumerate(calls):
        wait = len(since) == MOST_AT_ONCE or any(
            _must_wait((calls[j], call), (nests[j], nests[k]), lives) for j in since
        )
        if wait:
            since.clear()
        since.append(k)
        yield wait


def _must_wait(calls: tuple[Combo, Combo], nests: tuple[Sequence[LoopNest], Sequence[LoopNest]], lives: Lives) -> bool:
    alone = [most_threads(call) == 1 for call in calls]
    if all(alone):
        return False
    reports = [any(member.kernel.reports for member in call.members) for call in calls]
    if reports[0] or (reports[1] and not alone[1]):
        return True
    return not all(lives.apart(a, b) for a in nests[0] for b in nests[1])
