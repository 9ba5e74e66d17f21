"""Runs what a report is about: eagerly, compiled and watched, compiled and measured kernel by kernel."""

from __future__ import annotations

import statistics
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...options import Options
from ..explain import run_once
from ..profile import Profile, compiled_step, milliseconds, on_cuda, profile_of_step
from .machine import Machine, measure_machine
from .watch import Watcher

__all__ = ["Failure", "Findings", "collect"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A compile that raised: the stage if it is known, the message, and the traceback."""

    stage: str
    message: str
    trace: str


@dataclass
class Findings:
    """All that a page is made of. ``eager_ms`` and ``step_ms``: medians; ``missing``: why something is not there."""

    name: str
    watcher: Watcher
    eager_ms: float | None = None
    step_ms: float | None = None
    compile_seconds: float = 0.0
    profile: Profile | None = None
    machine: Machine | None = None
    failure: Failure | None = None
    breaks: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def collect(fn: Callable[..., Any], args: Any, kwargs: Any, options: Options, calls: int) -> Findings:
    """Run it and note what happens. What ``fn`` raises in eager mode is raised; what a compile raises is noted."""
    found = Findings(_name_of(fn), Watcher())
    run_once(fn, args, kwargs)
    found.eager_ms = statistics.median(milliseconds(lambda: run_once(fn, args, kwargs), calls)) if calls else None
    try:
        step = _compile(found, fn, args, kwargs, options)
    except Exception as error:  # noqa: BLE001  # whatever a compile raises is what the page is about
        found.failure = _failure(error)
        return found
    if calls and (on_cuda(fn, args, kwargs) or not found.watcher.programs):
        found.step_ms = statistics.median(milliseconds(step, calls))
        if found.watcher.programs:
            found.missing.append(
                "Kernels of a CUDA device are not timed here; a trace of torch.profiler has their times."
            )
    elif calls:
        found.machine = measure_machine()
        found.profile = profile_of_step(fn, options, args, kwargs, step, calls)
        found.step_ms = found.profile.step_ms
    return found


def _compile(found: Findings, fn: Any, args: Any, kwargs: Any, options: Options) -> Callable[[], None]:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    before = Counter(counters["graph_break"])
    try:
        step = compiled_step(fn, options, found.watcher, args, kwargs)
    finally:
        found.breaks = dict(Counter(counters["graph_break"]) - before)
        found.compile_seconds = sum(found.watcher.stage_seconds().values())
    return step


def _failure(error: Exception) -> Failure:
    """Without what Dynamo puts around an error of a backend, which is in the traceback."""
    inner: BaseException | None = getattr(error, "inner_exception", None) or error
    message, notes = f"{type(inner).__name__}: {inner}", list[str]()
    while inner is not None:
        notes += [note for note in getattr(inner, "__notes__", ()) if note.startswith("aotkit: ")]
        inner = inner.__cause__
    stage = notes[-1].split("'")[1] if notes else ""
    return Failure(stage, message, "".join(traceback.format_exception(error)))


def _name_of(fn: Any) -> str:
    return type(fn).__name__ if isinstance(fn, torch.nn.Module) else getattr(fn, "__name__", type(fn).__name__)
