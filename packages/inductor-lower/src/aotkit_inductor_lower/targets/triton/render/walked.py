"""The loop over a chunk of rows, around all nests of a kernel, see Note [Walked rows]."""

from __future__ import annotations

from collections.abc import Callable

from ....ir import Store
from ....kernel_ir.walk import PerfectNest
from ....symbolic import Symbol
from .body import BodyEmitter
from .indices import identifier
from .lines import Value
from .ops import TYPE_NAMES
from .reductions import Reducer

__all__ = ["WalkedRows"]


class WalkedRows:
    """The rows of one program instance."""

    def __init__(self, kernel: BodyEmitter) -> None:
        assert kernel.walked is not None
        self.kernel, self.loop, self.scope = kernel, kernel.walked, kernel.scope
        self.added = [
            (position, nest, i)
            for position, nest in enumerate(kernel.nests)
            for i in nest.body
            if isinstance(i, Store) and i.accumulates
        ]

    def emit(self, nests: Callable[[], None]) -> None:
        """The lines; ``nests`` writes those of one step."""
        kernel, scope, loop = self.kernel, self.scope, self.loop
        for number, (_, nest, i) in enumerate(self.added):
            kernel.sums[i.buffer] = f"sums{number}"
            shape = f"[XBLOCK, {nest.loops[0].map.width if nest.loops else 1}]"
            scope.line(f"sums{number} = tl.full({shape}, 0.0, {TYPE_NAMES[kernel.types[i.value]]})")
        saved = scope.enter_loop(f"for start in {kernel.range_of(kernel.expr(loop.extent), 'XBLOCK')}:")
        name = identifier(loop.symbol)
        scope.line(f"{name} = start + tl.arange(0, XBLOCK){kernel.along(0)}")
        kernel.symbols[Symbol(loop.symbol)] = Value(name, frozenset({0}))
        if loop.map.tail == "masked":
            kernel.masks[0] = f"in_{name}"
            scope.line(f"in_{name} = {name} < {kernel.expr(loop.extent)}")
        nests()
        scope.leave_loop(saved)
        kernel.drop_mask(0)
        for position, nest, i in self.added:
            self._store(position, nest, i)

    def _store(self, position: int, nest: PerfectNest, i: Store) -> None:
        kernel, scope = self.kernel, self.scope
        total, known = f"reduce_sum({kernel.sums[i.buffer]}, 0)", i.buffer not in kernel.memory.fresh
        if not nest.loops:
            self._add(total, known, i)
            return
        row = Reducer(kernel, nest, position)
        scope.row_block = str(nest.loops[0].map.width)
        if len(nest.loops) > 1 and Symbol(nest.loops[0].symbol) not in i.indices[0].symbols:
            self._store_together(total, known, row, nest, i)
        else:
            row.row_index()
            self._add(total, known, i)
        scope.row_block = "1"
        kernel.drop_mask(row.axis)

    def _store_together(self, total: str, known: bool, row: Reducer, nest: PerfectNest, i: Store) -> None:
        """The sums of rows that are walked together, see Note [Rows that are walked together] in :mod:`~..flat_rows`:
        those of the first of them, then those of the next are added, by threads that wait for each other."""
        kernel, scope, axis = self.kernel, self.scope, frozenset({row.axis})
        rows, length = nest.loops[0].extent.constant, nest.loops[1].extent.constant
        assert rows is not None and length is not None
        sums = scope.fresh("sums")
        scope.line(f"{sums} = {total}")
        lane = f"tl.arange(0, {scope.row_block}){kernel.along(row.axis)}"
        for k in range(rows):
            text = f"{lane} - {k * length}" if k else lane
            column = scope.define(scope.fresh("column"), text, axis, index=True)
            inside = scope.define(
                f"in_{column.text}", f"({column.text} >= 0) & ({column.text} < {length})", axis, index=True
            )
            kernel.symbols[Symbol(nest.loops[1].symbol)], kernel.masks[row.axis] = column, inside.text
            if k:
                scope.line("tl.debug_barrier()")
            self._add(sums, known or k > 0, i)

    def _add(self, total: str, known: bool, i: Store) -> None:
        """Store a line of sums, or add it to what is there."""
        kernel = self.kernel
        pointer, index = kernel.address(i.buffer, i.indices[0], kernel.types[i.value])
        mask = kernel.mask(kernel.dims_of(index))
        place, extra = f"{pointer} + {kernel.index_value(index)}", f", mask={mask}" if mask else ""
        if known:
            total = f"tl.load({place}{extra}) + {total}"
        self.scope.line(f"tl.store({place}, {total}{extra})")
