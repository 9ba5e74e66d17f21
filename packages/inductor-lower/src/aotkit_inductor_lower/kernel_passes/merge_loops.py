"""Neighbouring loops that are contiguous in every access become one: a pointwise op on ``[B, S, H]`` ends as one loop.
Loops of one iteration vanish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ..ir.walk import instructions, loads
from ..kernel_ir.bounds import hint
from ..kernel_ir.nodes import Kernel, Loop, Stmt
from ..kernel_ir.walk import all_loops, expressions, map_expressions, nested, perfect_nest
from ..symbolic import Expr, Symbol, product, sym, to_expr
from .each_kernel import kernel_pass

__all__ = ["PASS", "merge_loops"]

_SHORT = 64  # loops shorter than this may be repeated to fill vectors


def merge_loops(kernel: Kernel) -> Kernel:
    """The kernel with fewer and longer loops: those of the grid, and the perfect nests of its body."""
    kernel = _drop_unit_loops(kernel)
    kernel = _merge_in(kernel, kernel.grid, lambda k, loops: replace(k, grid=loops), in_grid=True)
    for position, stmt in enumerate(kernel.body):
        if not isinstance(stmt, Loop):
            continue

        def put(k: Kernel, loops: tuple[Loop, ...], at: int = position) -> Kernel:
            old = k.body[at]
            assert isinstance(old, Loop)
            new = nested(loops, perfect_nest(old)[1])
            return replace(k, body=(*k.body[:at], *new, *k.body[at + 1 :]))

        kernel = _merge_in(kernel, tuple(perfect_nest(stmt)[0]), put, in_grid=False)
    return kernel


def _drop_unit_loops(kernel: Kernel) -> Kernel:
    """A perfect nest of the body keeps one loop, since it is loops that reductions go over."""
    grid = tuple(_long(kernel.grid))
    body: list[Stmt] = []
    for stmt in kernel.body:
        if isinstance(stmt, Loop):
            loops, inner = perfect_nest(stmt)
            kept = list(_long(loops)) or loops[:1]
            body += (stmt,) if len(kept) == len(loops) else nested(kept, inner)
        else:
            body.append(stmt)
    return replace(kernel, grid=grid, body=tuple(body))


def _long(loops: Iterable[Loop]) -> Iterator[Loop]:
    return (loop for loop in loops if loop.extent.constant != 1)


def _merge_in(
    kernel: Kernel, loops: tuple[Loop, ...], put: Callable[[Kernel, tuple[Loop, ...]], Kernel], *, in_grid: bool
) -> Kernel:
    exprs = expressions(kernel)
    for position in range(len(loops) - 2, -1, -1):
        a, b = loops[position], loops[position + 1]
        if b.extent.constant == 0:
            continue
        transposed: frozenset[Expr] = frozenset()
        if not _jointly_contiguous(exprs, a, b):
            transposed = _transposed(kernel, a, b) if in_grid else transposed
            if not transposed or not _jointly_contiguous((e for e in exprs if e not in transposed), a, b):
                continue
        loops = (*loops[:position], replace(b, extent=a.extent * b.extent), *loops[position + 2 :])
        kernel = put(map_expressions(kernel, _without(a, b, transposed)), loops)
        exprs = expressions(kernel)
    return kernel


def _without(a: Loop, b: Loop, transposed: frozenset[Expr]) -> Callable[[Expr], Expr]:
    """What becomes of an expression when ``b`` runs through both loops."""
    zero, again = {Symbol(a.symbol): to_expr(0)}, {Symbol(b.symbol): sym(b.symbol) % b.extent}
    return lambda e: e.substitute(again if e in transposed else zero)


def _transposed(kernel: Kernel, a: Loop, b: Loop) -> frozenset[Expr]:
    """What the grid's loops ``a`` and ``b`` read for each ``a`` alike, before a long inner loop: it may be loaded from
    ``b % size``, where ``b`` alone is too short for vectors."""
    if kernel.ordered or (b.extent.constant or _SHORT) >= _SHORT:
        return frozenset()
    inner = list(all_loops(kernel))[len(kernel.grid) :]
    if hint(product(loop.extent for loop in inner)) < _SHORT:
        return frozenset()
    still = {Symbol(loop.symbol) for loop in (a, *inner)}
    loaded = [i.indices[0] for i in loads(instructions(kernel.body))]
    return frozenset(e for e in loaded if Symbol(b.symbol) in e.symbols and still.isdisjoint(e.symbols))


def _jointly_contiguous(exprs: Iterable[Expr], a: Loop, b: Loop) -> bool:
    """Whether stepping ``a`` once is stepping ``b`` through its whole range, in every expression."""
    outer, inner = Symbol(a.symbol), Symbol(b.symbol)
    for expr in exprs:
        if outer not in expr.symbols and inner not in expr.symbols:
            continue
        x, y = expr.coefficient(outer), expr.coefficient(inner)
        if x is None or y is None or x != y * b.extent:
            return False
    return True


PASS = kernel_pass(
    "merge-loops",
    merge_loops,
    why="neighbouring loops that are contiguous in every access are one",
    after=("order-loops",),
)
