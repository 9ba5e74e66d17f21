"""Which part of a compile makes a result wrong: parts are left out until it is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

from aotkit_inductor_lower.driver import pass_names

from ..backend import BackendFn, make_backend
from ..driver.user_passes import GraphPasses
from ..environment import read_environment
from ..options import Options

__all__ = ["Culprit", "find_culprit"]

_MOST_REWRITES = 1 << 20
_LEVELS: tuple[Literal["graph", "loop", "kernel"], ...] = ("graph", "loop", "kernel")


@dataclass(frozen=True, slots=True)
class Culprit:
    """The answer of :func:`find_culprit`.

    Attributes:
        where: the part of the compile.
        options: with these the result is right, if some are found.
        rewrite: the number of the rewrite that breaks it, counted over all passes from 1 in each graph, if one does.
        checks: how often something was compiled and checked.
    """

    where: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rewrite: int | None = None
    checks: int = 0

    def __str__(self) -> str:
        text = f"{self.where}, after {self.checks} checks"
        if self.rewrite is not None:
            text += f"; rewrite number {self.rewrite} breaks it"
        settings = ", ".join(f"{name!r}: {value!r}" for name, value in self.options.items())
        return text + (f"; right with options={{{settings}}}" if settings else "")


def find_culprit(
    check: Callable[[BackendFn], bool], options: Options | None = None, passes: GraphPasses | None = None
) -> Culprit:
    """Find what makes ``check`` fail: it compiles with the backend that it gets, and tells whether the result is right.

        find_culprit(lambda backend: torch.allclose(torch.compile(f, backend=backend)(x), f(x)))

    Looked at are ``passes`` of the user's, Dynamo, the capture, each pass over graphs, loops and kernels, and what
    remains: code generation, which interpreted kernels do without (on the CPU), and lowering. Dynamo is reset before
    every check; an exception in ``check`` counts as wrong.
    """
    return _Search(check, options or read_environment().options(), passes or GraphPasses()).run()


class _Search:
    def __init__(self, check: Callable[[BackendFn], bool], options: Options, passes: GraphPasses) -> None:
        self.check, self.options, self.passes = check, options.patch(cache=False), passes
        self.checks = 0

    def run(self) -> Culprit:
        if self.right():
            return self.found("nothing: the result is right")
        for each in fields(self.passes):
            without = replace(self.passes, **{each.name: None})
            if without != self.passes and self.right(without):
                return self.found(f"the given pass {each.name!r}")
        if not self.right(capture=False):
            return self.found("the function itself or Dynamo")
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
        """Whether the result is right with these changes."""
        torch._dynamo.reset()
        self.checks += 1
        backend = make_backend(self.options.patch(**changes), passes=passes or self.passes)
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
