"""Kernels that compute attention, forward or backward, known by the shape of Note [Attention as a nest]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir import CONTRACTIONS, Compute, Const, DType, Index, Instr, Load, Precision, Reduce, Store
from ..ir.walk import operands
from ..symbolic import Expr, Symbol, sym, to_expr
from .nodes import Kernel, Loop
from .walk import PerfectNest, perfect_nests

__all__ = ["AttentionSite", "Lines", "Mask", "attention_site"]


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of numbers in memory: number ``d`` of line ``i`` is at ``start + i*step + d``. The lines of a queries' loop
    that is of the grid begin at query 0."""

    buffer: str
    dtype: DType
    start: Expr
    step: Expr


@dataclass(frozen=True, slots=True)
class Mask:
    """What is added to the scores: of query ``i`` and key ``j`` at ``start + i*row + j``."""

    buffer: str
    dtype: DType
    start: Expr
    row: Expr


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """The attention that a kernel computes. ``batch``: loops of the grid, one iteration is a head; ``queries``: the
    loop of the grid that the forward has for them. ``inputs``: query, key, value; in the backward behind these the
    gradient of the result and the result. ``outputs``: the result, or the gradients of query, key and value.
    ``logarithms``: of the sums of weights, a number for each query."""

    backward: bool
    precision: Precision
    dtype: DType
    batch: tuple[Loop, ...]
    queries: Loop | None
    counts: tuple[Expr, Expr]
    head: int
    inputs: tuple[Lines, ...]
    outputs: tuple[Lines, ...]
    logarithms: Lines | None
    scale: float
    mask: Mask | None
    causal: bool


def attention_site(kernel: Kernel) -> AttentionSite | None:
    """The attention that a kernel in normal form is; ``None`` for any other kernel, and where numbers of a head don't
    lie side by side."""
    scratch = {declared.name for declared in kernel.scratch}
    if len(scratch) not in (3, 8):
        return None
    try:
        return _backward(kernel) if len(scratch) == 8 else _forward(kernel)
    except _Other:
        return None


class _Other(Exception):
    """The kernel is something else."""


#: What nests compute, as :func:`_form` writes it.
_CLEAR = "const store"
_SUMS = ("load load mul(2,1) store+", "load load cast(2) cast(2) mul(2,1) store+")
_SCALED = "load const mul(2,1)"
_MASKED = ("", " load add(2,1)", " load cast(1) add(3,1)")
_CAUSAL = ("", " index index le(2,1) const where(2,5,1)")
_MAXIMUM = " store max(2)"
_CHANGES = {
    DType.F32: " load sub(2,1) exp(1) store load load sub(2,1) mul(1,5) const mul(2,1) store",
    DType.BF16: " load sub(2,1) exp(1) cast(1) store load load sub(2,1) mul(1,6) const mul(2,1) cast(1) store",
}
_NO_KEY = "const const eq(^,1) where(1,3,^)"
_WEIGHTS = {DType.F32: "load sub(1,^) exp(1) store sum(2)", DType.BF16: "load sub(1,^) exp(1) cast(1) store sum(3)"}
_DIVISOR = "const const eq(^,2) where(1,2,^)"
_LOGARITHM = " log(1) add(^,1) store"
_DIVIDED = {DType.F32: "load div(1,^) store", DType.BF16: "load div(1,^) cast(1) store"}
_DELTA = {DType.F32: "load load mul(2,1) store+", DType.BF16: "load cast(1) load cast(1) mul(3,1) store+"}
_STORED = {DType.F32: "load store", DType.BF16: "load cast(1) store"}


def _form(nest: PerfectNest) -> str:
    """What a nest computes, without memory: ops, with how far before them the instructions are that they take; ``^`` is
    a value from another nest."""
    found: list[str] = []
    place: dict[str, int] = {}
    for position, instr in enumerate(nest.body):
        given = ",".join(str(position - place[name]) if name in place else "^" for name in operands(instr))
        found.append(_word(instr, given))
        if not isinstance(instr, Store):
            place[instr.result] = position
    return " ".join(found)


def _word(instr: Instr, given: str) -> str:
    if isinstance(instr, Store):
        return "store" if instr.plain else "store+" if instr.mode == "add" and instr.mask is None else "other"
    if isinstance(instr, Compute):
        return f"{'mul' if instr.op in CONTRACTIONS.values() else instr.op}({given})"
    if isinstance(instr, Reduce):
        return f"{instr.kind}({given})" if not instr.running else "other"
    plain = not (isinstance(instr, Load) and instr.mask is not None)
    return type(instr).__name__.lower() if plain else "other"


class _Reader:
    """Reads the nests of a kernel one after the other. Raises :class:`_Other` where one is not as expected."""

    def __init__(self, kernel: Kernel) -> None:
        self.scratch = {declared.name for declared in kernel.scratch}
        self.types = {param.name: param.dtype for param in kernel.params if not param.also}
        self.grid = kernel.grid
        self.nests = list(perfect_nests(kernel))
        self.precisions: set[Precision] = set()
        self.scale, self.causal = 0.0, False
        self.mask: Mask | None = None

    def take(self, form: str, *loops: int) -> PerfectNest:
        """The next nest, which must have this form, and so many loops."""
        nest = self.nests.pop(0) if self.nests else None
        if nest is None or _form(nest) != form or len(nest.loops) not in loops:
            raise _Other
        return nest

    def clear(self, *loops: int) -> None:
        """Zeros."""
        (zero, _) = self.take(_CLEAR, *loops).body
        if not isinstance(zero, Const) or zero.value != 0:
            raise _Other

    def sum(self, loops: int) -> tuple[PerfectNest, Load, Load]:
        """A sum of products that is added to scratch memory, with its factors."""
        nest = self.take(_SUMS[len(self.nests[0].body) == 6 if self.nests else 0], loops)
        ops = [i.op for i in nest.body if isinstance(i, Compute) and i.op != "cast"]
        self.precisions |= {name for name, known in CONTRACTIONS.items() if known in ops} or {"highest", "high"}
        first, second = nest.body[:2]
        assert isinstance(first, Load) and isinstance(second, Load)
        return nest, first, second

    def lines(self, access: Load | Store, line: Loop, along: Loop | None) -> Lines:
        """The lines that an access goes to, along two loops. Of one loop instead lines that touch."""
        offset = access.indices[0]
        symbols = [Symbol(loop.symbol) for loop in (line, along) if loop is not None]
        steps = [offset.coefficient(symbol) for symbol in symbols]
        if steps[-1] != 1 or steps[0] is None or access.buffer in self.scratch or access.buffer not in self.types:
            raise _Other
        start = offset.substitute({symbol: to_expr(0) for symbol in symbols})
        return Lines(access.buffer, self.types[access.buffer], start, steps[0])

    def row(self, access: Load | Store, line: Loop) -> Lines:
        """Numbers of which each line has one."""
        offset, symbol = access.indices[0], Symbol(line.symbol)
        step = offset.coefficient(symbol)
        if step is None or self.types.get(access.buffer) is not DType.F32:
            raise _Other
        return Lines(access.buffer, DType.F32, offset.substitute({symbol: to_expr(0)}), step)

    def score(self, nest: PerfectNest, row: Loop, column: Loop, rest: str) -> None:
        """Note the scale and the mask of a nest that makes scores of products, and then computes the ``rest``."""
        form = _form(nest)
        found = [(m, c) for m in _MASKED for c in _CAUSAL if form == _SCALED + m + c + rest]
        if not found:
            raise _Other
        scale, load = nest.body[1], nest.body[3]
        assert isinstance(scale, Const)
        self.scale, self.causal = float(scale.value), bool(found[0][1])
        if found[0][0]:
            assert isinstance(load, Load)
            symbols = Symbol(row.symbol), Symbol(column.symbol)
            steps = [load.indices[0].coefficient(symbol) for symbol in symbols]
            if steps[0] is None or steps[1] != 1 or load.buffer in self.scratch:
                raise _Other
            start = load.indices[0].substitute({symbol: to_expr(0) for symbol in symbols})
            self.mask = Mask(load.buffer, load.dtype, start, steps[0])
        if self.causal:
            indices = [i.expr for i in nest.body if isinstance(i, Index)]
            hidden = [i for i in nest.body if isinstance(i, Const)][1]
            if indices != [sym(column.symbol), sym(row.symbol)] or hidden.value != -math.inf:
                raise _Other

    def site(
        self,
        queries: Loop | None,
        counts: tuple[Expr, Expr],
        head: Loop,
        moved: Sequence[Sequence[Lines]],
        sums: Lines | None,
    ) -> AttentionSite:
        """The site, if nothing is left and all types fit. ``moved``: lines that are read, and that are written."""
        inputs, outputs = moved
        dtype, size = inputs[0].dtype, head.extent.constant
        same = all(lines.dtype is dtype for lines in (*inputs, *outputs))
        if self.nests or len(self.precisions) != 1 or size is None or not same or dtype not in _STORED:
            raise _Other
        (precision,) = self.precisions
        batch = tuple(loop for loop in self.grid if loop is not queries)
        read, written = tuple(inputs), tuple(outputs)
        backward = queries is None
        kept = (sums, self.scale, self.mask, self.causal)
        return AttentionSite(backward, precision, dtype, batch, queries, counts, size, read, written, *kept)


def _forward(kernel: Kernel) -> AttentionSite:
    """Raises :class:`_Other`."""
    reader = _Reader(kernel)
    reader.clear(1)
    nest, left, right = reader.sum(2)
    keys, head = nest.loops
    queries = _varies(kernel.grid, left, right)
    query, key = reader.lines(left, queries, head), reader.lines(right, keys, head)
    dtype = query.dtype
    scores = reader.nests.pop(0)
    reader.score(scores, queries, scores.loops[0], _MAXIMUM)
    reader.take(_NO_KEY, 0)
    reader.take(_WEIGHTS[dtype], 1)
    reader.clear(1)
    nest, _, right = reader.sum(2)
    value = reader.lines(right, nest.loops[0], nest.loops[1])
    logarithms = None
    if reader.nests and len(reader.nests[0].body) > 4:
        store = reader.take(_DIVISOR + _LOGARITHM, 0).body[-1]
        assert isinstance(store, Store)
        logarithms = reader.row(store, queries)
    else:
        reader.take(_DIVISOR, 0)
    nest = reader.take(_DIVIDED[dtype], 1)
    store = nest.body[-1]
    assert isinstance(store, Store)
    out = reader.lines(store, queries, nest.loops[0])
    return reader.site(queries, (queries.extent, keys.extent), head, ([query, key, value], [out]), logarithms)


def _varies(grid: Sequence[Loop], left: Load, right: Load) -> Loop:
    """The loop of the grid that a query varies along and a key does not."""
    symbols = {symbol.name for symbol in left.indices[0].symbols} - {symbol.name for symbol in right.indices[0].symbols}
    found = [loop for loop in grid if loop.symbol in symbols]
    if len(found) != 1:
        raise _Other
    return found[0]


def _backward(kernel: Kernel) -> AttentionSite:
    """Raises :class:`_Other`."""
    reader = _Reader(kernel)
    for _ in range(3):
        reader.clear(1, 2)
    nest = reader.take(_DELTA[DType.BF16 if len(reader.nests[0].body) == 6 else DType.F32], 2)
    result, gradient = (reader.lines(i, *nest.loops) for i in nest.body if isinstance(i, Load))
    nest, left, right = reader.sum(3)
    queries, keys, head = nest.loops
    query, key = reader.lines(left, queries, head), reader.lines(right, keys, head)
    dtype = query.dtype
    nest, left, right = reader.sum(3)
    value = reader.lines(right, nest.loops[1], nest.loops[2])
    if left.buffer != gradient.buffer or dtype not in _CHANGES:
        raise _Other
    changes = reader.nests.pop(0)
    if len(changes.loops) != 2:
        raise _Other
    reader.score(changes, *changes.loops, _CHANGES[dtype])
    loads = [i for i in changes.body if isinstance(i, Load) and i.buffer not in reader.scratch]
    logarithms = reader.row(loads[-1], changes.loops[0])
    scales = [i.value for i in changes.body if isinstance(i, Const)]
    if scales[0] != scales[-1] or Symbol(changes.loops[1].symbol) in loads[-1].indices[0].symbols:
        raise _Other
    for _ in range(3):
        reader.clear(1, 2)
        reader.sum(3)
    outputs = []
    for _ in range(3):
        nest = reader.take(_STORED[dtype], 1, 2)
        store = nest.body[-1]
        assert isinstance(store, Store)
        lines = reader.lines(store, nest.loops[0], nest.loops[1] if len(nest.loops) == 2 else None)
        outputs.append(lines if len(nest.loops) == 2 else replace(lines, step=head.extent))
    inputs = [query, key, value, gradient, result]
    return reader.site(None, (queries.extent, keys.extent), head, (inputs, outputs), logarithms)
