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
from dataclasses import replace

from ..symbolic import Expr, Symbol, product, sym, to_expr
from .independence import check_outer_independence
from .nodes import Buffer, Load, LoopNest, Store

__all__ = ["may_write_over", "row_major"]

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
    if sum(len(stage.body) for stage in nest.stages) > _MOST_INSTRUCTIONS:
        return False
    stored = [
        (number, at, instr)
        for number, stage in enumerate(nest.stages)
        for at, instr in enumerate(stage.body)
        if isinstance(instr, Store) and instr.buffer == result
    ]
    if len(stored) != 1 or stored[0][2].mode != "set" or stored[0][2].mask is not None:
        return False
    place = stored[0][:2]
    same_shape = buffers[argument].sizes == buffers[result].sizes
    renamed = []
    for number, stage in enumerate(nest.stages):
        body = []
        for at, instr in enumerate(stage.body):
            if isinstance(instr, Load) and instr.buffer in (argument, result):
                late = (number, at) > place
                if late != (instr.buffer == result) or instr.mask is not None:
                    return False
                if not same_shape and instr.buffer == argument:
                    indices = _as_stored(nest, (number, instr), (place[0], stored[0][2]), buffers)
                    if indices is None:
                        return False
                    instr = replace(instr, indices=indices)
                instr = replace(instr, buffer=result)
            body.append(instr)
        if stage.scans and number == place[0]:
            return False
        renamed.append(replace(stage, body=tuple(body)))
    return check_outer_independence(replace(nest, stages=tuple(renamed)), buffers) is None


def _as_stored(
    nest: LoopNest, load: tuple[int, Load], store: tuple[int, Store], buffers: Mapping[str, Buffer]
) -> tuple[Expr, ...] | None:
    """The indices of a store (with its stage's number), in loops of the load's stage, if they are the same place."""
    loops, others = nest.stages[load[0]].ranges, nest.stages[store[0]].ranges
    if [loop.size for loop in loops] != [loop.size for loop in others]:
        return None
    env = {Symbol(other.symbol): sym(loop.symbol) for loop, other in zip(loops, others, strict=True)}
    indices = tuple(index.substitute(env) for index in store[1].indices)
    place = _place(load[1].indices, buffers[load[1].buffer])
    return indices if place == _place(indices, buffers[store[1].buffer]) else None


def _place(indices: tuple[Expr, ...], buffer: Buffer) -> Expr:
    place = to_expr(0)
    for index, stride in zip(indices, buffer.strides, strict=True):
        place = place + index * stride
    return place
