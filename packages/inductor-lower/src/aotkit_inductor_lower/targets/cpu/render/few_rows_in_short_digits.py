"""Products of one to four rows of bfloat16 with a matrix of 4 bits in panels, in whole numbers of 16 bits.

Note [Sums of short digits]
    ``vpmaddubsw`` multiplies bytes without a sign with signed ones, and adds both products of a pair to a number of 16
    bits, which ends at 32767. Numbers of 4 bits are bytes of at most 15. A group of the left factor is turned into
    whole numbers by a power of two, of 16 bits with the sign, and these into two digits, each a signed byte. Sums of
    :data:`CHUNK` steps are made in two halves of a register, of 32 steps each. They fit 16 bits if neither the positive
    nor the negative digits of a half have a sum above :data:`MOST`, which those of a usual group are far from. Where
    one has, the power of two is the next smaller one, with which the first digits fit, and if the others still do not,
    all digits are 0. In the end the sums of both digits become one of 32 bits.

    A bfloat16 has 8 bits, so it is a whole number then if it is at least 2**-7 of the largest of its group. What the
    others have beside their whole number is written to a list, of a number or two for a usual group, and multiplied in
    float32. The sum of whole numbers is exact, and rounded once, to a float32 (from 2**24 on).

    Two loads of two steps each have four steps of both parts of a panel. Their bytes are interleaved, so that a pair is
    two steps of a column: the first and the third in one half of the register, the second and the fourth in the other,
    which are added up at the end of a group. The left factor's digits are kept in that order, as often as a half has
    pairs, since no instruction loads another pair into each half. The columns of a panel's first eight bytes are
    multiplied before the others, since the sums of all do not fit sixteen registers. Of more than :data:`MOST_ROWS`
    rows the products take longer than to unpack numbers to floats, which is done once for all rows.

    A line is asked for :data:`AHEAD` bytes before it is read, as the processor's own fetching ends with each page:
    without, all takes 1.3 times as long. Scales of a group lie far from those of the next, but beside those of the same
    group in the next panel, which are asked for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from ....ir import Load
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel
from ..machine import Machine
from .body import address_of
from .context import Vector
from .digits import FRACTION, larger_size, next_power
from .emitter import Ssa, imm, vector_type
from .few_rows import LINE, carried
from .few_rows_in_panels import FewRowsInPanels, Panels, Place
from .math.polynomials import whole_part

__all__ = ["COLUMNS", "MOST_ROWS", "FewRowsInShortDigits", "multiplies_short_digits", "suits_short_digits"]

COLUMNS = 16  # of a part of a panel
CHUNK = 64  # steps whose sums fit 16 bits
LONGEST = 256  # steps whose sums fit 32 bits
STEPS = 4  # of the sum that are interleaved
SETS = 4  # of them in an iteration
DIGITS = 2
DIGIT = 8  # bits, with a sign
LARGEST = (14, 13)  # the powers of two of which the largest number of a group becomes one, or more
MOST = 32767 // 15  # sums of digits in one half of a register, times 15, that fit 16 bits
LEAST = 27  # the biased exponent of 2**-100, below which numbers become smaller ones
EACH = 32 * DIGITS  # bytes of the digits of so many steps
ROWS = 2  # of a block
MOST_ROWS = 4
AHEAD = 1 << 12  # bytes of a panel
DOT, WIDEN = "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"
BYTES, WORDS = vector_type("i8", 32), vector_type("i16", 16)


def multiplies_short_digits(target: Machine) -> bool:
    """Whether vectors are such as this needs."""
    return target.vector_bits == 256 and target.has("avx2")


def suits_short_digits(site: FewRowsSite) -> bool:
    """Whether rows are few enough for this to be faster, and sums over groups have room."""
    group = site.inner[-1].extent.constant or 1
    whole = group % (STEPS * SETS if group <= CHUNK else CHUNK) == 0
    return site.count <= MOST_ROWS and group <= LONGEST and whole


class FewRowsInShortDigits(FewRowsInPanels):
    """Panel by panel, in whole numbers and a few others."""

    def __init__(
        self,
        kernel: Kernel,
        site: FewRowsSite,
        target: Machine,
        declarations: dict[str, str],
        panels: Panels,
        byte: Load,
    ) -> None:
        super().__init__(kernel, site, target, declarations, panels)
        self.byte = byte
        self.size = site.inner[-1].extent.constant or 0

    def most_together(self) -> int:
        """The sums of both digits of so many rows fit the registers."""
        return ROWS

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """For each group the digits, what sums begin with, the power of two that undoes the first, and the list of what
        digits leave: where each lies in its group, and how many there are."""
        em, groups = self.em, self.before(imm(self.count))
        steps = em.mul(groups, imm(self.size))
        digits = self.memory(em.add(em.mul(steps, imm(EACH // STEPS)), imm(LINE)))
        self.digits = em.aligned(digits, LINE)
        self.begins, self.unit_of_group = (self.memory(em.mul(groups, imm(4))) for _ in range(2))
        self.counts = self.memory(em.mul(groups, imm(8)))
        self.rests = em.aligned(self.memory(em.add(em.mul(steps, imm(4)), imm(LINE))), LINE)
        self.places_of_rests = self.memory(em.mul(steps, imm(8)))
        super().allocate(pointers)

    # -- the left factor -----------------------------------------------------------------------------------

    def group_copied(self, row: Ssa, group: Ssa, start: Ssa) -> None:
        """Writes the digits of a group, and the list of what they leave, too."""
        super().group_copied(row, group, start)
        em = self.em
        group = em.unsigned("udiv", start, imm(self.size))
        bits = next_power(self.ops, self._largest(start))
        exponent = em.here("i32", f"and {bits.typed}, {255 << FRACTION}")
        em.declare("llvm.umax.i32", "i32", ["i32", "i32"])
        exponent = em.here("i32", f"call i32 @llvm.umax.i32({exponent.typed}, i32 {LEAST << FRACTION})")
        self._try(start, group, exponent, LARGEST)
        list_rest = functools.partial(self._list_rest, start)
        count = em.loop(imm(0), imm(self.size), 1, carried([imm(0)]), list_rest, "rests")[0]
        self._keep("i64", count, self.counts, group)

    def _try(self, start: Ssa, group: Ssa, exponent: Ssa, powers: Sequence[int]) -> None:
        """Digits of numbers of which the largest becomes the first of some powers of two, or more: with the next one if
        sums might not fit, and none after the last."""
        em, largest = self.em, powers[0] if powers else LARGEST[-1]
        power = em.here("i32", f"sub i32 {((largest + 2 * 127) << FRACTION) - (1 << 32)}, {exponent.text}")
        unit = em.here("i32", f"sub {exponent.typed}, {largest << FRACTION}")
        self._keep("i32", unit, self.unit_of_group, group)
        scale = em.splat(em.here("float", f"bitcast {power.typed} to float"), self.across)

        def write_chunk(low: Ssa, before: list[Ssa]) -> list[Ssa]:
            first = carried([Ssa("zeroinitializer", vector_type("i32", self.across))] * (2 * DIGITS))
            write = functools.partial(self._write_digits, em.add(start, low), scale, bool(powers))
            sums = em.loop(imm(0), imm(min(CHUNK, self.size)), self.across, first, write, "digits")
            total, worst = self._checked_sums(sums)
            return [em.here("i32", f"add {before[0].typed}, {total.text}"), self._larger(before[1], worst)]

        none = carried([imm(0, "i32")] * 2)
        total, worst = em.loop(imm(0), imm(self.size), CHUNK, none, write_chunk, "chunk")
        self._keep("i32", em.here("i32", f"mul {total.typed}, -8"), self.begins, group)
        if powers:
            fits = em.here("i1", f"icmp sle {worst.typed}, {MOST}")
            em.choose(fits, None, lambda: None, lambda: self._try(start, group, exponent, powers[1:]))

    def _checked_sums(self, sums: Sequence[Ssa]) -> tuple[Ssa, Ssa]:
        """The sum of a chunk's numbers, and the largest of those sums of a digit's positive or negative numbers that
        are made in one half of a register, i.e. of every second step."""
        em, ops, totals, found = self.em, self.ops, [], []
        for digit, (all_, positive) in enumerate(zip(sums[::2], sums[1::2], strict=True)):
            totals.append(ops.op("shl", all_, em.splat(imm(DIGIT * digit, "i32"), self.across)))
            for some in (positive, ops.op("sub", positive, all_)):
                for by in (4, 2):
                    other = em.shuffle(some, some, "i32", [(lane + by) % self.across for lane in range(self.across)])
                    some = ops.op("add", some, other)
                found.append(some)
        total = self.over_lanes("add", functools.reduce(functools.partial(ops.op, "add"), totals))
        return total, self.over_lanes("smax", functools.reduce(self._larger, found))

    def _larger(self, a: Ssa, b: Ssa) -> Ssa:
        lanes = self.across if "x" in a.type else 1
        symbol = f"llvm.smax.v{lanes}i32" if lanes > 1 else "llvm.smax.i32"
        self.em.declare(symbol, a.type, [a.type] * 2)
        return self.em.here(a.type, f"call {a.type} @{symbol}({a.typed}, {b.typed})")

    def _largest(self, start: Ssa) -> Ssa:
        """The bits of the number that is farthest from 0 in the group whose copy is at ``start``, without a sign, an
        i32."""

        def compare(k: Ssa, before: list[Ssa]) -> list[Ssa]:
            assert self.copied is not None
            return [larger_size(self.ops, before[0], self.load(self.copied, self.em.add(start, k)))]

        first = carried([Ssa("zeroinitializer", vector_type("i32", self.across))])
        return self.over_lanes("umax", self.em.loop(imm(0), imm(self.size), self.across, first, compare, "largest")[0])

    def _write_digits(self, start: Ssa, scale: Ssa, some: bool, k: Ssa, before: list[Ssa]) -> list[Ssa]:
        """The digits of as many steps as a vector has lanes, or zeros, and what they leave, all of it at first. The
        result are sums by digit, of all and of those above 0."""
        assert self.copied is not None
        em, ops, wide = self.em, self.ops, before[0].type
        none, place, sums = Ssa("zeroinitializer", wide), em.add(start, k), list[Ssa]()
        scaled = ops.op("fmul", self.load(self.copied, place), scale)
        rest = whole_part(ops, scaled) if some else none
        back = em.pure(self.vector_type, f"sitofp {rest.typed} to {self.vector_type}", rest)
        self.store(ops.op("fsub", scaled, back), self.rests, place)
        for digit in range(DIGITS):
            above, by = (em.splat(imm(bits, "i32"), self.across) for bits in (32 - DIGIT, DIGIT))
            value = ops.op("ashr", ops.op("shl", rest, above), above)
            rest = ops.op("ashr", ops.op("sub", rest, value), by)
            sums += [ops.op("add", before[2 * digit], value)]
            sums += [ops.op("add", before[2 * digit + 1], self._larger(value, none))]
            bytes_ = ops.convert("trunc", value, "i8")
            for first in range(0, self.across, STEPS):
                pairs = [first + step + other for step in (0, 1) for _ in range(8) for other in (0, 2)]
                at = self._digits(digit, em.add(place, imm(first)))
                em.effect(f"store {em.shuffle(bytes_, bytes_, 'i8', pairs).typed}, ptr {at.text}, align 32")
        return sums

    def _list_rest(self, start: Ssa, k: Ssa, before: list[Ssa]) -> list[Ssa]:
        """What digits leave of one step, behind what is listed: the next one overwrites it if that is nothing."""
        em, (count,) = self.em, before
        rest = self._kept("float", self.rests, em.add(start, k))
        end = em.add(start, count)
        self._keep("float", rest, self.rests, end)
        self._keep("i64", k, self.places_of_rests, end)
        counts = em.here("i1", f"fcmp une {rest.typed}, 0.0")
        one = em.here("i64", f"zext {counts.typed} to i64")
        return [em.here("i64", f"add {count.typed}, {one.text}")]

    def _keep(self, type_: str, value: Ssa, memory: Ssa, place: Ssa) -> None:
        self.em.effect(f"store {value.typed}, ptr {self.em.element(type_, memory, place).text}")

    def _kept(self, type_: str, memory: Ssa, place: Ssa) -> Ssa:
        return self.em.here(type_, f"load {type_}, ptr {self.em.element(type_, memory, place).text}")

    def _digits(self, digit: int, place: Ssa) -> Ssa:
        """Where a digit of :data:`STEPS` steps of the copy lies."""
        offset = self.em.add(self.em.mul(place, imm(EACH // STEPS)), imm(digit * 32))
        return self.em.element("i8", self.digits, offset)

    # -- sums ----------------------------------------------------------------------------------------------

    def group_products(self, vector: Vector, each: Sequence[Place], *, factored: bool) -> list[Ssa]:
        """Sums of whole numbers and, one after the other, of what digits leave."""
        if not factored:
            return super().group_products(vector, each, factored=False)
        em, rows = self.em, sorted({row for row, _, _ in each})
        totals: dict[Place, Ssa] = {}
        for half in range(vector.interleave):
            for (row, part), total in self._sums_of_half(half, rows).items():
                begin = em.splat(self._kept("i32", self.begins, self._group(row)), self.across)
                total = self.ops.op("add", total, begin)
                value = em.pure(self.vector_type, f"sitofp {total.typed} to {self.vector_type}", total)
                totals[row, part, half] = value
        for row in rows:
            of_row = [place for place in each if place[0] == row]
            body = functools.partial(self._add_rest, vector, of_row)
            count = self._kept("i64", self.counts, self._group(row))
            found = em.loop(imm(0), count, 1, carried([totals[place] for place in of_row]), body, "rest")
            unit = em.splat(self._kept("float", self.unit_of_group, self._group(row)), self.across)
            totals |= {place: self.ops.op("fmul", value, unit) for place, value in zip(of_row, found, strict=True)}
        return [totals[place] for place in each]

    def _group(self, row: int) -> Ssa:
        """Which of all groups of the left factor the present one of a row is."""
        return self.em.add(self.em.mul(imm(row), self.before_first()), self.outer_steps())

    def _add_rest(self, vector: Vector, each: Sequence[Place], at: Ssa, sums: list[Ssa]) -> list[Ssa]:
        """One of the list of a row, times the numbers of its step."""
        place = self.em.add(self.left_offset(imm(each[0][0]), imm(0)), at)
        k = self._kept("i64", self.places_of_rests, place)
        rest = self.em.splat(self._kept("float", self.rests, place), self.across)
        found: dict[tuple[int, int], Ssa] = {}
        for part in range(self.count_of_parts):
            self.enter_part(vector, part, k)
            found |= {(part, copy): value for copy, value in enumerate(self._numbers(vector))}
        self.leave()
        return [self.multiply(rest, found[place[1:]], total) for place, total in zip(each, sums, strict=True)]

    def _sums_of_half(self, half: int, rows: Sequence[int]) -> dict[tuple[int, int], Ssa]:
        """By row and part: the sums of eight columns over a group, in whole numbers."""
        none, places = Ssa("zeroinitializer", WORDS), list(itertools.product(rows, range(self.count_of_parts)))
        found: list[list[Ssa]] = [[] for _ in places]
        for low in range(0, self.size, CHUNK):
            body = functools.partial(self._add_digits, half, rows)
            high, first = min(low + CHUNK, self.size), carried([none] * (DIGITS * len(places)))
            sums = self.em.loop(imm(low), imm(high), STEPS * SETS, first, body, "k")
            for at, before in enumerate(found):
                wider = self._widened(*sums[at * DIGITS : (at + 1) * DIGITS])
                found[at] = [self.ops.op("add", *pair) for pair in zip(before, wider, strict=True)] if low else wider
        return {place: self._lanes_added(*pair) for place, pair in zip(places, found, strict=True)}

    def _widened(self, low: Ssa, high: Ssa) -> list[Ssa]:
        """The numbers that two digits are: of the first four columns in both lanes, and of the others."""
        em, wide = self.em, vector_type("i32", self.across)
        em.declare(WIDEN, wide, [WORDS, WORDS])
        factors = ", ".join(f"i16 {1 << DIGIT * digit}" for _ in range(8) for digit in range(DIGITS))
        found = []
        for first in (0, 4):
            pairs = em.shuffle(low, high, "i16", _interleaved(16, 4, first))
            found.append(em.pure(wide, f"call {wide} @{WIDEN}({pairs.typed}, {WORDS} <{factors}>)", pairs))
        return found

    def _lanes_added(self, first: Ssa, second: Ssa) -> Ssa:
        """Eight columns, of which both lanes have a part of the sum."""
        lower, upper = (
            self.em.shuffle(first, second, "i32", [*range(start, start + 4), *range(start + 8, start + 12)])
            for start in (0, 4)
        )
        return self.ops.op("add", lower, upper)

    def _add_digits(self, half: int, rows: Sequence[int], k: Ssa, sums: list[Ssa]) -> list[Ssa]:
        for some in range(SETS):
            at = self.em.add(k, imm(some * STEPS))
            numbers = self._bytes_of_numbers(half, at)
            if not half and rows[0] == 0:
                self._ask_ahead(at)
            pairs: list[tuple[Ssa, Ssa]] = []
            for row in rows:
                left = [self._steps_of_left(row, digit, at) for digit in range(DIGITS)]
                pairs += itertools.product(numbers, left)
            sums = [self._dot(total, *pair) for total, pair in zip(sums, pairs, strict=True)]
        return sums

    def _bytes_of_numbers(self, half: int, k: Ssa) -> list[Ssa]:
        """By part: four steps of eight columns, 8 too large."""
        em, ops = self.em, self.ops
        two, others = (self._two_steps(em.add(k, imm(step))) for step in (0, 2))
        both = em.shuffle(two, others, "i8", _interleaved(32, 8, 8 * half))
        words = em.pure(WORDS, f"bitcast {both.typed} to {WORDS}", both)
        moved = ops.op("lshr", words, em.splat(imm(4, "i16"), 16))
        upper = em.pure(BYTES, f"bitcast {moved.typed} to {BYTES}", moved)
        return [ops.op("and", bytes_, em.splat(imm(15, "i8"), 32)) for bytes_ in (both, upper)]

    def _two_steps(self, k: Ssa) -> Ssa:
        """Two steps of a panel, as they lie in memory."""
        self.enter_part(Vector(self.columns, imm(0), self.across, 1), 0, k)
        place = address_of(self.ctx, self.byte, self.byte.indices[0], 0)
        read = self.em.here(BYTES, f"load {BYTES}, ptr {place.text}, align 1")
        self.leave()
        return read

    def _ask_ahead(self, k: Ssa) -> None:
        """For the line that will be read :data:`AHEAD` bytes later, of this panel or the next."""
        self.enter_part(Vector(self.columns, imm(0), self.across, 1), 0, self.em.add(k, imm(AHEAD // COLUMNS)))
        place = address_of(self.ctx, self.byte, self.byte.indices[0], 0)
        self.leave()
        self._fetch(place)

    def ask_for_scales(self, vector: Vector) -> None:
        """A part of a panel has a line of them."""
        self.ask_for_scales_beside(vector)

    def _fetch(self, place: Ssa) -> None:
        self.em.declare("llvm.prefetch.p0", "void", ["ptr", "i32", "i32", "i32"])
        self.em.effect(f"call void @llvm.prefetch.p0(ptr {place.text}, i32 0, i32 3, i32 1)")

    def _steps_of_left(self, row: int, digit: int, k: Ssa) -> Ssa:
        """A digit of four steps of a row in pairs, those of each half of a register."""
        place = self._digits(digit, self.left_offset(imm(row), k))
        return self.em.here(BYTES, f"load {BYTES}, ptr {place.text}, align 32")

    def _dot(self, total: Ssa, numbers: Ssa, left: Ssa) -> Ssa:
        self.em.declare(DOT, WORDS, [BYTES, BYTES])
        pairs = self.em.pure(WORDS, f"call {WORDS} @{DOT}({numbers.typed}, {left.typed})", numbers, left)
        return self.ops.op("add", total, pairs)


def _interleaved(lanes: int, count: int, first: int) -> list[int]:
    """Which elements of two vectors of so many ``lanes`` an instruction takes turns with: ``count`` from ``first`` on
    of each half."""
    halves = (0, lanes // 2)
    return [half + first + place + other for half in halves for place in range(count) for other in (0, lanes)]
