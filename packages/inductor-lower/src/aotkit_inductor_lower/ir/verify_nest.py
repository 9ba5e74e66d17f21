"""The rules of a loop nest, checked: Note [The loop IR in one page] in :mod:`.nodes`, made executable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from ..errors import IRError
from ..ops.dtypes import dtype_from_torch_name, int_bounds, is_float
from ..ops.scalar import check_op_types, reduce_dtype
from ..symbolic import Expr, Ranges, Symbol, SymbolKind, prove_lt, prove_nonnegative, simplify
from .grid import evaluate_on_grid, index_grid
from .independence import check_outer_independence
from .nodes import (
    STORE_MODES,
    Buffer,
    BufferKind,
    CheckedIndex,
    Compute,
    Const,
    DType,
    Index,
    Instr,
    Load,
    LoopNest,
    Range,
    Reduce,
    Stage,
    Store,
)
from .print import print_instr

__all__ = ["verify_nest_against"]

_ENUMERATION_LIMIT = 1 << 22  # grid points looked at one by one where the range analysis gives up


def verify_nest_against(nest: LoopNest, buffers: Mapping[str, Buffer], *, size_minimum: int = 0) -> None:
    """Check one nest. Raises :class:`IRError` naming nest, stage and instruction."""
    _NestChecker(nest, buffers, size_minimum).run()


class _NestChecker:
    """Walks one nest in execution order; ``types`` holds what is visible, ``sizes`` what indices range over."""

    def __init__(self, nest: LoopNest, buffers: Mapping[str, Buffer], size_minimum: int) -> None:
        self.nest = nest
        self.buffers = buffers
        self.size_minimum = size_minimum
        self.defined: set[str] = set()
        self.types: dict[str, DType] = {}  # values visible here
        self.lasting: dict[str, DType] = {}  # values visible in later stages too
        self.sizes: dict[Symbol, Expr] = {}  # loop variables and checked indices, by the size they stay below
        self.known: dict[Symbol, Expr] = {}  # index values, by their expression
        self.scratch_stored: set[str] = set()
        self.place = f"nest {nest.name}"
        self.ranges = Ranges()
        self.never_runs = False

    def fail(self, problem: str) -> IRError:
        return IRError(f"{self.place}: {problem}")

    def run(self) -> None:
        self.add_ranges(self.nest.outer)
        outer = dict(self.sizes)
        lasting_sizes: dict[Symbol, Expr] = {}
        for number, stage in enumerate(self.nest.stages):
            self.place = f"nest {self.nest.name}, stage {number}"
            self.sizes = {**outer, **lasting_sizes}
            self.types = dict(self.lasting)
            self.add_ranges(stage.ranges)
            self.never_runs = any(size == 0 for size in self.sizes.values())
            for position, instr in enumerate(stage.body):
                self.place = f"nest {self.nest.name}, stage {number}, instruction {position} `{_shown(instr)}`"
                _CHECKS[type(instr)](self, instr, stage)
                if not stage.ranges and isinstance(instr, CheckedIndex):
                    lasting_sizes[Symbol(instr.result, SymbolKind.VALUE)] = instr.size
        self.place = f"nest {self.nest.name}"
        problem = check_outer_independence(self.nest, self.buffers, self.size_minimum)
        if problem:
            raise self.fail(problem)

    def add_ranges(self, ranges: Iterable[Range]) -> None:
        for r in ranges:
            symbol = Symbol(r.symbol)
            if symbol in self.sizes:
                raise self.fail(f"loop variable {r.symbol} is used twice")
            self.require_size_expr(r.size, f"the range of {r.symbol}")
            if r.size.constant is not None and r.size.constant < 0:
                raise self.fail(f"the range of {r.symbol} is negative: {r.size}")
            self.sizes[symbol] = r.size
        self.ranges = Ranges(dict(self.sizes), self.size_minimum)

    def require_size_expr(self, expr: Expr, what: str) -> None:
        bad = sorted(s for s in expr.symbols if s.kind is not SymbolKind.SIZE)
        if bad:
            raise self.fail(f"{what} may hold size symbols only, not {', '.join(bad)}")

    # -- values ----------------------------------------------------------------------------------

    def define(self, name: str, dtype: DType, stage: Stage) -> None:
        if name in self.defined:
            raise self.fail(f"value %{name} is defined twice in this nest")
        self.defined.add(name)
        self.types[name] = dtype
        if not stage.ranges:
            self.lasting[name] = dtype

    def use(self, name: str) -> DType:
        found = self.types.get(name)
        if found is None:
            why = (
                "lives in an earlier stage only, or is a reduction that is not finished in this stage"
                if name in self.defined
                else "is not defined before"
            )
            raise self.fail(f"value %{name} {why}")
        return found

    def use_mask(self, name: str | None) -> None:
        if name is not None and self.use(name) is not DType.BOOL:
            raise self.fail(f"the mask %{name} must be bool, not {self.use(name).value}")

    # -- memory ----------------------------------------------------------------------------------

    def buffer(self, name: str) -> tuple[Buffer, DType]:
        found = self.buffers.get(name)
        if found is None:
            raise self.fail(f"no buffer named {name!r} is declared")
        dtype = dtype_from_torch_name(found.dtype)
        if dtype is None:
            raise self.fail(f"generated code cannot hold elements of {found.dtype}")
        return found, dtype

    def check_access(self, buffer: Buffer, indices: tuple[Expr, ...], masked: bool) -> None:
        if len(indices) != len(buffer.sizes):
            raise self.fail(f"{len(indices)} indices for {buffer.name}, which has {len(buffer.sizes)} dimensions")
        for index in indices:
            self.check_symbols(index)
            if buffer.kind is BufferKind.SCRATCH and any(Symbol(r.symbol) in index.symbols for r in self.nest.outer):
                raise self.fail(f"scratch buffer {buffer.name} is indexed by an outer loop variable")
        if masked or self.never_runs:
            return
        for dim, (index, size) in enumerate(zip(indices, buffer.sizes, strict=True)):
            symbol = index.symbol
            if symbol is not None and self.sizes.get(symbol) == size:
                continue  # a loop variable over the whole dimension, by far the most frequent
            self.check_bounds(index.substitute(self.known), size, f"index {dim} of {buffer.name}")

    def check_symbols(self, expr: Expr) -> None:
        for symbol in sorted(expr.symbols):
            if symbol.kind is SymbolKind.INDEX and symbol not in self.sizes:
                raise self.fail(f"{symbol} is no loop variable here")
            if symbol.kind is SymbolKind.VALUE and self.use(symbol.name) not in (DType.I64, DType.I32):
                raise self.fail(f"{symbol} is an index, so it must be i64 or i32")

    def check_bounds(self, index: Expr, size: Expr, what: str) -> None:
        free = sorted(s for s in index.symbols if s.kind is SymbolKind.VALUE and s not in self.sizes)
        if free:
            raise self.fail(f"{what} depends on {', '.join(free)}, which passed no check")
        if prove_nonnegative(index, self.ranges) and prove_lt(index, size, self.ranges):
            return
        index = simplify(index, self.ranges)
        if prove_nonnegative(index, self.ranges) and prove_lt(index, size, self.ranges):
            return
        symbols = sorted(index.symbols)
        limits = [self.sizes[s].constant if s in self.sizes else None for s in symbols]
        known = [limit for limit in limits if limit is not None]
        if size.constant is None or len(known) != len(limits):
            return  # over symbolic sizes not proven is accepted
        points = math.prod(known)
        if points > _ENUMERATION_LIMIT:
            raise self.fail(f"{what} could not be proven to stay in [0, {size}): {index}")
        found = evaluate_on_grid(index, index_grid(symbols, known))
        if points and (int(found.min()) < 0 or int(found.max()) >= size.constant):
            raise self.fail(f"{what} reaches [{int(found.min())}, {int(found.max())}], outside [0, {size}): {index}")


def _shown(instr: Instr) -> str:
    try:
        return print_instr(instr)
    except IRError:
        return repr(instr)


def _check_load(c: _NestChecker, i: Load, stage: Stage) -> None:
    buffer, dtype = c.buffer(i.buffer)
    c.use_mask(i.mask)
    if i.dtype is not dtype:
        raise c.fail(f"{i.buffer} holds {dtype.value}, not {i.dtype.value}")
    if buffer.kind is BufferKind.SCRATCH and i.buffer not in c.scratch_stored:
        raise c.fail(f"scratch buffer {i.buffer} is loaded before it is stored")
    c.check_access(buffer, i.indices, i.mask is not None)
    if i.mask is not None:
        _check_constant(c, i.other, dtype)
    c.define(i.result, dtype, stage)


def _check_const(c: _NestChecker, i: Const, stage: Stage) -> None:
    _check_constant(c, i.value, i.dtype)
    c.define(i.result, i.dtype, stage)


def _check_constant(c: _NestChecker, value: int | float | bool, dtype: DType) -> None:
    if is_float(dtype):
        return
    low, high = int_bounds(dtype)
    if isinstance(value, float) or not low <= value <= high:
        raise c.fail(f"{value} is no {dtype.value}")


def _check_index_value(c: _NestChecker, i: Index, stage: Stage) -> None:
    if i.dtype not in (DType.I64, DType.I32):
        raise c.fail(f"an index value is i64 or i32, not {i.dtype.value}")
    c.check_symbols(i.expr)
    c.define(i.result, i.dtype, stage)
    if i.dtype is DType.I64:
        c.known[Symbol(i.result, SymbolKind.VALUE)] = i.expr.substitute(c.known)


def _check_compute(c: _NestChecker, i: Compute, stage: Stage) -> None:
    problem = check_op_types(i.op, [c.use(a) for a in i.args], i.dtype)
    if problem:
        raise c.fail(problem)
    c.define(i.result, i.dtype, stage)


def _check_check_index(c: _NestChecker, i: CheckedIndex, stage: Stage) -> None:
    if c.use(i.value) is not DType.I64:
        raise c.fail(f"a checked index must be i64, not {c.use(i.value).value}")
    c.require_size_expr(i.size, "the checked size")
    c.define(i.result, DType.I64, stage)
    c.sizes[Symbol(i.result, SymbolKind.VALUE)] = i.size
    c.ranges = Ranges(dict(c.sizes), c.size_minimum)


def _check_reduce(c: _NestChecker, i: Reduce, stage: Stage) -> None:
    if not stage.ranges:
        raise c.fail("a reduction needs a stage with ranges")
    expected = reduce_dtype_or_fail(c, i.kind, c.use(i.value))
    if i.dtype is not expected:
        raise c.fail(f"reduce {i.kind} of {c.use(i.value).value} gives {expected.value}, not {i.dtype.value}")
    if i.running:
        if i.kind.startswith("arg"):
            raise c.fail(f"there is no running {i.kind}")
        c.define(i.result, i.dtype, stage)
        return
    if i.result in c.defined:
        raise c.fail(f"value %{i.result} is defined twice in this nest")
    c.defined.add(i.result)
    c.lasting[i.result] = i.dtype


def reduce_dtype_or_fail(c: _NestChecker, kind: str, value: DType) -> DType:
    try:
        return reduce_dtype(kind, value)
    except IRError as error:
        raise c.fail(str(error)) from None


def _check_store(c: _NestChecker, i: Store, stage: Stage) -> None:
    buffer, dtype = c.buffer(i.buffer)
    c.use_mask(i.mask)
    if buffer.kind is BufferKind.CONSTANT:
        raise c.fail(f"{i.buffer} is a constant of the graph")
    if i.mode not in STORE_MODES:
        raise c.fail(f"the mode of a store is one of {', '.join(STORE_MODES)}, not {i.mode!r}")
    if c.use(i.value) is not dtype:
        raise c.fail(f"{i.buffer} holds {dtype.value}, %{i.value} is {c.use(i.value).value}")
    c.check_access(buffer, i.indices, i.mask is not None)
    c.scratch_stored.add(i.buffer)


_CHECKS: dict[type, Callable[..., None]] = {
    Load: _check_load,
    Const: _check_const,
    Index: _check_index_value,
    Compute: _check_compute,
    CheckedIndex: _check_check_index,
    Reduce: _check_reduce,
    Store: _check_store,
}
