"""One program through eager and through aotkit, and the outcome; smaller programs with the same outcome."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit import CompileError, Options, Recorder
from aotkit.backend import REFUSALS, aotkit
from aotkit.pipeline import CompileContext, compile_flat, own_stages

from .compare import RECOMPUTED, Run, differences, observe
from .program import Program

__all__ = ["Outcome", "check", "shrink"]


# In-place operations that change nothing (squeeze_() without a dimension of 1) leave no trace in a captured graph.
_WITHOUT_EFFECT = "is being used in an in-place operation"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one program in one mode.

    ``kind``: equal, refused (typed, with its reason), mismatch, crash (an error that is no refusal), eager raises (and
    so does the compiled program).
    """

    kind: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether this has to be looked at."""
        return self.kind in ("mismatch", "crash")

    @property
    def family(self) -> str:
        """The outcome without the numbers in it, to count alike ones and to shrink towards the same one."""
        return f"{self.kind}: {_family(self.detail)}"


def check(program: Program, *, lowering: str, training: bool, dynamo: bool = False) -> Outcome:
    """Compile and run ``program`` and compare everything that :mod:`.compare` knows with eager."""
    mode: Any = nullcontext() if training else torch.no_grad()
    with mode:
        eager = observe(program, program.function())
        try:
            call = _through_dynamo(program, lowering) if dynamo else _compiled(program, lowering)
            runs = [observe(program, call) for _ in range(2)]
        except Exception as error:  # noqa: BLE001 - sorted by what it is
            runs = [Run(error=error)]
    for run in runs:
        outcome = _outcome(eager, run)
        if outcome.kind != "equal":
            return outcome
    return Outcome("equal")


def _outcome(eager: Run, run: Run) -> Outcome:
    if run.error is not None:
        refusal = _refusal(run.error)
        if eager.error is not None:
            return Outcome("eager raises")
        if refusal is not None:
            return Outcome("refused", refusal)
        return Outcome("crash", f"{type(run.error).__name__}: {(str(run.error).splitlines() or [''])[0]}")
    if eager.error is not None and _WITHOUT_EFFECT in str(eager.error):
        return Outcome("eager raises", "at an operation without effect")
    if eager.error is not None:
        return Outcome("mismatch", f"only eager raises {eager.error}")
    found = differences(eager, run)
    if found == [RECOMPUTED]:
        return Outcome("refused", RECOMPUTED)
    return Outcome("mismatch", "; ".join(found[:3])) if found else Outcome("equal")


def _refusal(error: BaseException) -> str | None:
    """The sentence of a typed refusal, wherever the frontend wrapped it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, REFUSALS):
            return str(seen)
        seen = seen.__cause__ or getattr(seen, "inner_exception", None)
    return str(error) if isinstance(error, CompileError) else None


def _compiled(program: Program, lowering: str) -> Callable[..., Any]:
    """The backend's own entry over an FX graph: the frontend left out, which takes most of the time."""
    with torch.enable_grad():
        named = program.make()
    examples = [named[name] for name in program.inputs]
    options = Options(lowering=lowering, fallback="error", cache=False, verify=True)  # type: ignore[arg-type]
    if not program.dynamic:
        return aotkit(program.graph(), examples, options=_keys(options))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes: dict[int, Any] = {}  # one object twice stays one object
    for tensor in examples:
        fakes.setdefault(id(tensor), mode.from_tensor(tensor, static_shapes=False))
    context = CompileContext(options, Recorder(), "fuzz")
    return compile_flat(program.graph(), [fakes[id(t)] for t in examples], examples, context, own_stages())


def _keys(options: Options) -> dict[str, Any]:
    return {key: getattr(options, key) for key in ("lowering", "fallback", "cache", "verify")}


def _through_dynamo(program: Program, lowering: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    options: Any = {"lowering": lowering, "fallback": "error", "cache": False, "verify": True}
    return torch.compile(program.function(), backend="aotkit", options=options, dynamic=program.dynamic)


def _family(detail: str) -> str:
    text = detail.partition("; ")[0].partition(" (at ")[0]
    text = re.sub(r": .*", "", text) if " in eager, " in text else text
    text = re.sub(r"\b[alm]\d+\b", "input", text)
    return re.sub(r"\d+(, \d+)*", "#", text)[:160]


# --- smaller programs -------------------------------------------------------------------------------------------


def shrink(program: Program, failing: Callable[[Program], bool], tries: int = 150) -> Program:
    """A smaller program for which ``failing`` still holds, by leaving out one thing after another."""
    progress = True
    while progress and tries > 0:
        progress = False
        for smaller in _smaller(program):
            tries -= 1
            if tries <= 0:
                break
            if _runs(smaller) and failing(smaller):
                program, progress = smaller, True
                break
    return program


def _runs(program: Program) -> bool:
    """Whether names resolve: a statement may have been left out that another one needs."""
    try:
        observe(program, program.function())
        program.graph()
    except (NameError, KeyError, IndexError, SyntaxError, RuntimeError, TypeError):
        return False
    return True


def _smaller(program: Program) -> Iterator[Program]:
    for index in range(len(program.outputs)):
        yield replace(
            program, outputs=_without(program.outputs, index), ignored=tuple(i for i in program.ignored if i != index)
        )
    if program.afterwards is not None:
        yield replace(program, afterwards=None)
    if program.ignored:
        yield replace(program, ignored=())
    for index in reversed(range(len(program.body))):
        yield replace(program, body=_without(program.body, index))
        name, assigned, expression = program.body[index].partition(" = ")
        if assigned and name.isidentifier():  # leave the operation out, use one of its operands instead
            for operand in dict.fromkeys(re.findall(r"\b[av]\d+\b", expression)):
                body = tuple(re.sub(rf"\b{name}\b", operand, s) for s in _without(program.body, index))
                yield replace(
                    program, body=body, outputs=tuple(re.sub(rf"\b{name}\b", operand, o) for o in program.outputs)
                )
        if program.body[index].startswith("with "):
            inner = program.body[index].splitlines()[1:]
            plain = tuple(line.strip() for line in inner)
            yield replace(program, body=(*program.body[:index], *plain, *program.body[index + 1 :]))
            for number in range(len(inner) if len(inner) > 1 else 0):
                block = "\n".join(["with torch.no_grad():", *_without(tuple(inner), number)])
                yield replace(program, body=(*program.body[:index], block, *program.body[index + 1 :]))
    if program.dynamic:
        yield replace(program, dynamic=False)
    for index in range(len(program.inputs)):
        yield replace(program, inputs=_without(program.inputs, index))
    for index in range(len(program.setup)):
        yield replace(program, setup=_without(program.setup, index))
        for dropped in (".requires_grad_()", ".detach()", ".clone()", "[..., ::2]", ".t()", "[1:]"):
            if dropped in program.setup[index]:
                line = program.setup[index].replace(dropped, "")
                yield replace(program, setup=(*program.setup[:index], line, *program.setup[index + 1 :]))


def _without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return items[:index] + items[index + 1 :]
