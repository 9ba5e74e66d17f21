"""Which part of a compile makes a result wrong: parts are left out until it is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from aotkit_inductor_lower.driver import pass_names

from ..backend import BackendFn, make_backend
from ..driver.user_passes import GraphPasses
from ..environment import read_environment
from ..options import Options
from ..recorder import Recorder
from .agreement import Comparison
from .minify import minify
from .repro import SeenGraph, UnwritableGraph, count_operators, seeing, write_repro

__all__ = ["Culprit", "find_culprit"]

_MOST_REWRITES = 1 << 20
_NOTHING = "nothing: the result is right"
_NOT_OURS = "the function itself or Dynamo"
_LEVELS: tuple[Literal["graph", "loop", "kernel"], ...] = ("graph", "loop", "kernel")


@dataclass(frozen=True, slots=True)
class Culprit:
    """The answer of :func:`find_culprit`.

    Attributes:
        where: the part of the compile.
        options: with these the result is right, if some are found.
        rewrite: the number of the rewrite that breaks it, counted over all passes from 1 in each graph, if one does.
        checks: how often something was compiled and checked.
        repro: the script that was written, or why there is none; empty if none was asked for.
    """

    where: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rewrite: int | None = None
    checks: int = 0
    repro: str = ""

    def __str__(self) -> str:
        text = f"{self.where}, after {self.checks} check{'' if self.checks == 1 else 's'}"
        if self.rewrite is not None:
            text += f"; rewrite number {self.rewrite} breaks it"
        settings = ", ".join(f"{name!r}: {value!r}" for name, value in self.options.items())
        text += f"; right with options={{{settings}}}" if settings else ""
        return text + (f"; {self.repro}" if self.repro else "")


def find_culprit(
    subject: Callable[..., Any],
    *args: Any,
    options: Options | None = None,
    passes: GraphPasses | None = None,
    repro: str | Path | None = None,
    **kwargs: Any,
) -> Culprit:
    """Find what makes the compiled ``subject``, a function or a module, give wrong results for these arguments.

        find_culprit(model, batch)

    Results, gradients and arguments are compared as :func:`aotkit.compare` does: with float64, and with eager's own
    error, so rounding is not blamed. A ``subject`` without arguments is a check of your own instead: it compiles with
    the backend that it gets, and tells whether the result is right.

        find_culprit(lambda backend: train(torch.compile(model, backend=backend)) < 0.1)

    Looked at are ``passes`` of the user's, Dynamo, the capture, each pass over graphs, loops and kernels, and what
    remains: code generation, which interpreted kernels do without (on the CPU), and lowering. Dynamo is reset before
    every check. An exception counts as wrong, and so does an internal error of ours, after which the graph runs
    eagerly; a graph that is refused does not. ``repro`` is a file, ``repro.py``, that becomes a script with the
    graph that is wrong, made as small as it can be, its inputs beside it; it compiles the graph stage by stage.
    """
    if not callable(subject):
        raise TypeError(f"find_culprit takes a function or a module; {subject!r} can't be called")
    chosen = options or read_environment().options()
    check = subject
    if args or kwargs:
        comparison = Comparison(subject, args, kwargs)
        chosen = chosen.patch(**comparison.needs)

        def check(backend: BackendFn) -> bool:
            return comparison.of(backend).right

    search = _Search(check, chosen, passes or GraphPasses())
    culprit = search.run()
    wrong = culprit.where not in (_NOTHING, _NOT_OURS)
    return replace(culprit, repro=search.write(culprit, Path(repro))) if repro is not None and wrong else culprit


class _Search:
    def __init__(self, check: Callable[[BackendFn], bool], options: Options, passes: GraphPasses) -> None:
        self.check, self.options, self.passes = check, options.patch(cache=False), passes
        self.checks = 0

    def run(self) -> Culprit:
        if self.right():
            return self.found(_NOTHING)
        for each in fields(self.passes):
            without = replace(self.passes, **{each.name: None})
            if without != self.passes and self.right(without):
                return self.found(f"the given pass {each.name!r}")
        if not self.right(capture=False):
            return self.found(_NOT_OURS)
        if not self.right(lowering="none"):
            return self.found("capture, partitioning or the code around the graph", capture=False)
        for level in _LEVELS:
            for name in pass_names(level):
                disable = self.options.disable | {name}
                if self.right(disable=disable):
                    return self.found(f"the {level} pass {name!r}", self.first_rewrite(), disable=sorted(disable))
        if self.right(fuel=0):
            alone = (level for level in _LEVELS if self.right(disable=frozenset(pass_names(level))))
            return self.found(f"several {next(alone, 'graph, loop and kernel')} passes", self.first_rewrite(), fuel=0)
        if self.right(processor="interpreter"):
            return self.found("code generation", processor="interpreter")
        return self.found("lowering, or code generation for a device", lowering="none")

    def right(self, passes: GraphPasses | None = None, **changes: Any) -> bool:
        """Whether the result is right with these changes, and no compile of it fails."""
        torch._dynamo.reset()
        self.checks += 1
        recorder = Recorder()
        backend = make_backend(self.options.patch(**changes), recorder, passes=passes or self.passes)
        return self.passed(backend) and not _bugs(recorder)

    def passed(self, backend: BackendFn) -> bool:
        """What the check says."""
        try:
            return bool(self.check(backend))
        except Exception:  # noqa: BLE001  # a crash is what somebody may be looking for
            return False

    def first_rewrite(self) -> int | None:
        """The least fuel with which the result is wrong; None if it is wrong without any."""
        if not self.right(fuel=0):
            return None
        low, high = 0, 1
        while self.right(fuel=high):
            low, high = high, 2 * high
            if high > _MOST_REWRITES:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.right(fuel=middle) else (low, middle)
        return high

    def found(self, where: str, rewrite: int | None = None, **options: Any) -> Culprit:
        torch._dynamo.reset()
        return Culprit(where, options, rewrite, self.checks)

    def write(self, culprit: Culprit, path: Path) -> str:
        """Write a script for the first graph that is wrong by itself; returns what is to be said of it."""
        recorder, seen = Recorder(), list[SeenGraph]()
        backend = make_backend(self.options, recorder, passes=self.passes)
        torch._dynamo.reset()
        self.passed(seeing(backend, seen))
        wrong = {f.name: getattr(self.options, f.name) for f in fields(self.options)}
        wrong = {name: value for name, value in wrong.items() if value != getattr(Options(), name)}
        for each in seen:
            if each.inputs is None or (how := _outcome(each, backend, recorder)) == "right":
                continue
            small = minify(each, lambda candidate: _outcome(candidate, backend, recorder))
            torch._dynamo.reset()
            title = f"{culprit}; {'a wrong result' if how == 'wrong' else f'{how} is raised'}"
            try:
                write_repro(path, small, title, wrong, {**wrong, **culprit.options})
            except UnwritableGraph as reason:
                return f"the graph that is wrong can't be written: {reason}"
            return f"{path} shows it, with {count_operators(small)} of {count_operators(each)} operators"
        return "no graph is wrong by itself, so there is no script"


def _outcome(graph: SeenGraph, backend: BackendFn, recorder: Recorder) -> str:
    """``right``, ``wrong``, or the name of what is raised, also where the graph runs eagerly after it."""
    assert graph.inputs is not None
    before = len(_bugs(recorder))
    try:
        right = Comparison(graph.graph, graph.inputs, {}).of(backend).right
    except Exception as error:  # noqa: BLE001  # a crash is what somebody may be looking for
        return type(getattr(error, "inner_exception", None) or error).__name__
    bugs = _bugs(recorder)[before:]
    return bugs[0] if bugs else "right" if right else "wrong"


def _bugs(recorder: Recorder) -> list[str]:
    """The names of the internal errors after which graphs run eagerly."""
    return [str(fields["error"]) for name, fields in recorder.events if name == "internal error"]
