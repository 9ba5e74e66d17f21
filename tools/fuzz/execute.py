"""One program through eager and through aotkit, and the outcome."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit import Options, Recorder, aot_function
from aotkit.driver.context import CompileContext, Stages
from aotkit.driver.run import compile_and_bind
from aotkit.driver.stages import own_stages

from .compare import RECOMPUTED, Run, differences, observe
from .program import Program
from .refusals import refusal
from .stability import is_unstable, rounds_as_well
from .tally import FAILURES

__all__ = ["Outcome", "check", "shows_a_later_write"]

SHIFTS = (0.0, 0.37)  # the compiled program is called once with each, so that it cannot depend on values
# In-place operations that change nothing (squeeze_() without a dimension of 1) leave no trace in a captured graph.
_WITHOUT_EFFECT = "is being used in an in-place operation"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one program.

    ``kind``: equal, refused (typed, with its reason), mismatch, crash (an error that is no refusal), eager raises (and
    so does the compiled program), frontend (Dynamo departs from eager in the same way without aotkit),
    unstable (eager's own results move as far with its rounding; generated code only), unseen write (the caller wrote
    behind autograd's back, and eager's gradient is of what it wrote).
    """

    kind: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether this has to be looked at."""
        return self.kind in FAILURES

    @property
    def family(self) -> str:
        """The outcome without the numbers in it, to count alike ones and to shrink towards the same one."""
        return f"{self.kind}: {_family(self.detail)}"


def check(program: Program, *, lowering: str = "none", verify: bool = False) -> Outcome:
    """Compile and run ``program`` and compare everything that :mod:`.compare` knows with eager.

    ``lowering``: ``none`` calls the captured graphs with ATen, ``kernels`` generates code. ``verify``: the product of
    each stage is serialized and read back.
    """
    mode: Any = nullcontext() if program.training else torch.no_grad()
    with mode:
        expected = [observe(program, program.function(), shift) for shift in SHIFTS]
        try:
            call = _ENTRIES[program.entry](program, lowering, verify)
            runs = [observe(program, call, shift) for shift in SHIFTS]
        except Exception as error:  # noqa: BLE001 - sorted by what it is
            runs = [Run(error=error)]
        if program.entry == "dynamo" and counters["stats"]["unique_graphs"] > 1:
            # An intermediate may leave the first graph as a lone view, which owns its memory (docs/limits.md).
            for eager in expected:
                eager.facts = {name: fact for name, fact in eager.facts.items() if not name.endswith("is a view")}
        for eager, run, shift in zip(expected, runs, SHIFTS, strict=False):
            outcome = _outcome(eager, run)
            if outcome.kind == "mismatch" and shows_a_later_write(program, eager, run, shift):
                outcome = Outcome("unseen write")
            if outcome.kind == "mismatch" and lowering == "kernels" and is_unstable(program, eager, run, shift):
                return Outcome("unstable")
            if outcome.kind == "mismatch" and rounds_as_well(program, eager, run, shift):
                outcome = Outcome("equal")
            if outcome.failed and program.entry == "dynamo" and _dynamo_alone(program, eager, shift) == outcome.family:
                return Outcome("frontend", outcome.detail)
            if outcome.kind != "equal":
                return outcome
    return Outcome("equal")


def shows_a_later_write(program: Program, eager: Run, run: Run, shift: float) -> bool:
    """Whether the program uses ``.data`` of a tensor, and only eager's gradients are of what was written to it later.

    Autograd does not see that write, so that eager's gradients are not those of the values that the program computed
    with. Those of the compiled program must be eager's where the caller writes nothing.
    """
    if program.afterwards is None or ".data" not in program.source():
        return False
    if any(not sentence.partition(": ")[0].endswith(" gradient") for sentence in differences(eager, run)):
        return False
    quiet = observe(replace(program, afterwards=None), program.function(), shift)
    quiet.facts = {name: fact for name, fact in quiet.facts.items() if name.endswith(" gradient")}
    return not differences(quiet, run)


def _dynamo_alone(program: Program, eager: Run, shift: float) -> str:
    """The family of the outcome with a backend that runs Dynamo's graphs as they are."""
    torch._dynamo.reset()
    call = torch.compile(program.function(), backend="eager", dynamic=program.dynamic)
    try:
        run = observe(program, call, shift)
    except Exception as error:  # noqa: BLE001 - sorted by what it is
        run = Run(error=error)
    return _outcome(eager, run).family


def _outcome(eager: Run, run: Run) -> Outcome:
    if run.error is not None:
        refused = refusal(run.error)
        if eager.error is not None:
            return Outcome("eager raises", f"{type(eager.error).__name__}: {eager.error}")
        if refused is not None and eager.gradients_raise:
            return Outcome("eager raises", "in the backward")
        if refused is not None:
            return Outcome("refused", refused)
        return Outcome("crash", f"{type(run.error).__name__}: {(str(run.error).splitlines() or [''])[0]}")
    if eager.error is not None and _WITHOUT_EFFECT in str(eager.error):
        return Outcome("eager raises", "at an operation without effect")
    if eager.error is not None:
        return Outcome("mismatch", f"only eager raises {eager.error}")
    found = differences(eager, run)
    if found == [RECOMPUTED]:
        return Outcome("refused", RECOMPUTED)
    if found and eager.unseen and all(sentence.partition(": ")[0].endswith(" gradient") for sentence in found):
        return Outcome("unseen write")
    return Outcome("mismatch", "; ".join(found[:3])) if found else Outcome("equal")


# --- what compiles a program ------------------------------------------------------------------------------------


def _of_graph(program: Program, lowering: str, verify: bool) -> Callable[..., Any]:
    """A compile of an FX graph, as Dynamo hands it over; Dynamo takes most of the time, so not here."""
    with torch.enable_grad():
        named = program.make()
    examples = [named[name] for name in program.inputs]
    mode = FakeTensorMode(shape_env=ShapeEnv() if program.dynamic else None)
    fakes: dict[int, Any] = {}  # one object twice stays one object
    for tensor in examples:
        fakes.setdefault(id(tensor), mode.from_tensor(tensor, static_shapes=not program.dynamic))
    options = Options(lowering=lowering, fallback="error", cache=False, verify=verify)  # type: ignore[arg-type]
    context = CompileContext(options, Recorder(), _own_stages(lowering), "fuzz")
    return compile_and_bind(program.graph(), [fakes[id(t)] for t in examples], examples, context)


@functools.cache
def _own_stages(lowering: str) -> Stages:
    stages = own_stages()
    return stages if lowering == "kernels" else replace(stages, decompositions={})


def _of_function(program: Program, lowering: str, verify: bool) -> Callable[..., Any]:
    """``aot_function`` of the Python text with compilers that run the graphs as they are."""
    if lowering == "kernels":
        return _of_graph(program, lowering, verify)
    return aot_function(program.function(), _pass_through, dynamic=program.dynamic)


def _pass_through(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    return graph


def _through_dynamo(program: Program, lowering: str, verify: bool) -> Callable[..., Any]:
    torch._dynamo.reset()
    counters.clear()
    options: Any = {"lowering": lowering, "fallback": "error", "cache": False, "verify": verify}
    return torch.compile(program.function(), backend="aotkit", options=options, dynamic=program.dynamic)


_ENTRIES = {"graph": _of_graph, "function": _of_function, "dynamo": _through_dynamo}


def _family(detail: str) -> str:
    text = detail.partition("; ")[0].partition(" (at ")[0]
    text = re.sub(r": .*", "", text) if " in eager, " in text else text
    text = re.sub(r"\b[alm]\d+\b", "input", text)
    text = re.sub(r"written to by \w+", "written to by an operation", text)
    return re.sub(r"\bs?\d+(, s?\d+)*", "#", text)[:160]
