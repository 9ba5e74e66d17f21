"""Seeing inside a compile: stage seconds, dumps and log lines.

Every package takes one optional :class:`._observer.Observer`; :class:`Recorder` is the one that users meet.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from .dumps import DumpFolder

__all__ = ["GraphRecord", "Recorder", "Sink", "StageTiming"]

LOG_KINDS = ("timing", "graphs", "ir", "kernels", "passes")

# What `TORCH_LOGS=aotkit` and `logging.basicConfig` show; torch gives handlers to the loggers of modules named there.
_LOG = logging.getLogger("aotkit")


class Sink(Protocol):
    """Who else is shown texts and told events, beside logs and dumps."""

    kinds: frozenset[str]

    def text(self, name: str, kind: str, text: Callable[[], str]) -> None:
        """One dumped text of a kind that is among ``kinds``."""

    def event(self, name: str, fields: Mapping[str, object]) -> None:
        """Something that happened."""


@dataclass(frozen=True, slots=True)
class StageTiming:
    """Seconds spent in one stage, without the stages nested in it. ``depth`` 0 is a stage of the pipeline.

    ``begin``: when it began, as ``time.perf_counter`` tells it. ``whole``: seconds with the nested stages.
    """

    name: str
    seconds: float
    depth: int
    begin: float = 0.0
    whole: float = 0.0


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """What was compiled for one graph: ``report`` is the lowering's own (kernels, fusion groups, externs).

    ``loaded``: it was not compiled now but comes from the cache, and so does the report.
    """

    name: str
    report: object
    text: str = ""
    loaded: bool = False


@dataclass
class Recorder:
    """Collects what the pipeline reports; optionally logs it and writes numbered dump files.

    Arguments: ``log`` kinds to print (``timing``, ``graphs``, ``ir``, ``kernels``, ``passes``), ``dump_dir`` a folder
    that gets a folder for each graph, with numbered files and a page ``index.html``, ``stream`` where log lines go
    (default: standard error). Safe under threads.
    """

    log: frozenset[str] = frozenset()
    dump_dir: str | os.PathLike[str] | None = None
    stream: TextIO | None = None
    stages: list[StageTiming] = field(default_factory=list)
    graphs: list[GraphRecord] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    events: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _open: threading.local = field(default_factory=threading.local, repr=False)
    _folder: DumpFolder | None = field(default=None, repr=False)
    _prefix: str = field(default="", repr=False)
    _sink: Sink | None = field(default=None, repr=False)
    _now: list[str] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self._folder is None and self.dump_dir is not None:
            self._folder = DumpFolder(self.dump_dir)

    def shown_to(self, sink: Sink) -> Recorder:
        """The same recorder, whose results ``sink`` gets, too."""
        view = copy.copy(self)
        view._sink = sink
        return view

    def of_graph(self, name: str, about: Callable[[], Mapping[str, str]] = dict) -> Recorder:
        """The same recorder, for what concerns one graph: its dumps go into a folder of their own, whose page tells
        what it is ``about``."""
        if not self._shows:
            return self
        view = self.part(name)
        if self.dump_dir is not None:
            view._folder = DumpFolder(self.dump_dir, name, about())
        return view

    def part(self, name: str) -> Recorder:
        """The same recorder, for a part of the graph: its ``name`` stands before those of its dumps."""
        if not self._shows:
            return self
        view = copy.copy(self)
        view._prefix = f"{self._prefix}{name}-"
        return view

    @property
    def _shows(self) -> bool:
        """Whether it matters which graph a result belongs to."""
        return self.dump_dir is not None or bool(self.log) or self._sink is not None

    def keep(self, name: str, what: object, /) -> None:
        """Look at a graph, a partition's report or a compiled program while it is at hand; nothing is kept here."""

    def wants(self, kind: str) -> bool:
        """Whether dumps of this kind are printed or written."""
        return self.dump_dir is not None or kind in self.log or self._is_sent(kind)

    def _is_sent(self, kind: str) -> bool:
        return self._sink is not None and kind in self._sink.kinds

    @contextmanager
    def stage(self, name: str, /) -> Iterator[None]:
        """Time a stage; nested stages are subtracted from the one around them."""
        stack: list[float] = self._open.__dict__.setdefault("stack", [])
        stack.append(0.0)
        self._now.append(name)
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
            self._now.remove(name)
            if stack:
                stack[-1] += total
            with self._lock:
                self.stages.append(StageTiming(name, total - nested, len(stack), begin, total))

    def at_work(self) -> str:
        """The stage that runs now, the outermost; empty if none does."""
        return next(iter(self._now), "")

    def dump(self, name: str, kind: str, text: Callable[[], str], /) -> None:
        """Print and/or write one result, if its kind is wanted."""
        if not self.wants(kind):
            return
        content, full = text(), self._prefix + name
        if self._sink is not None and self._is_sent(kind):
            self._sink.text(full, kind, lambda: content)
        if self._folder is not None:
            self._folder.write(full, kind, content)
        if kind in self.log:
            print(f"[aotkit {kind}] {full}\n{content}", file=self.stream or sys.stderr)

    def tell(self, sentence: str) -> None:
        """Print one line, to whoever has anything logged or dumped."""
        if self.log or self.dump_dir is not None:
            print(f"[aotkit] {sentence}", file=self.stream or sys.stderr)

    def event(self, name: str, fields: Mapping[str, object], /) -> None:
        """Keep an event; generated wrapper source is also dumped."""
        with self._lock:
            self.events.append((name, fields))
        if self._sink is not None:
            self._sink.event(name, fields)
        source = fields.get("source")
        if isinstance(source, str):
            self.dump(f"{name}.py", "graphs", lambda: source)

    def add_graph(self, record: GraphRecord) -> None:
        """Keep the report of one compiled graph."""
        with self._lock:
            self.graphs.append(record)
        if _LOG.isEnabledFor(logging.INFO):
            how = "loaded from the cache" if record.loaded else "compiled"
            summary = str(record.report).partition("\n")[0]
            _LOG.info("%s %s%s", record.name, how, f": {summary}" if record.report is not None else "")

    def add_fallback(self, reason: str) -> None:
        """Keep the reason why a graph runs eagerly."""
        with self._lock:
            self.fallbacks.append(reason)
        _LOG.info("a graph runs eagerly: %s", reason)

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
