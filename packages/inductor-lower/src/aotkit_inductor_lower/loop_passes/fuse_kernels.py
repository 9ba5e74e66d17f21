"""Pass: bring nests that share data into one kernel.

Nests are taken in program order. Each first tries the kernels that produce what it reads, the latest first, then
kernels that read the same buffers. A fusion that would make two kernels wait for each other is refused, by
sets of ancestors kept as bits of integers; so the pass is near linear. Neither may a kernel that makes little of a
large temporary wait for one that comes when that would be gone: a sum of sums would keep alive all that was summed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..analysis.dependencies import Dependencies
from ..analysis.nests import buffer_bytes, hint, numel
from ..ir import Buffer, BufferKind, ExternCall, LoopNest, Program, Step
from ..ir.walk import buffers_of, step_reads
from ..ops.aten import collective_role
from ..options import LowerOptions
from ..passes import Decision, DecisionKind, Pass, PassContext, fuses
from .merge_nests import Access, Kernel, merge_kernels

__all__ = ["PASS", "fuse_kernels"]

SHORT_ROW = 1 << 13  # elements: a launch takes longer than a pass over them
_RECENT_READERS = 3
_SMALL_ELEMENTS = 512
_LARGE_BYTES = 1 << 23  # a temporary that is worth a kernel more to be rid of it
_LITTLE = 8  # what is made of it is smaller by this factor at least


class _Groups:
    """The kernels so far. A group is known by the position of its first step."""

    def __init__(self, steps: Sequence[Step | None], dependencies: Dependencies) -> None:
        self.steps: dict[int, Step] = {}
        self.kernels: dict[int, Kernel] = {}
        self.needs: dict[int, set[int]] = {}
        self._needed_by: dict[int, set[int]] = {}
        self.ancestors: dict[int, int] = {}
        self.position: dict[int, int] = {}
        self.latest = -1
        self._waits = 0  # for collectives, as bits of their positions
        self._parent: dict[int, int] = {}
        self._raw = [set(before) for before in dependencies.before]
        self._gone = {position for position, step in enumerate(steps) if step is None}

    def add(self, position: int, step: Step) -> None:
        """A step as a group of its own."""
        self.latest = position
        needs = {self.find(p) for p in self._raw[position]}
        self.steps[position] = step
        self.needs[position] = needs
        self._needed_by[position] = set()
        for need in needs:
            self._needed_by[need].add(position)
        self.ancestors[position] = self._close(needs)
        self._parent[position] = position
        if isinstance(step, ExternCall) and collective_role(step.target) == "wait":
            self._waits |= 1 << position

    def waits_differ(self, first: int, second: int) -> bool:
        """Whether one of two groups needs a collective that the other does not: as one they could not run beside it."""
        return bool((self.ancestors[first] ^ self.ancestors[second]) & self._waits)

    def skip(self, position: int) -> None:
        """A step that is gone; its needs pass to its readers through the raw sets."""
        self._parent[position] = position

    def pass_needs(self) -> None:
        """Replace needs of steps that are gone by what those needed."""
        for position, before in enumerate(self._raw):
            gone = before & self._gone
            if gone:
                before -= gone
                for other in gone:
                    before |= self._raw[other]
            self._raw[position] = before

    def find(self, position: int) -> int:
        """The group a step is in."""
        root = position
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[position] != root:
            self._parent[position], position = root, self._parent[position]
        return root

    def _close(self, needs: set[int]) -> int:
        bits = 0
        for need in needs:
            bits |= self.ancestors[need] | (1 << need)
        return bits

    def blocks(self, first: int, second: int) -> bool:
        """Whether something between the two must run after the one and before the other."""
        bit = 1 << first
        return any(self.ancestors[need] & bit for need in self.needs[second] if need != first)

    def stays(self, first: int, second: int) -> bool:
        """Whether both as one can run where the first does now: nothing that the second needs comes later."""
        return not self.ancestors[second] >> first + 1

    def join(self, first: int, second: int, kernel: Kernel) -> None:
        """``second`` becomes part of ``first``."""
        both = {first, second}
        self._parent[second] = first
        for need in self.needs[second] - both:
            self._needed_by[need].discard(second)
            self._needed_by[need].add(first)
        self.needs[first] = (self.needs[first] | self.needs.pop(second)) - both
        self._needed_by[first] = (self._needed_by[first] | self._needed_by.pop(second)) - both
        for later in self._needed_by[first]:
            self.needs[later].discard(second)
            self.needs[later].add(first)
        del self.steps[second]
        self.kernels.pop(second, None)
        self.steps[first], self.kernels[first] = kernel.nest, kernel
        bit, other = 1 << first, 1 << second
        new = (self.ancestors[first] | self.ancestors.pop(second)) & ~(bit | other)
        self.ancestors[first] = new
        for later in self._all_later(first):
            self.ancestors[later] = (self.ancestors[later] | new | bit) & ~other

    def _all_later(self, group: int) -> set[int]:
        """The groups that have it among their ancestors."""
        found, waiting = set[int](), list(self._needed_by[group])
        while waiting:
            later = waiting.pop()
            if later not in found:
                found.add(later)
                waiting.extend(self._needed_by[later])
        return found


def fuse_kernels(program: Program, ctx: PassContext) -> Program:
    """The program with nests that share data in one kernel, as far as fuel lasts."""
    buffers = buffers_of(program)
    groups = _groups(program.steps, buffers, Dependencies.of(program), ctx)
    order = _topological(groups.needs)
    return replace(program, steps=tuple(groups.steps[g] for g in order))


def _topological(needs: Mapping[int, set[int]]) -> list[int]:
    """Program order as far as dependencies allow."""
    waiting = {group: len(before) for group, before in needs.items()}
    after: dict[int, list[int]] = {group: [] for group in needs}
    for group, before in needs.items():
        for need in before:
            after[need].append(group)
    ready = [group for group, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        group = heapq.heappop(ready)
        order.append(group)
        for later in after[group]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, later)
    if len(order) != len(needs):
        raise AssertionError("fusion made kernels wait for each other; this is a bug in the legality check")
    return order


def _groups(
    steps: Sequence[Step | None], buffers: Mapping[str, Buffer], dependencies: Dependencies, ctx: PassContext
) -> _Groups:
    """Fuse; returns the groups with their steps and what each needs."""
    groups = _Groups(steps, dependencies)
    groups.pass_needs()
    last = _last_reads(steps, buffers, dependencies)
    readers: dict[str, list[int]] = {}
    for position, step in enumerate(steps):
        if step is None:
            groups.skip(position)
            continue
        groups.add(position, step)
        if not isinstance(step, LoopNest):
            continue
        groups.kernels[position] = Kernel.of(step, buffers, parts=dependencies.parts)
        current, tried = position, {position}
        while ctx.fuel.left > 0:
            found = _fuse_once(groups, current, tried, readers, buffers, dependencies, last, ctx)
            if found is None:
                break
            current = found
            ctx.fuel.take()
        for name in groups.kernels[current].nest.reads:
            recent = readers.setdefault(name, [])
            if current not in recent:
                recent.append(current)
                del recent[:-_RECENT_READERS]
    return groups


def _fuse_once(
    groups: _Groups,
    current: int,
    tried: set[int],
    readers: Mapping[str, list[int]],
    buffers: Mapping[str, Buffer],
    dependencies: Dependencies,
    last: Mapping[str, int],
    ctx: PassContext,
) -> int | None:
    """Fuse ``current`` with one other kernel; the group that has both, or ``None``."""
    kernel = groups.kernels[current]
    short = SHORT_ROW if ctx.target.capabilities.shares_launches else 0
    for kind, other, anchors in _candidates(groups, current, readers, buffers, dependencies):
        if other in tried:
            continue
        tried.add(other)
        partner = groups.kernels[other]
        reason = _too_much(partner, kernel, ctx.options) or _overwrites(partner, kernel, dependencies)
        delayed = bool(last) and not groups.stays(other, current)
        if reason is None and delayed and _keeps_alive(partner, anchors, groups.latest, last, buffers, dependencies):
            reason = "a large buffer would live longer"
        if reason is None and (groups.blocks(other, current) or groups.blocks(current, other)):
            reason = "another step must run between them"
        if reason is None and kind == "horizontal" and groups.waits_differ(other, current):
            reason = "one of them waits for a collective that the other does not need"
        if reason is None:
            later = bool(groups.ancestors[other] >> current & 1)  # the partner runs after what it is joined to
            for anchor in anchors:
                if later:
                    merged = merge_kernels(kernel, partner, (anchor[1], anchor[0]), buffers, short)
                else:
                    merged = merge_kernels(partner, kernel, anchor, buffers, short)
                if isinstance(merged, LoopNest):
                    through = f"through {anchor[0].buffer}"
                    ctx.decisions.append(Decision(kind, partner.nest.name, kernel.nest.name, True, through))
                    members = partner.members + kernel.members
                    joined = Kernel.of(merged, buffers, members, dependencies.parts)
                    groups.join(other, current, joined)
                    return other
                reason = merged
        reason = reason or "nothing to align by"
        ctx.decisions.append(Decision(kind, partner.nest.name, kernel.nest.name, False, reason))
    return None


def _last_reads(
    steps: Sequence[Step | None], buffers: Mapping[str, Buffer], dependencies: Dependencies
) -> dict[str, int]:
    """Where each large temporary is read for the last time."""
    root = dependencies.root
    owned = (b for b in buffers.values() if b.kind is BufferKind.TEMPORARY and root.get(b.name) == b.name)
    large = {b.name for b in owned if buffer_bytes(b) >= _LARGE_BYTES}
    found: dict[str, int] = {}
    for position, step in enumerate(steps):
        for name in step_reads(step) if step is not None and large else ():
            if root.get(name) in large:
                found[root[name]] = position
    return found


def _keeps_alive(
    first: Kernel,
    anchors: Sequence[tuple[Access, Access]],
    position: int,
    last: Mapping[str, int],
    buffers: Mapping[str, Buffer],
    dependencies: Dependencies,
) -> bool:
    """Whether a kernel reads large temporaries that are gone by ``position``, where the fused one would run, and shares
    little with that."""
    gone = {root for access in first.loads if last.get(root := dependencies.root[access.buffer], position) < position}
    shared = max(buffer_bytes(buffers[access.buffer]) for access, _ in anchors)
    return sum(buffer_bytes(buffers[name]) for name in gone) > _LITTLE * shared


def _too_much(first: Kernel, second: Kernel, options: LowerOptions) -> str | None:
    if first.members + second.members > options.max_fusion_nodes:
        return "the kernel would have too many parts"
    if first.size + second.size > options.max_fusion_instructions:
        return "the kernel would get too large"
    return None


def _overwrites(first: Kernel, second: Kernel, dependencies: Dependencies) -> str | None:
    """Kernels that change memory which others see through any name keep their place in the program."""
    root, unstable = dependencies.root, dependencies.unstable
    if not unstable:
        return None
    for writer, other in ((first, second), (second, first)):
        changed = {root[name] for name in writer.stores} & unstable
        if changed and not changed.isdisjoint(root[n] for n in (*other.stores, *(a.buffer for a in other.loads))):
            return "one of them overwrites memory that the other uses"
    return None


def _candidates(
    groups: _Groups,
    current: int,
    readers: Mapping[str, list[int]],
    buffers: Mapping[str, Buffer],
    dependencies: Dependencies,
) -> Iterator[tuple[DecisionKind, int, list[tuple[Access, Access]]]]:
    """(kind, group, accesses to align by) in the order to try."""
    kernel = groups.kernels[current]
    vertical: dict[int, list[tuple[Access, Access]]] = {}
    horizontal: dict[int, list[tuple[Access, Access]]] = {}
    for access in kernel.loads:
        if not access.plain:
            continue
        for writer in dependencies.writers.get(access.buffer, ()):
            if writer > groups.latest:  # it overwrites later what is read here
                continue
            group = groups.find(writer)
            partner = groups.kernels.get(group)
            if partner is None or group == current:
                continue
            store = partner.stores.get(access.buffer)
            if store is not None:
                vertical.setdefault(group, []).append((store, access))
    for access in kernel.loads:
        if not access.plain or hint(numel(buffers[access.buffer])) < _SMALL_ELEMENTS:
            continue
        for reader in readers.get(access.buffer, ()):
            group = groups.find(reader)
            partner = groups.kernels.get(group)
            if partner is None or group == current or group in vertical:
                continue
            load = next((a for a in partner.loads if a.buffer == access.buffer and a.plain), None)
            if load is not None:
                horizontal.setdefault(group, []).append((load, access))
    for group in sorted(vertical, reverse=True):
        yield "vertical", group, _largest_first(vertical[group], buffers)
    for group in sorted(horizontal, reverse=True):
        yield "horizontal", group, _largest_first(horizontal[group], buffers)


def _largest_first(anchors: list[tuple[Access, Access]], buffers: Mapping[str, Buffer]) -> list[tuple[Access, Access]]:
    ordered = sorted(anchors, key=lambda pair: -hint(numel(buffers[pair[0].buffer])))
    return ordered[:3]


PASS = Pass(
    "fuse-kernels",
    fuse_kernels,
    why="data that two nests share is walked over once",
    after=("inline-producers", "split-loops"),
    when=fuses,
)
