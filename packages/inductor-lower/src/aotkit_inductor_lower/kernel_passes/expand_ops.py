"""Ops that the table of :mod:`..ops.scalar` says in other ops become these, once and for all targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..ir import CheckedIndex, Compute, Const, DType, Instr, Load, Reduce, Store
from ..kernel_ir.nodes import Kernel, Loop, Stmt
from ..kernel_ir.walk import expressions, instructions
from ..ops.scalar import EXPANDED, expansion, result_dtype
from ..passes import Pass, each_kernel

__all__ = ["PASS", "expand_ops"]


def expand_ops(kernel: Kernel) -> Kernel:
    """The kernel without ops that are bodies of others; the same object if there is none."""
    instrs = instructions(kernel.body)
    if not any(isinstance(i, Compute) and i.op in EXPANDED for i in instrs):
        return kernel
    expander = _Expander(instrs)
    body = expander.body(kernel.body)
    if expander.numbers:
        body = _without(body, expander.numbers - _used(replace(kernel, body=body)))
    return replace(kernel, body=body)


class _Expander:
    """``numbers``: constants that an expansion took the value of."""

    def __init__(self, instrs: Iterable[Instr]) -> None:
        self.types: dict[str, DType] = {}
        self.constants: dict[str, float | int | bool] = {}
        self.numbers: set[str] = set()
        for i in instrs:
            if isinstance(i, CheckedIndex):
                self.types[i.result] = DType.I64
            elif not isinstance(i, Store):
                self.types[i.result] = i.dtype
            if isinstance(i, Const):
                self.constants[i.result] = i.value
        self.taken = set(self.types)

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
        self.operands = expander.types[whole.args[-1]]
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
            body = expansion(op, known[args[-1]], constants)
            if body is not None:
                self.expander.numbers.update(a for a, c in zip(args, constants, strict=True) if c is not None)
                return body(self, *args)  # type: ignore[no-any-return]
        dtype = result_dtype(op, [known[a] for a in args])
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


def _used(kernel: Kernel) -> set[str]:
    """The values that something reads."""
    found = {symbol.name for expr in expressions(kernel) for symbol in expr.symbols}
    for i in instructions(kernel.body):
        if isinstance(i, Compute):
            found.update(i.args)
        elif isinstance(i, Reduce | Store | CheckedIndex):
            found.add(i.value)
        if isinstance(i, Load | Store) and i.mask is not None:
            found.add(i.mask)
    return found


def _without(body: tuple[Stmt, ...], names: set[str]) -> tuple[Stmt, ...]:
    """The body without these constants."""
    if not names:
        return body
    kept: list[Stmt] = []
    for stmt in body:
        if isinstance(stmt, Loop):
            kept.append(replace(stmt, body=_without(stmt.body, names)))
        elif not (isinstance(stmt, Const) and stmt.result in names):
            kept.append(stmt)
    return tuple(kept)


PASS = Pass(
    "expand-ops",
    each_kernel(expand_ops),
    why="what the table of ops says in other ops is written in these, for every target",
    required=True,
)
