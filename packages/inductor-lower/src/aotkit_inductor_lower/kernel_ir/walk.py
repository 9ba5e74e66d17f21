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
    "load_at",
    "map_expressions",
    "map_instructions",
    "nested",
    "perfect_nest",
    "store_at",
]


_ACCESS = (Load, Store)  # asked of every instruction: a tuple takes half the time of a union


def instructions(body: Iterable[Stmt]) -> list[Instr]:
    """Every instruction, in order."""
    found: list[Instr] = []
    for stmt in body:
        if isinstance(stmt, Loop):
            found += instructions(stmt.body)
        else:
            found.append(stmt)
    return found


def all_loops(kernel: Kernel) -> Iterator[Loop]:
    """The grid's loops, then those of the body, outer before inner."""
    yield from kernel.grid
    yield from _loops(kernel.body)


def _loops(body: Iterable[Stmt]) -> Iterator[Loop]:
    for stmt in body:
        if isinstance(stmt, Loop):
            yield stmt
            yield from _loops(stmt.body)


def expressions(kernel: Kernel) -> list[Expr]:
    """Every index expression: offsets and index values in order, then the positions of argmin and argmax."""
    found: list[Expr] = []
    positions: list[Expr] = []
    for instr in instructions(kernel.body):
        if isinstance(instr, _ACCESS):
            found.append(instr.indices[0])
        elif isinstance(instr, Index):
            found.append(instr.expr)
        elif isinstance(instr, Reduce) and instr.position is not None:
            positions.append(instr.position)
    return found + positions


def map_instructions(body: tuple[Stmt, ...], change: Callable[[Instr], Instr]) -> tuple[Stmt, ...]:
    """The body with every instruction changed."""
    return tuple(
        Loop(stmt.symbol, stmt.extent, map_instructions(stmt.body, change), stmt.map)
        if isinstance(stmt, Loop)
        else change(stmt)
        for stmt in body
    )


def load_at(load: Load, memory: str, offset: Expr) -> Load:
    """The same load from elsewhere. (``dataclasses.replace`` takes ten times as long.)"""
    return Load(load.result, memory, (offset,), load.dtype, load.mask, load.other)


def store_at(store: Store, memory: str, offset: Expr) -> Store:
    """The same store to elsewhere."""
    return Store(memory, (offset,), store.value, store.mode, store.mask)


def map_expressions(kernel: Kernel, change: Callable[[Expr], Expr]) -> Kernel:
    """The kernel with every index expression changed."""

    def changed(instr: Instr) -> Instr:
        if isinstance(instr, Load):
            new = change(instr.indices[0])
            return instr if new is instr.indices[0] else load_at(instr, instr.buffer, new)
        if isinstance(instr, Store):
            new = change(instr.indices[0])
            return instr if new is instr.indices[0] else store_at(instr, instr.buffer, new)
        if isinstance(instr, Index):
            return Index(instr.result, change(instr.expr), instr.dtype)
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
