"""Pass: temporaries lie in memory along the loop that the rest of the kernels' memory lies along.

Note [Layouts of temporaries]
    Eager's result of an operation has a layout, and a temporary inherits it, though nothing but our own kernels sees
    it. Where images have their channels together and a temporary has them apart, as what a scatter adds into has, the
    threads of a device that load neighbours store far apart: each moves a whole sector of memory, or adds to one. For
    each temporary, the nests that use it are asked along which loop most of their other memory lies, by bytes; the
    dimension that moves with that loop becomes the innermost, if it is the same one for all nests. What has been laid
    out counts for those that follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ..analysis.dependencies import Dependencies
from ..analysis.nests import buffer_bytes, hint
from ..ir import Buffer, BufferKind, Load, LoopNest, Program, Store
from ..ir.walk import accesses, buffers_of, instructions, step_writes
from ..passes import Decision, Pass, PassContext, coalesces
from ..symbolic import Expr, SymbolKind, contiguous_strides

__all__ = ["PASS", "lay_out_temporaries"]

_LEAST = 16  # elements side by side that are worth having


def lay_out_temporaries(program: Program, ctx: PassContext) -> Program:
    """The program with other strides of some temporaries."""
    buffers = buffers_of(program)
    users = _users(program)
    undecided = set(users)
    for name, nests in users.items():
        buffer = buffers[name]
        wanted = set[int]().union(*(_moving(nest, name, _leading_loop(nest, buffers, undecided)) for nest in nests))
        undecided.remove(name)
        if len(wanted) != 1:
            continue
        (best,) = wanted
        if not _gains(buffer, best) or not ctx.fuel.take():
            continue
        buffers[name] = replace(buffer, strides=_strides(buffer.sizes, best))
        reason = f"its kernels' other memory lies along dimension {best}"
        ctx.decisions.append(Decision("layout", name, nests[0].name, True, reason))
    return replace(program, buffers=tuple(buffers.values()))


def _users(program: Program) -> dict[str, list[LoopNest]]:
    """The nests that use each temporary that nothing else sees and that is as dense as can be, in program order."""
    dependencies = Dependencies.of(program)
    called = {name for step in program.steps if not isinstance(step, LoopNest) for name in step_writes(step)}
    whole = {
        b.name
        for b in program.buffers
        if b.kind is BufferKind.TEMPORARY
        and len(b.sizes) > 1
        and b.name not in dependencies.escapes
        and dependencies.root[b.name] == b.name
        and b.strides == contiguous_strides(b.sizes)
    }
    whole -= called | {root for name, root in dependencies.root.items() if name != root}
    found: dict[str, list[LoopNest]] = {}
    for step in program.steps:
        if isinstance(step, LoopNest):
            for name in dict.fromkeys((*step.writes, *step.reads)):
                if name in whole:
                    found.setdefault(name, []).append(step)
    return found


def _leading_loop(nest: LoopNest, buffers: Mapping[str, Buffer], undecided: Collection[str]) -> str | None:
    """The loop along which most of the memory lies whose layout is known."""
    found = Counter[str]()
    for buffer, loop in {(i.buffer, loop) for i in accesses(instructions(nest.stages)) for loop in _along(i, buffers)}:
        if buffer not in undecided:
            found[loop] += buffer_bytes(buffers[buffer])
    return max(found, key=lambda loop: (found[loop], loop), default=None)


def _gains(buffer: Buffer, dim: int) -> bool:
    """Whether elements lie elsewhere, and many side by side, with this dimension innermost."""
    return hint(buffer.sizes[dim]) >= _LEAST and any(size != 1 for size in buffer.sizes[dim + 1 :])


def _along(access: Load | Store, buffers: Mapping[str, Buffer]) -> Iterator[str]:
    """The loops whose next iteration has the next element in memory."""
    for index, stride in zip(access.indices, buffers[access.buffer].strides, strict=True):
        if stride == 1:
            yield from _plain_loops(index)


def _moving(nest: LoopNest, name: str, loop: str | None) -> set[int]:
    """The dimensions of a buffer along which the nest goes one element further in each iteration of the loop."""
    body = accesses(instructions(nest.stages), name)
    return {dim for access in body for dim, index in enumerate(access.indices) if loop in _plain_loops(index)}


def _plain_loops(index: Expr) -> list[str]:
    factors = ((s, index.coefficient(s)) for s in index.symbols if s.kind is SymbolKind.INDEX)
    return [s.name for s, factor in factors if factor is not None and factor == 1]


def _strides(sizes: tuple[Expr, ...], innermost: int) -> tuple[Expr, ...]:
    """Without gaps, the dimension innermost and the others in order."""
    order = [*(dim for dim in range(len(sizes)) if dim != innermost), innermost]
    packed = contiguous_strides([sizes[dim] for dim in order])
    return tuple(packed[order.index(dim)] for dim in range(len(sizes)))


PASS = Pass(
    "lay-out-temporaries",
    lay_out_temporaries,
    why="neighbouring threads load and store neighbours, also what only kernels see",
    after=("split-loops",),
    when=coalesces,
)
