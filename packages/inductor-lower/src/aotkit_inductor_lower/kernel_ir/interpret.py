"""The reference interpreter of kernels, in plain torch: slow and obviously right.

Every kernel pass and every renderer can be tested against it. An instruction runs on all iterations of the grid and of
the loops around it at once; how a target maps loops does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import IRError
from ..ir import LoopNest, Program
from ..ir.grid import index_grid
from ..ir.interpret import ProgramRun
from ..ir.run_instr import InstrRun
from ..ops.dtypes import to_torch_dtype
from ..symbolic import Symbol, SymbolKind
from .nodes import Kernel, KernelCall, KernelModule, Loop, Stmt

__all__ = ["interpret_call", "interpret_kernel", "interpret_module"]


def interpret_kernel(
    kernel: Kernel,
    memory: Mapping[str, Tensor],
    sizes: Mapping[str, int] | None = None,
    before: Mapping[str, int] | None = None,
) -> None:
    """Run a kernel on memory that it writes in place: for each parameter's name a contiguous tensor of one dimension.

    ``sizes``: what the other parameters are. ``before``: so many bytes of a memory lie before the element that has the
    offset 0, if any do. Raises :class:`IndexOutOfRange` where a checked index is,
    :class:`DividedByZero` for an integer division by zero, and :class:`IRError` for an access outside of the memory.
    """
    env = {Symbol(name, SymbolKind.SIZE): value for name, value in (sizes or {}).items()}
    with torch.no_grad():
        _KernelRun(kernel, memory, env, before or {}).run()


def interpret_call(
    module: KernelModule,
    call: KernelCall,
    memory: Callable[[str], Tensor],
    size: Callable[[str], int],
    before: Callable[[str], int] = lambda _name: 0,
) -> None:
    """Run a call of a module's kernel as :func:`interpret_kernel` does. ``memory``, ``before``: of a buffer, by name;
    ``size``: what a size symbol is."""
    kernel = module.kernels[call.kernel]
    memories: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    starts: dict[str, int] = {}
    for param, argument in zip(kernel.params, call.arguments, strict=True):
        if param.kind == "memory":
            memories[param.name], starts[param.name] = memory(argument), before(argument)
        else:
            sizes[param.name] = size(argument[1:])
    interpret_kernel(kernel, memories, sizes, starts)


def interpret_module(
    program: Program,
    module: KernelModule,
    inputs: Sequence[Tensor | int],
    constants: Mapping[str, Tensor] | None = None,
) -> list[Tensor | int | None]:
    """Run a program as :func:`.interpret_program` does, but its nests by their kernels."""
    with torch.no_grad():
        return _ModuleRun(program, module, inputs, constants or {}).run()


class _KernelRun(InstrRun):
    """State of one kernel's run. ``results``: of reductions, visible after the outermost loop."""

    def __init__(
        self, kernel: Kernel, memory: Mapping[str, Tensor], env: Mapping[Symbol, int], before: Mapping[str, int]
    ) -> None:
        super().__init__(f"kernel {kernel.name}", env)
        self.kernel = kernel
        self.given, self.before = memory, before
        self.outer = {Symbol(loop.symbol): loop.extent.evaluate(env) for loop in kernel.grid}
        self.scratch = {
            s.name: torch.empty([*self.outer.values(), s.extent.evaluate(env)], dtype=to_torch_dtype(s.dtype))
            for s in kernel.scratch
        }
        self.results: dict[str, Tensor] = {}

    def run(self) -> None:
        self.shape = tuple(self.outer.values())
        self.grid.update(index_grid(list(self.outer), list(self.outer.values())))
        self.run_body(self.kernel.body)

    def run_body(self, body: Iterable[Stmt]) -> None:
        for position, stmt in enumerate(body):
            if isinstance(stmt, Loop):
                self.run_loop(stmt)
            else:
                self.run_all([(position, stmt)])

    def run_loop(self, loop: Loop) -> None:
        """One axis more for all that is visible, and the variable along it; then everything as it was."""
        values, grid, shape = self.values, self.grid, self.shape
        extent = loop.extent.evaluate(self.env)
        self.shape = (*shape, extent)
        self.grid = {k: v.unsqueeze(-1) if isinstance(v, Tensor) else v for k, v in grid.items()}
        self.grid.update(index_grid([Symbol(loop.symbol)], [extent], before=len(shape)))
        self.values = {name: value.unsqueeze(-1) for name, value in values.items()}
        self.run_body(loop.body)
        self.values, self.grid, self.shape = values, grid, shape
        if len(shape) == len(self.outer):
            for name, value in self.results.items():
                self.define(name, value)
            self.results = {}

    def finish(self, name: str, value: Tensor) -> None:
        self.results[name] = value

    def memory(self, name: str, dtype: torch.dtype) -> tuple[Tensor, bool]:
        if name in self.scratch:
            return self.scratch[name], True
        if name not in self.given:
            raise IRError(f"{self.place}: no memory given for parameter {name!r}")
        return _as_type(self.given[name], dtype), False

    def elements_before(self, name: str, dtype: torch.dtype) -> int:
        return self.before.get(name, 0) // dtype.itemsize


def _as_type(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes as elements of another type, as many as there are room for."""
    if memory.dtype == dtype:
        return memory
    size, item = memory.numel() * memory.element_size(), dtype.itemsize
    return memory.view(torch.uint8)[: size // item * item].view(dtype)


class _ModuleRun(ProgramRun):
    """A program's run with kernels in the place of nests."""

    def __init__(
        self, program: Program, module: KernelModule, inputs: Sequence[Tensor | int], constants: Mapping[str, Tensor]
    ) -> None:
        super().__init__(program, inputs, constants)
        self.module = module
        self.calls = {call.step: call for call in module.calls}

    def run_nest(self, nest: LoopNest) -> None:
        call = self.calls.get(nest.name)
        if call is None:
            raise IRError(f"module {self.module.name} has no call for the step {nest.name}")
        sizes = {symbol.name: value for symbol, value in self.env.items()}
        interpret_call(self.module, call, lambda name: _owned(self.tensor(name)), sizes.__getitem__)


def _owned(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to the end of its storage."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((room,), (1,))
