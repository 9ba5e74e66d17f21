"""The reference interpreter: whole programs and single nests in plain torch, slow and obviously right.

Every pass and every code generator is tested against it. A nest runs stage by stage on the whole grid of its
iterations at once: a value is a tensor with one axis per outer range and one per range of its stage. Results of
reductions, and values of stages without ranges, have the outer axes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ..errors import IRError
from ..ops.aten import in_a_row
from ..ops.dtypes import FLOAT8_NAMES, dtype_from_torch_name, to_torch_dtype
from ..ops.fixups import FIX_UPS
from ..symbolic import Expr, Symbol, SymbolKind, sym, to_expr, with_computed
from .grid import index_grid
from .nodes import (
    Alias,
    Arg,
    Buffer,
    BufferKind,
    BufferRef,
    Contraction,
    ExternCall,
    LoopNest,
    Program,
    Range,
    Stage,
    Step,
    SymInput,
)
from .run_instr import InstrRun
from .walk import buffers_of, map_nest, ranges_within, substitute

__all__ = ["ProgramRun", "interpret_nest", "interpret_program"]

Input = Tensor | int

_LARGEST_GRID = 1 << 22  # products that are looked at at once


def interpret_program(
    program: Program, inputs: Sequence[Input], constants: Mapping[str, Tensor] | None = None
) -> list[Tensor | int | None]:
    """Run a program on real inputs and give its outputs. Inputs that the program writes are written.

    ``constants``: the tensors of CONSTANT buffers. Raises :class:`IRError` if an input does not fit its
    declaration, and eager's exceptions for indices out of range and integer division by zero.
    """
    with torch.no_grad():
        return ProgramRun(program, inputs, constants or {}).run()


def interpret_nest(
    nest: LoopNest,
    buffers: Mapping[str, Tensor],
    sizes: Mapping[str, int] | None = None,
    scratch: Mapping[str, Buffer] | None = None,
) -> None:
    """Run one nest on tensors by buffer name, which it writes in place.

    ``sizes``: values of size symbols by name. ``scratch``: declarations of the nest's scratch buffers. Raises
    ``IndexError`` where a checked index is out of range, ``RuntimeError`` for an integer division by zero, and
    :class:`IRError` for an unchecked access outside its buffer.
    """
    env = {Symbol(name, SymbolKind.SIZE): value for name, value in (sizes or {}).items()}
    with torch.no_grad():
        _NestRun(nest, buffers, env, scratch or {}).run()


# -- one nest ----------------------------------------------------------------------------------------


class _NestRun(InstrRun):
    """State of one nest's run. ``lasting`` values have outer axes only."""

    def __init__(
        self, nest: LoopNest, buffers: Mapping[str, Tensor], env: Mapping[Symbol, int], scratch: Mapping[str, Buffer]
    ) -> None:
        super().__init__(f"nest {nest.name}", env)
        self.nest = nest
        self.outer = {Symbol(r.symbol): _number(r.size, env) for r in nest.outer}
        self.scratch = {name: self.allocate_scratch(scratch[name]) for name in nest.writes if name in scratch}
        bits = {name: b.view(torch.uint8) for name, b in buffers.items() if str(b.dtype)[6:] in FLOAT8_NAMES}
        self.buffers = {**buffers, **bits, **self.scratch}
        self.lasting: dict[str, Tensor] = {}
        self.lasts = False

    def allocate_scratch(self, declared: Buffer) -> Tensor:
        """A scratch buffer for all outer iterations at once: the outer axes come first."""
        dtype = dtype_from_torch_name(declared.dtype)
        assert dtype is not None
        sizes = [*self.outer.values(), *(_number(s, self.env) for s in declared.sizes)]
        return torch.empty(sizes, dtype=to_torch_dtype(dtype))

    def run(self) -> None:
        for stage in self.nest.stages:
            self.enter(stage)
            self.run_all(enumerate(stage.body))

    def enter(self, stage: Stage) -> None:
        """Lay out the stage's grid and bring the lasting values onto it."""
        inner_sizes = [_number(r.size, self.env) for r in stage.ranges]
        self.shape = (*self.outer.values(), *inner_sizes)
        outer, inner = len(self.outer), len(inner_sizes)
        self.grid = dict(self.env)
        self.grid.update(index_grid(list(self.outer), list(self.outer.values()), after=inner))
        self.grid.update(index_grid([Symbol(r.symbol) for r in stage.ranges], inner_sizes, before=outer))
        self.values = {}
        self.lasts = False
        for name, value in self.lasting.items():
            self.define(name, value.reshape([*value.shape, *[1] * inner]))
        self.lasts = not stage.ranges

    def define(self, name: str, value: Tensor) -> None:
        super().define(name, value)
        if self.lasts:
            self.lasting[name] = value

    def finish(self, name: str, value: Tensor) -> None:
        self.lasting[name] = value

    def memory(self, name: str, dtype: torch.dtype) -> tuple[Tensor, bool]:
        tensor = self.buffers.get(name)
        if tensor is None:
            raise IRError(f"{self.place}: no tensor given for buffer {name!r}")
        return tensor, name in self.scratch


def _number(expr: Expr, env: Mapping[Symbol, int]) -> int:
    return expr.evaluate(env)


# -- a whole program ---------------------------------------------------------------------------------


class ProgramRun:
    """State of a program's run: the tensor of each buffer. How a nest is run is open to subclasses."""

    def __init__(self, program: Program, inputs: Sequence[Input], constants: Mapping[str, Tensor]) -> None:
        self.program = program
        self.declared = buffers_of(program)
        self.tensors: dict[str, Tensor] = {}
        if len(inputs) != len(program.inputs):
            raise IRError(f"program {program.name} takes {len(program.inputs)} inputs, not {len(inputs)}")
        self.env = _bind_sizes(program, inputs)
        for name, given in zip(program.inputs, inputs, strict=True):
            if isinstance(given, Tensor):
                self.tensors[name] = self.fitting(name, given)
        for buffer in program.buffers:
            if buffer.kind is BufferKind.CONSTANT:
                if buffer.name not in constants:
                    raise IRError(f"program {program.name} needs the constant {buffer.name!r}")
                self.tensors[buffer.name] = self.fitting(buffer.name, constants[buffer.name])

    def run(self) -> list[Tensor | int | None]:
        for step in self.program.steps:
            _STEPS[type(step)](self, step)
        return [self.output(o) for o in self.program.outputs]

    def output(self, output: BufferRef | SymInput | None) -> Tensor | int | None:
        if output is None:
            return None
        return self.tensor(output.name) if isinstance(output, BufferRef) else _number(output.expr, self.env)

    def layout(self, name: str) -> tuple[list[int], list[int], torch.dtype]:
        b = self.declared[name]
        dtype = getattr(torch, b.dtype)
        assert isinstance(dtype, torch.dtype)
        return [_number(s, self.env) for s in b.sizes], [_number(s, self.env) for s in b.strides], dtype

    def fitting(self, name: str, given: Tensor) -> Tensor:
        """``given`` if it has the declared layout. Strides of dimensions of size 1 do not matter."""
        sizes, strides, dtype = self.layout(name)
        same_strides = given.numel() == 0 or all(
            a == b for a, b, n in zip(given.stride(), strides, sizes, strict=False) if n > 1
        )
        if list(given.shape) != sizes or given.dtype != dtype or not same_strides:
            raise IRError(
                f"program {self.program.name}: {name} is declared {dtype} {sizes} with strides {strides}, "
                f"the tensor given is {given.dtype} {list(given.shape)} with strides {list(given.stride())}"
            )
        return given

    def tensor(self, name: str) -> Tensor:
        """The buffer's tensor, made when it is first used and filled with values that show up if they are read."""
        found = self.tensors.get(name)
        if found is None:
            sizes, strides, dtype = self.layout(name)
            found = torch.empty_strided(sizes, strides, dtype=dtype)
            if dtype.is_floating_point or dtype.is_complex:
                found.fill_(float("nan"))
            else:
                found.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)
            self.tensors[name] = found
        return found

    def run_nest(self, nest: LoopNest) -> None:
        names = dict.fromkeys((*nest.reads, *nest.writes))
        scratch = {n: self.declared[n] for n in names if self.declared[n].kind is BufferKind.SCRATCH}
        _NestRun(nest, {n: self.tensor(n) for n in names if n not in scratch}, self.env, scratch).run()

    def run_contraction(self, contraction: Contraction) -> None:
        for part in _in_parts(contraction.as_nest(), self.env):
            self.run_nest(part)

    def run_extern(self, call: ExternCall) -> None:
        target: Any = FIX_UPS.get(call.target) or reduce(getattr, call.target.split("."), torch.ops)
        found = target(*(self.arg(a) for a in call.args), **{k: self.arg(a) for k, a in call.kwargs})
        results = in_a_row(found) if isinstance(found, tuple | list) else [found]
        if len(call.results) > len(results):
            raise IRError(f"extern {call.name}: {call.target} gave {len(results)} results, not {len(call.results)}")
        for name, result in zip(call.results, results, strict=False):
            if name is not None:
                self.tensors[name] = self.fitting(name, result)

    def arg(self, arg: Arg) -> object:
        if isinstance(arg, BufferRef):
            return self.tensor(arg.name).item() if arg.number else self.tensor(arg.name)
        if isinstance(arg, SymInput):
            return _number(arg.expr, self.env)
        if isinstance(arg, tuple):
            return [self.arg(a) for a in arg]
        if arg.kind in ("dtype", "layout", "memory_format"):
            return getattr(torch, str(arg.value).removeprefix("torch."))
        if arg.kind == "device":
            return torch.device(str(arg.value))
        return complex(str(arg.value)) if arg.kind == "complex" else arg.value

    def run_alias(self, alias: Alias) -> None:
        base = self.tensor(alias.base)
        sizes, strides, dtype = self.layout(alias.result)
        view = torch.empty(0, dtype=dtype, device=base.device)
        start = base.storage_offset() * base.element_size() // view.element_size()
        view.set_(base.untyped_storage(), start + _number(alias.offset, self.env), sizes, strides)
        self.tensors[alias.result] = view


def _in_parts(nest: LoopNest, env: Mapping[Symbol, int]) -> Iterator[LoopNest]:
    """The nest; where its grid is large, for some iterations of its longest outer loop at a time."""
    iterations = math.prod(_number(r.size, env) for r in ranges_within(nest))
    if iterations <= _LARGEST_GRID or not nest.outer:
        yield nest
        return
    longest = max(nest.outer, key=lambda r: _number(r.size, env))
    symbol, size = Symbol(longest.symbol), _number(longest.size, env)
    step = max(size * _LARGEST_GRID // iterations, 1)
    for start in range(0, size, step):
        moved = {symbol: sym(longest.symbol) + start}
        part = Range(longest.symbol, to_expr(min(step, size - start)))
        outer = tuple(part if r is longest else r for r in nest.outer)
        yield replace(map_nest(nest, partial(substitute, env=moved)), outer=outer)


def _bind_sizes(program: Program, inputs: Sequence[Input]) -> dict[Symbol, int]:
    env: dict[Symbol, int] = {}
    for name, position, kind, dim in program.symbol_sources:
        given = inputs[position]
        if isinstance(given, Tensor):
            value = given.shape[dim] if kind == "size" else given.stride(dim)
        else:
            value = given if kind == "int" else max(given if kind == "above" else -given, 0)
        env[Symbol(name, SymbolKind.SIZE)] = int(value)
    return with_computed(program.computed_sizes, env)


_STEPS: dict[type[Step], Callable[..., None]] = {
    LoopNest: ProgramRun.run_nest,
    ExternCall: ProgramRun.run_extern,
    Alias: ProgramRun.run_alias,
    Contraction: ProgramRun.run_contraction,
}
