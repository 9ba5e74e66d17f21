"""A graph that was compiled in parts, as data: what no launch plan can hold, around the launch plans of its parts.

Note [The outer plan]
    The calls that stay (higher-order operators, operators whose results have sizes that depend on data, arithmetic on
    sizes) and the calls of compiled parts are a straight line of steps. Each step gives one value, which has a number:
    values of the inputs come first. Branches and loop bodies are arguments of higher-order operators by number. Each
    has an outer plan of its own, which runs it as it was recorded, and mostly a compiled part, which runs it on tensors
    that lie in memory as they did when it was compiled. A body refers to bodies before it only, so nothing is circular.

    A text is read by the types of the fields, and then looked at as a whole (:func:`check_parts`): whatever the reader
    accepts refers to values, parts, bodies and constants that are there. What is called is found by name in closed
    tables (:mod:`.functions`) when a program is bound.
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .._records import Format
from .._user_kernels import KernelName
from .codec import compiled_from_raw, compiled_to_raw
from .layout import Layout
from .records import CompiledProgram

__all__ = [
    "Argument",
    "Body",
    "BodyOf",
    "CallFunction",
    "CallPart",
    "Complex",
    "ConstantOf",
    "KernelConstants",
    "KernelOf",
    "Named",
    "OuterPlan",
    "Pairs",
    "Part",
    "PartitionedProgram",
    "Plain",
    "Several",
    "Step",
    "ValueOf",
]
__all__ += ["Program", "check_parts", "parts_from_raw", "parts_to_raw"]


class Argument:
    """What a step is given."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ValueOf(Argument):
    """An input or the result of a step, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class BodyOf(Argument):
    """A branch or loop body, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class ConstantOf(Argument):
    """A tensor that the graph holds."""

    name: str


@dataclass(frozen=True, slots=True)
class Plain(Argument):
    """A number, a text, or nothing."""

    value: bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Complex(Argument):
    """A complex number."""

    real: float
    imag: float


@dataclass(frozen=True, slots=True)
class Named(Argument):
    """What torch has a name for: ``("dtype", "float32")``, ``("operator", "aten.sin.default")``."""

    kind: Literal["dtype", "layout", "memory_format", "device", "operator"]
    name: str


@dataclass(frozen=True, slots=True)
class Several(Argument):
    """A tuple or a list; a slice has three items."""

    kind: Literal["tuple", "list", "slice"]
    items: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Pairs(Argument):
    """A dict whose keys are words."""

    items: tuple[tuple[str, Argument], ...]


@dataclass(frozen=True, slots=True)
class KernelOf(Argument):
    """The place, in torch's table, of a Triton kernel of the user's own; see Note [Triton kernels of a user's own]."""

    kernel: KernelName


@dataclass(frozen=True, slots=True)
class KernelConstants(Argument):
    """The place, in torch's table, of what a Triton kernel is given beside tensors and sizes: the JSON ``text``."""

    text: str


class Step:
    """One step of an outer plan, with one result."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class CallFunction(Step):
    """``target(*args, **kwargs)``: an operator, a higher-order operator, or one of Python's functions, by name."""

    target: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()


@dataclass(frozen=True, slots=True)
class CallPart(Step):
    """A compiled part is called; the result is its list of results."""

    part: int
    args: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class OuterPlan:
    """So many ``inputs``, then the steps; the ``result`` is a tuple or a list of values, or one value."""

    inputs: int
    steps: tuple[Step, ...]
    result: Argument


@dataclass(frozen=True, slots=True)
class Part:
    """A compiled stretch of a graph, or a compiled body.

    ``constants``: its own name of each tensor that it holds, and the name in the whole. ``layouts``: how inputs have to
    lie in memory, by position, where that is not sure.
    """

    program: CompiledProgram | PartitionedProgram
    constants: tuple[tuple[str, str], ...] = ()
    layouts: tuple[tuple[int, Layout], ...] = ()


@dataclass(frozen=True, slots=True)
class Body:
    """A branch or loop body: as it was ``recorded``, and the number of its compiled ``part``, if it has one."""

    recorded: OuterPlan
    part: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionedProgram:
    """A graph compiled in parts; see Note [The outer plan].

    ``device``: the present one during a call, as torch prints it. ``constants``: names of the tensors it holds.
    """

    name: str
    device: str
    plan: OuterPlan
    parts: tuple[Part, ...] = ()
    bodies: tuple[Body, ...] = ()
    constants: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _FORMAT.to_text(self)


Program = CompiledProgram | PartitionedProgram


def parts_to_raw(program: PartitionedProgram) -> dict[str, Any]:
    """A program in parts as JSON values."""
    return _FORMAT.to_raw(program)


def parts_from_raw(raw: Any) -> PartitionedProgram:
    """The inverse of :func:`parts_to_raw`. Raises ``ValueError`` for another format, and for a program that does not
    hold together."""
    program = _FORMAT.from_raw(raw)
    check_parts(program)
    return program


def check_parts(program: PartitionedProgram) -> None:
    """Raise ``ValueError`` where the program refers to what is not there."""
    _Check(program).whole()


class _DtypeForm:
    def to_raw(self, value: torch.dtype) -> Any:
        return {"dtype": str(value).removeprefix("torch.")}

    def from_raw(self, raw: Any) -> torch.dtype:
        name = raw.get("dtype") if isinstance(raw, dict) else None
        found = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{name!r} is no type of elements")
        return found


class _ProgramForm:
    def to_raw(self, value: Program) -> Any:
        return compiled_to_raw(value) if isinstance(value, CompiledProgram) else parts_to_raw(value)

    def from_raw(self, raw: Any) -> Program:
        in_parts = isinstance(raw, dict) and isinstance(raw.get("format"), str)
        return parts_from_raw(raw) if in_parts else compiled_from_raw(raw)


_FORMAT = Format(
    PartitionedProgram,
    "aotkit program in parts",
    2,
    members={
        Argument: (ValueOf, BodyOf, ConstantOf, Plain, Complex, Named, Several, Pairs, KernelOf, KernelConstants),
        Step: (CallFunction, CallPart),
    },
    own={torch.dtype: _DtypeForm(), CompiledProgram | PartitionedProgram: _ProgramForm()},
)


class _Check:
    def __init__(self, program: PartitionedProgram) -> None:
        self.program = program
        self.names = frozenset(program.constants)
        self.counts = [_count_inputs(part.program) for part in program.parts]

    def whole(self) -> None:
        program = self.program
        for number, part in enumerate(program.parts):
            self._that(all(name in self.names for _, name in part.constants), f"part {number} names another constant")
            inside = all(0 <= position < self.counts[number] for position, _ in part.layouts)
            self._that(inside, f"part {number} has not as many inputs")
        for number, body in enumerate(program.bodies):
            self._plan(body.recorded, number, f"body {number}")
            if body.part is not None:
                self._call(body.part, body.recorded.inputs, f"body {number}")
        self._plan(program.plan, len(program.bodies), "the outer plan")

    def _plan(self, plan: OuterPlan, bodies: int, where: str) -> None:
        self._that(plan.inputs >= 0, f"{where} has {plan.inputs} inputs")
        for position, step in enumerate(plan.steps):
            known = plan.inputs + position
            here = f"step {position} of {where}"
            for argument in step.args:  # type: ignore[attr-defined]
                self._argument(argument, known, bodies, here)
            if isinstance(step, CallPart):
                self._call(step.part, len(step.args), here)
            elif isinstance(step, CallFunction):
                for name, argument in step.kwargs:
                    self._that(name.isidentifier() and not keyword.iskeyword(name), f"{here} has the keyword {name!r}")
                    self._argument(argument, known, bodies, here)
                names = [name for name, _ in step.kwargs]
                self._that(len(set(names)) == len(names), f"{here} has a keyword twice")
        self._argument(plan.result, plan.inputs + len(plan.steps), 0, f"the result of {where}")

    def _call(self, part: int, arguments: int, where: str) -> None:
        self._that(0 <= part < len(self.counts), f"{where} calls part {part}, which is not there")
        self._that(self.counts[part] == arguments, f"{where} has {arguments} arguments for part {part}")

    def _argument(self, argument: Argument, values: int, bodies: int, where: str) -> None:
        if isinstance(argument, ValueOf):
            self._that(0 <= argument.number < values, f"{where} takes value {argument.number} before it is there")
        elif isinstance(argument, BodyOf):
            self._that(0 <= argument.number < bodies, f"{where} takes body {argument.number}, which is not there")
        elif isinstance(argument, ConstantOf):
            self._that(argument.name in self.names, f"{where} takes another constant")
        elif isinstance(argument, Several):
            self._that(argument.kind != "slice" or len(argument.items) == 3, f"{where} has a slice of other than three")
            for item in argument.items:
                self._argument(item, values, bodies, where)
        elif isinstance(argument, Pairs):
            for _, item in argument.items:
                self._argument(item, values, bodies, where)

    def _that(self, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"the program in parts {self.program.name} does not hold together: {what}")


def _count_inputs(program: Program) -> int:
    return len(program.plan.inputs) if isinstance(program, CompiledProgram) else program.plan.inputs
