"""What attention on vectors computes between its products, row by row, as functions that a module's kernels share.

Note [Rows of scores]
    Scores of some queries lie in rows. Of each only those numbers are looked at that there are: of keys that come after
    the query, where a causal mask hides them, nothing is read. Weights, and the gradients of scores, take the place of
    what they are made from. Behind the last one there are zeros, up to where the products read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....ir import DType
from .attention_blocks import AttentionBlocks
from .emitter import Carried, Emitter, Ssa, imm
from .lanes import Lanes
from .types import literal, memory_type

__all__ = ["LOG2E", "AttentionRows", "Masks", "Rows"]

LOG2E = math.log2(math.e)
Line = tuple[Ssa, Ssa]  # where lines begin, and the step to the next one


@dataclass(frozen=True, slots=True)
class Masks:
    """What becomes of scores, from a query and a key on: ``scale`` them, add numbers of memory where a byte is set, and
    ``hidden`` elsewhere, or put that in the place of scores (``replaces``); ``kept``: which weights dropout leaves,
    times ``kept_scale``."""

    added: Line | None
    dtype: DType
    seen: Line | None
    hidden: float
    replaces: bool
    scale: float
    kept: Line | None
    kept_scale: float

    @property
    def changes(self) -> bool:
        """Whether scores are changed at all."""
        return self.added is not None or self.seen is not None

    @property
    def name(self) -> str:
        """In names of functions."""
        added = "" if self.added is None else f"_{self.dtype.value}"
        seen = "" if self.seen is None else "_replaced" if self.replaces else "_seen"
        return f"{added}{seen}{'_kept' if self.kept is not None else ''}"

    @property
    def given(self) -> tuple[Ssa, ...]:
        """As arguments of a function."""
        none = Ssa("null", "ptr"), imm(0)
        lines = (value for line in (self.added, self.seen, self.kept) for value in line or none)
        numbers = (self.scale, self.hidden, self.kept_scale)
        return (*lines, *(Ssa(literal(number, DType.F32), "float") for number in numbers))

    parameters = (
        "ptr %added, i64 %added.step, ptr %seen, i64 %seen.step, ptr %kept, i64 %kept.step,"
        " float %scale, float %hidden, float %kept.scale"
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of scores: where they begin and how far they are apart, how many there are, with so many keys each; with a
    causal mask the first one sees one more than ``relation``, and each one more than the one before. Products read so
    many numbers of each as ``filled``."""

    scores: Ssa
    stride: int
    count: Ssa
    keys: Ssa
    relation: Ssa | None
    filled: Ssa

    @property
    def given(self) -> tuple[Ssa, ...]:
        """As arguments of a function."""
        return self.scores, self.count, self.keys, self.relation or imm(0), self.filled

    parameters = "ptr %scores, i64 %rows, i64 %keys, i64 %relation, i64 %filled"


class AttentionRows:
    """Emits calls of these functions."""

    def __init__(self, blocks: AttentionBlocks) -> None:
        self.blocks, self.em = blocks, blocks.em

    # -- the forward ---------------------------------------------------------------------------------------

    def weigh(self, rows: Rows, masks: Masks, state: Ssa, totals: Ssa, sums: Ssa, factor: float) -> None:
        """Make weights of scores, relative to the largest one so far, which is in ``state``; add them to ``totals``;
        and scale what was summed before down where a larger score is found. ``factor``: what scores are times, for
        powers of two."""
        causal = rows.relation is not None
        name = f"weigh_{self.blocks.name}_{rows.stride}{masks.name}{'_causal' if causal else ''}"
        given = (*rows.given, *masks.given, state, totals, sums, Ssa(literal(factor, DType.F32), "float"))
        parameters = f"{Rows.parameters}, {Masks.parameters}, ptr %state, ptr %totals, ptr %sums, float %factor"
        write = functools.partial(self._write_weigh, rows, masks)
        self.blocks.call(name, parameters, given, write)

    def _write_weigh(self, rows: Rows, masks: Masks, em: Emitter, lanes: Lanes) -> None:
        factor, least = lanes.all(Ssa("%factor", "float")), lanes.number(-math.inf)

        def row(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            line = em.element("float", Ssa("%scores", "ptr"), em.mul(at, imm(rows.stride)))
            count = _seen_by(em, rows, at)

            def largest(column: Ssa, some: Ssa | None, now: list[Ssa]) -> list[Ssa]:
                place = em.element("float", line, column)
                score = _score(lanes, masks, at, column, lanes.load(place), some)
                if some is not None:
                    score = lanes.select(some, score, least)
                if some is not None or masks.changes:
                    lanes.store(score, place)
                return [lanes.maximum(score, now[0])]

            kept = [em.element("float", Ssa(f"%{name}", "ptr"), at) for name in ("state", "totals")]
            before, known = (lanes.all(lanes.scalar(place)) for place in kept)
            (top,) = lanes.over(count, [before], largest)
            top = lanes.across(top, lanes.maximum)
            none = em.here(lanes.bits, f"fcmp oeq {top.typed}, {least.text}")
            used = lanes.select(none, Ssa("zeroinitializer", lanes.floats), top)

            def weight(column: Ssa, some: Ssa | None, now: list[Ssa]) -> list[Ssa]:
                place = em.element("float", line, column)
                made = lanes.power(lanes.op("fmul", lanes.op("fsub", lanes.load(place), used), factor))
                stored = made if masks.kept is None else lanes.op("fmul", made, _kept(lanes, at, column, some))
                self._store(lanes, stored, line, column)
                return [lanes.add(now[0], made)]

            def everywhere(column: Ssa, now: list[Ssa]) -> list[Ssa]:
                return weight(column, None, now)

            begin = [Ssa("zeroinitializer", lanes.floats)]
            if masks.kept is not None:
                (total,) = lanes.over(count, begin, weight)
            else:  # what is behind the last score has no weight
                (total,) = em.loop(
                    imm(0), lanes.up(count), lanes.count, [Carried(lanes.floats, begin[0])], everywhere, "lanes"
                )
            self._fill(lanes, line, count)
            total = lanes.across(total, lanes.add)
            fall = lanes.power(lanes.op("fmul", lanes.op("fsub", before, used), factor))
            for place, value in zip(kept, (top, lanes.fma(known, fall, total)), strict=True):
                em.effect(f"store float {em.lane(value, 0, 'float').text}, ptr {place.text}, align 4")
            self._scale(em, lanes, at, fall)
            return []

        em.loop(imm(0), Ssa("%rows", "i64"), 1, [], row, "row")

    def _scale(self, em: Emitter, lanes: Lanes, row: Ssa, fall: Ssa) -> None:
        start = em.element("float", Ssa("%sums", "ptr"), em.mul(row, imm(self.blocks.line)))
        for vector in range(self.blocks.vectors_of(self.blocks.head)):
            place = em.element("float", start, imm(vector * lanes.count))
            lanes.store(lanes.op("fmul", lanes.load(place), fall), place)

    def _store(self, lanes: Lanes, value: Ssa, line: Ssa, column: Ssa) -> None:
        """In the place of what it was made of; of bfloat16 that is multiplied in pairs, further to the front."""
        if self.blocks.group == 1:
            lanes.store(value, lanes.em.element("float", line, column))
        else:
            lanes.store_halves(lanes.rounded(value), lanes.em.element("i16", line, column), None)

    def _fill(self, lanes: Lanes, line: Ssa, count: Ssa) -> None:
        """Zeros behind the last vector of a row."""

        def zero(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self._store(lanes, Ssa("zeroinitializer", lanes.floats), line, at)
            return []

        lanes.em.loop(lanes.up(count), Ssa("%filled", "i64"), lanes.count, [], zero, "zeros")

    # -- the backward --------------------------------------------------------------------------------------

    def change(
        self,
        rows: Rows,
        masks: Masks,
        slopes: Ssa,
        lines: tuple[Line, Line],
        saved: Sequence[Line],
        numbers: tuple[float, float],
        stored: Line | None,
    ) -> None:
        """Make weights of scores, and the gradients of the products of query and key of the slopes: products of a
        gradient and a value. ``lines``: of the result and of its gradient; ``saved``: the logarithm of the sum of each
        row, or the largest score and the sum; ``numbers``: what scores are times, and their gradients; ``stored``:
        where these are written before that."""
        names = ["result", "gradient", "tops"] + (["sums"] if len(saved) == 2 else [])
        given = (*rows.given, *masks.given, slopes, *(v for line in (*lines, *saved) for v in line))
        parameters = f"{Rows.parameters}, {Masks.parameters}, ptr %slopes"
        parameters += "".join(f", ptr %{name}, i64 %{name}.step" for name in names)
        given = (*given, *(Ssa(literal(number, DType.F32), "float") for number in numbers))
        parameters += ", float %own, float %slope"
        name = f"change_{self.blocks.name}_{rows.stride}{masks.name}{'_causal' if rows.relation is not None else ''}"
        name += "_divided" if len(saved) == 2 else ""
        if stored is not None:
            name, given, parameters = (
                f"{name}_stored",
                (*given, *stored),
                f"{parameters}, ptr %stored, i64 %stored.step",
            )
        write = functools.partial(self._write_change, rows, masks, len(saved) == 2, stored is not None)
        self.blocks.call(name, parameters, given, write)

    def _write_change(self, rows: Rows, masks: Masks, divided: bool, stored: bool, em: Emitter, lanes: Lanes) -> None:
        own, slope = (lanes.all(Ssa(f"%{name}", "float")) for name in ("own", "slope"))
        zero = Ssa("zeroinitializer", lanes.floats)

        def row(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            line, slopes = (
                em.element("float", Ssa(f"%{name}", "ptr"), em.mul(at, imm(rows.stride)))
                for name in ("scores", "slopes")
            )
            delta = self._delta(em, lanes, at)
            top, *total = (_of_row(em, lanes, name, at) for name in ("tops", *(["sums"] if divided else [])))

            def change(column: Ssa, some: Ssa | None, _: list[Ssa]) -> list[Ssa]:
                place, other = em.element("float", line, column), em.element("float", slopes, column)
                score = _score(lanes, masks, at, column, lanes.load(place), some)
                if not masks.changes:
                    score = lanes.op("fmul", score, own)
                below = lanes.op("fsub", score, top)
                weight = used = lanes.power(lanes.op("fmul", below, lanes.number(LOG2E)))
                if divided:
                    weight = used = lanes.op("fdiv", weight, total[0])
                down = lanes.load(other)
                if masks.kept is not None:
                    kept = _kept(lanes, at, column, some)
                    used, down = (lanes.op("fmul", value, kept) for value in (weight, down))
                made = lanes.op("fmul", lanes.op("fsub", down, delta), weight)
                if masks.replaces and masks.seen is not None:
                    made = lanes.select(_bytes(lanes, "seen", at, column, some), made, zero)
                if stored:
                    lanes.write(made, _place(em, "stored", "float", at, column), DType.F32, some)
                made = lanes.op("fmul", made, slope)
                if some is not None:
                    used, made = lanes.select(some, used, zero), lanes.select(some, made, zero)
                self._store(lanes, used, line, column)
                self._store(lanes, made, slopes, column)
                return []

            count = _seen_by(em, rows, at)
            lanes.over(count, [], change)
            for start in (line, slopes):
                self._fill(lanes, start, count)
            if stored and rows.relation is not None:
                _hide(lanes, at, count)
            return []

        em.loop(imm(0), Ssa("%rows", "i64"), 1, [], row, "row")

    def _delta(self, em: Emitter, lanes: Lanes, row: Ssa) -> Ssa:
        """The sum of the products of a line of the result and of its gradient."""
        total, dtype = Ssa("zeroinitializer", lanes.floats), self.blocks.dtype
        for first in range(0, self.blocks.head, lanes.count):
            some = lanes.these(self.blocks.head - first)
            result, gradient = (
                lanes.read(_place(em, name, memory_type(dtype), row, imm(first)), dtype, some)
                for name in ("result", "gradient")
            )
            total = lanes.fma(result, gradient, total)
        return lanes.across(total, lanes.add)

    # -- results -------------------------------------------------------------------------------------------

    def write(self, sums: Ssa, to: Line, count: Ssa, divisors: Ssa | None) -> None:
        """Write lines of a result, divided by a number each or as they are."""
        name = f"write_{self.blocks.name}{'' if divisors is None else '_divided'}"
        given = (sums, *to, count, *([] if divisors is None else [divisors]))
        parameters = f"ptr %sums, ptr %to, i64 %to.step, i64 %count{'' if divisors is None else ', ptr %divisors'}"
        self.blocks.call(name, parameters, given, functools.partial(self._write_lines, divisors is not None))

    def _write_lines(self, divided: bool, em: Emitter, lanes: Lanes) -> None:
        head, dtype = self.blocks.head, self.blocks.dtype

        def line(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            start = em.element("float", Ssa("%sums", "ptr"), em.mul(at, imm(self.blocks.line)))
            for first in range(0, head, lanes.count):
                value = lanes.load(em.element("float", start, imm(first)))
                if divided:
                    divisor = lanes.all(lanes.scalar(em.element("float", Ssa("%divisors", "ptr"), at)))
                    value = lanes.op("fdiv", value, divisor)
                lanes.write(
                    value, _place(em, "to", memory_type(dtype), at, imm(first)), dtype, lanes.these(head - first)
                )
            return []

        em.loop(imm(0), Ssa("%count", "i64"), 1, [], line, "line")


def _place(em: Emitter, name: str, element: str, row: Ssa, column: Ssa) -> Ssa:
    """Where an element of a table is."""
    offset = em.add(em.mul(row, Ssa(f"%{name}.step", "i64")), column)
    return em.element(element, Ssa(f"%{name}", "ptr"), offset)


def _of_row(em: Emitter, lanes: Lanes, name: str, row: Ssa) -> Ssa:
    """A number that each row has one of."""
    return lanes.all(lanes.scalar(_place(em, name, "float", row, imm(0))))


def _seen_by(em: Emitter, rows: Rows, row: Ssa) -> Ssa:
    """How many keys a row sees."""
    keys = Ssa("%keys", "i64")
    if rows.relation is None:
        return keys
    seen = em.minimum(keys, em.add(em.add(row, Ssa("%relation", "i64")), imm(1)))
    return em.maximum(seen, imm(0))


def _score(lanes: Lanes, masks: Masks, row: Ssa, column: Ssa, product: Ssa, some: Ssa | None) -> Ssa:
    """What becomes of the product of a query and a key."""
    em = lanes.em
    if not masks.changes:
        return product
    scale, hidden = (lanes.all(Ssa(f"%{name}", "float")) for name in ("scale", "hidden"))
    bias = Ssa("zeroinitializer", lanes.floats)
    if masks.added is not None:
        bias = lanes.read(_place(em, "added", memory_type(masks.dtype), row, column), masks.dtype, some)
    shown = None if masks.seen is None else _bytes(lanes, "seen", row, column, some)
    if shown is not None and not masks.replaces:
        bias = lanes.select(shown, bias, hidden)
    made = lanes.fma(product, scale, bias)
    return lanes.select(shown, made, hidden) if shown is not None and masks.replaces else made


def _bytes(lanes: Lanes, name: str, row: Ssa, column: Ssa, some: Ssa | None) -> Ssa:
    return lanes.bytes_set(_place(lanes.em, name, "i8", row, column), some)


def _kept(lanes: Lanes, row: Ssa, column: Ssa, some: Ssa | None) -> Ssa:
    """What dropout multiplies weights by."""
    much = lanes.all(Ssa("%kept.scale", "float"))
    return lanes.select(_bytes(lanes, "kept", row, column, some), much, Ssa("zeroinitializer", lanes.floats))


def _hide(lanes: Lanes, row: Ssa, count: Ssa) -> None:
    """No gradient of scores that a causal mask hides."""
    em = lanes.em
    start = _place(em, "stored", "float", row, count)

    def zero(at: Ssa, some: Ssa | None, _: list[Ssa]) -> list[Ssa]:
        value = Ssa("zeroinitializer", lanes.floats)
        lanes.write(value, em.element("float", start, at), DType.F32, some)
        return []

    lanes.over(em.sub(Ssa("%keys", "i64"), count), [], zero)
