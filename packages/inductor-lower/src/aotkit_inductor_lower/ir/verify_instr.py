"""The rules of single instructions, which hold in the loop IR and in kernels alike."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import IRError
from ..ops.dtypes import int_bounds, is_float
from ..ops.reductions import REDUCTIONS, reduce_dtype
from ..ops.scalar import check_op_types
from ..symbolic import Expr, Ranges, Symbol, SymbolKind, prove_lt, prove_nonnegative, simplify
from .grid import evaluate_on_grid, index_grid
from .nodes import STORE_MODES, CheckedIndex, Compute, Const, DType, Index, Instr, Load, Reduce, Store
from .print import print_instr

__all__ = ["InstrChecker"]

_ENUMERATION_LIMIT = 1 << 22  # grid points looked at one by one where the range analysis gives up


class InstrChecker:
    """Walks instructions in execution order; ``types`` holds what is visible, ``sizes`` what indices range over."""

    whole = "nest"  # what value names are unique in,
    part = "stage"  # and what they live in, for messages
    needs_proof = True  # that indices are in range, where sizes are known

    def __init__(self, place: str, size_minimum: int) -> None:
        self.place = place
        self.size_minimum = size_minimum
        self.defined: set[str] = set()
        self.types: dict[str, DType] = {}  # values visible here
        self.sizes: dict[Symbol, Expr] = {}  # loop variables and checked indices, by the size they stay below
        self.known: dict[Symbol, Expr] = {}  # index values, by their expression
        self.ranges = Ranges()
        self.never_runs = False

    # -- what the container of the instructions says ------------------------------------------------

    def check_read(self, i: Load) -> None:
        """That the memory is declared, holds such elements and has the one that is read."""
        raise NotImplementedError

    def check_write(self, i: Store, dtype: DType) -> None:
        """The same for a value of type ``dtype`` that is stored."""
        raise NotImplementedError

    def check_result(self, i: Reduce) -> None:
        """That a reduction may stand here; makes its result known where it is visible."""
        raise NotImplementedError

    # -- one instruction -----------------------------------------------------------------------------

    def fail(self, problem: str) -> IRError:
        return IRError(f"{self.place}: {problem}")

    def check(self, instr: Instr) -> None:
        _CHECKS[type(instr)](self, instr)

    def shown(self, instr: Instr) -> str:
        try:
            return print_instr(instr)
        except IRError:
            return repr(instr)

    def require_size_expr(self, expr: Expr, what: str) -> None:
        bad = sorted(s for s in expr.symbols if s.kind is not SymbolKind.SIZE)
        if bad:
            raise self.fail(f"{what} may hold size symbols only, not {', '.join(bad)}")

    def add_loop(self, name: str, size: Expr) -> None:
        """Bring a loop's variable into scope."""
        symbol = Symbol(name)
        if symbol in self.sizes:
            raise self.fail(f"loop variable {name} is used twice")
        self.require_size_expr(size, f"the range of {name}")
        if size.constant is not None and size.constant < 0:
            raise self.fail(f"the range of {name} is negative: {size}")
        self.sizes[symbol] = size

    # -- values --------------------------------------------------------------------------------------

    def new_name(self, name: str) -> None:
        if name in self.defined:
            raise self.fail(f"value %{name} is defined twice in this {self.whole}")
        self.defined.add(name)

    def define(self, name: str, dtype: DType) -> None:
        self.new_name(name)
        self.types[name] = dtype

    def use(self, name: str) -> DType:
        found = self.types.get(name)
        if found is None:
            why = (
                f"lives in an earlier {self.part} only, or is a reduction that is not finished in this {self.part}"
                if name in self.defined
                else "is not defined before"
            )
            raise self.fail(f"value %{name} {why}")
        return found

    def use_mask(self, name: str | None) -> None:
        if name is not None and self.use(name) is not DType.BOOL:
            raise self.fail(f"the mask %{name} must be bool, not {self.use(name).value}")

    # -- indices -------------------------------------------------------------------------------------

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
            if not self.needs_proof:
                return
            raise self.fail(f"{what} could not be proven to stay in [0, {size}): {index}")
        found = evaluate_on_grid(index, index_grid(symbols, known))
        if points and (int(found.min()) < 0 or int(found.max()) >= size.constant):
            raise self.fail(f"{what} reaches [{int(found.min())}, {int(found.max())}], outside [0, {size}): {index}")


def _check_load(c: InstrChecker, i: Load) -> None:
    c.use_mask(i.mask)
    c.check_read(i)
    if i.mask is not None:
        _check_constant(c, i.other, i.dtype)
    c.define(i.result, i.dtype)


def _check_const(c: InstrChecker, i: Const) -> None:
    _check_constant(c, i.value, i.dtype)
    c.define(i.result, i.dtype)


def _check_constant(c: InstrChecker, value: int | float | bool, dtype: DType) -> None:
    if is_float(dtype):
        return
    low, high = int_bounds(dtype)
    if isinstance(value, float) or not low <= value <= high:
        raise c.fail(f"{value} is no {dtype.value}")


def _check_index(c: InstrChecker, i: Index) -> None:
    if i.dtype not in (DType.I64, DType.I32):
        raise c.fail(f"an index value is i64 or i32, not {i.dtype.value}")
    c.check_symbols(i.expr)
    c.define(i.result, i.dtype)
    if i.dtype is DType.I64:
        c.known[Symbol(i.result, SymbolKind.VALUE)] = i.expr.substitute(c.known)


def _check_compute(c: InstrChecker, i: Compute) -> None:
    problem = check_op_types(i.op, [c.use(a) for a in i.args], i.dtype)
    if problem:
        raise c.fail(problem)
    c.define(i.result, i.dtype)


def _check_checked_index(c: InstrChecker, i: CheckedIndex) -> None:
    if c.use(i.value) is not DType.I64:
        raise c.fail(f"a checked index must be i64, not {c.use(i.value).value}")
    c.require_size_expr(i.size, "the checked size")
    c.define(i.result, DType.I64)
    c.sizes[Symbol(i.result, SymbolKind.VALUE)] = i.size
    c.ranges = Ranges(dict(c.sizes), c.size_minimum)


def _check_reduce(c: InstrChecker, i: Reduce) -> None:
    value = c.use(i.value)
    try:
        expected = reduce_dtype(i.kind, value)
    except IRError as error:
        raise c.fail(str(error)) from None
    if i.dtype is not expected:
        raise c.fail(f"reduce {i.kind} of {value.value} gives {expected.value}, not {i.dtype.value}")
    if i.running and not REDUCTIONS[i.kind].scannable:
        raise c.fail(f"there is no running {i.kind}")
    c.check_result(i)


def _check_store(c: InstrChecker, i: Store) -> None:
    c.use_mask(i.mask)
    if i.mode not in STORE_MODES:
        raise c.fail(f"the mode of a store is one of {', '.join(STORE_MODES)}, not {i.mode!r}")
    c.check_write(i, c.use(i.value))


_CHECKS: dict[type, Callable[..., None]] = {
    Load: _check_load,
    Const: _check_const,
    Index: _check_index,
    Compute: _check_compute,
    CheckedIndex: _check_checked_index,
    Reduce: _check_reduce,
    Store: _check_store,
}
