"""Writes loop nests: value names chosen, types worked out, equal instructions found, parts of other nests copied.

b = NestBuilder("scale", loops({"i0": n}))
x = b.load_from(x_buffer, [b["i0"]])
b.store_to(y_buffer, [b["i0"]], b.op("mul", x, b.const(2.0, DType.F32)))
nest = b.finish()

Note [What a builder shares]
    Equal instructions of one stage become one value, and values that outlive a stage (see Note [The loop IR in one
    page]) are found again in later ones. For a builder that knows the ``buffers``, loads are equal if their positions
    are, whatever their indices look like, and a load of an element that was stored before in the same iteration is the
    stored value. A load of a buffer that is ``inlinable`` becomes the body of what computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from ..errors import IRError
from ..ops.dtypes import DType, dtype_from_torch_name, is_float
from ..ops.reductions import reduce_dtype
from ..ops.scalar import result_dtype
from ..symbolic import Expr, Ranges, Symbol, SymbolKind, has_calls, prove_lt, prove_nonnegative, simplify, sym, to_expr
from .inlining import Inlinable, under_mask, without_store
from .nodes import (
    Buffer,
    CheckedIndex,
    Compute,
    Const,
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
from .positions import flat_index

__all__ = ["BodyBuilder", "NestBuilder", "Value", "loops"]

_NO_ORIGIN = Origin()


@dataclass(frozen=True, slots=True)
class Value:
    """A typed SSA value."""

    name: str
    dtype: DType

    @property
    def index(self) -> Expr:
        """The value as an index expression (i64 only)."""
        return sym(self.name, SymbolKind.VALUE)


class BodyBuilder:
    """A body under construction, see Note [What a builder shares]. ``share``: whether equal instructions become one."""

    def __init__(
        self,
        buffers: Mapping[str, Buffer] | None = None,
        inlinable: Mapping[str, Inlinable] | None = None,
        *,
        share: bool = True,
    ) -> None:
        self._buffers = buffers
        self._inlinable = inlinable or {}
        self._share = share
        self._ranges: tuple[Range, ...] = ()
        self._limits = Ranges({})
        self._body: list[Instr] = []
        self._seen: dict[object, str] = {}
        self._lasting: dict[object, str] = {}
        self._stored: dict[tuple[str, object], str] = {}
        self._counter = 0

    # -- instructions by values ----------------------------------------------------------------------

    def load_element(
        self,
        buffer: str,
        indices: tuple[Expr, ...],
        dtype: DType,
        mask: Value | None = None,
        other: int | float | bool = 0,
    ) -> Value:
        """``buffer[indices]``, or ``other`` where ``mask`` is false."""
        return Value(self._load(buffer, indices, dtype, None if mask is None else mask.name, other), dtype)

    def store_element(
        self, buffer: str, indices: tuple[Expr, ...], value: Value, mode: str = "set", mask: Value | None = None
    ) -> None:
        """``buffer[indices] = value``, which has the buffer's type."""
        self._store(buffer, indices, value.name, mode, None if mask is None else mask.name)

    def const(self, value: int | float | bool, dtype: DType) -> Value:
        """A literal."""
        return Value(self._once(("const", repr(value), dtype), Const, value, dtype), dtype)

    def index_value(self, expr: Expr | int, dtype: DType = DType.I64) -> Value:
        """An index expression as a number."""
        return Value(self._position(to_expr(expr), dtype), dtype)

    def op(self, op: str, *args: Value, to: DType | None = None) -> Value:
        """A row of the op table; ``to`` is the target of casts. Raises :class:`IRError` if the types do not fit."""
        dtype = result_dtype(op, [a.dtype for a in args], to)
        names = tuple([a.name for a in args])
        return Value(self._once((op, names, dtype), Compute, op, names, dtype), dtype)

    def cast(self, value: Value, dtype: DType) -> Value:
        """``value`` converted; nothing if it has the type."""
        return value if value.dtype is dtype else self.op("cast", value, to=dtype)

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """``a`` where the bool is true, else ``b``."""
        return self.op("where", condition, a, b)

    def check_index(self, value: Value, size: Expr | int) -> Expr:
        """An i64 value as an index below ``size``: negatives wrap, out of range is an error."""
        return sym(self._check(value.name, to_expr(size)), SymbolKind.VALUE)

    def reduce(self, kind: str, value: Value) -> Value:
        """Reduce over the current stage's ranges; the result is for later stages too."""
        dtype = reduce_dtype(kind, value.dtype)
        return Value(self._reduce(kind, value.name, dtype), dtype)

    def scan(self, kind: str, value: Value) -> Value:
        """Reduce over the stage's iterations so far, this one included."""
        return Value(self._scan(kind, value.name, value.dtype), value.dtype)

    # -- parts of other nests --------------------------------------------------------------------------

    def copy(self, body: Sequence[Instr], env: MutableMapping[Symbol, Expr], names: MutableMapping[str, str]) -> None:
        """Append ``body`` with loop symbols replaced by ``env`` and values named by ``names``. Both grow."""
        for instr in body:
            if isinstance(instr, Load):
                indices = tuple([self._expr(e, env) for e in instr.indices])
                mask = names[instr.mask] if instr.mask is not None else None
                names[instr.result] = self._load(instr.buffer, indices, instr.dtype, mask, instr.other)
            elif isinstance(instr, Compute):
                args = tuple([names[a] for a in instr.args])
                names[instr.result] = self._once((instr.op, args, instr.dtype), Compute, instr.op, args, instr.dtype)
            elif isinstance(instr, Const):
                key = ("const", repr(instr.value), instr.dtype)
                names[instr.result] = self._once(key, Const, instr.value, instr.dtype)
            elif isinstance(instr, Store):
                indices = tuple([self._expr(e, env) for e in instr.indices])
                mask = names[instr.mask] if instr.mask is not None else None
                self._store(instr.buffer, indices, names[instr.value], instr.mode, mask)
            elif isinstance(instr, Index):
                names[instr.result] = self._position(self._expr(instr.expr, env), instr.dtype)
            elif isinstance(instr, Reduce):
                made = self._scan if instr.running else self._reduce
                names[instr.result] = made(instr.kind, names[instr.value], instr.dtype)
            else:
                checked = self._check(names[instr.value], instr.size)
                names[instr.result] = checked
                env[Symbol(instr.result, SymbolKind.VALUE)] = sym(checked, SymbolKind.VALUE)

    def _expr(self, expr: Expr, env: Mapping[Symbol, Expr]) -> Expr:
        result = expr.substitute(env)
        return simplify(result, self._limits) if result is not expr and has_calls(result) else result

    def _inline(
        self,
        buffer: str,
        producer: Inlinable,
        indices: tuple[Expr, ...],
        dtype: DType,
        mask: str | None,
        other: int | float | bool,
    ) -> str:
        key = ("inlined", buffer, indices, mask, repr(other) if mask else "")
        found = self._seen.get(key)
        if found is not None:
            return found
        env = {s: index for s, index in zip(producer.symbols, indices, strict=True) if s is not None}
        names: dict[str, str] = {}
        body, store = without_store(producer.nest.stages[0].body)
        if mask is not None:
            body = under_mask(body, names, mask, lambda load: self._repeats_inside(load, env))
        self.copy(body, env, names)
        value = names[store.value]
        if mask is not None:
            args = (mask, value, self._outside(other, dtype))
            value = self._once(("where", args, dtype), Compute, "where", args, dtype)
        self._seen[key] = value
        return value

    def _repeats_inside(self, load: Load, env: Mapping[Symbol, Expr]) -> bool:
        """Whether a float is certainly an element of its buffer, and the same one for all iterations of some loop."""
        buffer = (self._buffers or {}).get(load.buffer)
        if buffer is None or load.buffer in self._inlinable or not is_float(load.dtype):
            return False
        indices = [self._expr(index, env) for index in load.indices]
        if all(any(symbol in index.symbols for index in indices) for symbol in self._limits.sizes):
            return False
        pairs = zip(indices, buffer.sizes, strict=True)
        return all(
            prove_nonnegative(index, self._limits) and prove_lt(index, size, self._limits) for index, size in pairs
        )

    def _outside(self, other: int | float | bool, dtype: DType) -> str:
        """The literal for lanes that a mask leaves out."""
        if dtype not in (DType.F16, DType.BF16):
            return self._once(("const", repr(other), dtype), Const, other, dtype)
        wide = self._once(("const", repr(float(other)), DType.F32), Const, float(other), DType.F32)
        return self._once(("cast", (wide,), dtype), Compute, "cast", (wide,), dtype)

    # -- instructions by names -------------------------------------------------------------------------

    def _once(self, key: object, kind: type, *fields: object) -> str:
        found = self._seen.get(key) if self._share else None
        if found is None:
            found = self._seen[key] = f"v{self._counter}"
            self._counter += 1
            self._body.append(kind(found, *fields))
        return found

    def _element(self, buffer: str, indices: tuple[Expr, ...]) -> object:
        """What is equal for equal elements of a buffer."""
        return indices if self._buffers is None else flat_index(self._buffers[buffer], indices, self._limits)

    def _load(
        self, buffer: str, indices: tuple[Expr, ...], dtype: DType, mask: str | None, other: int | float | bool
    ) -> str:
        producer = self._inlinable.get(buffer)
        if producer is not None:
            return self._inline(buffer, producer, indices, dtype, mask, other)
        element = self._element(buffer, indices)
        if mask is None:
            stored = self._stored.get((buffer, element))
            if stored is not None:
                return stored
        key = ("load", buffer, element, mask, repr(other) if mask else "")
        return self._once(key, Load, buffer, indices, dtype, mask, other)

    def _store(self, buffer: str, indices: tuple[Expr, ...], value: str, mode: str, mask: str | None) -> None:
        self._body.append(Store(buffer, indices, value, mode, mask))
        if self._buffers is not None and mode == "set" and mask is None:
            self._stored[buffer, self._element(buffer, indices)] = value

    def _position(self, expr: Expr, dtype: DType) -> str:
        if expr.constant is not None and self._share:
            return self._once(("const", repr(expr.constant), dtype), Const, expr.constant, dtype)
        return self._once(("index", expr, dtype), Index, expr, dtype)

    def _check(self, value: str, size: Expr) -> str:
        return self._once(("check", value, size), CheckedIndex, value, size)

    def _reduce(self, kind: str, value: str, dtype: DType) -> str:
        key = ("reduce", kind, value, tuple([r.symbol for r in self._ranges]))
        name = self._lasting[key] = self._once(key, Reduce, kind, value, dtype)
        return name

    def _scan(self, kind: str, value: str, dtype: DType) -> str:
        return self._once(("scan", kind, value), Reduce, kind, value, dtype, True)


class NestBuilder(BodyBuilder):
    """One nest under construction. Instructions go to the current stage; the first has no ranges until
    :meth:`begin_stage` is called. ``builder["i0"]`` is a loop variable as an expression."""

    def __init__(
        self,
        name: str,
        outer: Sequence[Range],
        origin: Origin = _NO_ORIGIN,
        buffers: Mapping[str, Buffer] | None = None,
        inlinable: Mapping[str, Inlinable] | None = None,
        *,
        share: bool = True,
    ) -> None:
        super().__init__(buffers, inlinable, share=share)
        self.name = name
        self.origin = origin
        self.outer = tuple(outer)
        self._stages: list[Stage] = []
        self._lasting_stored: dict[tuple[str, object], str] = {}
        self._limits = self._limits_of(())

    def __getitem__(self, symbol: str) -> Expr:
        if all(r.symbol != symbol for r in (*self.outer, *self._ranges)):
            raise KeyError(f"nest {self.name} has no loop variable {symbol!r} here")
        return sym(symbol)

    def begin_stage(self, ranges: Sequence[Range] = ()) -> None:
        """Begin the next stage. Values of stages with ranges go out of scope, except results of reductions."""
        self._close()
        self._ranges = tuple(ranges)
        self._seen = dict(self._lasting)
        self._stored = dict(self._lasting_stored)
        self._limits = self._limits_of(self._ranges)

    def copy_stages(
        self,
        stages: Iterable[Stage],
        env: MutableMapping[Symbol, Expr],
        ranges: Callable[[tuple[Range, ...]], Sequence[Range]] = tuple,
        names: MutableMapping[str, str] | None = None,
    ) -> None:
        """Append whole stages, see :meth:`copy`, around which ``ranges`` gives the loops for those that they had."""
        names = {} if names is None else names
        for stage in stages:
            self.begin_stage(ranges(stage.ranges))
            self.copy(stage.body, env, names)

    def finish(self) -> LoopNest:
        """The nest."""
        self._close()
        return LoopNest(self.name, self.outer, tuple(self._stages), self.origin)

    def load_from(
        self, buffer: Buffer, indices: Sequence[Expr | int], mask: Value | None = None, other: int | float | bool = 0
    ) -> Value:
        """An element of a declared buffer."""
        return self.load_element(buffer.name, _exprs(indices), _element_type(buffer), mask, other)

    def store_to(
        self, buffer: Buffer, indices: Sequence[Expr | int], value: Value, mode: str = "set", mask: Value | None = None
    ) -> None:
        """Write an element of a declared buffer, converted to its type first."""
        self.store_element(buffer.name, _exprs(indices), self.cast(value, _element_type(buffer)), mode, mask)

    def _limits_of(self, ranges: tuple[Range, ...]) -> Ranges:
        return Ranges({Symbol(r.symbol): r.size for r in (*self.outer, *ranges)})

    def _close(self) -> None:
        if self._body:
            self._stages.append(Stage(self._ranges, tuple(self._body)))
        if not self._ranges:
            self._lasting, self._lasting_stored = self._seen, self._stored
        self._body = []


def loops(sizes: Mapping[str, Expr | int]) -> tuple[Range, ...]:
    """Loops by name."""
    return tuple(Range(name, to_expr(size)) for name, size in sizes.items())


def _exprs(indices: Sequence[Expr | int]) -> tuple[Expr, ...]:
    return tuple(to_expr(i) for i in indices)


def _element_type(buffer: Buffer) -> DType:
    dtype = dtype_from_torch_name(buffer.dtype)
    if dtype is None:
        raise IRError(f"generated code cannot hold elements of {buffer.dtype}")
    return dtype
