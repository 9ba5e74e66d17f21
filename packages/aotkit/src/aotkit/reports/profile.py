"""Where the time of a compiled function goes: a table of its kernels and ATen calls.

Note [What a profile measures]
    The function is compiled so that every kernel is a native call of its own, and run under torch's profiler, whose
    ranges give the times. Beside them stands the time of a step as it is: compiled as ever, without a profiler, and run
    in turn with the others. What the kernels do not add up to is Python, autograd and the caller's own code.
    How much watching costs is told by the processor time of the calling thread, watched and not: other processes have
    less of a say in it than in the time on the clock.
    Rows are means over those steps that are neither among the shortest nor among the longest quarter: were each a
    median of its own, they would add up to less than any step takes on a machine that does other things as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..backend import make_backend
from ..environment import read_environment
from ..options import Options
from ..recorder import Recorder
from .explain import run_once

__all__ = ["Profile", "ProfileRow", "compiled_step", "milliseconds", "on_cuda", "profile", "profile_of_step"]


_WARMUP = 3
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One kernel, or one ATen operator, of one graph, in one step.

    Attributes:
        graph: the graph that it is of.
        name: the kernel, or the operator.
        ops: the operators that the kernel computes; empty for a call of ATen.
        line: the user's, if it is known.
        calls: how often it runs in a typical step.
        ms: how long all of these calls take.
        share: of the time of all rows.
        bytes: moved by all calls, as the buffers' sizes tell; ``None`` where nobody knows.
        flops: operations of all calls; ``None`` where nobody knows.
    """

    graph: str
    name: str
    ops: tuple[str, ...]
    line: str
    calls: float
    ms: float
    share: float
    bytes: int | None
    flops: int | None

    @property
    def gb_per_s(self) -> float | None:
        """Bytes over time."""
        return billions_per_second(self.bytes, self.ms)

    @property
    def gflop_per_s(self) -> float | None:
        """Operations on floats over time."""
        return billions_per_second(self.flops, self.ms)


def billions_per_second(amount: int | None, ms: float | None) -> float | None:
    """Of bytes or operations; ``None`` where either is not known."""
    return None if amount is None or not ms else amount / ms / 1e6


@dataclass(frozen=True, slots=True)
class Profile:
    """The answer of :func:`profile`; ``str()`` is the table.

    ``rows``: the slowest first. ``step_ms``: the median of a step that nobody watches. ``watched_ms``: what the steps
    took that the rows are of. ``watching``: the processor time of a watched step over that of one that nobody watches.
    """

    rows: tuple[ProfileRow, ...]
    step_ms: float
    calls: int
    watched_ms: float = 0.0
    watching: float = 1.0

    @property
    def kernels_ms(self) -> float:
        """What the rows add up to."""
        return sum(row.ms for row in self.rows)

    @property
    def explained(self) -> float:
        """What the rows add up to, as a part of a step that nobody watches."""
        return self.kernels_ms / self.watched_ms * self.watching if self.watched_ms else 0.0

    def __str__(self) -> str:
        head = ("ms", "share", "GB/s", "GFLOP/s", "calls", "where", "what")
        table = [head, *map(_cells, self.rows)]
        widths = [max(len(row[column]) for row in table) for column in range(len(head) - 1)]
        lines = []
        for row in table:
            numbers = "  ".join(cell.rjust(width) for cell, width in zip(row[:5], widths, strict=False))
            lines.append(f"{numbers}  {row[5]:<{widths[5]}}  {row[6]}".rstrip())
        lines.append(
            f"one step takes {self.step_ms:.3f} ms (median of {self.calls}), and {self.watched_ms:.3f} ms while it is "
            f"watched; of these, kernels and ATen calls add up to {self.kernels_ms:.3f} ms"
        )
        lines.append(
            f"a watched step takes {self.watching:.3f} times the processor time, so the table explains "
            f"{100 * self.explained:.0f} % of a step; the rest is Python, autograd and your own code"
        )
        return "\n".join(lines)


def profile(
    fn: Callable[..., Any], *args: Any, calls: int = 20, options: Options | None = None, **kwargs: Any
) -> Profile:
    """Compile ``fn`` for these arguments, run it ``calls`` times with its backward, and measure each kernel.

    Compiled for these very sizes and not kept in the cache; Dynamo is reset. Gradients are computed but not accumulated
    into ``.grad``; anything else ``fn`` does to its arguments happens.
    Raises ``TypeError`` if ``fn`` can't be called, and ``ValueError`` for tensors on a CUDA device, whose kernels run
    beside the calls that are timed here: a trace of ``torch.profiler`` has their times.
    """
    if not callable(fn):
        raise TypeError(f"profile takes a function or a module, and its arguments; {fn!r} can't be called")
    if on_cuda(fn, args, kwargs):
        raise ValueError("profile times kernels on the CPU; those of a CUDA device are in a trace of torch.profiler")
    chosen = (options or read_environment().options()).patch(cache=False)
    torch._dynamo.reset()
    step = compiled_step(fn, chosen, Recorder(), args, kwargs)
    return profile_of_step(fn, chosen, args, kwargs, step, calls)


def on_cuda(fn: Any, args: Any, kwargs: Any) -> bool:
    """Whether an argument, or a parameter of a module, is on a CUDA device."""
    held = [*fn.parameters(), *fn.buffers()] if isinstance(fn, torch.nn.Module) else []
    return any(isinstance(t, torch.Tensor) and t.is_cuda for t in [*pytree.tree_leaves((args, kwargs)), *held])


def milliseconds(step: Callable[[], None], calls: int) -> list[float]:
    """Of ``calls`` steps in a row."""
    return [took for took, _ in _timed(step, calls)]


def _timed(step: Callable[[], None], calls: int) -> list[tuple[float, float]]:
    """Of each step in a row the milliseconds on the clock, and those of the processor in this thread."""
    found = []
    for _ in range(calls):
        begin, busy = time.perf_counter(), time.thread_time()
        step()
        found.append(((time.perf_counter() - begin) * 1e3, (time.thread_time() - busy) * 1e3))
    return found


def profile_of_step(
    fn: Any, options: Options, args: Any, kwargs: Any, unwatched: Callable[[], None], calls: int
) -> Profile:
    """Compile ``fn`` once more, each kernel by itself, and measure it. ``unwatched`` is a step as it is; both are run
    in turn, so that whatever else the machine does falls on both."""
    recorder = Recorder()
    step = compiled_step(fn, options.patch(separate_kernels=True), recorder, args, kwargs)
    plain, watched, events = list[tuple[float, float]](), list[tuple[float, float]](), list[Any]()
    for first in range(0, calls, -(-calls // _ROUNDS)):
        now = min(-(-calls // _ROUNDS), calls - first)
        plain += _timed(unwatched, now)
        # Events of other cycles are kept: there are none, and torch before 2.13 warns where they are forgotten.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as trace:
            watched += _timed(step, now)
        events += sorted(trace.events(), key=lambda event: event.time_range.start)
    ranked = sorted(range(calls), key=watched.__getitem__)
    typical = ranked[calls // 4 : calls - calls // 4]
    return Profile(
        _rows(events, recorder, calls, typical),
        statistics.median(took for took, _ in plain),
        calls,
        statistics.fmean(watched[each][0] for each in typical),
        statistics.median(busy for _, busy in watched) / (statistics.median(busy for _, busy in plain) or 1.0),
    )


def compiled_step(fn: Any, options: Options, recorder: Recorder, args: Any, kwargs: Any) -> Callable[[], None]:
    """What runs one step, which ran before: everything is compiled."""
    compiled = torch.compile(fn, backend=make_backend(options, recorder), dynamic=False)

    def step() -> None:
        run_once(compiled, args, kwargs)

    for _ in range(_WARMUP):
        step()
    return step


def _rows(events: list[Any], recorder: Recorder, calls: int, typical: list[int]) -> tuple[ProfileRow, ...]:
    groups = {
        f"{graph.name}: {group.kernel}": group
        for graph in recorder.graphs
        for group in getattr(graph.report, "groups", ())
    }
    names, times = {graph.name for graph in recorder.graphs}, dict[str, list[float]]()
    for event in events:
        if event.name.partition(": ")[0] in names:
            times.setdefault(event.name, []).append(event.cpu_time_total)
    in_step = {}
    for name, found in times.items():
        by_step = _by_step(found, calls)
        in_step[name] = statistics.fmean(by_step[each] for each in typical)
    total = sum(in_step.values()) or 1.0
    rows = []
    for key, microseconds in in_step.items():
        graph, _, name = key.partition(": ")
        group, count = groups.get(key), len(times[key]) / calls
        rows.append(
            ProfileRow(
                graph,
                name,
                () if group is None else group.nodes,
                "" if group is None else group.line,
                count,
                microseconds / 1e3,
                microseconds / total,
                None if group is None or group.bytes is None else round(group.bytes * count),
                None if group is None or group.flops is None else round(group.flops * count),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.ms))


def _by_step(times: list[float], steps: int) -> list[float]:
    """What the calls of each step take together; the mean, if the steps differ in how many there are."""
    if len(times) % steps:
        return [sum(times) / steps] * steps
    of_one = len(times) // steps
    return [sum(times[first : first + of_one]) for first in range(0, len(times), of_one)]


def _cells(row: ProfileRow) -> tuple[str, ...]:
    made = f"  # {' '.join(row.ops)}" if row.ops else ""
    return (
        f"{row.ms:.3f}",
        f"{100 * row.share:.1f} %",
        "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}",
        "" if row.gflop_per_s is None else f"{row.gflop_per_s:.1f}",
        f"{row.calls:g}",
        row.graph,
        f"{row.name}{made}",
    )
