"""Sorts of rows that are too long for a network: calls of a stable sort, and what these may stand for.

Note [Order that matters]
    Eager's unstable sort orders equal elements as a C++ library has them. A stable sort, for which targets have kernels
    (Note [A sort as a nest]), may take its place where nothing that is computed can tell, row by row:

    * Equal elements are the same bits, unless they are zeros of both signs or nans: values are marked where neighbours
      are equal and differ in their bits.
    * Places that nothing reads tell nothing. Places that are read as the index of a ``gather``, or of a ``scatter`` of
      a tensor, tell something only where neighbours are equal and what is gathered or scattered by them differs: of a
      sampler that keeps the largest probabilities, where equal ones lie across its threshold. These rows are marked
      before the gather or scatter.
    * Other uses tell the order of all equal elements. Short rows of 32 bits and more have seldom any.

    With ``numerics="fast"`` a sort is stable whatever is asked for. Else marked rows are ATen's, as in Note [Equal elements] of :mod:`.sorting`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import BufferRef, DType, ExternCall, Literal
from ..ops.dtypes import is_float
from ..ops.fixups import FIX_UP_ROWS
from ..symbolic import Expr
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype
from .reductions import RowNest
from .registry import aten
from .sort_nests import STABLE_SORT
from .values import NodeValue, View

__all__ = ["is_long", "long_sort", "redo_rows", "settle_order"]

_SHORTEST = {8: 160, 4: 64}  # elements of a row, by their bytes; of fewer bytes:
_SHORTEST_NARROW = 40
_SELDOM_EQUAL = 2048  # elements of rows whose equal elements are looked for
_STABLE = "sorts of long rows are left to ATen"
_BITS = {2: DType.I16, 4: DType.I32, 8: DType.I64}
Index = tuple[Expr, ...]
Results = tuple[View, View]
Numbers = tuple[int, int, bool]
Differs = Callable[[ViewBuilder, Sequence[Index]], Value]


def is_long(count: Expr, itemsize: int) -> bool:
    """Whether rows of so many elements take less time digit by digit than by comparisons, as far as that is known: see
    Note [Which sorts are ours] in ``targets/cpu/choose_sorts.py``."""
    return count.constant is None or count.constant >= _SHORTEST.get(itemsize, _SHORTEST_NARROW)


def long_sort(ctx: LoweringContext, node: Node, x: View, dim: int, descending: bool, *, stable: bool) -> NodeValue:
    """A stable sort, where that may take the place of the sort that is asked for.

    Raises :class:`Fallback` where eager's order of equal elements can be told from the results.
    """
    if stable:
        raise Fallback(_STABLE)
    dim %= len(x.sizes)
    told = _told(node) and not ctx.sorts_stably
    if told and (x.dtype not in (torch.float32, torch.float64) or not _is_short(x.sizes[dim])):
        raise Fallback("the order of equal elements, which long rows have, is ATen's")
    call, results = _sorted_stably(ctx, node, x, dim, descending)
    if told:
        _redo_where(ctx, node, call, results, None)
    elif x.dtype.is_floating_point and _taken(node, 0) and not ctx.sorts_stably:
        _redo_where(ctx, node, call, results, lambda nest, at: _bits_differ(nest, results[0], at))
    return list(results)


def settle_order(ctx: LoweringContext, node: Node) -> None:
    """Before a node that gathers or scatters by the places of a sort: let ATen order the rows in which it could tell
    equal elements apart."""
    found = _by_places(node)
    if found is None or ctx.sorts_stably or _told(found[0]):
        return
    sort, moved = found
    call = next((s for s in ctx.steps if isinstance(s, ExternCall) and s.name == sort.name), None)
    given, results = ctx.values[moved], ctx.values[sort]
    if call is None or call.target != STABLE_SORT or sort.target is not aten.sort.default:
        return
    assert isinstance(given, View) and isinstance(results, list)
    values, places = results
    assert isinstance(values, View) and isinstance(places, View)

    def differs(nest: ViewBuilder, at: Sequence[Index]) -> Value:
        if node.target is aten.gather.default:
            at = [_gathered(nest, places, _dim(call), each) for each in at]
        return _bits_differ(nest, given, at)

    _redo_where(ctx, node, call, (values, places), differs)


def redo_rows(
    ctx: LoweringContext, node: Node, op: str, x: str, marked: View, results: Results, numbers: Numbers
) -> None:
    """Let ATen do the rows of ``op`` of the buffer ``x`` that are marked, if there are any. ``numbers``: dimension,
    number and flag of :func:`~..ops.fixups.fix_up_rows`."""
    found = ctx.declare_dense(f"{node.name}_any_marked", (), torch.bool)
    rows = RowNest(ctx, node, found.buffer, marked.sizes, range(len(marked.sizes)))
    total = rows.nest.reduce("any", rows.nest.load(marked, rows.stage()))
    rows.nest.stage()
    rows.nest.store(found, (), total)
    ctx.add(rows.nest)
    written = tuple(view.buffer for view in results)
    dim, number, flag = numbers
    args = (
        tuple(map(BufferRef, (found.buffer, marked.buffer, x, *written))),
        *(Literal("str", op), Literal("int", dim), Literal("int", number), Literal("bool", flag)),
    )
    reason = "rows in which equal elements compete are left to ATen"
    ctx.steps.append(ExternCall(f"{node.name}_redo", FIX_UP_ROWS, args, (), (), written, reason, ctx.origin(node)))


# -- who can tell ----------------------------------------------------------------------------------------


def _told(sort: Node) -> bool:
    """Whether something reads the places in another way than :func:`settle_order` knows."""
    return any(_by_places(user) is None for places in _taken(sort, 1) for user in places.users)


def _taken(sort: Node, which: int) -> list[Node]:
    """Where a result is read."""
    return [user for user in sort.users if user.args[1] == which and user.users]


def _by_places(node: Node) -> tuple[Node, Node] | None:
    """The sort by whose places a node gathers or scatters, and what it moves: a tensor of the same sizes, along the
    same dimension."""
    if node.target is aten.gather.default:
        moved, dim, places, *others = node.args
    elif node.target is aten.scatter.src:
        start, dim, places, moved, *others = node.args
        others.append(start)
    else:
        return None
    if not isinstance(places, Node) or not isinstance(moved, Node) or places in (moved, *others):
        return None
    sort = places.args[0] if places.target is operator.getitem else None
    if not isinstance(sort, Node) or sort.target is not aten.sort.default or places.args[1] != 1:
        return None
    sizes = [tensor.meta["val"].shape for tensor in (places, moved)]
    own = sort.args[1] if len(sort.args) > 1 else -1
    if sizes[0] != sizes[1] or not isinstance(dim, int) or not isinstance(own, int) or not sizes[0]:
        return None
    return (sort, moved) if dim % len(sizes[0]) == own % len(sizes[0]) else None


def _is_short(count: Expr) -> bool:
    return count.constant is not None and count.constant <= _SELDOM_EQUAL


# -- steps -----------------------------------------------------------------------------------------------


def _sorted_stably(ctx: LoweringContext, node: Node, x: View, dim: int, descending: bool) -> tuple[ExternCall, Results]:
    values, places = (ctx.declare(f"{node.name}_{k}", val) for k, val in enumerate(node.meta["val"]))
    plain = (("stable", True), ("dim", dim), ("descending", bool(descending)))
    kwargs = tuple((name, Literal("int" if name == "dim" else "bool", value)) for name, value in plain)
    args = (BufferRef(ctx.as_buffer(x, node)),)
    results = (values.buffer, places.buffer)
    call = ExternCall(node.name, STABLE_SORT, args, kwargs, results, (), _STABLE, ctx.origin(node))
    ctx.steps.append(call)
    return call, (values, places)


def _dim(call: ExternCall) -> int:
    dim = dict(call.kwargs)["dim"]
    assert isinstance(dim, Literal) and isinstance(dim.value, int)
    return dim.value


def _redo_where(
    ctx: LoweringContext, node: Node, call: ExternCall, results: tuple[View, View], differs: Differs | None
) -> None:
    """Mark the rows that have equal neighbours of which something differs, and let ATen do these."""
    (x,), values, dim = call.args, results[0], _dim(call)
    descending = dict(call.kwargs)["descending"]
    assert isinstance(x, BufferRef) and isinstance(descending, Literal)
    kept = [size for each, size in enumerate(values.sizes) if each != dim]
    marked = ctx.declare_dense(f"{node.name}_marked", kept, torch.bool)
    nest = ctx.nest(marked.buffer, node, kept)
    (inner,) = nest.stage([values.sizes[dim] - 1])
    at = [(*nest.index[:dim], inner + step, *nest.index[dim:]) for step in (0, 1)]
    mark = _are_equal(nest, values, at)
    if differs is not None:
        mark = nest.op("logical_and", mark, differs(nest, at))
    total = nest.reduce("any", mark)
    nest.stage()
    nest.store(marked, nest.index, total)
    ctx.add(nest)
    redo_rows(ctx, node, "sort", x.name, marked, results, (dim, 1, bool(descending.value)))


def _are_equal(nest: ViewBuilder, values: View, at: Sequence[Index]) -> Value:
    """Whether two elements are, as a sort sees it."""
    a, b = (nest.cast(nest.load(values, each), compute_dtype(values.dtype)) for each in at)
    equal = nest.op("eq", a, b)
    if not is_float(a.dtype):
        return equal
    return nest.op("logical_or", equal, nest.op("logical_and", nest.op("isnan", a), nest.op("isnan", b)))


def _bits_differ(nest: ViewBuilder, view: View, at: Sequence[Index]) -> Value:
    a, b = (nest.load(view, each) for each in at)
    if is_float(a.dtype):
        a, b = (nest.op("bitcast", value, to=_BITS[view.dtype.itemsize]) for value in (a, b))
    return nest.op("ne", a, b)


def _gathered(nest: ViewBuilder, places: View, dim: int, at: Index) -> Index:
    """Where a gather by the places reads."""
    place = nest.check_index(nest.load(places, at), places.sizes[dim])
    return (*at[:dim], place, *at[dim + 1 :])
