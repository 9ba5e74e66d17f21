"""Products of few rows of bytes with a matrix of bytes where no instruction multiplies bytes exactly.

Note [Products of bytes as words]
    ``vpmaddwd`` multiplies words of 16 bits and adds both products of a pair to a number of 32 bits, which has room for
    them whatever the bytes are. (``vpmaddubsw`` takes bytes, but its sums are of 16 bits, and end at 32767.) So the
    left factor is copied as words, and bytes of the matrix are widened when they are loaded. A byte of the matrix takes
    three instructions for each sixteen of them then, which is less time than its memory does for a few rows. Four such
    vectors, a line of memory, are multiplied in one iteration: with one, what counts steps and asks for memory ahead
    takes as long as the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel
from ..machine import Machine
from .emitter import Ssa, imm, vector_type
from .few_rows_of_bytes import FewRowsOfBytes
from .tile import ALIGNED

__all__ = ["FewRowsOfWords"]

DOT: Mapping[int, str] = MappingProxyType({8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"})  # by lanes


class FewRowsOfWords(FewRowsOfBytes):
    """See Note [Products of bytes as words]."""

    apart = 0

    def __init__(self, kernel: Kernel, site: FewRowsSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, site, target, declarations)
        self.step = 2 * self.across
        self.bytes_type = vector_type("i8", self.step)
        self.words_type = vector_type("i16", self.step)

    def _room_for_left(self) -> Ssa:
        size = self.em.add(self.em.mul(imm(2 * self.count), self.padded()), imm(ALIGNED))
        return self.em.aligned(self.memory(size), ALIGNED)

    def keep(self, value: Ssa, copied: Ssa, offset: Ssa) -> None:
        """Writes bytes of the left factor as words."""
        place = self.em.element("i16", copied, offset)
        self.em.effect(f"store {self.widened(value).typed}, ptr {place.text}, align {2 * self.step}")

    def factors(self, rows: range, k: Ssa) -> list[Ssa]:
        """Some rows."""
        assert self.copied is not None
        places = [self.em.element("i16", self.copied, self.left_offset(imm(row), k)) for row in rows]
        type_ = self.words_type
        return [self.em.here(type_, f"load {type_}, ptr {place.text}, align {2 * self.step}") for place in places]

    def widened(self, right: Ssa) -> Ssa:
        """Bytes as words of the same value."""
        return self.em.pure(self.words_type, f"sext {right.typed} to {self.words_type}", right)

    def dot(self, total: Ssa, left: Ssa, right: Ssa) -> Ssa:
        """Products of words, added to ``total`` in pairs."""
        name, wide, words = DOT[self.across], self.vector_type, self.words_type
        self.em.declare(name, wide, [words, words])
        pairs = self.em.pure(wide, f"call {wide} @{name}({left.typed}, {right.typed})", left, right)
        return self.ops.op("add", total, pairs)
