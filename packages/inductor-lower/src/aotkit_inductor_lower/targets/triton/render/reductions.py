"""The loops of one perfect nest: its own axis, accumulators, reductions, running reductions."""

from __future__ import annotations

from ....ir import DType, Load, Reduce, Store
from ....kernel_ir.nodes import Loop
from ....kernel_ir.walk import PerfectNest
from ....ops.reductions import REDUCTIONS, is_positional
from ....symbolic import Symbol
from .body import BodyEmitter, End
from .combining import combine_text, function_name, identity_text
from .lines import Value
from .ops import TYPE_NAMES

__all__ = ["Reducer"]


class Reducer:
    """One perfect nest."""

    def __init__(self, kernel: BodyEmitter, nest: PerfectNest, position: int) -> None:
        self.kernel, self.nest, self.position = kernel, nest, position
        self.scope = kernel.scope
        self.reduces = [i for i in nest.body if isinstance(i, Reduce)]
        assert kernel.row_axis is not None
        self.axis: int = kernel.row_axis
        self.persistent = kernel.persistent

    def emit(self) -> None:
        """The nest's lines. Results of its reductions are values of the scope afterwards."""
        scope, kernel = self.scope, self.kernel
        reads = {i.buffer for i in self.nest.body if isinstance(i, Load)}
        writes = {i.buffer for i in self.nest.body if isinstance(i, Store)}
        total = self.nest.extent
        size = kernel.expr(total)
        if not self.persistent:
            scope.enter_loop_of(reads, writes)
        scope.in_stage = True
        if self.persistent:
            scope.row_block = str(self.nest.loops[0].map.width)
            self.row_index()
            kernel.window = self.nest.loops
            for instr in self.nest.body:
                if isinstance(instr, Reduce):
                    self._reduce_whole(instr)
                else:
                    kernel.instruction(instr)
            kernel.window = ()
        else:
            scope.row_block = "RBLOCK"
            self._looped(size)
        scope.in_stage = False
        scope.row_block = "1"
        kernel.drop_mask(self.axis)

    def row_index(self) -> None:
        """The loop variables of a nest that is held whole."""
        wide = ".to(tl.int64)" if self.kernel.wide else ""
        self._row_index(f"tl.arange(0, {self.scope.row_block}){wide}", self.kernel.expr(self.nest.extent))

    def _row_index(self, start: str, size: str) -> None:
        """The nest's loop variables, from its flattened position."""
        kernel, axis = self.kernel, frozenset({self.axis})
        at = kernel.along(self.axis)
        flat = self.scope.define(self._name(), f"({start}){at}" if at else start, axis, index=True)
        if self.nest.loops[0].map.tail == "masked":
            mask = self.scope.define(f"in_{self._name()}", f"{flat.text} < {size}", axis, index=True)
            kernel.masks[self.axis] = mask.text
            if len(self.nest.loops) == 1:
                kernel.ends[self.axis] = End(flat.text, self.nest.loops[0])
        rest, joint = flat.text, list[tuple[tuple[Loop, ...], str]]()
        for number, loop in reversed([*enumerate(self.nest.loops, 1)]):
            length, first = kernel.expr(loop.extent), loop is self.nest.loops[0]
            text = rest
            if not first:
                joint.append((tuple(self.nest.loops[:number]), rest))
                text = self.scope.define(f"{self._name()}_{loop.symbol}", f"{rest} % {length}", axis, index=True).text
                rest = self.scope.define(
                    f"{self._name()}_above_{loop.symbol}", f"{rest} // {length}", axis, index=True
                ).text
            kernel.symbols[Symbol(loop.symbol)] = Value(text, axis)
        kernel.together = tuple(joint)

    def _name(self) -> str:
        return f"row{self.position}"

    # -- in one piece --------------------------------------------------------------------------------------

    def _masked(self, i: Reduce) -> tuple[str, DType]:
        """The reduce's operand with the identity in lanes that do not exist, varying along the nest's axis."""
        kernel = self.kernel
        value, dtype = kernel.value(i.value), kernel.types[i.value]
        text = value.text
        if dtype is DType.BOOL:
            text, dtype = f"{text}.to(tl.int32)", DType.I32
        if self.axis not in value.dims:
            text = f"tl.broadcast_to({text}, {kernel.shape(value.dims | {self.axis})})"
        mask = kernel.masks.get(self.axis)
        if mask is not None:
            text = f"tl.where({mask}, {text}, {self._identity(i, dtype)})"
        return text, dtype

    def _identity(self, i: Reduce, dtype: DType) -> str:
        text = identity_text(i.kind, self.kernel.types[i.value])
        return f"tl.full({self.kernel.shape(frozenset())}, {text}, {TYPE_NAMES[dtype]})"

    def _position(self, i: Reduce) -> str:
        kernel = self.kernel
        assert i.position is not None
        text = f"({kernel.index_value(i.position, frozenset({self.axis}))}).to({kernel.index_type})"
        mask = kernel.masks.get(self.axis)
        limit = f"tl.full({kernel.shape(frozenset())}, {2**63 - 1 if kernel.wide else 2**31 - 1}, {kernel.index_type})"
        return f"tl.where({mask}, {text}, {limit})" if mask else text

    def _dims(self, i: Reduce) -> frozenset[int]:
        return self.kernel.value(i.value).dims - {self.axis}

    def _reduce_whole(self, i: Reduce) -> None:
        text, _ = self._masked(i)
        if i.running:
            found = f"scan_{self._function(i)}({text}, {self.axis})"
            self.kernel.define(i.result, self._narrow(found, i), self._dims(i) | {self.axis})
            return
        if is_positional(i.kind):
            position = self._position(i)
            full = self.kernel.shape(self._dims(i) | {self.axis})
            found = f"reduce_{i.kind}({text}, tl.broadcast_to({position}, {full}), {self.axis}).to(tl.int64)"
        else:
            found = self._narrow(f"reduce_{self._function(i)}({text}, {self.axis})", i)
        self.kernel.define(i.result, found, self._dims(i))

    def _function(self, i: Reduce) -> str:
        return function_name(i.kind, self.kernel.types[i.value])

    def _narrow(self, text: str, i: Reduce) -> str:
        """bools are reduced as integers."""
        return f"({text} != 0)" if self.kernel.types[i.value] is DType.BOOL else text

    # -- in a loop -----------------------------------------------------------------------------------------

    def _looped(self, size: str) -> None:
        scope, kernel = self.scope, self.kernel
        for number, i in enumerate(self.reduces):
            self._start(i, number)
        wide = "tl.arange(0, RBLOCK).to(tl.int64)" if kernel.wide else "tl.arange(0, RBLOCK)"
        saved = scope.enter_loop(f"for start{self.position} in {kernel.range_of(size, 'RBLOCK')}:")
        self._row_index(f"start{self.position} + {wide}", size)
        innermost = Symbol(self.nest.loops[-1].symbol)
        if len(self.nest.loops) == 1 and kernel.loads_odd_rows(innermost):
            kernel.starts[innermost] = f"start{self.position}"
        names = {i.result: n for n, i in enumerate(self.reduces)}
        for instr in self.nest.body:
            if isinstance(instr, Reduce):
                self._step(instr, names[instr.result])
            else:
                kernel.instruction(instr)
        scope.leave_loop(saved)
        kernel.starts.pop(innermost, None)
        kernel.drop_mask(self.axis)
        for number, i in enumerate(self.reduces):
            if not i.running:
                self._end(i, number)

    def _accumulator(self, number: int) -> str:
        return f"acc{self.position}_{number}"

    def _work_type(self, i: Reduce) -> DType:
        dtype = self.kernel.types[i.value]
        return DType.I32 if dtype is DType.BOOL else dtype

    def _start(self, i: Reduce, number: int) -> None:
        kernel, name = self.kernel, self._accumulator(number)
        every = frozenset(range(self.axis))
        shape = kernel.shape(every if i.running else every | {self.axis})
        dtype = self._work_type(i)
        text = identity_text(i.kind, kernel.types[i.value])
        self.scope.line(f"{name} = tl.full({shape}, {text}, {TYPE_NAMES[dtype]})")
        if is_positional(i.kind):
            limit = 2**63 - 1 if kernel.wide else 2**31 - 1
            self.scope.line(f"{name}_at = tl.full({shape}, {limit}, {kernel.index_type})")

    def _step(self, i: Reduce, number: int) -> None:
        name, scope, kernel = self._accumulator(number), self.scope, self.kernel
        text, _ = self._masked(i)
        part = scope.fresh("part")
        if i.running:
            scope.line(f"{part} = {text}")
            scanned = self._combine(i, name, f"scan_{self._function(i)}({part}, {self.axis})")
            kernel.define(i.result, self._narrow(scanned, i), frozenset(range(self.axis + 1)))
            total = f"reduce_{self._function(i)}({part}, {self.axis})"
            scope.line(f"{name} = {self._combine(i, name, total)}")
        elif is_positional(i.kind):
            every = kernel.shape(frozenset(range(self.axis + 1)))
            scope.line(f"{part} = tl.broadcast_to({text}, {every})")
            place = f"tl.broadcast_to({self._position(i)}, {every})"
            better = f"prefer_first_{REDUCTIONS[i.kind].position_of}({name}, {name}_at, {part}, {place})"
            scope.line(f"{name}, {name}_at = {better}")
        else:
            scope.line(f"{name} = {self._combine(i, name, text)}")

    def _combine(self, i: Reduce, a: str, b: str) -> str:
        return combine_text(i.kind, a, b, self.kernel.types[i.value])

    def _end(self, i: Reduce, number: int) -> None:
        name, every = self._accumulator(number), frozenset(range(self.axis))
        if is_positional(i.kind):
            found = f"reduce_{i.kind}({name}, {name}_at, {self.axis}).to(tl.int64)"
        else:
            found = self._narrow(f"reduce_{self._function(i)}({name}, {self.axis})", i)
        self.kernel.define(i.result, found, every)
