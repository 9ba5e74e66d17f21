"""Which results of kernels may be written over an argument that dies there.

Note [In place]
    A kernel's result takes the memory of a temporary that the kernel is the last to read, if both have the same layout
    and each element is read before, and nowhere else than where, its place is written: in the same iteration with
    the same indices, or in an earlier stage of the same outer iteration. Kernels promise LLVM nothing about pointers
    being different, and emit the loads of a block of lanes before its stores.

    Likewise for the result of a product or a convolution, which ATen allocates: the kernel that reads it last writes
    its own result there, also one that the graph returns. The result then is an alias of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..analysis.dependencies import buffer_args
from ..ir import Alias, Buffer, BufferKind, BufferRef, ExternCall, Load, LoopNest, Program, Step, Store
from ..ir.independence import check_outer_independence
from ..ops.aten import out_overload
from ..symbolic import Expr, Symbol, product, sym, to_expr

__all__ = ["find_in_place", "reuse_call_results"]

#: Operators whose results are known to be new memory of their own.
_ALLOCATE = frozenset(
    f"{name}.default"
    for name in (
        *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution"),
        "mkldnn._linear_pointwise",
    )
)

_MOST_INSTRUCTIONS = 300  # the check looks at all pairs of accesses


def find_in_place(
    nests: Mapping[int, LoopNest],
    lives: Mapping[str, tuple[int, int]],
    buffers: Mapping[str, Buffer],
    aliases: Mapping[str, str],
) -> dict[str, str]:
    """For results in the arena, the buffer whose memory they take over. ``nests`` by the point at which they run,
    ``lives``: first and last point of each buffer of the arena; ``aliases``: whose memory an alias views."""
    reuses: dict[str, str] = {}
    for point, nest in nests.items():
        if sum(len(stage.body) for stage in nest.stages) > _MOST_INSTRUCTIONS:
            continue
        shared = {aliases[name] for name in (*nest.reads, *nest.writes) if name in aliases}
        own = lives.keys() - shared
        born = [name for name in nest.writes if name in own and lives[name][0] == point]
        dying = [name for name in nest.reads if name in own and lives[name][1] == point and name not in nest.writes]
        for result in born:
            for argument in dying:
                if _same_memory(buffers[result], buffers[argument]) and _reads_first(nest, argument, result, buffers):
                    reuses[result] = argument
                    dying.remove(argument)
                    break
    return reuses


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


def reuse_call_results(program: Program) -> tuple[Program, frozenset[str]]:
    """The program whose kernels write over results of ATen calls that die there, see Note [In place], and the names of
    what they write, which have become aliases."""
    buffers = {b.name: b for b in program.buffers}
    roots = _roots(program)
    last = {roots.get(name, name): place for place, step in enumerate(program.steps) for name in _uses(step)}
    last.update((roots.get(o.name, o.name), len(program.steps)) for o in program.outputs if isinstance(o, BufferRef))
    made = {
        step.results[0]: step.target
        for step in program.steps
        if isinstance(step, ExternCall) and step.target in _ALLOCATE and len(step.results) == 1 and not step.mutates
    }
    born: set[str] = set()
    taken: set[str] = set()
    steps: list[Step] = []
    for place, step in enumerate(program.steps):
        if isinstance(step, LoopNest) and sum(len(stage.body) for stage in step.stages) <= _MOST_INSTRUCTIONS:
            shared = {roots[name] for name in (*step.reads, *step.writes) if name in roots}
            dying = [
                n for n in step.reads if n in made and last[n] == place and n not in shared and n not in step.writes
            ]
            for result in step.writes if dying else ():
                if result in roots or result in born:
                    continue
                planned = buffers[result].kind is BufferKind.TEMPORARY  # the arena's, see find_in_place
                wanted = [n for n in dying if not (planned and out_overload(made[n]))]
                argument = _taken(step, result, wanted, buffers)
                if argument is not None:
                    dying.remove(argument)
                    taken.add(result)
                    steps.append(Alias(f"{result}_over_{argument}", result, argument, to_expr(0), step.origin))
        born.update(_uses(step))
        steps.append(step)
    return replace(program, steps=tuple(steps)), frozenset(taken)


def _taken(nest: LoopNest, result: str, dying: list[str], buffers: Mapping[str, Buffer]) -> str | None:
    """The argument that ``result`` may be written over."""
    if buffers[result].kind not in (BufferKind.TEMPORARY, BufferKind.OUTPUT):
        return None
    for argument in dying:
        if _same_memory(buffers[result], buffers[argument]) and _reads_first(nest, argument, result, buffers):
            return argument
    return None


def _roots(program: Program) -> dict[str, str]:
    """Whose memory each alias views."""
    roots: dict[str, str] = {}
    for step in program.steps:
        if isinstance(step, Alias):
            roots[step.result] = roots.get(step.base, step.base)
    return roots


def _uses(step: Step) -> Iterator[str]:
    if isinstance(step, LoopNest):
        yield from (*step.reads, *step.writes)
    elif isinstance(step, Alias):
        yield from (step.base, step.result)
    else:
        yield from buffer_args((*step.args, *(value for _, value in step.kwargs)))
        yield from (name for name in (*step.results, *step.mutates) if name is not None)
