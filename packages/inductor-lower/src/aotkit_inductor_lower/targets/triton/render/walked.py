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
        row = Reducer(kernel, nest, position) if nest.loops else None
        if row is not None:
            scope.row_block = str(nest.loops[0].map.width)
            row.row_index()
        dtype = kernel.types[i.value]
        pointer, index = kernel.address(i.buffer, i.indices[0], dtype)
        mask = kernel.mask(kernel.dims_of(index))
        place, extra = f"{pointer} + {kernel.index_value(index)}", f", mask={mask}" if mask else ""
        total = f"reduce_sum({kernel.sums[i.buffer]}, 0)"
        if i.buffer not in kernel.memory.fresh:
            total = f"tl.load({place}{extra}) + {total}"
        scope.line(f"tl.store({place}, {total}{extra})")
        if row is not None:
            scope.row_block = "1"
            kernel.drop_mask(row.axis)
