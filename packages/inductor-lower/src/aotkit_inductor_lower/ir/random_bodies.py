"""The bodies of random nests: loads through all kinds of index maps, and arithmetic whose results can be compared.

See Note [Comparable results] in :mod:`.random_programs`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..ops.dtypes import is_float, is_half, is_int
from ..symbolic import Expr, floordiv, mod, product, sym, to_expr
from .builder import NestBuilder, Value, loops
from .nodes import Buffer, DType

__all__ = ["BodyWriter", "Known"]

_MANTISSA = {DType.F64: 52, DType.F32: 23}
_UNBOUNDED = 1000

# Results that are the same in every correct execution, given exact arguments.
_EXACT: tuple[str, ...] = (
    "neg",
    "abs",
    "floor",
    "ceil",
    "trunc",
    "round",
    "sign",
    "add",
    "sub",
    "mul",
    "minimum",
    "maximum",
)
_EXACT += ("fmin", "fmax", "sqrt", "div", "fma", "isnan", "isinf", "eq", "ne", "lt", "le", "gt", "ge")
# What may follow a value that is not: the relative error stays.
_SMOOTH = ("neg", "abs", "minimum", "maximum", "mul")
_APPROXIMATE = ("exp", "exp2", "expm1", "log1p", "sin", "cos", "tanh", "atan", "asinh", "erf", "erfc", "sigmoid")
_INTEGER: tuple[str, ...] = (
    "neg",
    "abs",
    "sign",
    "add",
    "sub",
    "mul",
    "minimum",
    "maximum",
    "floordiv",
    "truncdiv",
    "mod",
    "fmod",
    "pow",
)
_INTEGER += (
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_not",
    "shl",
    "shr",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
)
_BOOL = ("logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_not", "bitwise_and", "eq", "maximum")
_UNARY: tuple[str, ...] = (
    "neg",
    "abs",
    "floor",
    "ceil",
    "trunc",
    "round",
    "sign",
    "sqrt",
    "isnan",
    "isinf",
    "bitwise_not",
    "logical_not",
)
_UNARY += _APPROXIMATE
_DIVISIONS = ("floordiv", "truncdiv", "mod", "fmod")
_MAYBE_OTHER_ZERO = ("minimum", "maximum", "fmin", "fmax")


@dataclass(frozen=True, slots=True)
class Known:
    """A value and what is known of it. Floats: magnitude below ``2**high``, a multiple of ``2**-low``; ``exact``: the
    same in every correct execution; ``loose``: the sign of a zero may differ all the same."""

    value: Value
    exact: bool = True
    high: int = 3
    low: int = 2
    loose: bool = False

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    def again(self, value: Value) -> Known:
        """The same knowledge of another value, loaded from where this one was stored."""
        return replace(self, value=value)


class Memory(Protocol):
    """Where buffers come from: the program generator."""

    written: dict[str, Known]
    buffers: list[Buffer]

    def input(self, prefix: str, dtype: DType, sizes: Sequence[Expr]) -> Buffer:
        """A new input buffer."""


class BodyWriter:
    """Writes stages into ``builder``. ``pool``: the values visible in the current stage."""

    def __init__(
        self, rng: random.Random, builder: NestBuilder, outer: dict[str, Expr], exact_only: bool, memory: Memory
    ) -> None:
        self.rng = rng
        self.builder = builder
        self.outer = outer
        self.inner: dict[str, Expr] = {}
        self.exact_only = exact_only
        self.memory = memory
        self.pool: list[Known] = []

    @property
    def loops(self) -> dict[str, Expr]:
        """The loop variables of the current stage and their sizes."""
        return {**self.outer, **self.inner}

    def stage(self, inner: dict[str, Expr]) -> None:
        """Begin a stage. The pool is empty then."""
        self.builder.begin_stage(loops(inner))
        self.inner = inner
        self.pool = []

    def pick(self, *, newest: bool = False) -> Known:
        """One of the visible values."""
        return self.pool[-1] if newest else self.rng.choice(self.pool)

    # -- loads -----------------------------------------------------------------------------------

    def load_several(self) -> None:
        """One to three loads, and sometimes an index or a literal."""
        dtypes = self.memory.options.dtypes  # type: ignore[attr-defined]
        for _ in range(self.rng.randint(1, 3)):
            self.pool.append(self.earlier_result() or self.widened(self.load(self.rng.choice(dtypes))))
        if self.loops and self.rng.random() < 0.2:
            name = self.rng.choice(list(self.loops))
            dtype = self.rng.choice((DType.I64, DType.I32))
            self.pool.append(Known(self.builder.index_value(sym(name) * 3 + 1, dtype)))
        if self.rng.random() < 0.3:
            self.pool.append(Known(self.builder.const(self.rng.choice((0.25, -1.5, 3.0)), DType.F32)))

    def widened(self, known: Known) -> Known:
        """float16 and bfloat16 are computed with in f32."""
        return known.again(self.builder.cast(known.value, DType.F32)) if is_half(known.dtype) else known

    def earlier_result(self) -> Known | None:
        """An element of what an earlier nest wrote, if there is something that fits."""
        earlier = [b for b in self.memory.buffers if b.name in self.memory.written]
        if not earlier or self.rng.random() < 0.4:
            return None
        buffer = self.rng.choice(earlier)
        indices = self.fitting_indices(buffer)
        if indices is None:
            return None
        return self.memory.written[buffer.name].again(self.builder.load_from(buffer, indices))

    def load(self, dtype: DType) -> Known:
        """An element of a new input."""
        if self.rng.random() < 0.15:
            return self.masked_load(dtype)
        indices, sizes = self.access()
        if self.rng.random() < 0.15:
            rows = self.rng.choice((2, 6))
            positions = self.memory.input("index", DType.I64, sizes)
            row = self.builder.check_index(self.builder.load_from(positions, indices), rows)
            indices, sizes = [row, *indices[-1:]], [to_expr(rows), *sizes[-1:]]
        return Known(self.builder.load_from(self.memory.input("in", dtype, sizes), indices))

    def masked_load(self, dtype: DType) -> Known:
        """Reads a buffer that is smaller than the loops, like padding does."""
        indices, sizes = [sym(n) for n in self.loops], list(self.loops.values())
        mask = None
        for dim, size in enumerate(sizes):
            if size.constant is not None and size.constant > 2:
                sizes[dim] = size - 2
                number = self.builder.index_value(indices[dim])
                inside = self.builder.op("lt", number, self.builder.const(size.constant - 1, DType.I64))
                inside = self.builder.op(
                    "logical_and", inside, self.builder.op("ge", number, self.builder.const(1, DType.I64))
                )
                indices[dim] = indices[dim] - 1
                mask = inside if mask is None else self.builder.op("logical_and", mask, inside)
        other: float = self.rng.choice((0.0, -1.5)) if is_float(dtype) else 1
        if dtype is DType.BOOL:
            other = True
        return Known(self.builder.load_from(self.memory.input("in", dtype, sizes), indices, mask, other))

    def access(self) -> tuple[list[Expr], list[Expr]]:
        """Indices over some of the loops, and the sizes of a buffer they fit into."""
        names = [n for n in self.loops if self.rng.random() < 0.85]
        if self.rng.random() < 0.3:
            self.rng.shuffle(names)
        indices: list[Expr] = []
        sizes: list[Expr] = []
        for name in names:
            self.access_dimension(sym(name), self.loops[name], indices, sizes)
        if len(indices) > 1 and self.rng.random() < 0.1:
            indices = [*indices[:-2], indices[-2] * sizes[-1] + indices[-1]]
            sizes = [*sizes[:-2], sizes[-2] * sizes[-1]]
        return indices, sizes

    def access_dimension(self, i: Expr, size: Expr, indices: list[Expr], sizes: list[Expr]) -> None:
        way = self.rng.random()
        factor = next((k for k in (4, 3, 2) if size.constant and size.constant % k == 0), None)
        if way < 0.08:
            index, size = size - 1 - i, size
        elif way < 0.14:
            index, size = i + 2, size + 3
        elif way < 0.2:
            index, size = 2 * i + 1, 2 * size + 1
        elif way < 0.3 and factor is not None:
            indices.append(floordiv(i, factor))
            sizes.append(floordiv(size, factor))
            index, size = mod(i, factor), to_expr(factor)
        elif way < 0.34:
            indices.append(to_expr(0))
            sizes.append(to_expr(1))
            index = i
        else:
            index = i
        indices.append(index)
        sizes.append(size)

    def fitting_indices(self, buffer: Buffer) -> list[Expr] | None:
        """Indices into an existing buffer: for each dimension a loop of its size, or element 0 of a static one."""
        free = dict(self.loops)
        indices: list[Expr] = []
        for size in buffer.sizes:
            name = next((n for n, s in free.items() if s == size), None)
            if name is not None:
                indices.append(sym(name))
                del free[name]
            elif size.constant:
                indices.append(to_expr(0))
            else:
                return None
        return indices

    # -- arithmetic ------------------------------------------------------------------------------

    def compute(self, count: int) -> None:
        """Some ops on what is in the pool; each result joins it."""
        for _ in range(count):
            known = self.one_op(self.pick())
            if known is not None:
                self.pool.append(known)

    def one_op(self, a: Known) -> Known | None:
        if self.rng.random() < 0.2:
            return self.converted(a)
        if self.rng.random() < 0.15:
            return self.selected(a)
        if is_int(a.dtype):
            return self.integer_op(a)
        if a.dtype is DType.BOOL:
            return self.bool_op(a)
        return self.float_op(a)

    def partner(self, a: Known) -> Known:
        """Another value of the same type."""
        return self.rng.choice([k for k in self.pool if k.dtype is a.dtype] or [a])

    def integer_op(self, a: Known) -> Known:
        op = self.rng.choice(_INTEGER)
        if op in _UNARY:
            return Known(self.builder.op(op, a.value))
        b = self.partner(a).value
        if op in _DIVISIONS:
            b = self.builder.op("bitwise_or", b, self.builder.const(1, b.dtype))
        return Known(self.builder.op(op, a.value, b))

    def bool_op(self, a: Known) -> Known:
        op = self.rng.choice(_BOOL)
        args = (a.value,) if op in _UNARY else (a.value, self.partner(a).value)
        return Known(self.builder.op(op, *args))

    def float_op(self, a: Known) -> Known | None:
        b = self.partner(a)
        approximate = not self.exact_only and self.rng.random() < 0.3
        if approximate and a.exact and a.high <= 5:
            return Known(self.builder.op(self.rng.choice(_APPROXIMATE), a.value), exact=False, high=50, low=_UNBOUNDED)
        op = self.rng.choice(_EXACT if a.exact and b.exact else _SMOOTH)
        if op == "div" and b.loose:
            return None
        if op == "mul" and not (a.exact and b.exact) and a.high + b.high > 100:
            return None
        if op in _UNARY:
            b = a
        args = [k.value for k in (a, b, self.partner(a))[: 1 if op in _UNARY else 3 if op == "fma" else 2]]
        if op == "fma" and not self.partner(a).exact:
            return None
        value = self.builder.op(op, *args)
        high, low = max(a.high, b.high), max(a.low, b.low)
        if op in ("add", "sub"):
            high += 1
        elif op == "mul":
            high, low = a.high + b.high, a.low + b.low
        elif op in ("div", "sqrt", "fma"):
            high, low = _UNBOUNDED, _UNBOUNDED
        loose = (a.loose or b.loose or op in _MAYBE_OTHER_ZERO) and op != "abs"
        return Known(value, a.exact and b.exact, high, low, loose)

    def selected(self, a: Known) -> Known | None:
        conditions = [k for k in self.pool if k.dtype is DType.BOOL]
        if not conditions:
            return None
        b = self.partner(a)
        value = self.builder.op("where", self.rng.choice(conditions).value, a.value, b.value)
        return Known(value, a.exact and b.exact, max(a.high, b.high), max(a.low, b.low), a.loose or b.loose)

    def converted(self, a: Known) -> Known | None:
        """A cast, where its result is well defined."""
        if is_float(a.dtype):
            if not a.exact:
                return None
            to = self.rng.choice((DType.F64, DType.F32, DType.I64, DType.I32, DType.I8, DType.U8, DType.BOOL))
            value = self.builder.cast(a.value, to)
            return a.again(value) if is_float(to) else Known(value)
        if a.dtype in (DType.BOOL, DType.I8, DType.U8, DType.I16):
            to = self.rng.choice((DType.F32, DType.I64, DType.F64))
            return Known(self.builder.cast(a.value, to), high=16, low=0)
        return Known(self.builder.cast(a.value, self.rng.choice((DType.I64, DType.I8, DType.U8, DType.BOOL))))

    def reduce(self) -> Known:
        """A reduction whose result is the same in any order (or nearly, unless ``exact_only``)."""
        a = self.pick()
        count = product(self.inner.values()).constant
        if a.dtype is DType.BOOL:
            return Known(self.builder.reduce(self.rng.choice(("any", "all", "max", "argmax")), a.value))
        if is_int(a.dtype):
            return Known(self.builder.reduce(self.rng.choice(("sum", "prod", "min", "max", "argmin")), a.value))
        grown = a.high + (count or 1 << 16).bit_length()
        summable = a.exact and grown + a.low <= _MANTISSA[a.dtype]
        kinds = ["min", "max"]
        if a.exact:
            kinds += ["argmin", "argmax"]
        if summable:
            kinds += ["sum", "sum", "sum"]
        kind = self.rng.choice(kinds)
        value = self.builder.reduce(kind, a.value)
        if not is_float(value.dtype):
            return Known(value)
        return Known(value, a.exact, grown if kind == "sum" else a.high, a.low, loose=True)
