"""The rules of a contraction that its nest does not know: Note [What a contraction is] in :mod:`.nodes`, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from ..errors import IRError
from ..ops.dtypes import bits, is_float
from ..symbolic import Expr, Symbol, SymbolKind
from .nodes import (
    PRECISIONS,
    CheckedIndex,
    Compute,
    Const,
    Contraction,
    DType,
    Index,
    Instr,
    Load,
    Operand,
    Range,
    Store,
)
from .print import print_instr
from .walk import definitions, index_exprs, loops_of_places, operands, places_in, ranges_within

__all__ = ["check_contraction"]

_POINTWISE = (Load, Const, Index, Compute)


def check_contraction(contraction: Contraction) -> None:
    """That ranges, operands, types and the epilogue are those of a contraction. Raises :class:`IRError`. What is true
    of every nest (names, types of ops, bounds) is checked on :meth:`.Contraction.as_nest`."""
    _Checker(contraction).run()


class _Checker:
    def __init__(self, contraction: Contraction) -> None:
        self.contraction = contraction
        self.place = f"contraction {contraction.name}"

    def fail(self, problem: str) -> IRError:
        return IRError(f"{self.place}: {problem}")

    def run(self) -> None:
        c = self.contraction
        self.check_ranges((*c.outer, *c.reduced))
        if c.precision not in PRECISIONS:
            raise self.fail(f"the precision is one of {', '.join(PRECISIONS)}, not {c.precision!r}")
        self.check_operand("left", c.left, (*c.batch, *c.rows, *c.reduced))
        self.check_operand("right", c.right, (*c.batch, *c.columns, *c.reduced))
        self.check_types(c.left.dtype, c.right.dtype, c.accumulate)
        self.check_epilogue()
        self.check_library()

    def check_ranges(self, ranges: Sequence[Range]) -> None:
        if not self.contraction.reduced:
            raise self.fail("there is nothing to sum over")
        symbols = [r.symbol for r in ranges]
        twice = next((s for s in symbols if symbols.count(s) > 1), None)
        if twice is not None:
            raise self.fail(f"loop variable {twice} is in two of batch, rows, columns and reduced")

    def check_operand(self, side: str, operand: Operand, along: Sequence[Range]) -> None:
        """Straight-line loads at affine indices, which vary along some loops only, or at checked ones, which vary along
        loops of the batch only and may be loaded from anywhere."""
        allowed = {Symbol(r.symbol) for r in along}
        self.check_instructions(f"the {side} operand", operand.body, (*_POINTWISE, CheckedIndex))
        self.check_places(side, operand)
        if operand.value not in definitions(operand.body):
            raise self.fail(f"the {side} operand does not make its value %{operand.value}")
        places = places_in(operand.body)
        checked = {i.result for i in places if isinstance(i, CheckedIndex)}
        for instr in operand.body:
            for expr in index_exprs(instr):
                outside = sorted(s for s in expr.symbols if s.kind is SymbolKind.INDEX and s not in allowed)
                if outside:
                    raise self.fail(f"the {side} operand varies along {outside[0]} in `{print_instr(instr)}`")
                if isinstance(instr, Load) and instr not in places and not _is_affine(expr, checked):
                    raise self.fail(f"the {side} operand loads at an index that is not affine: `{print_instr(instr)}`")

    def check_places(self, side: str, operand: Operand) -> None:
        """That what is checked as an index is one of each product of the batch."""
        symbols = {r.symbol for r in ranges_within(self.contraction)} - {r.symbol for r in self.contraction.batch}
        outside = sorted(symbols & loops_of_places(operand.body))
        if outside:
            raise self.fail(f"the {side} operand checks an index that varies along {outside[0]}, no loop of the batch")

    def check_types(self, left: DType, right: DType, accumulate: DType) -> None:
        if left is not right:
            raise self.fail(f"its factors are {left.value} and {right.value}, which must be the same")
        if (left, accumulate) == (DType.I8, DType.I32):
            return
        if not (is_float(left) and accumulate in (DType.F32, DType.F64) and bits(accumulate) >= bits(left)):
            raise self.fail(f"products of {left.value} are not summed in {accumulate.value}")

    def check_epilogue(self) -> None:
        c = self.contraction
        self.check_instructions("the epilogue", c.epilogue, (*_POINTWISE, Store))
        own = {*definitions(c.epilogue), c.result}
        for instr in c.epilogue:
            foreign = [name for name in operands(instr) if name not in own]
            if foreign:
                raise self.fail(f"`{print_instr(instr)}` uses %{foreign[0]}, which is no value of the epilogue")
            if isinstance(instr, Store) and instr.accumulates:
                raise self.fail(f"`{print_instr(instr)}` combines with what is there, and sums come in no order")
            if isinstance(instr, Store):
                self.check_place(instr)
        if not c.writes:
            raise self.fail("the epilogue stores nothing")

    def check_place(self, store: Store) -> None:
        """Every sum has a place of its own."""
        along = {s.name for index in store.indices for s in index.symbols}
        missing = [r.symbol for r in self.contraction.outer if r.symbol not in along and r.size != 1]
        if missing:
            raise self.fail(f"`{print_instr(store)}` does not vary along {missing[0]}, and sums come in no order")

    def check_instructions(self, what: str, body: Iterable[Instr], kinds: tuple[type[Instr], ...]) -> None:
        for instr in body:
            if not isinstance(instr, kinds):
                raise self.fail(f"{what} may not hold `{print_instr(instr)}`")

    def check_library(self) -> None:
        call = self.contraction.library
        if call is None:
            return
        if call.mutates or call.name != self.contraction.name:
            raise self.fail("ATen's call has the contraction's name, and writes to none of its arguments")
        if call.results != self.contraction.writes:
            given = ", ".join(str(r) for r in call.results)
            raise self.fail(f"ATen's call gives {given}, the contraction {', '.join(self.contraction.writes)}")


def _is_affine(index: Expr, checked: Set[str]) -> bool:
    """Whether an index is a sum of loop variables, each times what varies along none, and of checked indices."""
    loops = {s for s in index.symbols if s.kind is SymbolKind.INDEX}
    if any(s.kind is SymbolKind.VALUE and s.name not in checked for s in index.symbols):
        return False
    factors = [index.coefficient(s) for s in loops]
    return all(factor is not None and loops.isdisjoint(factor.symbols) for factor in factors)
