"""Seeing inside a compile: stage seconds, dumps and log lines.

Every package takes one optional :class:`._observer.Observer`; :class:`Recorder` is the one that users meet.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

__all__ = ["GraphRecord", "Recorder", "StageTiming"]

LOG_KINDS = ("timing", "graphs", "ir", "kernels", "passes")


@dataclass(frozen=True, slots=True)
class StageTiming:
    """Seconds spent in one stage, without the stages nested in it. ``depth`` 0 is a stage of the pipeline."""

    name: str
    seconds: float
    depth: int


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """What was compiled for one graph: ``report`` is the lowering's own (kernels, fusion groups, externs)."""

    name: str
    report: object
    text: str = ""


@dataclass
class Recorder:
    """Collects what the pipeline reports; optionally logs it and writes numbered dump files.

    Arguments: ``log`` kinds to print (``timing``, ``graphs``, ``ir``, ``kernels``, ``passes``), ``dump_dir`` a folder
    for ``NN_<name>.txt`` files, ``stream`` where log lines go (default: standard error). Safe under threads.
    """

    log: frozenset[str] = frozenset()
    dump_dir: Path | None = None
    stream: TextIO | None = None
    stages: list[StageTiming] = field(default_factory=list)
    graphs: list[GraphRecord] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    events: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _open: threading.local = field(default_factory=threading.local, repr=False)
    _files: int = 0

    @contextmanager
    def stage(self, name: str, /) -> Iterator[None]:
        """Time a stage; nested stages are subtracted from the one around them."""
        stack: list[float] = self._open.__dict__.setdefault("stack", [])
        stack.append(0.0)
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            if not getattr(error, "__notes__", None):  # the innermost stage
                error.add_note(f"aotkit: raised in the stage {name!r} of a compile")
            raise
        finally:
            total = time.perf_counter() - begin
            nested = stack.pop()
            if stack:
                stack[-1] += total
            with self._lock:
                self.stages.append(StageTiming(name, total - nested, len(stack)))

    def dump(self, name: str, kind: str, text: Callable[[], str], /) -> None:
        """Print and/or write one result, if its kind is wanted."""
        if self.dump_dir is None and kind not in self.log:
            return
        content = text()
        if self.dump_dir is not None:
            with self._lock:
                number, self._files = self._files, self._files + 1
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
            (self.dump_dir / f"{number:02d}_{safe}.txt").write_text(content)
        if kind in self.log:
            print(f"[aotkit {kind}] {name}\n{content}", file=self.stream or sys.stderr)

    def event(self, name: str, fields: Mapping[str, object], /) -> None:
        """Keep an event; generated wrapper source is also dumped."""
        with self._lock:
            self.events.append((name, fields))
        source = fields.get("source")
        if isinstance(source, str):
            self.dump(name, "graphs", lambda: source)

    def add_graph(self, record: GraphRecord) -> None:
        """Keep the report of one compiled graph."""
        with self._lock:
            self.graphs.append(record)

    def add_fallback(self, reason: str) -> None:
        """Keep the reason why a graph runs eagerly."""
        with self._lock:
            self.fallbacks.append(reason)

    def stage_seconds(self) -> dict[str, float]:
        """Seconds per stage name, summed over graphs, in order of first appearance."""
        totals: dict[str, float] = {}
        with self._lock:
            for timing in self.stages:
                totals[timing.name] = totals.get(timing.name, 0.0) + timing.seconds
        return totals

    def table(self) -> str:
        """The stage table as text."""
        totals = self.stage_seconds()
        width = max([len(n) for n in totals] + [5])
        rows = [f"{name:<{width}}  {seconds * 1e3:10.1f} ms" for name, seconds in totals.items()]
        rows.append(f"{'total':<{width}}  {sum(totals.values()) * 1e3:10.1f} ms")
        return "\n".join(rows)
