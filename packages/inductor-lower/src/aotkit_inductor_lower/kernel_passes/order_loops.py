"""The widest stride goes outside. The grid's loops go by the stores, others by all that their bodies access."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.walk import accesses, instructions, reduces, stores
from ..kernel_ir.bounds import hint
from ..kernel_ir.nodes import Kernel, Loop, Stmt
from ..kernel_ir.walk import nested, perfect_nest
from ..symbolic import Expr, Symbol
from .each_kernel import kernel_pass

__all__ = ["PASS", "order_loops"]


def order_loops(kernel: Kernel) -> Kernel:
    """The kernel with its loops reordered, where their order does not matter."""
    stored = [i.indices[0] for i in stores(instructions(kernel.body))]
    grid = kernel.grid if kernel.ordered else tuple(_by_stride(kernel.grid, stored))
    return replace(kernel, grid=grid, body=_ordered(kernel.body))


def _ordered(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    return tuple(new for stmt in body for new in (_ordered_loop(stmt) if isinstance(stmt, Loop) else (stmt,)))


def _ordered_loop(loop: Loop) -> tuple[Stmt, ...]:
    loops, inner = perfect_nest(loop)
    body = instructions(inner)
    in_order = any(i.running for i in reduces(body)) or any(i.accumulates for i in stores(body))
    offsets = [i.indices[0] for i in accesses(body)]
    return nested(loops if in_order else _by_stride(loops, offsets), _ordered(inner))


def _by_stride(loops: Sequence[Loop], offsets: list[Expr]) -> Sequence[Loop]:
    if len(loops) < 2 or not offsets:
        return loops

    def stride(loop: Loop) -> int:
        widest = 0
        for offset in offsets:
            factor = offset.coefficient(Symbol(loop.symbol))
            widest = max(widest, abs(hint(factor)) if factor is not None else 1)
        return widest

    return sorted(loops, key=stride, reverse=True)


PASS = kernel_pass(
    "order-loops",
    order_loops,
    why="the widest stride goes outside",
    after=("split-loops-by-divisors",),
)
