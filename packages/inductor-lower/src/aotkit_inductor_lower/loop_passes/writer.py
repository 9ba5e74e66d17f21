"""Writes a nest out of pieces of others: renames values, substitutes loop variables, drops what it has seen.

Three things happen while instructions are copied: equal ones become one value (common subexpressions), a load
of an element stored before in the same iteration becomes the stored value, and a load of a buffer that is to be
computed where it is read becomes its producer's body.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from ..analysis.nests import flat_index, has_calls
from ..ir import (
    Buffer,
    CheckedIndex,
    Compute,
    Const,
    DType,
    Index,
    Instr,
    Load,
    LoopNest,
    Origin,
    Range,
    Reduce,
    Stage,
    Store,
)
from ..ir.walk import stores
from ..symbolic import Expr, Ranges, Symbol, SymbolKind, simplify, sym

__all__ = ["Inlinable", "NestWriter", "under_mask", "without_store"]

Env = MutableMapping[Symbol, Expr]


@dataclass(frozen=True, slots=True)
class Inlinable:
    """A producer to compute where it is read: its body and the loop symbol of each dimension of its buffer."""

    nest: LoopNest
    symbols: tuple[Symbol | None, ...]


class NestWriter:
    """One nest being written. Begin each stage with :meth:`stage`, fill it with :meth:`copy`."""

    def __init__(
        self,
        outer: Sequence[Range],
        buffers: Mapping[str, Buffer],
        inlinable: Mapping[str, Inlinable] | None = None,
    ) -> None:
        self.outer = tuple(outer)
        self._buffers = buffers
        self._inlinable = inlinable or {}
        self._stages: list[Stage] = []
        self._ranges: tuple[Range, ...] = ()
        self._body: list[Instr] = []
        self._seen: dict[object, str] = {}
        self._row_seen: dict[object, str] = {}
        self._stored: dict[tuple[str, Expr], str] = {}
        self._row_stored: dict[tuple[str, Expr], str] = {}
        self._limits = Ranges({Symbol(r.symbol): r.size for r in outer})
        self._counter = 0

    def stage(self, ranges: Sequence[Range]) -> None:
        """Begin the next stage."""
        self._close()
        self._ranges = tuple(ranges)
        self._seen = dict(self._row_seen)
        self._stored = dict(self._row_stored)
        limits = {Symbol(r.symbol): r.size for r in self.outer}
        limits.update((Symbol(r.symbol), r.size) for r in ranges)
        self._limits = Ranges(limits)

    def finish(self, name: str, origin: Origin) -> LoopNest:
        """The nest."""
        self._close()
        return LoopNest(name, self.outer, tuple(self._stages), origin)

    def _close(self) -> None:
        if self._body:
            self._stages.append(Stage(self._ranges, tuple(self._body)))
        if not self._ranges:
            self._row_seen, self._row_stored = self._seen, self._stored
        self._body = []

    def copy(self, body: Sequence[Instr], env: Env, names: MutableMapping[str, str]) -> None:
        """Append ``body`` with loop symbols replaced by ``env`` and values named by ``names`` (which grows)."""
        for instr in body:
            if isinstance(instr, Load):
                names[instr.result] = self._load(instr, env, names)
            elif isinstance(instr, Compute):
                args = tuple(names[a] for a in instr.args)
                names[instr.result] = self._once((instr.op, args, instr.dtype), Compute, instr.op, args, instr.dtype)
            elif isinstance(instr, Const):
                key = ("const", repr(instr.value), instr.dtype)
                names[instr.result] = self._once(key, Const, instr.value, instr.dtype)
            elif isinstance(instr, Store):
                self._store(instr, env, names)
            elif isinstance(instr, Index):
                expr = self._expr(instr.expr, env)
                names[instr.result] = self._index_value(expr, instr.dtype)
            elif isinstance(instr, Reduce):
                self._reduce(instr, names)
            else:
                value = names[instr.value]
                checked = self._once(("check", value, instr.size), CheckedIndex, value, instr.size)
                names[instr.result] = checked
                env[Symbol(instr.result, SymbolKind.VALUE)] = sym(checked, SymbolKind.VALUE)

    # -- single instructions -------------------------------------------------------------------------

    def _expr(self, expr: Expr, env: Mapping[Symbol, Expr]) -> Expr:
        result = expr.substitute(env)
        return simplify(result, self._limits) if result is not expr and has_calls(result) else result

    def _fresh(self) -> str:
        self._counter += 1
        return f"v{self._counter - 1}"

    def _once(self, key: object, kind: type, *fields: object) -> str:
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = self._fresh()
            self._body.append(kind(found, *fields))
        return found

    def _index_value(self, expr: Expr, dtype: DType) -> str:
        if expr.constant is not None:
            return self._once(("const", repr(expr.constant), dtype), Const, expr.constant, dtype)
        return self._once(("index", expr, dtype), Index, expr, dtype)

    def _reduce(self, instr: Reduce, names: MutableMapping[str, str]) -> None:
        value = names[instr.value]
        if instr.running:
            once = ("scan", instr.kind, value)
            names[instr.result] = self._once(once, Reduce, instr.kind, value, instr.dtype, True)
            return
        key = ("reduce", instr.kind, value, tuple(r.symbol for r in self._ranges))
        name = self._once(key, Reduce, instr.kind, value, instr.dtype)
        self._row_seen[key] = name
        names[instr.result] = name

    def _load(self, instr: Load, env: Mapping[Symbol, Expr], names: Mapping[str, str]) -> str:
        indices = tuple(self._expr(e, env) for e in instr.indices)
        mask = names[instr.mask] if instr.mask is not None else None
        producer = self._inlinable.get(instr.buffer)
        if producer is not None:
            return self._inline(instr, producer, indices, mask)
        flat = flat_index(self._buffers[instr.buffer], indices, self._limits)
        if mask is None:
            stored = self._stored.get((instr.buffer, flat))
            if stored is not None:
                return stored
        key = ("load", instr.buffer, flat, mask, repr(instr.other) if mask else "")
        return self._once(key, Load, instr.buffer, indices, instr.dtype, mask, instr.other)

    def _store(self, instr: Store, env: Mapping[Symbol, Expr], names: Mapping[str, str]) -> None:
        indices = tuple(self._expr(e, env) for e in instr.indices)
        value = names[instr.value]
        mask = names[instr.mask] if instr.mask is not None else None
        self._body.append(Store(instr.buffer, indices, value, instr.mode, mask))
        if instr.mode == "set" and mask is None:
            self._stored[instr.buffer, flat_index(self._buffers[instr.buffer], indices, self._limits)] = value

    def _inline(self, load: Load, producer: Inlinable, indices: tuple[Expr, ...], mask: str | None) -> str:
        key = ("inlined", load.buffer, indices, mask, repr(load.other) if mask else "")
        found = self._seen.get(key)
        if found is not None:
            return found
        env = {s: index for s, index in zip(producer.symbols, indices, strict=True) if s is not None}
        names: dict[str, str] = {}
        body, store = without_store(producer.nest.stages[0].body)
        if mask is not None:
            body = under_mask(body, names, mask)
        self.copy(body, env, names)
        value = names[store.value]
        if mask is not None:
            other = self._other(load)
            args = (mask, value, other)
            value = self._once(("where", args, load.dtype), Compute, "where", args, load.dtype)
        self._seen[key] = value
        return value

    def _other(self, load: Load) -> str:
        if load.dtype not in (DType.F16, DType.BF16):
            return self._once(("const", repr(load.other), load.dtype), Const, load.other, load.dtype)
        wide = self._once(("const", repr(float(load.other)), DType.F32), Const, float(load.other), DType.F32)
        return self._once(("cast", (wide,), load.dtype), Compute, "cast", (wide,), load.dtype)


def under_mask(body: Sequence[Instr], names: MutableMapping[str, str], mask: str) -> list[Instr]:
    """A producer's body with every load under ``mask`` too; lanes outside read nothing."""
    outside = "mask:outside"
    names[outside] = mask
    result: list[Instr] = []
    for instr in body:
        if isinstance(instr, Load) and instr.mask is None:
            instr = Load(instr.result, instr.buffer, instr.indices, instr.dtype, outside, 0)
        elif isinstance(instr, Load):
            both = f"mask:{instr.result}"
            result.append(Compute(both, "logical_and", (outside, instr.mask or outside), DType.BOOL))
            instr = Load(instr.result, instr.buffer, instr.indices, instr.dtype, both, instr.other)
        result.append(instr)
    return result


def without_store(body: Sequence[Instr]) -> tuple[list[Instr], Store]:
    """A producer's body without its store, and the store."""
    return [i for i in body if not isinstance(i, Store)], stores(body)[0]
