"""The ways through a kernel's loops. Its instructions are those of the loop IR: :mod:`..ir.walk` has the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ..ir import Instr, Load, Store
from ..ir import walk as ir_walk
from ..symbolic import Expr
from .nodes import Kernel, Loop, Stmt

__all__ = [
    "accesses_within",
    "all_loops",
    "expressions",
    "map_expressions",
    "map_instructions",
    "nested",
    "perfect_nest",
]

_ACCESS = (Load, Store)


def all_loops(kernel: Kernel) -> Iterator[Loop]:
    """The grid's loops, then those of the body, outer before inner."""
    yield from kernel.grid
    yield from _loops(kernel.body)


def _loops(body: Iterable[Stmt]) -> Iterator[Loop]:
    for stmt in body:
        if isinstance(stmt, Loop):
            yield stmt
            yield from _loops(stmt.body)


def accesses_within(
    body: Iterable[Stmt], around: tuple[Loop, ...] = ()
) -> Iterator[tuple[tuple[Loop, ...], Load | Store]]:
    """Each load and store with the loops around it, the outermost first."""
    for stmt in body:
        if isinstance(stmt, Loop):
            yield from accesses_within(stmt.body, (*around, stmt))
        elif isinstance(stmt, _ACCESS):
            yield around, stmt


def expressions(kernel: Kernel) -> list[Expr]:
    """Every index expression: offsets and index values in order, then the positions of argmin and argmax."""
    return ir_walk.expressions(ir_walk.instructions(kernel.body))


def map_instructions(body: tuple[Stmt, ...], change: Callable[[Instr], Instr]) -> tuple[Stmt, ...]:
    """The body with every instruction changed."""
    return tuple(
        [
            stmt.with_body(map_instructions(stmt.body, change)) if isinstance(stmt, Loop) else change(stmt)
            for stmt in body
        ]
    )


def map_expressions(kernel: Kernel, change: Callable[[Expr], Expr]) -> Kernel:
    """The kernel with every index expression changed."""
    return replace(
        kernel, body=map_instructions(kernel.body, lambda instr: ir_walk.map_expressions(instr, change))
    )


def perfect_nest(loop: Loop) -> tuple[list[Loop], tuple[Stmt, ...]]:
    """The loop, those that are alone in each other, and the body of the innermost."""
    loops = [loop]
    while len(loops[-1].body) == 1 and isinstance(inner := loops[-1].body[0], Loop):
        loops.append(inner)
    return loops, loops[-1].body


def nested(loops: Iterable[Loop], body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The body inside of loops, the first of them outside."""
    for loop in reversed(tuple(loops)):
        body = (Loop(loop.symbol, loop.extent, body, loop.map),)
    return body
