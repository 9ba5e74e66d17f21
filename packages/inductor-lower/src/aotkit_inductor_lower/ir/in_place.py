"""Which results of kernels may be written over an argument.

Note [In place]
    A kernel's result takes the memory of a temporary that the kernel is the last to read, if both have the same layout
    and each element is read before, and nowhere else than where, its place is written: in the same iteration with
    the same indices, or in an earlier stage of the same outer iteration. Kernels promise LLVM nothing about pointers
    being different, and emit the loads of a block of lanes before its stores.

    Likewise for the result of a product or a convolution, which ATen allocates: the kernel that reads it last writes
    its own result there, also one that the graph returns. The result then is an alias of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..symbolic import Expr, Symbol, product, sym, to_expr
from .independence import check_outer_independence
from .nodes import Buffer, BufferKind, Load, LoopNest, Store
from .walk import load_at, map_nest, placed

__all__ = ["may_write_over", "row_major"]

_ROOMS = 4  # sums in scratch memory that other nests have, at most
_MOST_INSTRUCTIONS = 300  # the check looks at all pairs of accesses


def may_write_over(nest: LoopNest, argument: str, result: str, buffers: Mapping[str, Buffer]) -> bool:
    """Whether the nest may write ``result`` into the memory of ``argument``, if nothing else needs that any more."""
    return _same_memory(buffers[result], buffers[argument]) and _reads_first(nest, argument, result, buffers)


def _same_memory(a: Buffer, b: Buffer) -> bool:
    """Whether the two fill the same bytes with elements of the same type."""
    if a.dtype != b.dtype:
        return False
    if a.sizes == b.sizes:
        return a.strides == b.strides
    return product(a.sizes) == product(b.sizes) and row_major(a) and row_major(b)


def row_major(buffer: Buffer) -> bool:
    """Whether the elements follow each other in the order of their indices."""
    expected = to_expr(1)
    for size, stride in zip(reversed(buffer.sizes), reversed(buffer.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected = expected * size
    return True


def _reads_first(nest: LoopNest, argument: str, result: str, buffers: Mapping[str, Buffer]) -> bool:
    """Whether the nest reads each element of ``argument`` before, and nowhere else than where, it writes its place in
    ``result``, if the two are :func:`_same_memory`."""
    body = placed(nest.stages)
    if len(body) > _MOST_INSTRUCTIONS:
        return False
    if _is_done_twice(nest, buffers):
        return False
    stored = [(number, at, i) for number, at, i in body if isinstance(i, Store) and i.buffer == result]
    if len(stored) != 1:
        return False
    stage, place, store = stored[0]
    if not store.plain or nest.stages[stage].scans:
        return False
    same_shape = buffers[argument].sizes == buffers[result].sizes
    moved: dict[str, Load] = {}
    for number, at, load in body:
        if not isinstance(load, Load) or load.buffer not in (argument, result):
            continue
        late = (number, at) > (stage, place)
        if late != (load.buffer == result) or load.mask is not None:
            return False
        same = same_shape or load.buffer == result
        indices = load.indices if same else _as_stored(nest, (number, load), (stage, store), buffers)
        if indices is None:
            return False
        moved[load.result] = load_at(load, result, indices)
    there = map_nest(nest, lambda i: moved.get(i.result, i) if isinstance(i, Load) else i)
    return check_outer_independence(there, buffers) is None


def _is_done_twice(nest: LoopNest, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a target may compute the nest by several kernels, one after the other, which read the same: the gradients
    of an attention, of which each is a sum of products in memory of its own."""
    rooms = {name for name in nest.writes if buffers[name].kind is BufferKind.SCRATCH}
    return len(rooms) > _ROOMS


def _as_stored(
    nest: LoopNest, load: tuple[int, Load], store: tuple[int, Store], buffers: Mapping[str, Buffer]
) -> tuple[Expr, ...] | None:
    """The indices of a store (with its stage's number), in loops of the load's stage, if they are the same place."""
    loops, others = nest.stages[load[0]].ranges, nest.stages[store[0]].ranges
    if [loop.size for loop in loops] != [loop.size for loop in others]:
        return None
    env = {Symbol(other.symbol): sym(loop.symbol) for loop, other in zip(loops, others, strict=True)}
    indices = tuple(index.substitute(env) for index in store[1].indices)
    place = buffers[load[1].buffer].offset(load[1].indices)
    return indices if place == buffers[store[1].buffer].offset(indices) else None
