"""The state of emitting one kernel, and index expressions as LLVM values.

Note [Uniform and varying]
    Code is emitted for a block of ``lanes * interleave`` consecutive values of one loop variable, the vector variable.
    A value that depends on it is *varying*: ``interleave`` vectors of ``lanes`` elements. Anything else is
    *uniform*: one scalar. With no vector variable (tails, row scope) everything is uniform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ....ir import DType
from ....kernel_ir.bounds import lower_bound
from ....symbolic import Call, Expr, Symbol, SymbolKind, to_expr
from .arithmetic import Ops
from .emitter import Emitter, Ssa, imm, vector_type
from .types import register_type

__all__ = ["KernelContext", "Value", "Vector", "ramp_literal"]


@dataclass(frozen=True, slots=True)
class Value:
    """An IR value: its type and one SSA value (uniform) or one per copy (varying). ``starts``: of places that follow
    each other in the lanes, or are the same in all, those of lane 0."""

    dtype: DType
    parts: tuple[Ssa, ...]
    varying: bool = False
    starts: tuple[Ssa, ...] = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """The vector variable: lane ``l`` of copy ``k`` is at ``base + k*lanes + l``.

    With ``tile``, lane ``l`` of every copy is at ``base + l``, and copy ``k`` is ``k`` steps of the loop variable
    ``tile`` further, see Note [Tiles]. ``tail``: the lanes that exist, if not all, see Note [Masked tails].
    """

    symbol: Symbol
    base: Ssa
    lanes: int
    interleave: int
    tile: Symbol | None = None
    tail: Ssa | None = None

    def first(self, copy: int) -> int:
        """Where a copy's lane 0 is, from ``base``."""
        return 0 if self.tile is not None else copy * self.lanes

    def at(self, expr: Expr, copy: int) -> Expr:
        """An index expression as copy ``copy`` sees it."""
        if self.tile is None or self.tile not in expr.symbols:
            return expr
        return expr.substitute({self.tile: to_expr(self.tile) + copy})


@dataclass(slots=True)
class KernelContext:
    """What is known while a kernel's body is emitted."""

    ops: Ops
    pointers: Mapping[str, Ssa]
    written: frozenset[str]
    scratch: Mapping[str, int]
    nontemporal: frozenset[str] = frozenset()
    symbols: dict[Symbol, Ssa] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    vector: Vector | None = None
    hoist_depth: int = 0
    streams: bool = False  # whether a streaming store was emitted
    beside: bool = False  # whether iterations are beside each other

    @property
    def em(self) -> Emitter:
        """The function being built."""
        return self.ops.em

    def mask(self, name: str | None, copy: int) -> Ssa | None:
        """The lanes for which an access with the mask ``name`` is made; ``None`` for all."""
        assert self.vector is not None
        tail = self.vector.tail
        if name is None:
            return tail
        own = self.part(name, copy, self.vector.lanes)
        return own if tail is None else self.ops.op("and", own, tail)

    def some(self, vector: Vector, end: Ssa) -> Vector:
        """The same place, but only those of its lanes that come before ``end``."""
        before, self.vector = self.vector, vector
        here = self.ops.compare("icmp slt", self.ramp(0), self.em.splat(end, vector.lanes))
        self.vector = before
        return replace(vector, tail=here)

    # -- values ------------------------------------------------------------------------------------------

    def part(self, name: str, copy: int, lanes: int) -> Ssa:
        """The value ``name`` for one copy, splat if it is uniform."""
        value = self.values[name]
        if value.varying:
            return value.parts[copy]
        return self.em.splat(value.parts[0], lanes)

    def varies(self, expr: Expr) -> bool:
        """Whether the expression depends on the vector variable."""
        if self.vector is None:
            return False
        if self.vector.symbol in expr.symbols or self.vector.tile in expr.symbols:
            return True
        return any(s.kind is SymbolKind.VALUE and self.values[s.name].varying for s in expr.symbols)

    def across_lanes(self, expr: Expr) -> bool:
        """Whether the lanes of one copy differ in the expression."""
        if self.vector is None:
            return False
        if self.vector.symbol in expr.symbols:
            return True
        return any(s.kind is SymbolKind.VALUE and self.values[s.name].varying for s in expr.symbols)

    def slope(self, expr: Expr) -> Expr | None:
        """The coefficient of the vector variable, or ``None`` where the lanes are not evenly spaced."""
        assert self.vector is not None
        if any(s.kind is SymbolKind.VALUE and self.values[s.name].varying for s in expr.symbols):
            return None
        return expr.coefficient(self.vector.symbol)

    # -- index expressions -------------------------------------------------------------------------------

    def scalar(self, expr: Expr, skip: Symbol | None = None) -> Ssa:
        """A uniform expression as i64; with ``skip``, without the terms in that symbol.

        Terms are added from the outermost loop inwards, so that partial sums are hoisted.
        """
        terms = []
        for monomial, factor in expr.terms:
            if skip is not None and skip in monomial:
                continue
            product = imm(factor)
            for value in sorted((self._atom(atom) for atom in monomial), key=lambda v: v.depth):
                product = self.em.mul(value, product)
            terms.append(product)
        total = imm(0)
        for term in sorted(terms, key=lambda v: v.depth):
            total = self.em.add(total, term)
        return total

    def _atom(self, atom: Symbol | Call) -> Ssa:
        if isinstance(atom, Symbol):
            if atom.kind is SymbolKind.VALUE:
                return self.values[atom.name].parts[0]
            return self.symbols[atom]
        args = [self.scalar(arg) for arg in atom.args]
        if atom.fn == "isqrt":  # of sizes, which are the same in all lanes
            return self.em.square_root(args[0])
        if atom.fn in ("min", "max"):
            result = args[0]
            for other in args[1:]:
                result = self.em.minimum(result, other) if atom.fn == "min" else self.em.maximum(result, other)
            return result
        a, b = args
        if lower_bound(atom.args[0]) >= 0:
            return self.em.unsigned("udiv" if atom.fn == "floordiv" else "urem", a, b)
        return self._floor(atom.fn, a, b)

    def _floor(self, fn: str, a: Ssa, b: Ssa) -> Ssa:
        """Division rounding down for a positive divisor: shift a negative dividend up by whole multiples."""
        em, ops = self.em, self.ops
        lanes = ops.lanes(a)
        if lanes == 1 and b.constant is None:
            b = em.maximum(b, imm(1))
        rest = ops.op("srem", a, b)
        zero = em.splat(imm(0), lanes)
        negative = ops.compare("icmp slt", rest, zero)
        if fn == "mod":
            return ops.select(negative, ops.op("add", rest, b), rest)
        quotient = ops.op("sdiv", a, b)
        return ops.select(negative, ops.op("sub", quotient, em.splat(imm(1), lanes)), quotient)

    def lanes_i64(self, expr: Expr, copy: int) -> Ssa:
        """A varying expression as a vector of i64, for one copy."""
        assert self.vector is not None
        return self._lanes_at(self.vector.at(expr, copy), copy)

    def _lanes_at(self, expr: Expr, copy: int) -> Ssa:
        """Of an expression, or a part of one, that is about this copy already."""
        assert self.vector is not None
        lanes = self.vector.lanes
        uniform = Expr(tuple(t for t in expr.terms if not self.across_lanes(Expr((t,)))))
        total: Ssa | None = None
        for term in expr.terms:
            if not self.across_lanes(Expr((term,))):
                continue
            monomial, factor = term
            product = self.em.splat(imm(factor), lanes) if factor != 1 else None
            for atom in monomial:
                value = self._lane_atom(atom, copy)
                product = value if product is None else self.ops.op("mul", product, value)
            assert product is not None
            total = product if total is None else self.ops.op("add", total, product)
        base = self.scalar(uniform)
        if total is None:
            return self.em.splat(base, lanes)
        return total if base.constant == 0 else self.ops.op("add", total, self.em.splat(base, lanes))

    def _lane_atom(self, atom: Symbol | Call, copy: int) -> Ssa:
        vector = self.vector
        assert vector is not None
        if atom == vector.symbol:
            return self.ramp(copy)
        if not self.across_lanes(Expr((((atom,), 1),))):
            return self.em.splat(self._atom(atom), vector.lanes)
        if isinstance(atom, Symbol):
            return self.values[atom.name].parts[copy]
        args = [self._lanes_at(arg, copy) for arg in atom.args]
        if atom.fn in ("min", "max"):
            result = args[0]
            for other in args[1:]:
                less = self.ops.compare("icmp slt" if atom.fn == "min" else "icmp sgt", result, other)
                result = self.ops.select(less, result, other)
            return result
        if atom.args[1].constant is None:
            one = self.em.splat(imm(1), vector.lanes)
            args[1] = self.ops.select(self.ops.compare("icmp sgt", args[1], one), args[1], one)
        if lower_bound(atom.args[0]) >= 0:
            return self.ops.op("udiv" if atom.fn == "floordiv" else "urem", args[0], args[1])
        return self._floor(atom.fn, args[0], args[1])

    def ramp(self, copy: int, scalar: str = "i64") -> Ssa:
        """The vector variable's values in one copy."""
        vector = self.vector
        assert vector is not None
        base = vector.base
        if scalar != "i64":
            base = self.ops.convert("trunc", base, scalar)
        start = vector.first(copy)
        steps = ramp_literal(range(start, start + vector.lanes), scalar)
        return self.ops.op("add", self.em.splat(base, vector.lanes), steps)

    def index_value(self, expr: Expr, dtype: DType) -> Value:
        """An index expression as an IR value."""
        scalar = register_type(dtype)
        if not self.varies(expr):
            place = self.ops.convert("trunc", self.scalar(expr), scalar)
            return Value(dtype, (place,), starts=(place,) if dtype is DType.I64 else ())
        vector, slope = self.vector, self.slope(expr)
        assert vector is not None
        parts, starts = [], []
        for copy in range(vector.interleave):
            if slope is not None and slope.constant is not None:
                own = vector.at(expr, copy)
                base = self.em.add(self.scalar(own, skip=vector.symbol), self.em.mul(vector.base, imm(slope.constant)))
                base = self.ops.convert("trunc", base, scalar)
                first = vector.first(copy)
                if slope == 1 and dtype is DType.I64:
                    starts.append(self.em.add(base, imm(first)))
                steps = [slope.constant * lane for lane in range(first, first + vector.lanes)]
                parts.append(self.ops.op("add", self.em.splat(base, vector.lanes), ramp_literal(steps, scalar)))
            else:
                parts.append(self.ops.convert("trunc", self.lanes_i64(expr, copy), scalar))
        return Value(dtype, tuple(parts), varying=True, starts=tuple(starts))


def ramp_literal(values: Sequence[int] | range, scalar: str) -> Ssa:
    """A vector constant of integers."""
    inside = ", ".join(f"{scalar} {v}" for v in values)
    return Ssa(f"<{inside}>", vector_type(scalar, len(values)))
