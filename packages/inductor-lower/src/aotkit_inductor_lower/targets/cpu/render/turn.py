"""The function that copies rows into a panel, turned over: what is contiguous along ``k`` becomes ``[k][width]``."""

from __future__ import annotations

from collections.abc import Mapping

from .emitter import Emitter, Ssa, imm, vector_type
from .tile import ALIGNED
from .transpose import transpose

__all__ = ["turn_function"]

_BITS: Mapping[str, int] = {"float": 32, "double": 64}


def turn_function(
    name: str, element: str, lanes: int, width: int, declarations: dict[str, str], aligned: int | None = None
) -> str:
    """The text: ``width`` rows of ``count`` numbers, ``step`` elements apart, from ``from`` into the panel ``to``.
    All products of a module share it, since squares that are turned over in registers take long to compile.
    ``aligned``: bytes, if numbers may lie elsewhere than numbers of their size do."""
    em = Emitter(declarations)
    type_, align = vector_type(element, lanes), min(ALIGNED, lanes * _BITS[element] // 8)
    read_at = aligned or _BITS[element] // 8
    start, to = Ssa("%from", "ptr"), Ssa("%to", "ptr")
    step, count = Ssa("%step", "i64"), Ssa("%count", "i64")

    def at(pointer: Ssa, offset: Ssa) -> Ssa:
        return em.element(element, pointer, offset)

    def store(value: Ssa, k: Ssa, column: Ssa) -> None:
        place = at(to, em.add(em.mul(k, imm(width)), column))
        em.effect(f"store {value.typed}, ptr {place.text}, align {align}")

    def group(column: Ssa, _: list[Ssa]) -> list[Ssa]:
        rows = [at(start, em.mul(em.add(column, imm(lane)), step)) for lane in range(lanes)]

        def square(k: Ssa, _: list[Ssa]) -> list[Ssa]:
            places = [at(row, k) for row in rows]
            read = [em.here(type_, f"load {type_}, ptr {p.text}, align {read_at}") for p in places]
            for copy, turned in enumerate(transpose(em, read, element, _BITS[element])):
                store(turned, em.add(k, imm(copy)), column)
            return []

        def single(k: Ssa, _: list[Ssa]) -> list[Ssa]:
            read = [em.here(element, f"load {element}, ptr {at(row, k).text}, align {read_at}") for row in rows]
            store(em.pack(read), k, column)
            return []

        whole = em.round_down(count, lanes)
        em.loop(imm(0), whole, lanes, [], square, "k")
        return em.loop(whole, count, 1, [], single, "k")

    em.loop(imm(0), imm(width), lanes, [], group, "group")
    header = f"define internal void @{name}(ptr %from, i64 %step, i64 %count, ptr %to) noinline {{"
    return "\n".join([header, "entry:", *em.lines(), "  ret void", "}"])
