"""A compiled graph: as data, and as what is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .ir import Program
from .launch_plan import CompiledProgram
from .passes import Decision
from .report import LoweringReport
from .runtime import BoundProgram
from .runtime.input_checks import input_check

__all__ = ["Compiled", "CompiledGraph", "Scheduled"]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A graph as loop IR, fused and in order, before there is code of it: :func:`.generate_program` makes that.

    ``program`` and ``constants`` print and read back; ``device`` is the one that the kernels are for, as torch prints
    it; ``fuel``: how many optional rewrites may still be made, ``None`` for any number.
    """

    program: Program
    constants: Mapping[str, torch.Tensor]
    report: LoweringReport
    records: tuple[Decision, ...]
    device: str
    fuel: int | None = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled graph as data: :func:`.bind_program` makes a callable of ``program`` and ``constants``.

    ``scheduled`` is the loop IR that the program was generated from, ``records`` every fusion decision.
    """

    program: CompiledProgram
    constants: Mapping[str, torch.Tensor]
    report: LoweringReport
    scheduled: Program
    records: tuple[Decision, ...]


class CompiledGraph:
    """A compiled graph in the boxed convention: takes one list, empties it, returns a list.

    ``checked``: a call raises :class:`~.errors.InputMismatchError` for tensors that it was not compiled for.

    ``compiled`` is the whole result as data, which with the tensors of ``constants`` can be bound again
    (:func:`.bind_program`); ``program`` is the scheduled loop IR, ``records`` every fusion decision.
    """

    _boxed_call = True

    def __init__(
        self,
        bound: BoundProgram,
        constants: Mapping[str, torch.Tensor],
        program: Program,
        records: Sequence[Decision],
        report: LoweringReport,
        checked: bool = False,
    ) -> None:
        self.compiled: CompiledProgram = bound.compiled
        self.constants = constants
        self.program = program
        self.records = tuple(records)
        self._bound = bound
        self._check = input_check(bound.compiled) if checked else None
        self._report = report

    def __call__(self, args: list[Any]) -> list[Any]:
        if self._check is not None:
            self._check(args)
        return self._bound(args)

    def report(self) -> LoweringReport:
        """Kernels, fusion groups, ATen calls with reasons; ``str()`` of it is readable."""
        return self._report
