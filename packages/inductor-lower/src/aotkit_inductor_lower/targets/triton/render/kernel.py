"""One loop nest to one Triton kernel, as readable source text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....analysis.reduction_patterns import online_pair, welford_pair
from ....ir import Buffer, CheckedIndex, DType, Load, Origin, Store
from ....kernel_ir.nests import FlatNest
from ....ops.dtypes import ATOMIC
from ....symbolic import Symbol
from ..map_loops import TileLimits, plan_tiles
from ..records import KernelArgument, KernelSource
from .body import BodyEmitter
from .indices import identifier
from .lines import Value
from .names import argument_name
from .online import OnlineSoftmaxLoop, recompute_scratch
from .prelude import prelude_for
from .reductions import Reducer
from .welford import WelfordLoop

__all__ = ["KernelEmitter", "emit_kernel"]

_NO_ORIGIN = Origin()
_LIMITS = TileLimits()


def emit_kernel(
    name: str,
    nest: FlatNest,
    buffers: Mapping[str, Buffer],
    origin: Origin = _NO_ORIGIN,
    limits: TileLimits = _LIMITS,
    asserts: bool = True,
) -> KernelSource:
    """The kernel of a nest in normal form; ``limits`` of its tile; ``asserts``: see Note [Computed indices] in
    :mod:`.body`."""
    plan = plan_tiles(nest, nest.ordered and not _atomic(nest), limits)
    if not plan.persistent:
        nest = recompute_scratch(nest)
    return KernelEmitter(name, nest, buffers, plan, plan.config, asserts).emit(origin)


def _atomic(nest: FlatNest) -> bool:
    """Whether each store that combines is an atomic operation of the device, and nothing reads what it makes."""
    types = {i.result: i.dtype for s in nest.stages for i in s.body if not isinstance(i, CheckedIndex | Store)}
    loaded = {i.buffer for s in nest.stages for i in s.body if isinstance(i, Load)}
    for stage in nest.stages:
        for instr in stage.body:
            if isinstance(instr, Store) and instr.accumulates:
                kind = (types.get(instr.value, DType.I64), instr.mode)
                if instr.buffer in loaded or kind not in ATOMIC:
                    return False
    return True


class KernelEmitter(BodyEmitter):
    """Writes one kernel. A subclass may write the stages in another way."""

    def emit(self, origin: Origin) -> KernelSource:
        self._grid()
        self.stages()
        lines = self.scope.finish(drop={f"scratch {r}" for r in self.scratch if r not in self.scratch_read})
        arguments = self._arguments(lines)
        parameters = [argument_name(a) for a in arguments] + [f"{n}: tl.constexpr" for n, _ in self.config.blocks]
        head = [f"# {line}" for line in _describe(origin)]
        head += ["@jit", f"def {self.name}({', '.join(parameters)}):"]
        body = "\n".join([*head, *(f"    {line}" for line in lines)]) + "\n"
        grid = () if self.plan.serial else tuple((a.loop.size, a.block) for a in self.plan.axes)
        text = prelude_for(body) + body
        return KernelSource(self.name, text, arguments, grid, self.config, self.checks, self.plan.persistent)

    def stages(self) -> None:
        """The lines after the loop variables."""
        done = set()  # together with an earlier stage
        for position, stage in enumerate(self.nest.stages):
            looped = bool(stage.ranges) and not self.plan.persistent
            below = online_pair(self.nest.stages, position) if looped else None
            around = welford_pair(self.nest.stages, position) if looped and position not in done else None
            if below is not None:
                OnlineSoftmaxLoop(self, stage, position, below).emit()
                done.add(below.position)
            elif around is not None:
                WelfordLoop(self, stage, position, around).emit()
                done.add(around.position)
            elif stage.ranges and position not in done:
                Reducer(self, stage, position).emit()
            elif not stage.ranges:
                self.body(stage.body)

    def _arguments(self, lines: Sequence[str]) -> tuple[KernelArgument, ...]:
        text = "\n".join(lines)
        found = [
            KernelArgument("pointer", name, self.pointers[name], name in self.written)
            for name in self.nest.memories
            if name in self.pointers
        ]
        for name in self.scratch:
            if name in self.scratch_read:
                found.append(
                    KernelArgument("scratch", name, self._scratch_type(name), True, self._scratch_extent(name)[1])
                )
        for symbol in self.nest.sizes:
            argument = KernelArgument("size", symbol.name, DType.I64)
            if argument_name(argument) in text:
                found.append(argument)
        return tuple(found)

    def _grid(self) -> None:
        """The value of each outer loop in this program instance."""
        if self.wide and not self.plan.persistent:
            self.scope.line("zero = tl.full([], 0, tl.int64)")
        if self.plan.serial:
            for axis in self.plan.axes:
                name = identifier(axis.loop.symbol)
                self.scope.open(f"for {name} in {self.range_of(self.expr(axis.loop.size))}:")
                self.symbols[Symbol(axis.loop.symbol)] = Value(name, frozenset())
            return
        axes, rest = list(self.plan.axes), "program"
        if axes:
            wide = ".to(tl.int64)" if self.wide else ""
            self.scope.line(f"program = tl.program_id(0){wide}")
        position = len(self.plan.tile)
        for axis in reversed(axes):
            size, name = self.expr(axis.loop.size), identifier(axis.loop.symbol)
            part = rest
            if axis is not axes[0]:
                count = size if axis.block is None else f"(({size} + ({axis.block} - 1)) // {axis.block})"
                part = f"({rest} % {count})"
                following = f"rest_{name}"
                self.scope.line(f"{following} = {rest} // {count}")
                rest = following
            if axis.block is None:
                self.scope.line(f"{name} = {part}")
                self.symbols[Symbol(axis.loop.symbol)] = Value(name, frozenset())
                continue
            position -= 1
            at = self.along(position)
            self.scope.line(f"{name} = {part} * {axis.block} + tl.arange(0, {axis.block}){at}")
            self.symbols[Symbol(axis.loop.symbol)] = Value(name, frozenset({position}))
            constant = axis.loop.size.constant
            if constant is None or constant % self.config.block(axis.block):
                self.masks[position] = f"in_{name}"
                self.scope.line(f"in_{name} = {name} < {size}")


def _describe(origin: Origin) -> list[str]:
    lines = []
    if origin.nodes:
        lines.append(f"{' '.join(origin.nodes)}: {' '.join(dict.fromkeys(origin.ops))}"[:200])
    if origin.line:
        lines.append(origin.line.replace("\n", " ")[:200])
    return lines
