"""The ways through a kernel's loops. Its instructions are those of the loop IR: :mod:`..ir.walk` has the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace

from ..ir import Instr, Load, Range, Reduce, Store
from ..ir import walk as ir_walk
from ..symbolic import Expr, product
from .nodes import Kernel, Loop, Param, Stmt

__all__ = [
    "PerfectNest",
    "accesses_within",
    "all_loops",
    "expressions",
    "loops_of_values",
    "map_expressions",
    "map_instructions",
    "memories",
    "nested",
    "perfect_nest",
    "perfect_nests",
    "with_nests",
    "without_values",
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


def memories(kernel: Kernel) -> tuple[Param, ...]:
    """The parameters that are memory."""
    return tuple(param for param in kernel.params if param.kind == "memory")


def map_instructions(body: tuple[Stmt, ...], change: Callable[[Instr], Instr]) -> tuple[Stmt, ...]:
    """The body with every instruction changed."""
    return tuple(
        [
            stmt.with_body(map_instructions(stmt.body, change)) if isinstance(stmt, Loop) else change(stmt)
            for stmt in body
        ]
    )


def without_values(body: tuple[Stmt, ...], names: Set[str]) -> tuple[Stmt, ...]:
    """The body without what makes the values ``names``, which nothing may use."""
    if not names:
        return body
    kept: list[Stmt] = []
    for stmt in body:
        if isinstance(stmt, Loop):
            kept.append(stmt.with_body(without_values(stmt.body, names)))
        elif isinstance(stmt, Store) or stmt.result not in names:
            kept.append(stmt)
    return tuple(kept)


def map_expressions(kernel: Kernel, change: Callable[[Expr], Expr]) -> Kernel:
    """The kernel with every index expression changed."""
    return replace(kernel, body=map_instructions(kernel.body, lambda instr: ir_walk.map_expressions(instr, change)))


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


@dataclass(frozen=True, slots=True)
class PerfectNest:
    """Loops that are alone in each other, outer before inner, and the innermost one's body; or without ``loops`` what
    stands between such nests."""

    loops: tuple[Loop, ...]
    body: tuple[Instr, ...]

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The loops as the loop IR has them."""
        return tuple(Range(loop.symbol, loop.extent) for loop in self.loops)

    @property
    def extent(self) -> Expr:
        """How many iterations the loops have together."""
        return product(loop.extent for loop in self.loops)

    @property
    def scans(self) -> bool:
        """Whether its iterations run one after the other, in the order of the loops."""
        return any(isinstance(i, Reduce) and i.running for i in self.body)


def perfect_nests(kernel: Kernel) -> tuple[PerfectNest, ...]:
    """The body as perfect nests and what stands between them. Raises ``ValueError`` where loops stand beside
    instructions within a loop."""
    found: list[PerfectNest] = []
    beside: list[Instr] = []
    for stmt in kernel.body:
        if not isinstance(stmt, Loop):
            beside.append(stmt)
            continue
        if beside:
            found.append(PerfectNest((), tuple(beside)))
            beside = []
        loops, inner = perfect_nest(stmt)
        body = tuple(i for i in inner if not isinstance(i, Loop))
        if len(body) != len(inner):
            raise ValueError(f"loop {loops[-1].symbol} of kernel {kernel.name} holds loops beside instructions")
        found.append(PerfectNest(tuple(loops), body))
    if beside:
        found.append(PerfectNest((), tuple(beside)))
    return tuple(found)


def loops_of_values(nest: PerfectNest) -> dict[str, frozenset[str]]:
    """Per value of a nest the symbols of the loops that it may vary along, the grid's too. What is made of values from
    elsewhere is left out."""
    return ir_walk.loops_of_values(nest.body)


def with_nests(kernel: Kernel, nests: Iterable[PerfectNest]) -> Kernel:
    """The kernel with other perfect nests for its body."""
    return replace(kernel, body=tuple(stmt for nest in nests for stmt in nested(nest.loops, nest.body)))
