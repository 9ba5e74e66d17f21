"""Ops that the table of :mod:`..ops.scalar` says in other ops become these, once and for all targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import Compute, Const, DType, Instr
from ..ir.walk import computes, definitions, instructions, used_values, value_types
from ..kernel_ir.nodes import Kernel, Loop, Stmt
from ..kernel_ir.walk import without_values
from ..ops.scalar import EXPANDED, expansion, result_dtype
from .each_kernel import kernel_pass

__all__ = ["PASS", "expand_ops"]


def expand_ops(kernel: Kernel) -> Kernel:
    """The kernel without ops that are bodies of others; the same object if there is none."""
    instrs = instructions(kernel.body)
    if not any(i.op in EXPANDED for i in computes(instrs)):
        return kernel
    expander = _Expander(instrs)
    body = expander.body(kernel.body)
    if expander.numbers:
        body = without_values(body, expander.numbers - used_values(instructions(body)))
    return replace(kernel, body=body)


class _Expander:
    """``numbers``: constants that an expansion took the value of."""

    def __init__(self, instrs: Sequence[Instr]) -> None:
        made = definitions(instrs)
        self.types = value_types(instrs)
        self.constants = {name: i.value for name, i in made.items() if isinstance(i, Const)}
        self.numbers: set[str] = set()
        self.taken = set(made)

    def body(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        found: list[Stmt] = []
        for stmt in body:
            if isinstance(stmt, Loop):
                found.append(replace(stmt, body=self.body(stmt.body)))
            elif isinstance(stmt, Compute) and stmt.op in EXPANDED:
                found += _Writer(self, stmt).instrs
            else:
                found.append(stmt)
        return tuple(found)


class _Writer:
    """The instructions in the place of one op."""

    def __init__(self, expander: _Expander, whole: Compute) -> None:
        self.expander, self.whole = expander, whole
        self.operands = expander.types.get(whole.args[-1], DType.I64)  # of a checked index
        self.instrs: list[Instr] = []
        last = self._write(whole.op, whole.args)
        assert self.instrs and isinstance(self.instrs[-1], Compute) and self.instrs[-1].result == last
        self.instrs[-1] = replace(self.instrs[-1], result=whole.result)

    def __call__(self, op: str, *args: str | float) -> str:
        return self._write(op, tuple(a if isinstance(a, str) else self._constant(a) for a in args))

    def _write(self, op: str, args: tuple[str, ...]) -> str:
        known = self.expander.types
        body = None
        if op in EXPANDED:
            constants = [self.expander.constants.get(a) for a in args]
            body = expansion(op, known.get(args[-1], DType.I64), constants)
            if body is not None:
                self.expander.numbers.update(a for a, c in zip(args, constants, strict=True) if c is not None)
                return body(self, *args)  # type: ignore[no-any-return]
        dtype = result_dtype(op, [known.get(a, DType.I64) for a in args])
        return self._add(Compute(self._name(), op, args, dtype), dtype)

    def _constant(self, value: float) -> str:
        return self._add(Const(self._name(), value, self.operands), self.operands)

    def _add(self, instr: Const | Compute, dtype: DType) -> str:
        self.instrs.append(instr)
        self.expander.types[instr.result] = dtype
        return instr.result

    def _name(self) -> str:
        taken, number = self.expander.taken, len(self.instrs)
        while (name := f"{self.whole.result}_{number}") in taken:
            number += 1
        taken.add(name)
        return name


PASS = kernel_pass(
    "expand-ops",
    expand_ops,
    why="what the table of ops says in other ops is written in these, for every target",
    required=True,
)
