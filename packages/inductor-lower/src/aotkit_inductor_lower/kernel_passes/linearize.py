"""Loop IR to kernel IR: each load and store names the memory that owns the buffer, and one offset in it.

Aliases are resolved here. Stages become loops, and what stands in stages without ranges becomes the kernel's own body.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..errors import CodegenError
from ..ir import (
    Alias,
    Buffer,
    BufferKind,
    CheckedIndex,
    DType,
    Instr,
    Load,
    LoopNest,
    Program,
    Range,
    Reduce,
    Stage,
    Store,
)
from ..ir.walk import access_at, buffers_of, contractions, instructions, nests, substitute
from ..kernel_ir.nodes import Kernel, KernelCall, KernelModule, Loop, Param, Scratch, Stmt
from ..kernel_ir.walk import all_loops, expressions, memories, nested
from ..ops.dtypes import dtype_from_torch_name, item_bytes
from ..ops.reductions import is_positional
from ..symbolic import Expr, Symbol, SymbolKind, floordiv, smax, sym, to_expr
from .each_kernel import kernel_pass

__all__ = ["DECLARE_SIZES", "Placement", "declare_sizes", "extents_of", "linearize", "linearize_nest"]
__all__ += ["memory_extents", "memory_starts", "placements"]


_ACCESS = (Load, Store)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a buffer lives: the buffer that owns the memory, and this one's offset there in its own elements."""

    root: str
    offset: Expr


def linearize(program: Program) -> KernelModule:
    """The kernels of a program's nests, as they stand, and a call of each.

    Raises :class:`~.errors.CodegenError` for a nest over buffers that are not declared or have no generated type, and
    for a contraction: nobody has chosen yet who computes it.
    """
    for contraction in contractions(program):
        raise CodegenError(f"contraction {contraction.name} is no kernel until choose-contractions has run")
    buffers, where = buffers_of(program), placements(program)
    kernels = [declare_sizes(linearize_nest(nest, buffers, where)) for nest in nests(program)]
    calls = [
        KernelCall(kernel.name, number, tuple(map(_argument, kernel.params)), kernel.origin.line)
        for number, kernel in enumerate(kernels)
    ]
    return KernelModule(program.name, tuple(kernels), tuple(calls))


def _argument(param: Param) -> str:
    return param.name if param.kind == "memory" else f"${param.name}"


def linearize_nest(nest: LoopNest, buffers: Mapping[str, Buffer], where: Mapping[str, Placement]) -> Kernel:
    """The kernel of one nest, without its sizes: see :func:`declare_sizes`. ``where`` gives the owner of each alias."""
    found = _Memories(buffers, where, {}, {})
    body: list[Stmt] = []
    taken = {r.symbol for r in nest.outer}
    for stage in (_with_own_loops(stage, taken) for stage in nest.stages):
        instrs = tuple([_linear(instr, found, stage.ranges) for instr in stage.body])
        body += nested((Loop(r.symbol, r.size) for r in stage.ranges), instrs)
    grid = tuple(Loop(r.symbol, r.size) for r in nest.outer)
    params, scratch = tuple(found.params.values()), tuple(found.scratch.values())
    return Kernel(nest.name, params, scratch, grid, tuple(body), bool(nest.combines), origin=nest.origin)


def _with_own_loops(stage: Stage, taken: set[str]) -> Stage:
    """The stage without loops of names that are ``taken``: stages may share them, the loops of a kernel not."""
    names = {r.symbol: _fresh(r.symbol, taken) for r in stage.ranges}
    taken.update(names.values())
    if all(old == new for old, new in names.items()):
        return stage
    env = {Symbol(old): sym(new) for old, new in names.items()}
    body = tuple(substitute(instr, env) for instr in stage.body)
    return replace(stage, ranges=tuple(replace(r, symbol=names[r.symbol]) for r in stage.ranges), body=body)


def _fresh(name: str, taken: set[str]) -> str:
    number, fresh = 1, name
    while fresh in taken:
        number, fresh = number + 1, f"{name}_{number}"
    return fresh


def _linear(instr: Instr, found: _Memories, ranges: tuple[Range, ...]) -> Instr:
    """An instruction of a stage as one of a kernel."""
    if isinstance(instr, _ACCESS):
        memory, offset = found.place(instr.buffer, instr.indices, written=isinstance(instr, Store))
        return access_at(instr, memory, (offset,))
    if isinstance(instr, Reduce) and is_positional(instr.kind):
        return replace(instr, position=_position(ranges))
    return instr


def declare_sizes(kernel: Kernel) -> Kernel:
    """The kernel with a parameter for each size symbol that it holds, and no others."""
    return replace(kernel, params=(*memories(kernel), *(Param(symbol.name, "size") for symbol in _sizes(kernel))))


def _sizes(kernel: Kernel) -> Iterable[Symbol]:
    found: dict[Symbol, None] = {}
    for expr in _all_expressions(kernel):
        sizes = [symbol for symbol in expr.symbols if symbol.kind is SymbolKind.SIZE]
        if sizes:
            found.update(dict.fromkeys(sorted(sizes, key=str)))
    return found


def _all_expressions(kernel: Kernel) -> Iterator[Expr]:
    yield from expressions(kernel)
    yield from (loop.extent for loop in all_loops(kernel))
    yield from (i.size for i in instructions(kernel.body) if isinstance(i, CheckedIndex))
    yield from (declared.extent for declared in kernel.scratch)


@dataclass(slots=True)
class _Memories:
    """The memories that a nest's buffers are in, by first use."""

    buffers: Mapping[str, Buffer]
    where: Mapping[str, Placement]
    params: dict[str, Param]
    scratch: dict[str, Scratch]

    def place(self, name: str, indices: tuple[Expr, ...], *, written: bool = False) -> tuple[str, Expr]:
        """The memory that owns a buffer's element, and the offset there."""
        if name not in self.buffers:
            raise CodegenError(f"a kernel would use the undeclared buffer {name!r}")
        buffer = self.buffers[name]
        offset = buffer.offset(indices)
        dtype = dtype_from_torch_name(buffer.dtype)
        if dtype is None:
            raise CodegenError(f"a kernel would use {name} of type {buffer.dtype}, which has no generated code")
        if buffer.kind is BufferKind.SCRATCH:
            if name not in self.scratch:
                self.scratch[name] = Scratch(name, dtype, _extent(buffer))
            return name, offset
        place = self.where.get(name)
        if place is not None:
            name, offset = place.root, offset + place.offset
        self.declare(name, dtype, written)
        return name, offset

    def declare(self, owner: str, dtype: DType, written: bool) -> None:
        param = self.params.get(owner)
        if param is None:
            self.params[owner] = Param(owner, "memory", dtype, written)
            return
        if param.dtype is dtype and param.written >= written:
            return
        also = param.also if dtype in (param.dtype, *param.also) else (*param.also, dtype)
        self.params[owner] = replace(param, also=also, written=written or param.written)


def _position(ranges: tuple[Range, ...]) -> Expr:
    position = to_expr(0)
    for loop in ranges:
        position = position * loop.size + sym(loop.symbol)
    return position


# -- where buffers are -----------------------------------------------------------------------------------


def placements(program: Program) -> dict[str, Placement]:
    """The memory that each alias of a program views, with the offset in the alias's own elements."""
    buffers = buffers_of(program)
    found: dict[str, Placement] = {}
    for step in program.steps:
        if isinstance(step, Alias):
            found[step.result] = _placement(step, buffers, found.get(step.base))
    return found


def _placement(alias: Alias, buffers: Mapping[str, Buffer], base: Placement | None) -> Placement:
    if base is None:
        return Placement(alias.base, alias.offset)
    offset = base.offset
    wide, narrow = item_bytes(buffers[alias.base].dtype), item_bytes(buffers[alias.result].dtype)
    if wide != narrow:
        offset = floordiv(offset * wide, narrow)
    return Placement(base.root, alias.offset + offset)


def memory_extents(program: Program) -> dict[str, Expr]:
    """How many bytes each memory has that kernels read or write: as far as the owner and all of its aliases go."""
    where = placements(program)
    found: dict[str, Expr] = {}
    for buffer in program.buffers:
        if dtype_from_torch_name(buffer.dtype) is None:
            continue  # no kernel reads it but through aliases
        place = where.get(buffer.name)
        root, offset = (buffer.name, to_expr(0)) if place is None else (place.root, place.offset)
        reached = (offset + _extent(buffer)) * item_bytes(buffer.dtype)
        found[root] = smax(found[root], reached) if root in found else reached
    return found


def memory_starts(program: Program) -> dict[str, Expr]:
    """How many bytes before a memory's address kernels may read or write, where an alias begins before its owner: the
    owner is a view itself, of a larger tensor."""
    buffers = buffers_of(program)
    found: dict[str, Expr] = {}
    for name, place in placements(program).items():
        before = smax(0, -place.offset * item_bytes(buffers[name].dtype))
        if before != 0:
            found[place.root] = smax(found[place.root], before) if place.root in found else before
    return found


def extents_of(buffers: Iterable[Buffer]) -> dict[str, Expr]:
    """How many elements each buffer has, from the first to the last."""
    return {buffer.name: _extent(buffer) for buffer in buffers}


def _extent(buffer: Buffer) -> Expr:
    """Elements from the first to the last."""
    extent = to_expr(1)
    for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
        extent = extent + (size - 1) * stride
    return extent


DECLARE_SIZES = kernel_pass(
    "declare-sizes",
    declare_sizes,
    why="a kernel takes the sizes that it still uses",
    after=("merge-loops",),
    required=True,
)
