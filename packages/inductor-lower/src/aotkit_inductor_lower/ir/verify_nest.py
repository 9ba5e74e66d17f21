"""The rules of a loop nest, checked: Note [The loop IR in one page] in :mod:`.nodes`, made executable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..ops.dtypes import dtype_from_torch_name
from ..symbolic import Expr, Ranges, Symbol, SymbolKind
from .independence import check_outer_independence
from .nodes import Buffer, BufferKind, CheckedIndex, DType, Load, LoopNest, Range, Reduce, Stage, Store
from .verify_instr import InstrChecker

__all__ = ["verify_nest_against"]


def verify_nest_against(nest: LoopNest, buffers: Mapping[str, Buffer], *, size_minimum: int = 0) -> None:
    """Check one nest. Raises :class:`IRError` naming nest, stage and instruction."""
    _NestChecker(nest, buffers, size_minimum).run()


class _NestChecker(InstrChecker):
    """Walks one nest, stage by stage."""

    def __init__(self, nest: LoopNest, buffers: Mapping[str, Buffer], size_minimum: int) -> None:
        super().__init__(f"nest {nest.name}", size_minimum)
        self.nest = nest
        self.buffers = buffers
        self.stage = Stage((), ())
        self.lasting: dict[str, DType] = {}  # values visible in later stages too
        self.scratch_stored: set[str] = set()

    def run(self) -> None:
        self.add_ranges(self.nest.outer)
        outer = dict(self.sizes)
        lasting_sizes: dict[Symbol, Expr] = {}
        for number, stage in enumerate(self.nest.stages):
            self.place = f"nest {self.nest.name}, stage {number}"
            self.stage = stage
            self.sizes = {**outer, **lasting_sizes}
            self.types = dict(self.lasting)
            self.add_ranges(stage.ranges)
            self.never_runs = any(size == 0 for size in self.sizes.values())
            for position, instr in enumerate(stage.body):
                self.place = f"nest {self.nest.name}, stage {number}, instruction {position} `{self.shown(instr)}`"
                self.check(instr)
                if not stage.ranges and isinstance(instr, CheckedIndex):
                    lasting_sizes[Symbol(instr.result, SymbolKind.VALUE)] = instr.size
        self.place = f"nest {self.nest.name}"
        problem = check_outer_independence(self.nest, self.buffers, self.size_minimum)
        if problem:
            raise self.fail(problem)

    def add_ranges(self, ranges: Iterable[Range]) -> None:
        for r in ranges:
            self.add_loop(r.symbol, r.size)
        self.ranges = Ranges(dict(self.sizes), self.size_minimum)

    def define(self, name: str, dtype: DType) -> None:
        super().define(name, dtype)
        if not self.stage.ranges:
            self.lasting[name] = dtype

    # -- memory ----------------------------------------------------------------------------------

    def check_read(self, i: Load) -> None:
        buffer, dtype = self.buffer(i.buffer)
        if i.dtype is not dtype:
            raise self.fail(f"{i.buffer} holds {dtype.value}, not {i.dtype.value}")
        if buffer.kind is BufferKind.SCRATCH and i.buffer not in self.scratch_stored:
            raise self.fail(f"scratch buffer {i.buffer} is loaded before it is stored")
        self.check_access(buffer, i.indices, i.mask is not None)

    def check_write(self, i: Store, dtype: DType) -> None:
        buffer, holds = self.buffer(i.buffer)
        if buffer.kind is BufferKind.CONSTANT:
            raise self.fail(f"{i.buffer} is a constant of the graph")
        if dtype is not holds:
            raise self.fail(f"{i.buffer} holds {holds.value}, %{i.value} is {dtype.value}")
        self.check_access(buffer, i.indices, i.mask is not None)
        self.scratch_stored.add(i.buffer)

    def buffer(self, name: str) -> tuple[Buffer, DType]:
        found = self.buffers.get(name)
        if found is None:
            raise self.fail(f"no buffer named {name!r} is declared")
        dtype = dtype_from_torch_name(found.dtype)
        if dtype is None:
            raise self.fail(f"generated code cannot hold elements of {found.dtype}")
        return found, dtype

    def check_access(self, buffer: Buffer, indices: tuple[Expr, ...], masked: bool) -> None:
        if len(indices) != len(buffer.sizes):
            raise self.fail(f"{len(indices)} indices for {buffer.name}, which has {len(buffer.sizes)} dimensions")
        for index in indices:
            self.check_symbols(index)
            if buffer.kind is BufferKind.SCRATCH and any(Symbol(r.symbol) in index.symbols for r in self.nest.outer):
                raise self.fail(f"scratch buffer {buffer.name} is indexed by an outer loop variable")
        if masked or self.never_runs:
            return
        for dim, (index, size) in enumerate(zip(indices, buffer.sizes, strict=True)):
            symbol = index.symbol
            if symbol is not None and self.sizes.get(symbol) == size:
                continue  # a loop variable over the whole dimension, by far the most frequent
            self.check_bounds(index.substitute(self.known), size, f"index {dim} of {buffer.name}")

    # -- reductions ------------------------------------------------------------------------------

    def check_result(self, i: Reduce) -> None:
        if not self.stage.ranges:
            raise self.fail("a reduction needs a stage with ranges")
        if i.position is not None:
            raise self.fail("the ranges of a stage tell the position; only a kernel's reduction names one")
        if i.running:
            self.define(i.result, i.dtype)
            return
        self.new_name(i.result)
        self.lasting[i.result] = i.dtype
