"""Pass: constant matrices are laid out once as the products read them, see Note [Matrices in panels].

Only where ``LowerOptions.pack_constants`` says that constants never change. A matrix of which something else is read,
another product in another layout or a gather of an embedding, stays as it is: in memory there is one copy or the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..ir import Alias, Buffer, BufferKind, BufferRef, Compute, DType, Instr, Load, LoopNest, Program, Step
from ..ir.walk import buffers_of, loads, reduces, step_reads, step_writes
from ..kernel_ir.panels import Panels
from ..passes import Decision, Pass, PassContext
from ..symbolic import Expr, Symbol, contiguous_strides, to_expr
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
            continue
        value = pack(_matrix(found[0], buffers, ctx.constants[root]), found[0].panels)
        if value is None:
            why = "its numbers are not sums of three of bfloat16"
            _note(ctx, program.steps[found[0].position], root, False, why)
        elif ctx.fuel.take():
            added.append(_packed(found, steps, buffers, ctx.constants, root, value))
            _note(ctx, program.steps[found[0].position], root, True, "laid out once as the product reads it")
    if not added:
        return program
    program = drop_dead_steps(replace(program, steps=tuple(steps), buffers=(*program.buffers, *added)))
    kept = {buffer.name for buffer in program.buffers}
    for name in [name for name in ctx.constants if name not in kept]:
        del ctx.constants[name]
    return program


def pack(matrix: torch.Tensor, panels: Panels) -> torch.Tensor | None:
    """A new tensor in the layout, of a matrix with a row for each step of the sum; ``None`` where the layout's pieces
    do not hold its numbers whole."""
    steps, columns = matrix.shape
    packed = matrix.new_zeros(panels.sizes(columns, steps))
    whole = matrix.new_zeros((panels.padded(steps), packed.shape[0] * panels.width))
    whole[:steps, :columns] = matrix
    if panels.pieces == 1:
        apart = whole.view(-1, panels.group, packed.shape[0], panels.width)
        return packed.copy_(apart.permute(2, 0, 3, 1).reshape(packed.shape))
    pieces = _pieces_of(whole, panels.pieces)
    if pieces is None:
        return None
    packed = packed.bfloat16()
    for number, piece in enumerate(pieces):
        apart = piece.view(-1, panels.group, panels.apart, packed.shape[0], panels.width)
        packed[:, :, number] = apart.permute(3, 0, 2, 4, 1)
    return packed


def _pieces_of(numbers: torch.Tensor, count: int) -> list[torch.Tensor] | None:
    """bfloat16 that add up to float32 numbers, the largest first, if no number leaves a rest. The first is rounded to
    nearest and the others are cut off, as a kernel that packs a matrix in each call does."""
    found, rest = list[torch.Tensor](), numbers
    for number in range(count):
        bits = rest.contiguous().view(torch.int32)
        near = bits + 0x8000 if number == 0 else bits
        piece = (near & -0x10000).view(torch.float32)
        found.append(piece.bfloat16())
        rest = rest - piece  # nan where a number, or what it rounds to, is not finite
    return found if bool((rest == 0).all()) else None


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
    places = [
        use.panels.indices(use.load.indices[column], use.load.indices[step], piece)
        for piece in range(use.panels.pieces)
    ]
    read = (
        _sum_of_pieces(use.load, name, places)
        if len(places) > 1
        else (replace(use.load, buffer=name, indices=places[0]),)
    )
    stages = []
    for stage in nest.stages:
        body = [new for instr in stage.body for new in (read if instr == use.load else (instr,))]
        stages.append(stage.with_body(tuple(body)))
    dtype = "bfloat16" if len(places) > 1 else matrix.dtype
    strides = contiguous_strides(sizes)
    made = Buffer(name, dtype, tuple(map(to_expr, sizes)), strides, BufferKind.CONSTANT, matrix.device)
    return replace(nest, stages=tuple(stages)), made


def _sum_of_pieces(load: Load, name: str, places: Sequence[tuple[Expr, ...]]) -> tuple[Instr, ...]:
    """What computes the element that a load gave from its pieces, see Note [Panels of pieces]."""
    made: list[Instr] = []
    for number, place in enumerate(places):
        piece = f"{load.result}_piece{number}"
        made += [Load(piece, name, place, DType.BF16), Compute(f"{piece}_wide", "cast", (piece,), load.dtype)]
        if number:
            before = f"{load.result}_piece{number - 1}_{'sum' if number > 1 else 'wide'}"
            last = number == len(places) - 1
            made.append(Compute(load.result if last else f"{piece}_sum", "add", (before, f"{piece}_wide"), load.dtype))
    return tuple(made)


def _packed(
    uses: Sequence[_Use],
    steps: list[Step],
    buffers: Mapping[str, Buffer],
    constants: dict[str, torch.Tensor],
    root: str,
    value: torch.Tensor,
) -> Buffer:
    """Put the products that read a packed matrix into ``steps``, and that matrix among the constants."""
    name = f"{root}_packed"
    while name in buffers:
        name += "_"
    for use in uses:
        nest = steps[use.position]
        assert isinstance(nest, LoopNest)
        steps[use.position], made = _rewritten(nest, use, name, buffers)
    constants[name] = value
    return made


def _matrix(use: _Use, buffers: Mapping[str, Buffer], constant: torch.Tensor) -> torch.Tensor:
    """What a product reads of a constant, with a row for each step of the sum."""
    seen = buffers[use.load.buffer]
    sizes, strides = ([each.constant or 0 for each in axes] for axes in (seen.sizes, seen.strides))
    matrix = constant.detach().as_strided(sizes, strides, int(constant.storage_offset()))
    return matrix if use.steps_first else matrix.t()


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
