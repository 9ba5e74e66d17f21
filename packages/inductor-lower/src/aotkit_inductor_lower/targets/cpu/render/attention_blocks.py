"""The products of attention on vectors, and how their factors are packed, as functions that a module's kernels share.

Note [Blocks of attention]
    Lines (queries, keys, values, gradients) are copied into panels of as many numbers of a head as a product sums in
    registers: ``[panel][line][width]``, in float32, with zeros behind a head's last number and behind the last line. So
    a copy is a left factor, of which a number is read at a time, and a right one whose lines are summed over. Where the
    head is summed over, the right factor is such a copy turned over: ``[panel of lines][number of a head][width]``.

    A product is six lines by up to a panel of columns. Its left factor is read wherever it lies, so weights are one
    turned over as well: what is beside each other in memory are lines then. Only whole sixes of lines are computed: of
    those behind the last one nothing is kept.

Note [Pairs of attention]
    Where an instruction multiplies vectors of pairs of bfloat16 (AVX512-BF16), pairs are what is read at a time, of
    numbers that are beside each other in the sum. So a left factor whose lines are summed along is lines as they lie,
    and the right one for it these turned over pair by pair. A right factor whose lines are summed over has two of them
    in each of its own; so have weights that are turned over, of two queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ....ir import DType
from ..machine import Machine
from ..products import multiplies_pairs
from .emitter import Carried, Emitter, Ssa, imm
from .lanes import Lanes
from .turn import turn_function

__all__ = ["CHAIN", "ROWS", "AttentionBlocks", "lanes_of"]

ROWS = 6  # of a product
CHAIN = 128  # products that are added up before they go to memory
HEAD_CHAIN = 64  # the same of numbers of a head: of less, panels of 16 would go there and back four times as often
FLOAT = 4  # bytes
_TURNED = 8  # sides of squares that are turned over, see :mod:`.product`


def lanes_of(machine: Machine) -> int:
    """Numbers of float32 in a vector."""
    return machine.lanes(32)


class AttentionBlocks:
    """Defines the functions for one type and size of heads, and emits their calls."""

    def __init__(self, em: Emitter, machine: Machine, dtype: DType, head: int) -> None:
        self.em, self.machine, self.dtype, self.head = em, machine, dtype, head
        self.lanes = lanes_of(machine)
        many = machine.vector_bits == 512 or machine.triple.startswith("aarch64")
        self.vectors = 4 if many else 2  # of a panel
        self.width = self.lanes * self.vectors
        self.panels = -(-head // self.width)  # of a head
        self.line = self.panels * self.width  # numbers of a line of sums
        self.group = 2 if dtype is DType.BF16 and multiplies_pairs(machine) else 1  # numbers that are read at a time
        self.depth = -(-head // self.group)  # groups of a head
        self.left_line = self.width if self.group == 1 else self.depth  # groups of a line of a left factor
        self.pieces = 3 if dtype is DType.F32 else 2
        self.name = f"{self.lanes}_{dtype.value}_{head}{'_in_pairs' if self.group == 2 else ''}"

    def call(self, name: str, parameters: str, given: Sequence[Ssa], write: Callable[[Emitter, Lanes], None]) -> None:
        """A call of a function that ``write`` writes where the module has none of this name."""
        whole = f"attention_vectors_{name}"
        if whole not in self.em.declarations:
            own = Emitter(self.em.declarations)
            write(own, Lanes(own, self.machine, self.lanes, self.pieces))
            header = f"define internal void @{whole}({parameters}) noinline {{"
            self.em.define(whole, "\n".join([header, "entry:", *own.lines(), "  ret void", "}"]))
        self.em.effect(f"call void @{whole}({', '.join(value.typed for value in given)})")

    def filled(self, panel: int) -> int:
        """How many numbers of a head a panel has."""
        return min(self.width, self.head - panel * self.width)

    def vectors_of(self, columns: int) -> int:
        return -(-columns // self.lanes)

    # -- lines ---------------------------------------------------------------------------------------------

    def copy(self, lines: tuple[Ssa, Ssa], count: Ssa, padded: Ssa, to: Ssa, room: int) -> None:
        """Copy lines for a left factor, and where numbers are read one at a time, for a right one: into panels that
        have ``room`` for more of them, with zeros up to the number ``padded``."""
        given = (*lines, count, padded, to, imm(room * self.width))
        parameters = "ptr %from, i64 %step, i64 %count, i64 %padded, ptr %to, i64 %panel"
        write = self._write_copy if self.group == 1 else self._write_copy_of_pairs
        self.call(f"copy_{self.name}", parameters, given, write)

    def pair(self, lines: tuple[Ssa, Ssa], count: Ssa, to: Ssa, room: int) -> None:
        """Two lines in each of a right factor's, with room for so many of them; an odd one beside zeros."""
        given = (*lines, count, to, imm(room // 2 * self.width))
        parameters = "ptr %from, i64 %step, i64 %count, ptr %to, i64 %panel"
        self.call(f"pair_{self.name}", parameters, given, self._write_pairs)

    def _write_copy_of_pairs(self, em: Emitter, lanes: Lanes) -> None:
        def place(line: Ssa, first: int) -> Ssa:
            start = em.element("i32", Ssa("%to", "ptr"), em.mul(line, imm(self.left_line)))
            return em.element("i16", start, imm(first))

        def copied(line: Ssa, _: list[Ssa]) -> list[Ssa]:
            start = em.element("i16", Ssa("%from", "ptr"), em.mul(line, Ssa("%step", "i64")))
            for first in range(0, 2 * self.depth, self.lanes):
                read, kept = (lanes.these(count - first) for count in (self.head, 2 * self.depth))
                lanes.store_halves(lanes.halves(em.element("i16", start, imm(first)), read), place(line, first), kept)
            return []

        def zeros(line: Ssa, _: list[Ssa]) -> list[Ssa]:
            for first in range(0, 2 * self.depth, self.lanes):
                zero = Ssa("zeroinitializer", lanes.short)
                lanes.store_halves(zero, place(line, first), lanes.these(2 * self.depth - first))
            return []

        em.loop(imm(0), Ssa("%count", "i64"), 1, [], copied, "line")
        em.loop(Ssa("%count", "i64"), Ssa("%padded", "i64"), 1, [], zeros, "line")

    def _write_pairs(self, em: Emitter, lanes: Lanes) -> None:
        def pair(two: bool, at: Ssa, _: list[Ssa]) -> list[Ssa]:
            line = em.mul(em.unsigned("udiv", at, imm(2)), imm(self.width))
            starts = [
                em.element("i16", Ssa("%from", "ptr"), em.mul(em.add(at, imm(k)), Ssa("%step", "i64")))
                for k in range(1 + two)
            ]
            for p in range(self.panels):
                to = em.add(line, em.mul(Ssa("%panel", "i64"), imm(p)))
                for v in range(self.vectors_of(self.filled(p))):
                    first = p * self.width + v * self.lanes
                    some = lanes.these(self.head - first)
                    read = [lanes.halves(em.element("i16", start, imm(first)), some) for start in starts]
                    place = em.element("i32", Ssa("%to", "ptr"), em.add(to, imm(v * self.lanes)))
                    lanes.store(lanes.paired(read[0], read[1] if two else None), place)
            return []

        count = Ssa("%count", "i64")
        whole = em.round_down(count, 2)
        em.loop(imm(0), whole, 2, [], functools.partial(pair, True), "pair")
        em.loop(whole, count, 2, [], functools.partial(pair, False), "odd")

    def _write_copy(self, em: Emitter, lanes: Lanes) -> None:
        element = "i16" if self.dtype is DType.BF16 else "float"
        to, panel = Ssa("%to", "ptr"), Ssa("%panel", "i64")
        vectors = [(p, v) for p in range(self.panels) for v in range(self.vectors_of(self.filled(p)))]

        def place(line: Ssa, p: int, v: int) -> Ssa:
            inside = em.add(em.mul(line, imm(self.width)), em.mul(panel, imm(p)))
            return em.element("float", to, em.add(inside, imm(v * self.lanes)))

        def copied(line: Ssa, _: list[Ssa]) -> list[Ssa]:
            start = em.element(element, Ssa("%from", "ptr"), em.mul(line, Ssa("%step", "i64")))
            for p, v in vectors:
                first = p * self.width + v * self.lanes
                source = em.element(element, start, imm(first))
                lanes.store(lanes.read(source, self.dtype, lanes.these(self.head - first)), place(line, p, v))
            return []

        def zeros(line: Ssa, _: list[Ssa]) -> list[Ssa]:
            for p, v in vectors:
                lanes.store(Ssa("zeroinitializer", lanes.floats), place(line, p, v))
            return []

        em.loop(imm(0), Ssa("%count", "i64"), 1, [], copied, "line")
        em.loop(Ssa("%count", "i64"), Ssa("%padded", "i64"), 1, [], zeros, "line")

    def turn(self, lines: Ssa, room: int, count: Ssa, to: Ssa) -> None:
        """Turn a copy of lines over: as many panels of them as ``count`` fill, at least in part."""
        em, width = self.em, self.width
        name = f"turn_float_{width}_by_{min(self.lanes, _TURNED)}"
        if name not in em.declarations:
            square = min(self.lanes, _TURNED)
            em.define(name, turn_function(name, "float", square, width, em.declarations))

        def panel_of_pairs(first: Ssa, _: list[Ssa]) -> list[Ssa]:
            source, target = (em.element("float", x, em.mul(first, imm(self.depth))) for x in (lines, to))
            given = (source, imm(self.depth), imm(self.depth), target)
            em.effect(f"call void @{name}({', '.join(value.typed for value in given)})")
            return []

        def panel(first: Ssa, _: list[Ssa]) -> list[Ssa]:
            for p in range(self.panels):
                source = em.element("float", lines, em.add(em.mul(first, imm(width)), imm(p * room * width)))
                target = em.element("float", to, em.add(em.mul(first, imm(self.head)), imm(p * width * width)))
                given = (source, imm(width), imm(self.filled(p)), target)
                em.effect(f"call void @{name}({', '.join(value.typed for value in given)})")
            return []

        em.loop(imm(0), count, width, [], panel if self.group == 1 else panel_of_pairs, "panel")

    # -- products ------------------------------------------------------------------------------------------

    def multiply(
        self, left: tuple[Ssa, Ssa, Ssa], right: Ssa, count: Ssa, sums: tuple[Ssa, Ssa], vectors: int, *, adds: bool
    ) -> None:
        """Six lines of a left factor, with the steps to the next line and to the next number, times vectors of a panel
        of ``count`` lines, into sums with the step to the next line, or added to these."""
        pairs = "_of_pairs" if self.group == 2 else ""
        name = f"product{pairs}_{self.lanes}x{vectors}{'_added' if adds else ''}"
        parameters = "ptr %left, i64 %row, i64 %step, ptr %panel, i64 %count, ptr %sums, i64 %line"
        write = functools.partial(self._write_product, vectors, adds)
        self.call(name, parameters, (*left, right, count, *sums), write)

    def _write_product(self, vectors: int, adds: bool, em: Emitter, lanes: Lanes) -> None:
        starts = self._starts(em, Ssa("%row", "i64"))
        sums = [Ssa("zeroinitializer", lanes.floats)] * (ROWS * vectors)
        panel, count = Ssa("%panel", "ptr"), Ssa("%count", "i64")
        sums = self._summed(em, lanes, (starts, Ssa("%step", "i64")), panel, count, sums)
        self._store_sums(em, lanes, sums, adds)

    def multiply_heads(self, left: tuple[Ssa, int], right: Ssa, sums: tuple[Ssa, Ssa], vectors: int) -> None:
        """Six lines of a copy, whose panels are so far apart, times vectors of a panel of lines that are turned over.
        Sums of some panels stay in registers, see :data:`HEAD_CHAIN`."""
        em, width = self.em, self.width
        parameters = "ptr %left, i64 %apart, ptr %panel, ptr %sums, i64 %line"
        for first in range(0, self.head, max(HEAD_CHAIN, width)):
            count, added = min(max(HEAD_CHAIN, width), self.head - first), first > 0
            name = f"product_{self.lanes}x{vectors}_of_{count}{'_added' if added else ''}"
            given = (
                em.element("float", left[0], imm(first // width * left[1])),
                imm(left[1]),
                em.element("float", right, imm(first * width)),
                *sums,
            )
            self.call(name, parameters, given, functools.partial(self._write_product_of_heads, vectors, count, added))

    def _write_product_of_heads(self, vectors: int, count: int, adds: bool, em: Emitter, lanes: Lanes) -> None:
        starts, width = self._starts(em, imm(self.width)), self.width
        whole = count // width

        def panel(p: Ssa, count: int, sums: list[Ssa]) -> list[Ssa]:
            inside = em.mul(p, Ssa("%apart", "i64"))
            left = [em.element("float", start, inside) for start in starts]
            right = em.element("float", Ssa("%panel", "ptr"), em.mul(p, imm(width * width)))
            return self._summed(em, lanes, (left, imm(1)), right, imm(count), sums)

        zero = Carried(lanes.floats, Ssa("zeroinitializer", lanes.floats))
        carried = [zero] * (ROWS * vectors)
        sums = em.loop(imm(0), imm(whole), 1, carried, lambda p, now: panel(p, width, now), "panel")
        if count % width:
            sums = panel(imm(whole), count % width, sums)
        self._store_sums(em, lanes, sums, adds)

    @staticmethod
    def _starts(em: Emitter, row: Ssa) -> list[Ssa]:
        """Where six lines of the left factor begin."""
        return [em.element("float", Ssa("%left", "ptr"), em.mul(row, imm(r))) for r in range(ROWS)]

    def _summed(
        self, em: Emitter, lanes: Lanes, left: tuple[Sequence[Ssa], Ssa], panel: Ssa, count: Ssa, sums: list[Ssa]
    ) -> list[Ssa]:
        """Products of six lines, with the step to the next number, and a panel of ``count`` lines, added to sums."""
        starts, along_step = left
        vectors = len(sums) // ROWS

        def step(k: Ssa, sums: list[Ssa]) -> list[Ssa]:
            along, line = em.mul(k, along_step), em.mul(k, imm(self.width))
            places = (em.element("float", panel, em.add(line, imm(v * self.lanes))) for v in range(vectors))
            right = [lanes.load(place) if self.group == 1 else lanes.load_pairs(place) for place in places]
            multiply = lanes.fma if self.group == 1 else lanes.dot
            made: list[Ssa] = []
            for start in starts:
                place = em.element("float", start, along)
                number = lanes.all(lanes.scalar(place)) if self.group == 1 else lanes.all_pairs(place)
                made += [multiply(number, right[v], sums[len(made) + v]) for v in range(vectors)]
            return made

        return em.loop(imm(0), count, 1, [Carried(lanes.floats, value) for value in sums], step, "k")

    def _store_sums(self, em: Emitter, lanes: Lanes, sums: Sequence[Ssa], adds: bool) -> None:
        vectors = len(sums) // ROWS
        for r in range(ROWS):
            line = em.element("float", Ssa("%sums", "ptr"), em.mul(Ssa("%line", "i64"), imm(r)))
            for v in range(vectors):
                place, value = em.element("float", line, imm(v * self.lanes)), sums[r * vectors + v]
                lanes.store(lanes.add(lanes.load(place), value) if adds else value, place)

    def scores(self, left: tuple[Ssa, int], turned: Ssa, rows: Ssa, columns: Ssa, sums: tuple[Ssa, int]) -> None:
        """Products of lines with other lines, that are turned over: so many of both. ``left``: panels, and their
        room; ``sums``: with the step to the next line."""
        em = self.em

        def panel(vectors: int, first: Ssa, _: list[Ssa]) -> list[Ssa]:
            right = em.element("float", turned, em.mul(first, imm(self.depth)))

            def tile_of_pairs(row: Ssa, _: list[Ssa]) -> list[Ssa]:
                place = em.element("float", sums[0], em.add(em.mul(row, imm(sums[1])), first))
                factor = em.element("float", left[0], em.mul(row, imm(self.depth))), imm(self.depth), imm(1)
                self.multiply(factor, right, imm(self.depth), (place, imm(sums[1])), vectors, adds=False)
                return []

            def tile(row: Ssa, _: list[Ssa]) -> list[Ssa]:
                place = em.element("float", sums[0], em.add(em.mul(row, imm(sums[1])), first))
                lines = em.element("float", left[0], em.mul(row, imm(self.width)))
                self.multiply_heads((lines, left[1] * self.width), right, (place, imm(sums[1])), vectors)
                return []

            em.loop(imm(0), rows, ROWS, [], tile if self.group == 1 else tile_of_pairs, "tile")
            return []

        whole = em.round_down(columns, self.width)
        em.loop(imm(0), whole, self.width, [], functools.partial(panel, self.vectors), "panel")
        rest = em.unsigned("udiv", em.add(em.sub(columns, whole), imm(self.lanes - 1)), imm(self.lanes))
        if rest.constant is not None:
            if rest.constant:
                panel(rest.constant, whole, [])
            return
        for vectors in range(1, self.vectors + 1):
            this = em.pure("i1", f"icmp eq i64 {rest.text}, {vectors}", rest)
            em.choose(this, None, functools.partial(self._ignored, panel, vectors, whole), lambda: None)

    @staticmethod
    def _ignored(panel: Callable[[int, Ssa, list[Ssa]], list[Ssa]], vectors: int, first: Ssa) -> None:
        panel(vectors, first, [])

    def add_lines(
        self, left: tuple[Ssa, int, int], lines: Ssa, room: int, rows: Ssa, count: tuple[Ssa, Ssa], sums: Ssa
    ) -> None:
        """Add sums of lines, weighed: ``rows`` of them, with a number for each of the lines from the first to the last
        of ``count``; whole pairs of them. ``left``: with the steps to the next row and to the next number, or pair;
        ``lines``: panels with so much ``room``."""
        em, group = self.em, self.group
        room //= group
        begin = em.unsigned("udiv", count[0], imm(group))
        end = em.unsigned("udiv", em.add(count[1], imm(group - 1)), imm(group))

        def chain(first: Ssa, _: list[Ssa]) -> list[Ssa]:
            own = em.minimum(em.sub(end, first), imm(CHAIN // group))
            for p in range(self.panels):
                offset = em.add(em.mul(first, imm(self.width)), imm(p * room * self.width))
                right = em.element("float", lines, offset)

                def tile(row: Ssa, _: list[Ssa], p: int = p, right: Ssa = right) -> list[Ssa]:
                    inside = em.add(em.mul(row, imm(left[1])), em.mul(first, imm(left[2])))
                    factor = em.element("float", left[0], inside), imm(left[1]), imm(left[2])
                    place = em.element("float", sums, em.add(em.mul(row, imm(self.line)), imm(p * self.width)))
                    given = (place, imm(self.line))
                    self.multiply(factor, right, own, given, self.vectors_of(self.filled(p)), adds=True)
                    return []

                em.loop(imm(0), rows, ROWS, [], tile, "tile")
            return []

        em.loop(begin, end, CHAIN // group, [], chain, "chain")

    def pair_rows(self, rows: Ssa, stride: int, count: Ssa, columns: Ssa, to: Ssa) -> None:
        """Rows of bfloat16, each at the beginning of ``stride`` numbers, as pairs of two rows, for products that sum
        over them."""
        parameters = "ptr %rows, i64 %count, i64 %columns, ptr %to"
        write = functools.partial(self._write_pair_rows, stride)
        self.call(f"pair_rows_{self.lanes}_{stride}", parameters, (rows, count, columns, to), write)

    def _write_pair_rows(self, stride: int, em: Emitter, lanes: Lanes) -> None:
        def pair(two: bool, at: Ssa, _: list[Ssa]) -> list[Ssa]:
            starts = [
                em.element("float", Ssa("%rows", "ptr"), em.mul(em.add(at, imm(k)), imm(stride)))
                for k in range(1 + two)
            ]
            to = em.element("float", Ssa("%to", "ptr"), em.mul(em.unsigned("udiv", at, imm(2)), imm(stride)))

            def vector(column: Ssa, _: list[Ssa]) -> list[Ssa]:
                read = [lanes.halves(em.element("i16", start, column), None) for start in starts]
                lanes.store(lanes.paired(read[0], read[1] if two else None), em.element("float", to, column))
                return []

            em.loop(imm(0), Ssa("%columns", "i64"), self.lanes, [], vector, "column")
            return []

        count = Ssa("%count", "i64")
        whole = em.round_down(count, 2)
        em.loop(imm(0), whole, 2, [], functools.partial(pair, True), "pair")
        em.loop(whole, count, 2, [], functools.partial(pair, False), "odd")
