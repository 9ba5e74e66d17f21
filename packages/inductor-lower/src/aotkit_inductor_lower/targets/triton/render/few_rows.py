"""Products of few rows as kernels, see Note [Products of few rows] in :mod:`..few_rows`.

Note [Loads of a product]
    Everything that is loaded of known places is asked for before anything waits, as the sum of a norm does, or that of
    the product: a compiler does not move loads past these, and what is asked for later takes as long again. The
    matrices come last: where loads want their numbers on threads in different ways, Triton computes with those of the
    last one, and exchanges the others through shared memory, which should be the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....ir import Load, Reduce
from ....kernel_ir.nodes import Kernel
from ....kernel_ir.walk import PerfectNest
from ....kernel_passes.choose_index_width import choose_index_width
from ....symbolic import SymbolKind
from ..few_rows import RowsSite, map_rows
from ..records import KernelSource, KnownMemory
from .kernel import KernelEmitter
from .reductions import Reducer

__all__ = ["emit_rows"]

_NOTHING_KNOWN = KnownMemory()
_TOGETHER = 16  # bytes of neighbours that one thread has


def emit_rows(
    kernel: Kernel,
    site: RowsSite,
    asserts: bool = True,
    fast: bool = False,
    memory: KnownMemory = _NOTHING_KNOWN,
) -> KernelSource:
    """The source of a kernel with a :func:`~..few_rows.rows_site`."""
    return _RowsEmitter(choose_index_width(map_rows(kernel, site)), site, asserts, fast, memory).emit()


class _RowsEmitter(KernelEmitter):
    def __init__(self, kernel: Kernel, site: RowsSite, asserts: bool, fast: bool, memory: KnownMemory) -> None:
        super().__init__(kernel, asserts, fast, memory)
        self.site = site

    def write_nests(self) -> None:
        if self.persistent:
            self._load_early()
        for position, nest in enumerate(self.nests):
            if not nest.loops:
                self.body(nest.body)
            elif position == self.site.position and not self.persistent:
                _Steps(self, nest, position).emit()
            else:
                Reducer(self, nest, position).emit()

    def _load_early(self) -> None:
        """All that is known where it lies, see Note [Loads of a product]."""
        matrices = set(self.site.matrices)
        for last in (False, True):
            for position, nest in enumerate(self.nests):
                early = [i for i in nest.body if isinstance(i, Load) and self._is_known(i) and (i in matrices) is last]
                if early:
                    self._loads(position, early)

    def _is_known(self, load: Load) -> bool:
        values = any(s.kind is SymbolKind.VALUE for s in load.indices[0].symbols)
        return load.mask is None and not values and load.buffer not in self.written

    def _loads(self, position: int, loads: Sequence[Load]) -> None:
        nest, scope = self.nests[position], self.scope
        if not nest.loops:
            self.body(loads)
            return
        reducer = Reducer(self, nest, position)
        scope.in_stage, scope.row_block = True, str(nest.loops[0].map.width)
        reducer.row_index()
        self.body(loads)
        scope.in_stage, scope.row_block = False, "1"
        self.drop_mask(reducer.axis)


class _Steps(Reducer):
    """The sums of products whose loop goes in steps: one number a thread, row and column."""

    def __init__(self, kernel: _RowsEmitter, nest: PerfectNest, position: int) -> None:
        super().__init__(kernel, nest, position)
        site, length = kernel.site, kernel.config.block("RBLOCK")
        if site.along:
            self.together = min(length, _TOGETHER // site.size)
            self.shape = f"RBLOCK // {self.together}, {self.together}"
        else:
            threads = 32 * kernel.config.num_warps * _TOGETHER // (site.size * kernel.config.block("XBLOCK"))
            self.together = max(1, length // max(1, threads))
            self.shape = f"{self.together}, RBLOCK // {self.together}"
        self.blocks = ", ".join(kernel.axes)

    def _start(self, i: Reduce, number: int) -> None:
        left = f"RBLOCK // {self.together}"
        self.scope.line(f"{self._accumulator(number)} = tl.full([{self.blocks}, {left}], 0.0, tl.float32)")

    def _step(self, i: Reduce, number: int) -> None:
        scope, name = self.scope, self._accumulator(number)
        text, _ = self._masked(i)
        part, axis = scope.fresh("part"), self.axis + (1 if self.kernel_site.along else 0)
        every = self.kernel.shape(frozenset(range(self.axis + 1)))
        scope.line(f"{part} = tl.broadcast_to({text}, {every})")
        scope.line(f"{part} = tl.reshape({part}, [{self.blocks}, {self.shape}])")
        scope.line(f"{name} = {name} + fold_sum({part}, {axis})")

    @property
    def kernel_site(self) -> RowsSite:
        assert isinstance(self.kernel, _RowsEmitter)
        return self.kernel.site
