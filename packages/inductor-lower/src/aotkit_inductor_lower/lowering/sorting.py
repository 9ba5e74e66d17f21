"""Sorting, the best few and medians of short rows: generated where a row's length is known, with eager's bits.

Note [Sorting short rows]
    An element becomes a key, an integer in eager's order (nan is the largest, zeros are equal), with its place in the
    row in the low bits: no two are equal, and equal elements keep their order. One stage makes a row's keys; a sorting
    network orders them, rows in the lanes, or one pass over the row per result finds the next. The last stage fetches
    the elements by place, so their bits survive. Keys of 64 bits have their place beside them.

Note [Equal elements]
    Which of several equal elements eager's ``topk``, ``kthvalue``, ``median`` and (of over 16) unstable ``sort`` take
    is up to a C++ library. Rows where it matters are marked, and ``fix_up_rows`` has ATen do those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import DType
from ..ops.dtypes import is_float
from ..symbolic import Expr, to_expr
from .access import Value
from .context import LoweringContext
from .long_sorts import is_long, long_sort, redo_rows
from .promotion import compute_dtype
from .reductions import RowNest
from .registry import RuleTable, aten
from .sort_nests import ordered
from .values import NodeValue, View

__all__ = ["TABLE"]

TABLE = RuleTable("sorting")

INSERTED = 16  # the longest rows that eager sorts by insertion, so that equal elements keep their order
LONGEST_NETWORK, LONGEST_WIDE, LONGEST_ROW = 32, 16, 128  # elements; wide: keys of 64 bits; row: in passes
MOST_PASSES = 8
_PLACE_BITS = 32
_TIED = "equal elements, which are the rule among numbers of a byte or two, are ordered by ATen"


class _Key(NamedTuple):
    """What is compared: ``first``, which holds the place too, or has ``place`` beside it where there is no room."""

    first: Value
    place: Value | None = None


class _Sorter:
    """The nest of one operator on the rows of ``x`` along ``dim``, and what ``fix_up_rows`` is told of it."""

    def __init__(
        self, ctx: LoweringContext, node: Node, x: View, dim: int, op: str, flag: bool, number: object = 1
    ) -> None:
        if not ctx.capabilities.sorts_rows:
            raise Fallback("sorting is generated for the CPU only")
        count = x.sizes[dim].constant if x.sizes else None
        number = number.constant if isinstance(number, Expr) else number
        if not count or not isinstance(number, int) or not 0 < number <= count:
            raise Fallback("sorting is generated for rows of known length")
        if op != "sort" and x.dtype.itemsize == 1:
            raise Fallback(_TIED)
        self.ctx, self.node, self.x, self.dim = ctx, node, x, dim % len(x.sizes)
        self.op, self.count, self.number, self.flag = op, count, number, flag
        self.ranks = op in ("sort", "topk")  # the flag says in which direction; else whether the dimension is kept
        self.wide = compute_dtype(x.dtype) in (DType.F64, DType.I64)
        self.marks: list[Value] = []

    def _temporary(self, name: str, dtype: torch.dtype, *sizes: int) -> View:
        kept = [self.rows.sizes[dim] for dim in self.rows.kept]
        return self.ctx.declare_dense(f"{self.node.name}_{name}", [*kept, *map(to_expr, sizes)], dtype)

    def make_keys(self) -> Value:
        """Declare the results, and begin the stage that stores each element and its key; the key."""
        results = enumerate(self.node.meta["val"])
        self.values, self.indices = (self.ctx.declare(f"{self.node.name}_{k}", val) for k, val in results)
        self.rows = RowNest(self.ctx, self.node, self.values.buffer, self.x.sizes, [self.dim])
        self.keys = self._temporary("keys", torch.int64, self.count)
        self.kept = self._temporary("kept", self.x.dtype, self.count)
        self.nest, index = self.rows.nest, self.rows.stage()
        nest, place = self.nest, index[self.dim]
        element = nest.load(self.x, index)
        nest.store(self.kept, (*nest.index, place), element)
        if self.op == "median" and is_float(element.dtype):
            self.marks.append(nest.reduce("any", nest.op("isnan", nest.cast(element, compute_dtype(self.x.dtype)))))
        key = ordered(nest, element)
        if self.ranks and self.flag:
            key = nest.op("bitwise_not", key)
        if not self.wide:
            shift = nest.const(_PLACE_BITS, DType.I64)
            key = nest.op("bitwise_or", nest.op("shl", key, shift), nest.index_value(place))
        nest.store(self.keys, (*nest.index, place), key)
        return key

    def equal(self, a: _Key, b: _Key) -> Value:
        """Whether the elements of two keys are equal."""
        if a.place is not None:
            return self.nest.op("eq", a.first, b.first)
        shift = self.nest.const(_PLACE_BITS, DType.I64)
        return self.nest.op("eq", *(self.nest.op("shr", key.first, shift) for key in (a, b)))

    def by_network(self, wanted: Sequence[int]) -> list[_Key]:
        """The keys at the ``wanted`` positions of the sorted row, in a stage without loops."""
        if self.count > (LONGEST_WIDE if self.wide else LONGEST_NETWORK):
            raise Fallback("rows of that length are sorted by ATen")
        self.make_keys()
        nest = self.nest
        nest.stage()
        lines = []
        for at in range(self.count):
            key = nest.load(self.keys, (*nest.index, to_expr(at)))
            lines.append(_Key(key, nest.const(at, DType.I64) if self.wide else None))
        for low, high, both in _needed(self.count, set(wanted)):
            a, b = lines[low], lines[high]
            lines[low], lines[high] = self._first(a, b), self._first(a, b, last=True) if both else b
        return [lines[at] for at in wanted]

    def _first(self, a: _Key, b: _Key, *, last: bool = False) -> _Key:
        """The smaller of two keys, or the larger."""
        nest = self.nest
        first = nest.op("maximum" if last else "minimum", a.first, b.first)
        if a.place is None or b.place is None:
            return _Key(first)
        same = nest.op("logical_and", nest.op("eq", a.first, b.first), nest.op("lt", b.place, a.place))
        swap = nest.op("logical_or", nest.op("lt", b.first, a.first), same)
        return _Key(first, nest.where(swap, *((a.place, b.place) if last else (b.place, a.place))))

    def by_passes(self, count: int) -> list[_Key]:
        """The first ``count`` keys of the sorted row, each from a pass over the row."""
        first = self.make_keys()
        nest, found = self.nest, [_Key(self.nest.reduce("min", first))]
        while len(found) < count:
            key = nest.load(self.keys, (*nest.index, self.rows.stage()[self.dim]))
            later = nest.where(nest.op("gt", key, found[-1].first), key, nest.const((1 << 63) - 1, DType.I64))
            found.append(_Key(nest.reduce("min", later)))
        nest.stage()
        return found

    def finish(self, keys: Sequence[_Key], compared: Sequence[_Key] = ()) -> NodeValue:
        """Store the elements of ``keys``. ``compared``: neighbours of which no two may be equal, else ATen decides."""
        nest, marks = self.nest, [*self.marks, *(self.equal(a, b) for a, b in pairwise(compared))]
        order = self._temporary("order", torch.int64, len(keys))
        low = nest.const((1 << _PLACE_BITS) - 1, DType.I64)
        for at, key in enumerate(keys):
            nest.store(order, (*nest.index, to_expr(at)), key.place or nest.op("bitwise_and", key.first, low))
        marked = self._temporary("marked", torch.bool) if marks else None
        if marked is not None:
            nest.store(marked, nest.index, reduce(partial(nest.op, "logical_or"), marks))
        inner = nest.stage([to_expr(len(keys))])[0]
        place = nest.load(order, (*nest.index, inner))
        index = list(nest.index)
        if self.ranks or self.flag:
            index.insert(self.dim, inner)
        nest.store(self.indices, index, place)
        source = nest.check_index(place, to_expr(self.count)) if self.count > 1 else to_expr(0)
        nest.store(self.values, index, nest.load(self.kept, (*nest.index, source)))
        self.ctx.add(nest)
        if marked is not None:
            self._redo(marked)
        return [self.values, self.indices]

    def _redo(self, marked: View) -> None:
        """Let ATen do the rows that were marked, if there are any."""
        x, numbers = self.ctx.as_buffer(self.x, self.node), (self.dim, self.number, bool(self.flag))
        redo_rows(self.ctx, self.node, self.op, x, marked, (self.values, self.indices), numbers)


def _comparators(count: int) -> Iterator[tuple[int, int]]:
    """Batcher's merge exchange for any number of lines (Knuth, The Art of Computer Programming 3, 5.2.2 M)."""
    top = 1 << max(0, (count - 1).bit_length() - 1)
    part = top if count > 1 else 0
    while part:
        step, rest, distance = top, 0, part
        while True:
            yield from ((at, at + distance) for at in range(count - distance) if at & part == rest)
            if step == part:
                break
            distance, step, rest = step - part, step // 2, part
        part //= 2


def _needed(count: int, wanted: set[int]) -> list[tuple[int, int, bool]]:
    """The comparators that the ``wanted`` lines of the result depend on, and whether their second results are used."""
    live, kept = set(wanted), []
    for low, high in reversed(list(_comparators(count))):
        if low in live or high in live:
            kept.append((low, high, high in live))
            live |= {low, high}
    return kept[::-1]


@TABLE.lowers(aten.sort.default, aten.sort.stable)
def sort(
    ctx: LoweringContext, node: Node, x: View, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> NodeValue:
    """Sorted elements and their places; equal elements as eager has them."""
    if ctx.capabilities.sorts_rows and x.sizes and is_long(x.sizes[dim], x.dtype.itemsize):
        return long_sort(ctx, node, x, dim, descending, stable=bool(stable))
    sorter = _Sorter(ctx, node, x, dim, "sort", descending)
    certain = stable or ctx.sorts_stably or sorter.count <= INSERTED
    if not certain and x.dtype.itemsize < 4:
        raise Fallback(_TIED)
    keys = sorter.by_network(range(sorter.count))
    return sorter.finish(keys, () if certain else keys)


@TABLE.lowers(aten.topk.default)
def topk(
    ctx: LoweringContext, node: Node, x: View, k: object, dim: int = -1, largest: bool = True, sorted: bool = True
) -> NodeValue:
    """The ``k`` largest or smallest elements, sorted."""
    sorter = _Sorter(ctx, node, x, dim, "topk", largest, k)
    if not sorted and sorter.number > 2:  # eager puts the last of them in its place, and then sorts those before it
        raise Fallback("the order of an unsorted topk is ATen's")
    seen = min(sorter.number + 1, sorter.count)
    passes = not sorter.wide and INSERTED < sorter.count <= LONGEST_ROW and seen <= MOST_PASSES
    keys = sorter.by_passes(seen) if passes else sorter.by_network(range(seen))
    return sorter.finish(keys[: sorter.number], keys)


def _at(sorter: _Sorter, place: int) -> NodeValue:
    """The element at one place of the sorted row."""
    keys = sorter.by_network(range(max(0, place - 1), min(sorter.count, place + 2)))
    return sorter.finish([keys[min(1, place)]], keys)


@TABLE.lowers(aten.kthvalue.default)
def kthvalue(ctx: LoweringContext, node: Node, x: View, k: object, dim: int = -1, keepdim: bool = False) -> NodeValue:
    """The ``k``-th smallest element."""
    sorter = _Sorter(ctx, node, x, dim, "kthvalue", keepdim, k)
    return _at(sorter, sorter.number - 1)


@TABLE.lowers(aten.median.dim)
def median(ctx: LoweringContext, node: Node, x: View, dim: int, keepdim: bool = False) -> NodeValue:
    """The median, of two in the middle the lower; nan if there is one."""
    sorter = _Sorter(ctx, node, x, dim, "median", keepdim)
    return _at(sorter, (sorter.count - 1) // 2)
