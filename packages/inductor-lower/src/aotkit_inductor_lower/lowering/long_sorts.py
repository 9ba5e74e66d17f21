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
      Of numbers of float16 and bfloat16 that were widened this would be most rows, after all the work: such rows are
      ATen's from the start, and zeros take their place in ours, which no digit moves.
    * Other uses tell the order of all equal elements. Short rows of 32 bits and more have seldom any.

    With ``numerics="fast"`` a sort is stable whatever is asked for. Else marked rows are ATen's, as in Note [Equal
    elements] of :mod:`.sorting`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import BufferRef, DType, ExternCall, Literal
from ..ops.aten import is_view
from ..ops.dtypes import is_float
from ..ops.fixups import FIX_UP_ROWS
from ..symbolic import Expr, to_expr
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype
from .reductions import RowNest
from .registry import aten
from .sort_nests import STABLE_SORT
from .values import NodeValue, View, dim_exprs

__all__ = ["is_long", "long_sort", "redo_rows", "settle_order"]

_SHORTEST = {8: 160, 4: 64}  # elements of a row, by their bytes; of fewer bytes:
_SHORTEST_NARROW = 40
_SELDOM_EQUAL = 2048  # elements of rows whose equal elements are looked for
_LOW_BITS = 13  # of a float32, which numbers of float16 and bfloat16 leave 0
_COARSE = "_coarse_redo"  # the end of the name of the step that does such rows
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
    moves = bool(_taken(node, 1)) and not told and not ctx.sorts_stably
    if moves and x.dtype.itemsize < 4:
        raise Fallback("most elements of two bytes and less are equal, and their order is ATen's")
    coarse = _coarse_rows(ctx, node, x, dim) if moves and x.dtype is torch.float32 else None
    whole = x if coarse is None else _without(ctx, node, x, dim, coarse)
    call, results = _sorted_stably(ctx, node, whole, dim, descending)
    if coarse is not None:
        name = f"{node.name}{_COARSE}"
        redo_rows(ctx, node, "sort", ctx.as_buffer(x, node), coarse, results, (dim, 1, bool(descending)), name)
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
    ctx: LoweringContext,
    node: Node,
    op: str,
    x: str,
    marked: View,
    results: Results,
    numbers: Numbers,
    name: str | None = None,
) -> None:
    """Let ATen do the rows of ``op`` of the buffer ``x`` that are marked, if there are any. ``numbers``: dimension,
    number and flag of :func:`~..ops.fixups.fix_up_rows`; ``name``: of the step."""
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
    name = name or f"{node.name}_redo"
    ctx.steps.append(ExternCall(name, FIX_UP_ROWS, args, (), (), written, reason, ctx.origin(node)))


# -- who can tell ----------------------------------------------------------------------------------------


def _told(sort: Node) -> bool:
    """Whether something reads the places in another way than :func:`settle_order` knows; or in that way, when what was
    sorted may be gone."""
    users = [user for places in _taken(sort, 1) for user in places.users]
    return any(_by_places(user) is None for user in users) or (bool(users) and _is_written_to(sort.args[0]))


def _is_written_to(tensor: object) -> bool:
    """Whether a node of the graph writes to the memory of a tensor."""
    own = _root(tensor)
    writers = (node for node in own.graph.nodes if node.op == "call_function" and _writes(node.target))
    return any(_root(given) is own for node in writers for given in node.all_input_nodes)


def _root(tensor: object) -> Node:
    """The tensor that a view is of."""
    assert isinstance(tensor, Node)
    while tensor.op == "call_function" and is_view(tensor) and isinstance(tensor.args[0], Node):
        tensor = tensor.args[0]
    return tensor


def _writes(target: object) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return isinstance(target, torch._ops.HigherOrderOperator)


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


# -- numbers of few bits ---------------------------------------------------------------------------------


def _coarse_rows(ctx: LoweringContext, node: Node, x: View, dim: int) -> View:
    """Which rows of float32 hold nothing but numbers of float16 or bfloat16."""
    rows = RowNest(ctx, node, ctx.unique(f"{node.name}_coarse"), x.sizes, [dim])
    nest = rows.nest
    bits = nest.op("bitcast", nest.load(x, rows.stage()), to=DType.I32)
    low = nest.op("bitwise_and", bits, nest.const((1 << _LOW_BITS) - 1, DType.I32))
    fine = nest.reduce("any", nest.op("ne", low, nest.const(0, DType.I32)))
    nest.stage()
    coarse = ctx.declare_dense(f"{node.name}_coarse", [x.sizes[each] for each in rows.kept], torch.bool)
    nest.store(coarse, nest.index, nest.op("logical_not", fine))
    ctx.add(nest)
    return coarse


def _without(ctx: LoweringContext, node: Node, x: View, dim: int, coarse: View) -> View:
    """The tensor with zeros for its coarse rows: no digit of a zero moves it."""
    result = ctx.declare_dense(f"{node.name}_fine", x.sizes, x.dtype)
    nest = ctx.nest(result.buffer, node, x.sizes)
    is_coarse = nest.load(coarse, (*nest.index[:dim], *nest.index[dim + 1 :]))
    nest.store(result, nest.index, nest.where(is_coarse, nest.const(0.0, DType.F32), nest.load(x, nest.index)))
    ctx.add(nest)
    return result


def _coarse_redo(ctx: LoweringContext, sort: str) -> tuple[str, View] | None:
    """The rows of a sort that ATen has done whole, and of what."""
    step = next((s for s in ctx.steps if isinstance(s, ExternCall) and s.name == f"{sort}{_COARSE}"), None)
    if step is None:
        return None
    given = step.args[0]
    assert isinstance(given, tuple)
    _, marked, x, *_ = given
    assert isinstance(marked, BufferRef) and isinstance(x, BufferRef)
    buffer = ctx.buffers[marked.name]
    return x.name, View(buffer.name, torch.bool, buffer.sizes, dim_exprs(len(buffer.sizes)), buffer.strides, to_expr(0))


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
    total, of, done = nest.reduce("any", mark), x.name, _coarse_redo(ctx, call.name)
    nest.stage()
    if done is not None:
        of, coarse = done
        total = nest.op("logical_and", total, nest.op("logical_not", nest.load(coarse, nest.index)))
    nest.store(marked, nest.index, total)
    ctx.add(nest)
    redo_rows(ctx, node, "sort", of, marked, results, (dim, 1, bool(descending.value)))


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
