"""The ways through a kernel: its loops, its instructions, its expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ..ir import Index, Instr, Load, Reduce, Store
from ..symbolic import Expr
from .nodes import Kernel, Loop, Stmt

__all__ = [
    "all_loops",
    "expressions",
    "instructions",
    "map_expressions",
    "map_instructions",
    "nested",
    "perfect_nest",
]


def instructions(body: Iterable[Stmt]) -> Iterator[Instr]:
    """Every instruction, in order."""
    for stmt in body:
        if isinstance(stmt, Loop):
            yield from instructions(stmt.body)
        else:
            yield stmt


def all_loops(kernel: Kernel) -> Iterator[Loop]:
    """The grid's loops, then those of the body, outer before inner."""
    yield from kernel.grid
    yield from _loops(kernel.body)


def _loops(body: Iterable[Stmt]) -> Iterator[Loop]:
    for stmt in body:
        if isinstance(stmt, Loop):
            yield stmt
            yield from _loops(stmt.body)


def expressions(kernel: Kernel) -> Iterator[Expr]:
    """Every index expression: offsets and index values in order, then the positions of argmin and argmax."""
    positions = []
    for instr in instructions(kernel.body):
        if isinstance(instr, Load | Store):
            yield instr.indices[0]
        elif isinstance(instr, Index):
            yield instr.expr
        elif isinstance(instr, Reduce) and instr.position is not None:
            positions.append(instr.position)
    yield from positions


def map_instructions(body: tuple[Stmt, ...], change: Callable[[Instr], Instr]) -> tuple[Stmt, ...]:
    """The body with every instruction changed."""
    return tuple(
        Loop(stmt.symbol, stmt.extent, map_instructions(stmt.body, change), stmt.map)
        if isinstance(stmt, Loop)
        else change(stmt)
        for stmt in body
    )


def map_expressions(kernel: Kernel, change: Callable[[Expr], Expr]) -> Kernel:
    """The kernel with every index expression changed."""

    def changed(instr: Instr) -> Instr:
        if isinstance(instr, Load | Store):
            (old,) = instr.indices
            new = change(old)
            return instr if new is old else replace(instr, indices=(new,))
        if isinstance(instr, Index):
            new = change(instr.expr)
            return instr if new is instr.expr else replace(instr, expr=new)
        if isinstance(instr, Reduce) and instr.position is not None:
            return replace(instr, position=change(instr.position))
        return instr

    return replace(kernel, body=map_instructions(kernel.body, changed))


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
