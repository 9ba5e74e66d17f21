"""Pass: constant matrices are laid out once as the products read them, see Note [Matrices in panels].

Only where ``LowerOptions.pack_constants`` says that constants never change. A matrix of which something else is read,
another product in another layout or a gather of an embedding, stays as it is: in memory there is one copy or the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..ir import Alias, Buffer, BufferKind, BufferRef, Load, LoopNest, Program, Step
from ..ir.walk import buffers_of, loads, reduces, step_reads, step_writes
from ..kernel_ir.panels import Panels
from ..passes import Decision, Pass, PassContext
from ..symbolic import Symbol, contiguous_strides, to_expr
from .drop_dead_steps import drop_dead_steps

__all__ = ["PASS", "pack", "pack_constants"]


@dataclass(frozen=True, slots=True)
class _Use:
    """A product that reads a constant: the step, the load, whether its rows are the steps of the sum, the layout."""

    position: int
    load: Load
    steps_first: bool
    panels: Panels


def pack_constants(program: Program, ctx: PassContext) -> Program:
    """The program with constants in panels, which are added to the context's."""
    buffers, uses = buffers_of(program), dict[str, list[_Use]]()
    roots = _roots(program, buffers, ctx)
    readers = _readers(program, roots, ctx.constants)
    for position, step in enumerate(program.steps):
        use = _use(position, step, roots, buffers, ctx) if isinstance(step, LoopNest) else None
        if use is not None:
            uses.setdefault(roots[use.load.buffer], []).append(use)
    steps, added = list(program.steps), list[Buffer]()
    for root, found in uses.items():
        kind = {(_seen(buffers[use.load.buffer]), use.steps_first, use.panels) for use in found}
        if len(kind) > 1 or readers[root] - {use.position for use in found}:
            _note(ctx, program.steps[found[0].position], root, False, "something else reads it as it is")
        elif ctx.fuel.take():
            added.append(_packed(found, steps, buffers, ctx.constants, root))
            _note(ctx, program.steps[found[0].position], root, True, "laid out once as the product reads it")
    if not added:
        return program
    program = drop_dead_steps(replace(program, steps=tuple(steps), buffers=(*program.buffers, *added)))
    kept = {buffer.name for buffer in program.buffers}
    for name in [name for name in ctx.constants if name not in kept]:
        del ctx.constants[name]
    return program


def pack(matrix: torch.Tensor, panels: Panels) -> torch.Tensor:
    """A new tensor in the layout, of a matrix with a row for each step of the sum."""
    steps, columns = matrix.shape
    packed = matrix.new_zeros(panels.sizes(columns, steps))
    whole = matrix.new_zeros((packed.shape[1] * panels.group, packed.shape[0] * panels.width))
    whole[:steps, :columns] = matrix
    apart = whole.view(packed.shape[1], panels.group, packed.shape[0], panels.width)
    return packed.copy_(apart.permute(2, 0, 3, 1).reshape(packed.shape))


def _seen(buffer: Buffer) -> tuple[object, ...]:
    """What tells views of one constant apart."""
    return buffer.sizes, buffer.strides


def _roots(program: Program, buffers: Mapping[str, Buffer], ctx: PassContext) -> dict[str, str]:
    """The constant that each buffer shows, itself or a view of it from its first element on. Of several that are one
    tensor it is the first."""
    found: dict[str, str] = {}
    same: dict[Hashable, str] = {}
    for name, tensor in ctx.constants.items():
        if name in buffers and tensor.layout is torch.strided:
            own = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_neg())
            found[name] = same.setdefault(own, name)
    for step in program.steps:
        whole = isinstance(step, Alias) and step.base in found and step.offset == 0
        if isinstance(step, Alias) and whole and buffers[step.result].dtype == buffers[step.base].dtype:
            found[step.result] = found[step.base]
    return found


def _readers(program: Program, roots: Mapping[str, str], constants: Mapping[str, torch.Tensor]) -> dict[str, set[int]]:
    """Where the memory of a constant is read or written; the end of the program for one that is returned."""
    memory = {root: constants[root].untyped_storage().data_ptr() for root in roots.values()}
    found: dict[int, set[int]] = {place: set() for place in memory.values()}
    for position, step in enumerate(program.steps):
        known = isinstance(step, Alias) and step.result in roots
        for name in () if known else (*step_reads(step), *step_writes(step)):
            if name in roots:
                found[memory[roots[name]]].add(position)
    for out in program.outputs:
        if isinstance(out, BufferRef) and out.name in roots:
            found[memory[roots[out.name]]].add(len(program.steps))
    return {root: found[place] for root, place in memory.items()}


def _use(
    position: int, nest: LoopNest, roots: Mapping[str, str], buffers: Mapping[str, Buffer], ctx: PassContext
) -> _Use | None:
    """How a nest reads a constant, if it is a product of which that is the right factor."""
    body = [instr for stage in nest.stages for instr in stage.body]
    constant = [load for load in loads(body) if load.buffer in roots]
    panels = ctx.target.packs_product(nest, buffers) if constant else None
    summed = {Symbol(r.symbol) for stage in nest.stages if any(reduces(stage.body)) for r in stage.ranges}
    for load in constant if panels is not None else ():
        along = [bool(summed & set(index.symbols)) for index in load.indices]
        if len(along) == 2 and sum(along) == 1 and load.mask is None and panels is not None:
            use = _Use(position, load, along[0], panels)
            changed, buffer = _rewritten(nest, use, "packed", buffers)
            if ctx.target.packs_product(changed, {**buffers, "packed": buffer}) == panels:
                return use
    return None


def _rewritten(nest: LoopNest, use: _Use, name: str, buffers: Mapping[str, Buffer]) -> tuple[LoopNest, Buffer]:
    """The nest that reads the packed matrix, and the buffer that this is."""
    matrix = buffers[use.load.buffer]
    step, column = (0, 1) if use.steps_first else (1, 0)
    sizes = use.panels.sizes(*(matrix.sizes[axis].constant or 0 for axis in (column, step)))
    at = use.panels.indices(use.load.indices[column], use.load.indices[step])
    load = replace(use.load, buffer=name, indices=at)
    stages = [
        stage.with_body(tuple(load if instr is use.load or instr == use.load else instr for instr in stage.body))
        for stage in nest.stages
    ]
    strides = contiguous_strides(sizes)
    made = Buffer(name, matrix.dtype, tuple(map(to_expr, sizes)), strides, BufferKind.CONSTANT, matrix.device)
    return replace(nest, stages=tuple(stages)), made


def _packed(
    uses: Sequence[_Use],
    steps: list[Step],
    buffers: Mapping[str, Buffer],
    constants: dict[str, torch.Tensor],
    root: str,
) -> Buffer:
    """Put the products that read a packed matrix into ``steps``, and that matrix among the constants."""
    name = f"{root}_packed"
    while name in buffers:
        name += "_"
    for use in uses:
        nest = steps[use.position]
        assert isinstance(nest, LoopNest)
        steps[use.position], made = _rewritten(nest, use, name, buffers)
    first, seen = uses[0], buffers[uses[0].load.buffer]
    sizes, strides = ([each.constant or 0 for each in axes] for axes in (seen.sizes, seen.strides))
    with torch.no_grad():
        value = constants[root].detach()
        matrix = value.as_strided(sizes, strides, int(value.storage_offset()))
        constants[name] = pack(matrix if first.steps_first else matrix.t(), first.panels)
    return made


def _note(ctx: PassContext, step: Step, constant: str, packed: bool, why: str) -> None:
    assert isinstance(step, LoopNest)
    ctx.decisions.append(Decision("pack", step.name, constant, packed, f"{constant}: {why}"))


def _wanted(ctx: PassContext) -> bool:
    return ctx.options.pack_constants and bool(ctx.constants)


PASS = Pass(
    "pack-constants",
    pack_constants,
    why="a product reads a matrix that never changes in the order of its memory",
    after=("generate-contractions", "split-reductions"),
    when=_wanted,
)
