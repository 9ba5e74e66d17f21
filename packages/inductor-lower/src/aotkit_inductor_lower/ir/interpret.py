"""The reference interpreter: whole programs and single nests in plain torch, slow and obviously right.

Every pass and every code generator is tested against it. A nest runs stage by stage on the whole grid of its
iterations at once: a value is a tensor with one axis per outer range and one per range of its stage. Results of
reductions, and values of stages without ranges, have the outer axes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..errors import IRError
from ..ops.dtypes import FLOAT8_NAMES, dtype_from_torch_name, to_torch_dtype
from ..ops.fixups import FIX_UPS
from ..ops.scalar import OP_TABLE, REDUCE_TABLE, TypeRule
from ..symbolic import Expr, Symbol, SymbolKind
from .grid import evaluate_on_grid, index_grid
from .nodes import (
    Alias,
    Arg,
    Buffer,
    BufferKind,
    BufferRef,
    CheckedIndex,
    Compute,
    Const,
    ExternCall,
    Index,
    Load,
    LoopNest,
    Program,
    Reduce,
    Stage,
    Step,
    Store,
    SymInput,
)

__all__ = ["interpret_nest", "interpret_program"]

Input = Tensor | int


def interpret_program(
    program: Program, inputs: Sequence[Input], constants: Mapping[str, Tensor] | None = None
) -> list[Tensor | int | None]:
    """Run a program on real inputs and give its outputs. Inputs that the program writes are written.

    ``constants``: the tensors of CONSTANT buffers. Raises :class:`IRError` if an input does not fit its
    declaration, and eager's exceptions for indices out of range and integer division by zero.
    """
    with torch.no_grad():
        return _ProgramRun(program, inputs, constants or {}).run()


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


class _NestRun:
    """State of one nest's run. ``values``: name to tensor; ``lasting`` values have outer axes only."""

    def __init__(
        self, nest: LoopNest, buffers: Mapping[str, Tensor], env: Mapping[Symbol, int], scratch: Mapping[str, Buffer]
    ) -> None:
        self.nest = nest
        self.env = env
        self.outer_sizes = [_number(r.size, env) for r in nest.outer]
        self.scratch = {name: self.allocate_scratch(scratch[name]) for name in nest.writes if name in scratch}
        bits = {name: b.view(torch.uint8) for name, b in buffers.items() if str(b.dtype)[6:] in FLOAT8_NAMES}
        self.buffers = {**buffers, **bits, **self.scratch}
        self.lasting: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.grid: dict[Symbol, Tensor | int] = {}
        self.shape: tuple[int, ...] = ()
        self.lasts = False

    def allocate_scratch(self, declared: Buffer) -> Tensor:
        """A scratch buffer for all outer iterations at once: the outer axes come first."""
        dtype = dtype_from_torch_name(declared.dtype)
        assert dtype is not None
        return torch.empty(
            [*self.outer_sizes, *(_number(s, self.env) for s in declared.sizes)], dtype=to_torch_dtype(dtype)
        )

    def run(self) -> None:
        for stage in self.nest.stages:
            self.enter(stage)
            for position, instr in enumerate(stage.body):
                try:
                    _RUN[type(instr)](self, instr)
                except ZeroDivisionError as error:
                    raise RuntimeError(f"nest {self.nest.name}, instruction {position}: {error}") from None

    def enter(self, stage: Stage) -> None:
        """Lay out the stage's grid and bring the lasting values onto it."""
        inner_sizes = [_number(r.size, self.env) for r in stage.ranges]
        self.shape = (*self.outer_sizes, *inner_sizes)
        outer, inner = len(self.outer_sizes), len(inner_sizes)
        self.grid = dict(self.env)
        self.grid.update(index_grid([Symbol(r.symbol) for r in self.nest.outer], self.outer_sizes, after=inner))
        self.grid.update(index_grid([Symbol(r.symbol) for r in stage.ranges], inner_sizes, before=outer))
        self.values = {}
        for name, value in self.lasting.items():
            self.define(name, value.reshape([*value.shape, *[1] * inner]))
        self.lasts = not stage.ranges

    def define(self, name: str, value: Tensor) -> None:
        self.values[name] = value
        if value.dtype in (torch.int64, torch.int32):
            self.grid[Symbol(name, SymbolKind.VALUE)] = value.long()

    def keep(self, name: str, value: Tensor) -> None:
        """A new value of this stage; it lasts if the stage has no ranges."""
        rank = len(self.shape)
        value = value.reshape([1] * (rank - value.dim()) + list(value.shape))
        self.define(name, value)
        if self.lasts:
            self.lasting[name] = value

    def index(self, buffer: str, indices: tuple[Expr, ...], mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The tensor and, over the whole grid, one index tensor per dimension of it (one zero for a scalar)."""
        tensor = self.buffers.get(buffer)
        if tensor is None:
            raise IRError(f"nest {self.nest.name}: no tensor given for buffer {buffer!r}")
        whole = [evaluate_on_grid(index, self.grid).expand(self.shape) for index in indices]
        if buffer in self.scratch:
            outer = [self.grid[Symbol(r.symbol)] for r in self.nest.outer]
            whole = [torch.as_tensor(axis).expand(self.shape) for axis in outer] + whole
        if len(whole) != tensor.dim():
            raise IRError(f"nest {self.nest.name}: {len(whole)} indices for {buffer}, of {tensor.dim()} dimensions")
        if mask is not None:
            whole = [torch.where(mask.expand(self.shape), index, 0) for index in whole]
        for dim, index in enumerate(whole):
            reached = index if mask is None else index[mask.expand(self.shape)]
            if reached.numel() and not (int(reached.min()) >= 0 and int(reached.max()) < tensor.shape[dim]):
                found = f"[{int(reached.min())}, {int(reached.max())}]"
                raise IRError(
                    f"nest {self.nest.name}: index {dim} of {buffer} reaches {found}, outside [0, {tensor.shape[dim]})"
                )
        if not whole:
            return tensor.unsqueeze(0), (torch.zeros(self.shape, dtype=torch.int64),)
        return tensor, tuple(whole)

    def load(self, i: Load) -> None:
        mask = None if i.mask is None else self.values[i.mask]
        tensor, indices = self.index(i.buffer, i.indices, mask)
        if mask is None:
            self.keep(i.result, tensor[indices])
            return
        other = torch.full(self.shape, i.other, dtype=tensor.dtype)
        read = tensor[indices] if tensor.numel() else other
        self.keep(i.result, torch.where(mask, read, other))

    def const(self, i: Const) -> None:
        self.keep(i.result, torch.full([1] * len(self.shape), i.value, dtype=to_torch_dtype(i.dtype)))

    def index_value(self, i: Index) -> None:
        self.keep(i.result, evaluate_on_grid(i.expr, self.grid).to(to_torch_dtype(i.dtype)))

    def compute(self, i: Compute) -> None:
        row = OP_TABLE[i.op]
        args = [self.values[a] for a in i.args]
        if row.rule in (TypeRule.CAST, TypeRule.BITCAST):
            self.keep(i.result, row.reference(args[0], i.dtype))
        else:
            self.keep(i.result, row.reference(*args))

    def check_index(self, i: CheckedIndex) -> None:
        value, size = self.values[i.value], _number(i.size, self.env)
        wrapped = torch.where(value < 0, value + size, value)
        bad = (wrapped < 0) | (wrapped >= size)
        if 0 not in self.shape and bool(bad.any()):
            raise IndexError(f"index {int(value[bad][0])} is out of bounds for dimension with size {size}")
        self.keep(i.result, wrapped)

    def reduce(self, i: Reduce) -> None:
        whole = self.values[i.value].expand(self.shape)
        flat = whole.reshape(*self.outer_sizes, -1) if whole.numel() else whole.new_empty((*self.outer_sizes, 0))
        if i.running:
            reference = REDUCE_TABLE[i.kind].reference
            so_far = [reference(flat[..., : n + 1]) for n in range(flat.shape[-1])]
            self.keep(i.result, torch.stack(so_far, -1).reshape(whole.shape) if so_far else whole)
            return
        self.lasting[i.result] = REDUCE_TABLE[i.kind].reference(flat)

    def store(self, i: Store) -> None:
        mask = None if i.mask is None else self.values[i.mask]
        tensor, indices = self.index(i.buffer, i.indices, mask)
        value = self.values[i.value].expand(self.shape)
        chosen = torch.ones(self.shape, dtype=torch.bool) if mask is None else mask.expand(self.shape)
        places, values = tuple(index[chosen] for index in indices), value[chosen]
        if i.mode in ("set", "add"):
            tensor.index_put_(places, values, accumulate=i.accumulates)
            return
        if not tensor.dim():
            places, tensor = (values.new_zeros(values.shape, dtype=torch.int64),), tensor.view(1)
        for *place, element in zip(*places, values, strict=True):  # slow, and in order
            at = tuple(int(p) for p in place)
            tensor[at] = _COMBINE[i.mode](tensor[at], element)


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}

_RUN: dict[type, Callable[..., None]] = {
    Load: _NestRun.load,
    Const: _NestRun.const,
    Index: _NestRun.index_value,
    Compute: _NestRun.compute,
    CheckedIndex: _NestRun.check_index,
    Reduce: _NestRun.reduce,
    Store: _NestRun.store,
}


def _number(expr: Expr, env: Mapping[Symbol, int]) -> int:
    return expr.evaluate(env)


# -- a whole program ---------------------------------------------------------------------------------


class _ProgramRun:
    def __init__(self, program: Program, inputs: Sequence[Input], constants: Mapping[str, Tensor]) -> None:
        self.program = program
        self.declared = {b.name: b for b in program.buffers}
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

    def run_extern(self, call: ExternCall) -> None:
        target: Any = FIX_UPS.get(call.target) or reduce(getattr, call.target.split("."), torch.ops)
        found = target(*(self.arg(a) for a in call.args), **{k: self.arg(a) for k, a in call.kwargs})
        results = list(found) if isinstance(found, tuple | list) else [found]
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


def _bind_sizes(program: Program, inputs: Sequence[Input]) -> dict[Symbol, int]:
    env: dict[Symbol, int] = {}
    for name, position, kind, dim in program.symbol_sources:
        given = inputs[position]
        if isinstance(given, Tensor):
            value = given.shape[dim] if kind == "size" else given.stride(dim)
        else:
            value = given if kind == "int" else max(given if kind == "above" else -given, 0)
        env[Symbol(name, SymbolKind.SIZE)] = int(value)
    return env


_STEPS: dict[type[Step], Callable[..., None]] = {
    LoopNest: _ProgramRun.run_nest,
    ExternCall: _ProgramRun.run_extern,
    Alias: _ProgramRun.run_alias,
}
