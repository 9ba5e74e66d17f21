"""Products of one row of bfloat16 with a matrix of bytes along the sum, in whole numbers.

Note [Bytes and digits]
    To widen 64 bytes to floats and to add their products takes twelve instructions, which is longer than the memory
    takes for the bytes. In whole numbers it is five: a chunk of the left factor becomes digits as in Note [Digits of
    groups], 128 is added to each byte, so that none has a sign, and ``vpdpbusd`` multiplies 64 with each of four
    digits. Sums of digits are exact, and begin with what the added 128 make of the digits.

    Chunks in which a number is not 0 and so much smaller than the largest that digits do not have all of its bits are
    multiplied as floats, as are those with an infinity or a nan. A bfloat16 has 8 bits, and digits have all of them
    down to 2**-22 of the largest, with three down to 2**-14. A float32 has too many bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....ir import DType, Load
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel
from ..machine import Machine
from ..products import computed_by, widened_along_sum
from .body import emit_body
from .context import Vector
from .digits import digits_of, dot_bytes, float_sum, larger_size, powers_of
from .emitter import Ssa, imm, vector_type
from .few_rows import LINE, carried
from .few_rows_along_sums import FewRowsAlongSums
from .few_rows_in_pairs import is_bfloat16

__all__ = ["FewRowsOfBytesInDigits", "widened_bytes"]

CHUNK = 1 << 12  # steps of the sum with one unit: sums of their digits are floats
DIGITS, OF_DIGIT = 4, 8  # of a number, and bits of each
BITS = 29  # the power of two that the largest number of a chunk becomes, or more


def widened_bytes(kernel: Kernel, site: FewRowsSite) -> Load | None:
    """The load of the matrix, where that is bytes along the sum, in whole lines, and one row of bfloat16 is multiplied
    with it, both only widened."""
    outer = [loop for loop in kernel.grid[:-1] if loop is not site.rows]
    if site.count != 1 or site.reduce.dtype is not DType.F32 or outer:
        return None
    if not (size := site.inner[0].extent.constant) or size % LINE:
        return None
    if not is_bfloat16(computed_by(kernel, site.left)):
        return None
    return widened_along_sum(kernel, site, DType.I8)


class FewRowsOfBytesInDigits(FewRowsAlongSums):
    """A chunk of a few columns at a time, see Note [Bytes and digits]. ``byte`` is the load of the matrix."""

    def __init__(
        self, kernel: Kernel, site: FewRowsSite, target: Machine, declarations: dict[str, str], byte: Load
    ) -> None:
        super().__init__(kernel, site, target, declarations)
        self.byte = byte
        self.size = self.summed() or 0
        self.vectors = LINE // self.across  # of floats
        self.bytes_type, self.words = vector_type("i8", LINE), vector_type("i32", self.across)

    # -- the left factor -----------------------------------------------------------------------------------

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """The digits, too, and for each chunk what its sums begin with, the power of two that undoes the first, and
        whether the digits are the numbers."""
        em, chunks = self.em, -(-self.size // CHUNK)
        self.digits = em.aligned(self.memory(imm(DIGITS * self.size + LINE)), LINE)
        self.begins = em.aligned(self.memory(imm(DIGITS * chunks * LINE + LINE)), LINE)
        self.unit_of_chunk, self.exact = self.memory(imm(chunks * 4)), self.memory(imm(chunks))
        super().allocate(pointers)

    def _copy_left(self) -> list[Ssa]:
        super()._copy_left()
        self.em.comment("digits of it")
        return self.em.loop(imm(0), imm(self.size), CHUNK, [], self._write_chunk, "chunk")

    def _write_chunk(self, low: Ssa, _: list[Ssa]) -> list[Ssa]:
        em, high, chunk = self.em, self._end(low), self._chunk(low)
        none = Ssa("zeroinitializer", self.words)
        (most,) = em.loop(low, high, self.across, carried([none]), self._larger, "largest")
        power, unit = powers_of(self.ops, self.over_lanes("umax", most), BITS)
        em.effect(f"store {unit.typed}, ptr {em.element('i32', self.unit_of_chunk, chunk).text}")
        write = functools.partial(self._write_digits, em.splat(power, self.across))
        (seen,) = em.loop(low, high, self.across, carried([none]), write, "digits")
        exact = em.here("i1", f"icmp eq {self.over_lanes('or', seen).typed}, 0")
        byte = em.here("i8", f"zext {exact.typed} to i8")
        em.effect(f"store {byte.typed}, ptr {em.element('i8', self.exact, chunk).text}")
        sums = em.loop(low, high, LINE, carried([none] * DIGITS), self._add_digits, "line")
        for digit, total in enumerate(sums):
            less = self.ops.op("sub", none, total)
            em.effect(f"store {less.typed}, ptr {self._begin(chunk, digit).text}, align {LINE}")
        return []

    def _larger(self, k: Ssa, before: list[Ssa]) -> list[Ssa]:
        """The bits of the numbers that are farthest from 0, without a sign."""
        return [larger_size(self.ops, before[0], self._floats(k))]

    def _write_digits(self, scale: Ssa, k: Ssa, before: list[Ssa]) -> list[Ssa]:
        _, digits, differs = digits_of(self.ops, self.ops.op("fmul", self._floats(k), scale), DIGITS, OF_DIGIT)
        for digit, value in enumerate(digits):
            bytes_ = self.ops.convert("trunc", value, "i8")
            self.em.effect(f"store {bytes_.typed}, ptr {self._place(digit, k).text}, align {self.across}")
        return [self.ops.op("or", before[0], differs)]

    def _add_digits(self, k: Ssa, sums: list[Ssa]) -> list[Ssa]:
        """128 times the digits of a line."""
        added = self.em.splat(imm(-128, "i8"), LINE)
        return [dot_bytes(self.ops, total, added, self._line(digit, k)) for digit, total in enumerate(sums)]

    def _floats(self, k: Ssa) -> Ssa:
        assert self.copied is not None
        return self.load(self.copied, self.left_offset(imm(0), k))

    # -- places --------------------------------------------------------------------------------------------

    def _end(self, low: Ssa) -> Ssa:
        return self.em.minimum(self.em.add(low, imm(CHUNK)), imm(self.size))

    def _chunk(self, low: Ssa) -> Ssa:
        return self.em.unsigned("udiv", low, imm(CHUNK))

    def _place(self, digit: int, k: Ssa) -> Ssa:
        return self.em.element("i8", self.digits, self.em.add(k, imm(digit * self.size)))

    def _line(self, digit: int, k: Ssa) -> Ssa:
        place = self._place(digit, k)
        return self.em.here(self.bytes_type, f"load {self.bytes_type}, ptr {place.text}, align {LINE}")

    def _begin(self, chunk: Ssa, digit: int) -> Ssa:
        em = self.em
        return em.element(self.words, self.begins, em.add(em.mul(chunk, imm(DIGITS)), imm(digit)))

    # -- sums ----------------------------------------------------------------------------------------------

    def _add_columns(self, first: Ssa, low: Ssa, high: Ssa, columns: int, at: Ssa, rows: range) -> None:
        """Their sums over parts of whole chunks."""
        add = functools.partial(self._add_chunk, columns, at)
        sums = self.em.loop(low, high, CHUNK, carried([self.zero()] * columns), add, "chunk")
        self.keep_sums(first, columns, at, rows, sums)

    def _add_chunk(self, columns: int, at: Ssa, low: Ssa, sums: list[Ssa]) -> list[Ssa]:
        """In digits or as floats: one of two loops runs once."""
        em, chunk, high = self.em, self._chunk(low), self._end(low)
        exact = em.here("i8", f"load i8, ptr {em.element('i8', self.exact, chunk).text}")
        once = em.here("i64", f"zext {exact.typed} to i64")
        whole = functools.partial(self._sum_digits, columns, at, chunk, low, high)
        floats = functools.partial(self._sum_floats, columns, at, low, high)
        sums = em.loop(imm(0), once, 1, carried(sums), whole, "whole")
        return em.loop(once, imm(1), 1, carried(sums), floats, "floats")

    def _sum_digits(self, columns: int, at: Ssa, chunk: Ssa, low: Ssa, high: Ssa, _: Ssa, sums: list[Ssa]) -> list[Ssa]:
        em = self.em
        places = [self._begin(chunk, digit) for digit in range(DIGITS)]
        begins = [em.here(self.words, f"load {self.words}, ptr {place.text}, align {LINE}") for place in places]
        add = functools.partial(self._add_line, columns, at)
        found = em.loop(low, high, LINE, carried(begins * columns), add, "k")
        unit = em.here("float", f"load float, ptr {em.element('float', self.unit_of_chunk, chunk).text}")
        each = [found[column * DIGITS : (column + 1) * DIGITS] for column in range(columns)]
        factor = em.splat(unit, self.across)
        return [
            self.multiply(float_sum(self.ops, w, OF_DIGIT), factor, total) for w, total in zip(each, sums, strict=True)
        ]

    def _add_line(self, columns: int, at: Ssa, k: Ssa, sums: list[Ssa]) -> list[Ssa]:
        digits, result = [self._line(digit, k) for digit in range(DIGITS)], []
        for column in range(columns):
            self.ctx.symbols[self.columns] = self.column(at, column)
            self.enter(None, Vector(self.inner, k, LINE, 1), k)
            emit_body(self.ctx, (self.byte,))
            self.ask(self.column(at, column), 1)
            signed = self.ctx.part(self.byte.result, 0, LINE)
            self.leave()
            byte = self.ops.op("xor", signed, self.em.splat(imm(-128, "i8"), LINE))
            mine = sums[column * DIGITS : (column + 1) * DIGITS]
            result += [dot_bytes(self.ops, total, byte, digit) for total, digit in zip(mine, digits, strict=True)]
        return result

    def _sum_floats(self, columns: int, at: Ssa, low: Ssa, high: Ssa, _: Ssa, sums: list[Ssa]) -> list[Ssa]:
        none = carried([self.zero()] * (columns * self.vectors))
        add = functools.partial(self._add_vectors, columns, at, range(1), None)
        found: Sequence[Ssa] = self.em.loop(low, high, LINE, none, add, "k")
        more = functools.partial(self.ops.op, "fadd")
        each = [found[column * self.vectors : (column + 1) * self.vectors] for column in range(columns)]
        return [functools.reduce(more, vectors, total) for vectors, total in zip(each, sums, strict=True)]
