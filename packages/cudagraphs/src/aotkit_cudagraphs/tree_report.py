"""What a tree holds and did, as data that prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .manager import TreeManager
from .reasons import SkipReason


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """One recording.

    Attributes:
        name: of the callable.
        path: names from the first recording of the step to this one.
        inputs: readable layouts.
        pool: number of its pool.
        added_bytes: how much the pool grew for it.
        result_bytes: of its new results.
        path_bytes: of the results of all recordings of its path.
        replays: how often it ran.
    """

    name: str
    path: tuple[str, ...]
    inputs: str
    pool: int
    added_bytes: int
    result_bytes: int
    path_bytes: int
    replays: int


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """One pool.

    Attributes:
        number: as in `RecordingInfo.pool`.
        reserved_bytes: what it holds on the device.
        live_bytes: results in it that are in use.
        dropped_bytes: what it grew by for recordings that were dropped since.
    """

    number: int
    reserved_bytes: int
    live_bytes: int
    dropped_bytes: int


@dataclass(frozen=True, slots=True)
class FunctionInfo:
    """One callable.

    Attributes:
        name: of the callable.
        replays: calls answered by a recording.
        warm_ups: calls that ran as they are because their inputs were new.
        blocked: calls that ran as they are because of results in use, or of such calls before them in the step.
        uncaptured: calls that ran as they are for one of `skips`.
        copied_results: which results are handed out as copies.
        skips: distinct reasons.
    """

    name: str
    replays: int
    warm_ups: int
    blocked: int
    uncaptured: int
    copied_results: tuple[int, ...]
    skips: tuple[SkipReason, ...]


@dataclass(frozen=True, slots=True)
class TreeReport:
    """All threads' recordings, pools and callables."""

    recordings: tuple[RecordingInfo, ...]
    pools: tuple[PoolInfo, ...]
    functions: tuple[FunctionInfo, ...]

    @property
    def pool_bytes(self) -> int:
        """Bytes that all pools hold: what recordings, those dropped included, added."""
        return sum(pool.reserved_bytes for pool in self.pools)

    def __str__(self) -> str:
        lines = [f"{len(self.recordings)} recordings in {len(self.pools)} pools of {self.pool_bytes} bytes"]
        for info in self.recordings:
            where = " > ".join(info.path)
            lines.append(
                f"  {where} {info.inputs}: +{info.added_bytes} bytes, path {info.path_bytes}, {info.replays} replays"
            )
        for function in self.functions:
            lines.append(
                f"  {function.name}: {function.replays} replays, {function.warm_ups} warm-ups, "
                f"{function.blocked} blocked, {function.uncaptured} uncaptured"
            )
            lines += [f"    skipped: {reason}" for reason in function.skips]
        return "\n".join(lines)


def report_on(managers: Sequence[TreeManager]) -> TreeReport:
    """The report on what these managers hold."""
    recordings: list[RecordingInfo] = []
    pools: list[PoolInfo] = []
    functions: list[FunctionInfo] = []
    for manager in managers:
        nodes = [node for function in manager.functions for node in function.nodes]
        for node in nodes:
            path = node.path()
            own = sum(slot.nbytes for slot in node.slots)
            everything = sum(slot.nbytes for member in path for slot in member.slots)
            names = tuple(member.function.name for member in path)
            recordings.append(
                RecordingInfo(
                    names[-1], names, node.label, node.pool.number, node.added_bytes, own, everything, node.replays
                )
            )
        for pool in manager.pools:
            added = sum(node.added_bytes for node in nodes if node.pool is pool)
            reserved = pool.reserved_bytes
            pools.append(PoolInfo(pool.number, reserved, pool.live_bytes, reserved - added))
        for known in manager.functions:
            counts = (known.replays, known.warm_ups, known.blocked, known.uncaptured)
            functions.append(FunctionInfo(known.name, *counts, tuple(sorted(known.kept)), tuple(known.skips)))
    return TreeReport(tuple(recordings), tuple(pools), tuple(functions))
