"""Kernels whose program instances walk over rows and keep the sums of their columns.

Note [Walked rows]
    Where a row kernel adds each row's share to a line of sums (Note [Rows and columns at once] of the loop passes), the
    line belongs to a chunk of rows, and one program instance walks over these::

        sums0 = tl.full([XBLOCK, 1024], 0.0, tl.float32)
        for start in range(0, 16, XBLOCK):
            i1 = start + tl.arange(0, XBLOCK)[:, None]
            ...
            sums0 = sums0 + value
        tl.store(p_part + .., reduce_sum(sums0, 0))

    No other instance adds to that line, so there are no atomic operations, and the order of additions is fixed. A sum
    of one number of each row, as a loss is, has a line of one element. The
    line is 0 before; where a kernel that stores these zeros does nothing else, it is not launched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...ir import Const, DType, Store
from ...ir.walk import accesses, instructions, stores
from ...kernel_ir.nodes import Kernel, Loop
from ...kernel_ir.walk import PerfectNest, perfect_nests
from ...symbolic import Symbol, product

__all__ = ["added_stores", "needless_zeros", "walked_loop"]


def added_stores(kernel: Kernel) -> list[Store]:
    """The stores that add."""
    return [i for i in stores(instructions(kernel.body)) if i.accumulates]


def walked_loop(kernel: Kernel, longest: int) -> Loop | None:
    """The loop of the grid that one program instance may walk over, if all that the kernel adds up is sums of its
    iterations, over rows of at most ``longest`` elements."""
    added = added_stores(kernel)
    nests = perfect_nests(kernel)
    if not added or not any(nest.loops for nest in nests) or not all(_fits(nest, longest) for nest in nests):
        return None
    places = list(accesses(instructions(kernel.body)))
    if any(sum(p.buffer == i.buffer for p in places) != 1 for i in added):
        return None  # something else reads or writes the sums
    grid = {loop.symbol for loop in kernel.grid}
    left = {frozenset(grid - {symbol.name for symbol in i.indices[0].symbols}) for i in added}
    walked = [loop for loop in kernel.grid if left == {frozenset({loop.symbol})}]
    if len(walked) != 1 or walked[0].extent.constant is None:
        return None
    (loop,) = walked
    for nest in nests:
        loops = (*(other for other in kernel.grid if other is not loop), *nest.loops)
        for i in nest.body:
            if isinstance(i, Store) and i.accumulates and not _adds_plainly(i, loops):
                return None
    return loop


def _fits(nest: PerfectNest, longest: int) -> bool:
    size = nest.extent.constant
    return not nest.loops or (size is not None and size <= longest)


def _adds_plainly(store: Store, loops: Sequence[Loop]) -> bool:
    """Whether each iteration of ``loops`` adds to an element of its own."""
    if store.mode != "add" or store.mask is not None:
        return False
    index = store.indices[0]
    factors = [(index.coefficient(Symbol(loop.symbol)), loop.extent.constant) for loop in loops]
    known = [(f.constant, size) for f, size in factors if f is not None and f.constant is not None and size is not None]
    if len(known) != len(loops) or not index.symbols <= {Symbol(loop.symbol) for loop in loops}:
        return False
    reach = 0  # of the loops that move less
    for factor, size in sorted(known):
        if size > 1 and factor <= reach:
            return False
        reach += factor * (size - 1)
    return True


def needless_zeros(kernels: Iterable[Kernel], longest: int) -> tuple[frozenset[str], frozenset[str]]:
    """Names of kernels that store the zeros from which one kernel of walked rows adds up, and nothing else, and the
    memory in question."""
    kernels = list(kernels)
    lines: dict[str, int] = {}  # elements that are added up, by memory
    for kernel in kernels:
        loop = walked_loop(kernel, longest)
        for nest in perfect_nests(kernel) if loop is not None else ():
            extent = product(each.extent for each in (*kernel.grid, *nest.loops) if each is not loop).constant
            lines.update((i.buffer, extent or 0) for i in nest.body if isinstance(i, Store) and i.accumulates)
    writers: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        for name in {i.buffer for i in stores(instructions(kernel.body))} & lines.keys():
            writers.setdefault(name, []).append(kernel)
    found: dict[str, set[str]] = {}
    for kernel in kernels:
        written = {i.buffer for i in stores(instructions(kernel.body))}
        size = product(loop.extent for loop in kernel.grid).constant
        alone = all(len(writers.get(name, ())) == 2 and lines[name] == size for name in written)
        if written and alone and _is_zero(kernel):
            found[kernel.name] = written
    return frozenset(found), frozenset().union(*found.values())


def _is_zero(kernel: Kernel) -> bool:
    if any(isinstance(stmt, Loop) for stmt in kernel.body):
        return False
    body = instructions(kernel.body)
    values = {i.result for i in body if isinstance(i, Const) and i.value == 0 and i.dtype in (DType.F32, DType.F64)}
    return all(isinstance(i, Const | Store) for i in body) and all(
        not i.accumulates and i.mask is None and i.value in values for i in stores(body)
    )
