"""Masks of attention that are computed for a block of scores.

Note [Masks of a block]
    A value is a block with an axis of one where it does not vary: numbers of the head, lines of queries, lines of keys,
    and what is of both. What does not vary along the loop over blocks is made once, before it. Whole numbers of which
    it is certain that they fit are of 32 bits, whatever type the mask has them in; what a program instance reads for
    lines that there are not is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....ir import Compute, Const, DType, Index, Instr, Load
from ....ir.walk import operands
from ....kernel_ir.attention_site import Places
from ....ops.dtypes import is_float, is_int
from ....symbolic import Expr, Ranges, Symbol, bounds
from .indices import expr_text
from .names import pointer_name
from .ops import TYPE_NAMES, cast_text, constant_text, op_text

__all__ = ["Block", "PlacesText"]

_SMALL = 1 << 30  # whole numbers below it stay small in a sum


@dataclass(frozen=True, slots=True)
class Block:
    """How scores lie in a block: what symbols are in the text, along which axis they vary (``None``: none), and what
    tells which lines there are along each axis, nothing where all are. ``moving``: the symbols that differ from one
    step to the next of the loop over blocks."""

    names: Mapping[Symbol, tuple[str, int | None]]
    inside: tuple[str, str]
    moving: frozenset[Symbol]

    def axes(self, symbols: frozenset[Symbol]) -> list[int]:
        """Those that symbols vary along."""
        found = {self.names[symbol][1] for symbol in symbols if symbol in self.names}
        return sorted(axis for axis in found if axis is not None)


class PlacesText:
    """Writes the instructions of one mask, called ``name``. ``define``: writes a line. ``other``: how symbols of sizes,
    and loops of the grid, are written. ``ranges``: of the symbols."""

    def __init__(
        self, name: str, places: Places, ranges: Ranges, define: Callable[[str], None], other: Callable[[Symbol], str]
    ) -> None:
        self.name, self.places, self.ranges = name, places, ranges
        self.define, self.other = define, other
        self.symbols: dict[str, frozenset[Symbol]] = {}  # that each value depends on
        self.types: dict[str, DType] = {}
        self.small: dict[str, int] = {}  # whole numbers of 32 bits, with what they are at most, without their sign
        self.ahead: set[str] = set()

    def write_ahead(self, block: Block, fast: bool) -> None:
        """What stays the same, before the loop."""
        for instr in self.places.body:
            symbols = self._symbols_of(instr)
            if symbols is not None and symbols.isdisjoint(block.moving):
                self._write(instr, symbols, block, fast)
                self.ahead.add(instr.result)  # type: ignore[union-attr]

    def write(self, block: Block, fast: bool) -> None:
        """The rest, within the loop."""
        for instr in self.places.body:
            symbols = self._symbols_of(instr)
            if symbols is not None and instr.result not in self.ahead:  # type: ignore[union-attr]
                self._write(instr, symbols, block, fast)

    def value(self) -> str:
        """The name of the mask's value."""
        return self._named(self.places.value)

    def _named(self, value: str) -> str:
        return f"{self.name}_{value}"

    def _symbols_of(self, instr: Instr) -> frozenset[Symbol] | None:
        """What a value depends on; ``None`` if something that it is made of is not written yet."""
        found: frozenset[Symbol] = frozenset()
        for name in operands(instr):
            if name not in self.symbols:
                return None
            found |= self.symbols[name]
        return found.union(*(expr.symbols for expr in _exprs(instr)))

    def _write(self, instr: Instr, symbols: frozenset[Symbol], block: Block, fast: bool) -> None:
        assert isinstance(instr, Load | Const | Index | Compute)
        self.symbols[instr.result], self.types[instr.result] = symbols, instr.dtype
        self.define(f"{self._named(instr.result)} = {self._text(instr, block, fast)}")

    def _text(self, instr: Load | Const | Index | Compute, block: Block, fast: bool) -> str:
        if isinstance(instr, Load):
            return self._load(instr, block)
        if isinstance(instr, Const):
            return self._constant(instr)
        if isinstance(instr, Index):
            most, text = _most(instr.expr, self.ranges), self._index(instr.expr, block)
            if most is not None and is_int(instr.dtype):
                self.small[instr.result] = most
                return text
            return f"({text}).to({TYPE_NAMES[instr.dtype]})"
        return self._compute(instr, fast)

    def _constant(self, instr: Const) -> str:
        wide = instr.dtype in (DType.I32, DType.I64) and abs(int(instr.value)) < _SMALL
        if wide:
            self.small[instr.result] = abs(int(instr.value))
        return constant_text(instr.value, DType.I32 if wide else instr.dtype, 2)

    def _index(self, expr: Expr, block: Block) -> str:
        text = expr_text(expr, lambda s: block.names[s][0] if s in block.names else self.other(s))
        return text if block.axes(expr.symbols) else f"(tl.full([1, 1], 0, tl.int32) + {text})"

    def _load(self, instr: Load, block: Block) -> str:
        index = instr.indices[0]
        masks = " & ".join(block.inside[axis] for axis in block.axes(index.symbols) if block.inside[axis])
        extra = f", mask={masks}, other=0" if masks else ""
        loaded = f"tl.load({pointer_name(instr.buffer)} + {self._index(index, block)}{extra})"
        return f"({loaded} != 0)" if instr.dtype is DType.BOOL else loaded

    def _compute(self, instr: Compute, fast: bool) -> str:
        types = [self.types[name] for name in instr.args]
        args = [self._named(name) for name in instr.args]
        most = self._most_of(instr)
        if most is not None:
            if is_int(instr.dtype):
                self.small[instr.result] = most
            if instr.op == "cast":
                return args[0]
            return op_text(instr.op, args, [DType.I32] * len(args), DType.I32 if is_int(instr.dtype) else instr.dtype)
        if instr.op == "cast" and instr.args[0] in self.small and is_float(instr.dtype):
            return cast_text(args[0], DType.I32, instr.dtype)
        wide = [self._wide(*each) for each in zip(instr.args, args, types, strict=True)]
        return op_text(instr.op, wide, types, instr.dtype, fast)

    def _wide(self, name: str, text: str, dtype: DType) -> str:
        return f"{text}.to({TYPE_NAMES[dtype]})" if name in self.small and dtype is DType.I64 else text

    def _most_of(self, instr: Compute) -> int | None:
        """What a result of whole numbers of 32 bits is at most, where it fits, too; of a comparison 1."""
        most = [self.small.get(name) for name in instr.args]
        if None in most or (not is_int(instr.dtype) and instr.dtype is not DType.BOOL):
            return None
        first, *rest = (each for each in most if each is not None)
        found = None
        if instr.op in ("eq", "ne", "lt", "le", "gt", "ge"):
            found = 1
        elif instr.op in ("abs", "neg"):
            found = first
        elif instr.op in ("minimum", "maximum"):
            found = max(first, *rest)
        elif instr.op in ("add", "sub"):
            found = first + rest[0]
        elif instr.op == "mul":
            found = first * rest[0]
        elif instr.op in ("floordiv", "mod"):
            found = max(first, *rest) + 1
        elif instr.op == "cast" and instr.dtype in (DType.I32, DType.I64):
            found = first
        return found if found is not None and found < _SMALL else None


def _exprs(instr: Instr) -> tuple[Expr, ...]:
    if isinstance(instr, Load):
        return instr.indices
    return (instr.expr,) if isinstance(instr, Index) else ()


def _most(expr: Expr, ranges: Ranges) -> int | None:
    """What a number is at most, without its sign, where that is small; of lines that there are not, too."""
    found = bounds(expr, ranges)
    if found.low is None or found.high is None:
        return None
    most = max(abs(found.low), abs(found.high))
    return most if most < _SMALL else None
