"""One kernel to one Triton kernel, as readable source text."""

from __future__ import annotations

from collections.abc import Sequence

from ....analysis.reduction_patterns import online_pair, welford_pair
from ....ir import DType, Origin
from ....kernel_ir.nodes import Kernel
from ....kernel_ir.walk import memories
from ....kernel_passes.choose_index_width import choose_index_width
from ....kernel_passes.recompute_scratch import recompute_scratch
from ....symbolic import Symbol
from ..map_loops import TileLimits, is_persistent, map_loops
from ..records import KernelArgument, KernelSource, KnownMemory
from .body import BodyEmitter, End
from .indices import identifier
from .lines import Value
from .names import argument_name
from .online import OnlineSoftmaxLoop
from .prelude import prelude_for
from .reductions import Reducer
from .walked import WalkedRows
from .welford import WelfordLoop

__all__ = ["KernelEmitter", "emit_kernel"]

_LIMITS = TileLimits()
_NOTHING_KNOWN = KnownMemory()


def emit_kernel(
    kernel: Kernel,
    limits: TileLimits = _LIMITS,
    asserts: bool = True,
    fast: bool = False,
    memory: KnownMemory = _NOTHING_KNOWN,
) -> KernelSource:
    """The source of a kernel in normal form; ``limits`` of its tile; ``asserts``: see Note [Computed indices] in
    :mod:`.body`; ``fast``: see :class:`~..records.KernelSource`."""
    kernel = map_loops(kernel, limits)
    if not is_persistent(kernel):
        kernel = recompute_scratch(kernel)
    return KernelEmitter(choose_index_width(kernel), asserts, fast, memory).emit()


class KernelEmitter(BodyEmitter):
    """Writes one kernel. A subclass may write the body in another way."""

    def emit(self) -> KernelSource:
        self._grid()
        self.write_body()
        lines = self.scope.finish(drop={f"scratch {r}" for r in self.scratch if r not in self.scratch_read})
        arguments = self._arguments(lines)
        parameters = [argument_name(a) for a in arguments] + [f"{n}: tl.constexpr" for n, _ in self.config.blocks]
        head = [f"# {line}" for line in _describe(self.kernel.origin)]
        head += ["@jit", f"def {self.name}({', '.join(parameters)}):"]
        body = "\n".join([*head, *(f"    {line}" for line in lines)]) + "\n"
        shared = () if self.serial else (loop for loop in self.kernel.grid if loop is not self.walked)
        grid = tuple((loop.extent, loop.map.block or None) for loop in shared)
        text = prelude_for(body) + body
        return KernelSource(self.name, text, arguments, grid, self.config, self.checks, self.persistent, self.fast)

    def write_body(self) -> None:
        """The lines after the loop variables."""
        if self.walked is not None:
            WalkedRows(self).emit(self.write_nests)
        else:
            self.write_nests()

    def write_nests(self) -> None:
        """The body's nests."""
        done = set()  # together with an earlier nest
        for position, nest in enumerate(self.nests):
            looped = bool(nest.loops) and not self.persistent
            below = online_pair(self.nests, position) if looped else None
            around = welford_pair(self.nests, position) if looped and position not in done else None
            if below is not None:
                OnlineSoftmaxLoop(self, nest, position, below).emit()
                done.add(below.position)
            elif around is not None:
                WelfordLoop(self, nest, position, around).emit()
                done.add(around.position)
            elif nest.loops and position not in done:
                Reducer(self, nest, position).emit()
            elif not nest.loops:
                self.body(nest.body)

    def _arguments(self, lines: Sequence[str]) -> tuple[KernelArgument, ...]:
        text = "\n".join(lines)
        found = [
            KernelArgument("pointer", name, self.pointers[name], name in self.written)
            for name in (param.name for param in memories(self.kernel))
            if name in self.pointers
        ]
        for name, row in self.scratch.items():
            if name in self.scratch_read:
                found.append(KernelArgument("scratch", name, row.dtype, True, self._scratch_extent(name)))
        for param in (param for param in self.kernel.params if param.kind == "size"):
            argument = KernelArgument("size", param.name, DType.I64)
            if argument_name(argument) in text:
                found.append(argument)
        return tuple(found)

    def _grid(self) -> None:
        """The value of each loop of the grid in this program instance."""
        if self.wide and (not self.persistent or self.walked is not None):
            self.scope.line("zero = tl.full([], 0, tl.int64)")
        loops = tuple(loop for loop in self.kernel.grid if loop is not self.walked)
        if self.serial:
            for loop in loops:
                name = identifier(loop.symbol)
                self.scope.open(f"for {name} in {self.range_of(self.expr(loop.extent))}:")
                self.symbols[Symbol(loop.symbol)] = Value(name, frozenset())
            return
        rest = "program"
        if loops:
            wide = ".to(tl.int64)" if self.wide else ""
            self.scope.line(f"program = tl.program_id(0){wide}")
        position = len(self.tile)
        for loop in reversed(loops):
            size, name, block = self.expr(loop.extent), identifier(loop.symbol), loop.map.block
            part = rest
            if loop is not loops[0]:
                count = f"(({size} + ({block} - 1)) // {block})" if block else size
                part = f"({rest} % {count})"
                following = f"rest_{name}"
                self.scope.line(f"{following} = {rest} // {count}")
                rest = following
            if not block:
                self.scope.line(f"{name} = {part}")
                self.symbols[Symbol(loop.symbol)] = Value(name, frozenset())
                continue
            position -= 1
            at = self.along(position)
            start = f"{part} * {block}"
            self.tile_starts[Symbol(loop.symbol)] = start
            if self.loads_odd_rows(Symbol(loop.symbol)):
                self.starts[Symbol(loop.symbol)] = f"start_{name}"
                self.scope.line(f"start_{name} = {start}")
                start = f"start_{name}"
            self.scope.line(f"{name} = {start} + tl.arange(0, {block}){at}")
            self.symbols[Symbol(loop.symbol)] = Value(name, frozenset({position}))
            if loop.map.tail == "masked":
                self.masks[position] = f"in_{name}"
                self.ends[position] = End(name, loop)
                self.scope.line(f"in_{name} = {name} < {size}")


def _describe(origin: Origin) -> list[str]:
    lines = []
    if origin.nodes:
        lines.append(f"{' '.join(origin.nodes)}: {' '.join(dict.fromkeys(origin.ops))}"[:200])
    if origin.line:
        lines.append(origin.line.replace("\n", " ")[:200])
    return lines
