"""What a body is for a part of its iterations: conditions on indices that always hold there, or never, are gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..ir import CheckedIndex, Compute, Const, DType, Index, Instr, Load, Reduce, Store
from ..ir.walk import operands, rename, substitute
from ..symbolic import Expr, Symbol, to_expr
from .bounds import bounds

__all__ = ["moved", "within"]


def within(body: Iterable[Instr], places: Mapping[Symbol, tuple[int, int]]) -> tuple[Instr, ...]:
    """``body`` where each of these symbols lies between two numbers, both included: the same values with fewer masks.
    What nothing uses any more is left out."""
    low = {symbol: to_expr(symbol) + first for symbol, (first, _) in places.items()}
    upper = {symbol: last - first for symbol, (first, last) in places.items()}
    numbers: dict[str, Expr] = {}
    known: dict[str, bool] = {}
    same: dict[str, str] = {}
    made: list[Instr] = []
    for instr in body:
        instr = rename(instr, same) if same else instr
        if isinstance(instr, Index):
            numbers[instr.result] = instr.expr.substitute(low)
        elif isinstance(instr, Const) and isinstance(instr.value, bool):
            known[instr.result] = instr.value
        elif isinstance(instr, Const) and isinstance(instr.value, int):
            numbers[instr.result] = to_expr(instr.value)
        elif isinstance(instr, Load) and instr.mask in known:
            instr = _certain(instr, known[instr.mask or ""])
        elif isinstance(instr, Store) and instr.mask is not None and known.get(instr.mask):
            instr = replace(instr, mask=None)
        elif isinstance(instr, Compute):
            holds = _holds(instr, numbers, known, upper)
            kept = _operand(instr, known)
            if holds is not None:
                known[instr.result] = holds
                instr = Const(instr.result, holds, DType.BOOL)
            elif kept is not None:
                same[instr.result] = kept
                continue
        made.append(instr)
    return _used(made)


def moved(body: Iterable[Instr], symbol: Symbol, by: int) -> tuple[Instr, ...]:
    """``body`` so many iterations of a loop further."""
    return tuple(substitute(instr, {symbol: to_expr(symbol) + by}) for instr in body) if by else tuple(body)


def _certain(load: Load, reads: bool) -> Instr:
    return replace(load, mask=None, other=0) if reads else Const(load.result, load.other, load.dtype)


def _holds(
    instr: Compute, numbers: Mapping[str, Expr], known: Mapping[str, bool], upper: Mapping[Symbol, int]
) -> bool | None:
    """Whether a condition holds, if that is known."""
    if instr.op in ("lt", "ge") and all(arg in numbers for arg in instr.args):
        first, second = (numbers[arg] for arg in instr.args)
        low, high = bounds(first - second, upper)
        if high < 0 or low >= 0:
            return (high < 0) == (instr.op == "lt")
    if instr.op == "logical_and" and any(known.get(arg) is False for arg in instr.args):
        return False
    if instr.op == "logical_and" and all(known.get(arg) for arg in instr.args):
        return True
    return None


def _operand(instr: Compute, known: Mapping[str, bool]) -> str | None:
    """The operand that an instruction gives, if it is one."""
    if instr.op == "where" and instr.args[0] in known:
        return instr.args[1 if known[instr.args[0]] else 2]
    if instr.op == "logical_and":
        first, second = instr.args
        return second if known.get(first) else first if known.get(second) else None
    return None


def _used(body: list[Instr]) -> tuple[Instr, ...]:
    """Without what makes values that nothing uses."""
    wanted: set[str] = set()
    kept: list[Instr] = []
    for instr in reversed(body):
        if isinstance(instr, Store | CheckedIndex | Reduce) or instr.result in wanted:
            kept.append(instr)
            wanted.update(operands(instr))
    return tuple(reversed(kept))
