"""What attention computes of tiles between its products, as functions that all kernels of a module share.

Note [Tiles of scores]
    A block of scores is 32 queries by 32 keys: four tiles of 1 KiB, as tile registers leave them (:mod:`.amx_tiles`).
    Weights and the gradients of scores are written where they are made, packed for the products that follow: pairs of
    keys are the layout of a left factor, pairs of queries that of a right one, so that nothing is turned over but the
    gradients of keys and values, which are summed with the head's numbers for lines, at the end.

    In one piece (bfloat16) pairs are neighbors, and those of queries are made by instructions that interleave within
    each 16 bytes. So the keys of such a block are in another order (:func:`_key`), which the end puts right.

    A weight is ``2**t``: a polynomial of what ``t`` is away from the nearest integer, scaled by that integer. A weight
    of at most ``2**-126`` of the largest is 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....ir import DType
from ..tile_forms import PANEL, TILE_BYTES, TileForm
from .amx_pack import GROUP, pairs_of
from .attention_vectors import (
    BITS,
    FLOATS,
    across,
    bytes_set,
    first_lanes,
    fma,
    in_block,
    interleaved,
    interleaved_key,
    kept_factor,
    load,
    maximum,
    narrow,
    number,
    read_numbers,
    rounded,
    splat_of,
    store,
    store_all,
    store_lanes,
    sum_of,
    these_lanes,
    words,
)
from .emitter import Carried, Emitter, Ssa, imm
from .lanes import POLYNOMIALS
from .transpose import transpose

__all__ = ["BLOCK_BYTES", "LOG2E", "AttentionTiles", "Bias", "Changes", "Dropped"]

BLOCK_BYTES = 4 * TILE_BYTES
LOG2E = math.log2(math.e)

_LEAST = -126.0  # of powers: where numbers are subnormal, each would take as long as a hundred others


_NO_LINES = imm(0)


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to a block of scores: numbers, and bytes that say where they are added, each with the step to the
    next line; and what is added elsewhere, or what scores are there (``replaces``)."""

    added: tuple[Ssa, Ssa] | None
    dtype: DType
    seen: tuple[Ssa, Ssa] | None
    hidden: float
    replaces: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """Bytes that say which weights are kept, from a place on, with the step to the next line, how many lines and keys
    there are from there on, and what a weight that is kept is multiplied by."""

    kept: Ssa
    step: Ssa
    rows: Ssa
    left: Ssa
    scale: float

    @property
    def given(self) -> tuple[Ssa, ...]:
        return self.kept, self.step, self.rows, self.left, Ssa(number(self.scale), "float")


@dataclass(frozen=True, slots=True)
class Changes:
    """How gradients of scores are made. ``own``: what scores are multiplied by; ``slope``: what their gradients are;
    ``divided``: weights are divided by their sum; ``dropped``: by dropout; ``stored``: where gradients of scores are
    written, with the step to the next line, ``seen``: bytes that say where there are any, the same way; of ``rows``
    lines and ``left`` keys."""

    own: float
    slope: float
    divided: bool = False
    dropped: Dropped | None = None
    stored: tuple[Ssa, Ssa] | None = None
    seen: tuple[Ssa, Ssa] | None = None
    rows: Ssa = _NO_LINES
    left: Ssa = _NO_LINES


_DROPPED = "ptr %kept, i64 %kept.step, i64 %kept.rows, i64 %kept.left, float %kept.scale"


def is_exact(scale: float) -> bool:
    """Whether products with a number are not rounded: it is a power of two."""
    return 2.0**-20 <= abs(scale) <= 2.0**20 and math.frexp(scale)[0] in (0.5, -0.5)


def _cell(em: Emitter, row: Ssa) -> Ssa:
    """Where a row of a block begins, in bytes; its other half is a tile further."""
    half, line = em.unsigned("udiv", row, imm(GROUP)), em.unsigned("urem", row, imm(GROUP))
    return em.add(em.mul(half, imm(2 * TILE_BYTES)), em.mul(line, imm(64)))


class AttentionTiles:
    """Defines the functions for one form of products, type and size of heads, and emits their calls."""

    def __init__(self, em: Emitter, form: TileForm, dtype: DType, head: int) -> None:
        self.em, self.form, self.head = em, form, head
        self.narrow = dtype is DType.BF16
        self.vectors = -(-head // GROUP)
        self.panels = -(-head // PANEL)
        self.name = f"{form.name.replace('-', '_')}_{'bf16' if self.narrow else 'f32'}_{head}"

    def call(self, name: str, parameters: str, given: Sequence[Ssa], write: Callable[[Emitter], None]) -> None:
        """A call of a function that ``write`` writes where the module has none of this name."""
        whole = f"attention_{name}_{self.name}"
        if whole not in self.em.declarations:
            own = Emitter(self.em.declarations)
            write(own)
            header = f"define internal void @{whole}({parameters}) noinline {{"
            self.em.define(whole, "\n".join([header, "entry:", *own.lines(), "  ret void", "}"]))
        self.em.effect(f"call void @{whole}({', '.join(value.typed for value in given)})")

    # -- scores --------------------------------------------------------------------------------------------

    def hide(self, scores: Ssa, relation: Ssa, left: Ssa) -> None:
        """-inf for keys from number ``left`` of a block on, and for those that come after the query. ``relation``: by
        how much the first query comes after the first key."""
        self.call("hide", "ptr %scores, i64 %relation, i64 %left", (scores, relation, left), _write_hide)

    def add_bias(self, scores: Ssa, bias: Bias, rows: Ssa, left: Ssa, scale: float) -> None:
        """Scale a block of scores and add a mask, of which there are so many rows and columns."""
        none = Ssa("null", "ptr"), imm(0)
        numbers = (Ssa(number(scale), "float"), Ssa(number(bias.hidden), "float"))
        given = (scores, *(bias.added or none), *(bias.seen or none), rows, left, *numbers)
        parameters = (
            "ptr %scores, ptr %added, i64 %added.step, ptr %seen, i64 %seen.step, i64 %rows, i64 %left, float %scale,"
            " float %hidden"
        )
        kind = "" if bias.added is None else "_bf16" if bias.dtype is DType.BF16 else "_f32"
        seen = "" if bias.seen is None else "_replaced" if bias.replaces else "_seen"
        self.call(f"bias{kind}{seen}", parameters, given, functools.partial(_write_bias, kind, seen))

    # -- the forward ---------------------------------------------------------------------------------------

    def weigh(
        self,
        blocks: tuple[Ssa, Ssa, Ssa, Ssa],
        panels: Ssa,
        first: Ssa,
        factor: float,
        dropped: Dropped | None,
    ) -> None:
        """Make weights of 32 rows of scores. ``blocks``: scores, weights, state and sums. The state is of each row the
        largest score and the sum of weights so far; sums of weights and values are scaled where a larger score is
        found, unless there are none yet."""
        given: tuple[Ssa, ...] = (*blocks, panels, first, Ssa(number(factor), "float"))
        parameters = "ptr %scores, ptr %weights, ptr %state, ptr %sums, i64 %panels, i1 %first, float %factor"
        if dropped is not None:
            given, parameters = (*given, *dropped.given), f"{parameters}, {_DROPPED}"
        drops = dropped is not None
        write = functools.partial(self._write_weigh, drops)
        self.call("weigh_dropped" if drops else "weigh", parameters, given, write)

    def _write_weigh(self, drops: bool, em: Emitter) -> None:
        em.loop(imm(0), imm(PANEL), 1, [], functools.partial(self._weigh_row, em, drops), "row")

    def _weigh_row(self, em: Emitter, drops: bool, row: Ssa, _: list[Ssa]) -> list[Ssa]:
        cell = _cell(em, row)
        line = em.element("i8", Ssa("%scores", "ptr"), cell)
        least = Ssa(f"splat (float {number(-math.inf)})", FLOATS)
        panels, factor = Ssa("%panels", "i64"), em.splat(Ssa("%factor", "float"), GROUP)

        def halves(panel: Ssa) -> list[Ssa]:
            own = em.element("i8", line, em.mul(panel, imm(BLOCK_BYTES)))
            return [load(em, em.element("i8", own, imm(TILE_BYTES * half))) for half in range(2)]

        def most(panel: Ssa, now: list[Ssa]) -> list[Ssa]:
            return [maximum(em, x, top) for x, top in zip(halves(panel), now, strict=True)]

        tops = em.loop(imm(0), panels, 1, [Carried(FLOATS, least)] * 2, most, "panel")
        kept = [em.element("float", Ssa("%state", "ptr"), em.add(row, imm(PANEL * k))) for k in range(2)]
        old = em.here("float", f"load float, ptr {kept[0].text}, align 4")
        before = em.splat(old, GROUP)
        top = across(em, maximum(em, maximum(em, *tops), before), maximum)
        none = em.here(BITS, f"fcmp oeq {top.typed}, {least.text}")
        used = em.here(FLOATS, f"select {none.typed}, {FLOATS} zeroinitializer, {top.typed}")
        half, at = em.unsigned("udiv", row, imm(GROUP)), em.unsigned("urem", row, imm(GROUP))
        inside = em.add(em.mul(half, imm(TILE_BYTES)), em.mul(at, imm(64)))
        to = em.element("i8", Ssa("%weights", "ptr"), inside)

        def weights(panel: Ssa, now: list[Ssa]) -> list[Ssa]:
            made = stored = [self._weight(em, x, used, factor) for x in halves(panel)]
            if drops:
                kept = [kept_factor(em, row, em.add(em.mul(panel, imm(PANEL)), imm(GROUP * k))) for k in range(2)]
                stored = [em.here(FLOATS, f"fmul {x.typed}, {k.text}") for x, k in zip(made, kept, strict=True)]
            own = em.element("i8", to, em.mul(panel, imm(self.form.step_bytes)))
            store_all(em, self._pairs(em, *stored), own)
            return [em.here(FLOATS, f"fadd {total.typed}, {x.text}") for total, x in zip(now, made, strict=True)]

        zero = Ssa("zeroinitializer", FLOATS)
        totals = em.loop(imm(0), panels, 1, [Carried(FLOATS, zero)] * 2, weights, "panel")
        both = em.here(FLOATS, f"fadd {totals[0].typed}, {totals[1].text}")
        total = em.lane(across(em, both, sum_of), 0, "float")
        em.effect(f"store float {em.lane(top, 0, 'float').text}, ptr {kept[0].text}, align 4")

        def scale() -> None:
            fall = self._weight(em, before, used, factor)
            known = em.here("float", f"load float, ptr {kept[1].text}, align 4")
            one = em.lane(fall, 0, "float")
            scaled = em.here("float", f"fmul float {known.text}, {one.text}")
            summed = em.here("float", f"fadd float {scaled.text}, {total.text}")
            em.effect(f"store {summed.typed}, ptr {kept[1].text}, align 4")

            def block(number: Ssa, _: list[Ssa]) -> list[Ssa]:
                own = em.element("i8", Ssa("%sums", "ptr"), em.add(em.mul(number, imm(BLOCK_BYTES)), cell))
                for side in range(2):
                    place = em.element("i8", own, imm(TILE_BYTES * side))
                    store(em, em.here(FLOATS, f"fmul {load(em, place).typed}, {fall.text}"), place)
                return []

            em.loop(imm(0), imm(self.panels), 1, [], block, "block")

        def begin() -> None:
            em.effect(f"store {total.typed}, ptr {kept[1].text}, align 4")

        em.choose(Ssa("%first", "i1"), None, begin, scale)
        return []

    def _weight(self, em: Emitter, score: Ssa, top: Ssa, factor: Ssa) -> Ssa:
        """2**((score - top) * factor): nothing is rounded where large scores are close to each other."""
        below = em.here(FLOATS, f"fsub {score.typed}, {top.text}")
        power = em.here(FLOATS, f"fmul {below.typed}, {factor.text}")
        some = em.here(BITS, f"fcmp ugt {power.typed}, {splat_of(_LEAST).text}")
        em.declare("llvm.roundeven.v16f32", FLOATS, [FLOATS])
        whole = em.here(FLOATS, f"call {FLOATS} @llvm.roundeven.v16f32({power.typed})")
        rest = em.here(FLOATS, f"fsub {power.typed}, {whole.text}")
        *others, last = POLYNOMIALS[self.form.pieces]
        value = splat_of(last)
        for coefficient in reversed(others):
            value = fma(em, value, rest, splat_of(coefficient))
        scale = "llvm.x86.avx512.mask.scalef.ps.512"
        em.declare(scale, FLOATS, [FLOATS, FLOATS, FLOATS, "i16", "i32 immarg"])
        kept = em.here("i16", f"bitcast {some.typed} to i16")
        given = f"{value.typed}, {whole.typed}, {FLOATS} zeroinitializer, {kept.typed}, i32 4"
        return em.here(FLOATS, f"call {FLOATS} @{scale}({given})")

    def _pairs(self, em: Emitter, low: Ssa, high: Ssa) -> list[Ssa]:
        """A row of pairs of each piece."""
        return pairs_of(em, self.form, low, high)[0] if self.form.pieces > 1 else [words(em, narrow(em, low, high))]

    # -- the backward --------------------------------------------------------------------------------------

    def gradients(
        self, scores: Ssa, slopes: Ssa, rows: Ssa, weights: Ssa, changes: tuple[Ssa, Ssa], how: Changes
    ) -> None:
        """From a block of scores, and one of the products of gradient and value: weights, packed for a right factor,
        and gradients of the products of query and key, packed for a right and for a left factor. ``rows``: of
        :meth:`look_at_rows`."""
        before, factor = (1.0, how.own * LOG2E) if is_exact(how.own) else (how.own, LOG2E)
        numbers = tuple(Ssa(number(value), "float") for value in (before, factor, how.slope))
        parameters = (
            "ptr %scores, ptr %slopes, ptr %rows, ptr %weights, ptr %right, ptr %left,"
            " float %before, float %factor, float %scale"
        )
        given = (scores, slopes, rows, weights, *changes, *numbers)
        name = "gradients" if is_exact(how.own) else "gradients_rounded"
        if how.divided:
            name += "_divided"
        if how.dropped is not None:
            name, parameters = f"{name}_dropped", f"{parameters}, {_DROPPED}"
            given = (*given, *how.dropped.given)
        given, parameters = (*given, how.rows, how.left), f"{parameters}, i64 %rows.there, i64 %keys.there"
        for kind, lines in (("seen", how.seen), ("stored", how.stored)):
            if lines is not None:
                name, given = f"{name}_{kind}", (*given, *lines)
                parameters += f", ptr %{kind}, i64 %{kind}.step"
        self.call(name, parameters, given, functools.partial(self._write_gradients, how))

    def _write_gradients(self, how: Changes, em: Emitter) -> None:
        em.loop(imm(0), imm(GROUP), 1, [], functools.partial(self._gradient_rows, em, how), "pair")

    def _gradient_rows(self, em: Emitter, how: Changes, pair: Ssa, _: list[Ssa]) -> list[Ssa]:
        near = self.form.pieces == 1
        rows = [em.add(em.mul(pair, imm(2)), imm(k)) if near else em.add(pair, imm(GROUP * k)) for k in range(2)]
        made = [self._gradient_row(em, how, row) for row in rows]
        line = em.mul(pair, imm(64))
        for kind, name in enumerate(("%weights", "%right")):
            to = em.element("i8", Ssa(name, "ptr"), line)
            if near:
                first, second = (narrow(em, *row[kind]) for row in made)
                halves = [[interleaved(em, first, second, half)] for half in range(2)]
            else:
                halves = [self._pairs(em, made[0][kind][half], made[1][kind][half]) for half in range(2)]
            for half, values in enumerate(halves):
                store_all(em, values, em.element("i8", to, imm(TILE_BYTES * half)))
        for row, (_weights, changes) in zip(rows, made, strict=True):
            lower, at = em.unsigned("udiv", row, imm(GROUP)), em.unsigned("urem", row, imm(GROUP))
            inside = em.add(em.mul(lower, imm(TILE_BYTES)), em.mul(at, imm(64)))
            store_all(em, self._pairs(em, *changes), em.element("i8", Ssa("%left", "ptr"), inside))
        return []

    def _gradient_row(self, em: Emitter, how: Changes, row: Ssa) -> tuple[list[Ssa], list[Ssa]]:
        """The weights of a row, and the gradients of its products: two vectors of each."""
        cell = _cell(em, row)
        before, factor, scale = (em.splat(Ssa(f"%{name}", "float"), GROUP) for name in ("before", "factor", "scale"))
        places = [em.element("float", Ssa("%rows", "ptr"), em.add(row, imm(PANEL * k))) for k in range(2 + how.divided)]
        top, delta, *total = (em.splat(em.here("float", f"load float, ptr {p.text}, align 4"), GROUP) for p in places)
        weights, changes = [], []
        for half in range(2):
            at = em.add(cell, imm(TILE_BYTES * half))
            score, slope = (load(em, em.element("i8", Ssa(name, "ptr"), at)) for name in ("%scores", "%slopes"))
            if not is_exact(how.own):
                score = em.here(FLOATS, f"fmul {score.typed}, {before.text}")
            weight = used = self._weight(em, score, top, factor)
            if how.divided:
                weight = used = em.here(FLOATS, f"fmul {weight.typed}, {total[0].text}")
            if how.dropped is not None:
                kept = kept_factor(em, row, imm(GROUP * half))
                used = em.here(FLOATS, f"fmul {weight.typed}, {kept.text}")
                slope = em.here(FLOATS, f"fmul {slope.typed}, {kept.text}")
            weights.append(used)
            if how.stored is None:
                change = em.here(FLOATS, f"fmul {fma(em, slope, scale, delta).typed}, {weight.text}")
                changes.append(self._shown(em, how, row, half, change))
                continue
            below = em.here(FLOATS, f"fadd {slope.typed}, {delta.text}")
            change = self._shown(em, how, row, half, em.here(FLOATS, f"fmul {below.typed}, {weight.text}"))
            self._store_change(em, row, half, change)
            changes.append(em.here(FLOATS, f"fmul {change.typed}, {scale.text}"))
        return weights, changes

    def _store_change(self, em: Emitter, row: Ssa, half: int, change: Ssa) -> None:
        offset = em.add(em.mul(row, Ssa("%stored.step", "i64")), imm(GROUP * half))
        place = em.element("float", Ssa("%stored", "ptr"), offset)
        store_lanes(em, place, change, self._there(em, row, half))

    def _there(self, em: Emitter, row: Ssa, half: int) -> Ssa:
        left = em.sub(Ssa("%keys.there", "i64"), imm(GROUP * half))
        return in_block(em, row, Ssa("%rows.there", "i64"), left)

    def _shown(self, em: Emitter, how: Changes, row: Ssa, half: int, change: Ssa) -> Ssa:
        """A gradient of scores, 0 where something is in their place."""
        if how.seen is None:
            return change
        offset = em.add(em.mul(row, Ssa("%seen.step", "i64")), imm(GROUP * half))
        seen = bytes_set(em, em.element("i8", Ssa("%seen", "ptr"), offset), self._there(em, row, half))
        return em.here(FLOATS, f"select {seen.typed}, {change.typed}, {FLOATS} zeroinitializer")

    def look_at_rows(
        self,
        result: tuple[Ssa, Ssa],
        gradient: tuple[Ssa, Ssa],
        saved: Sequence[tuple[Ssa, Ssa]],
        count: Ssa,
        to: Ssa,
        how: Changes,
    ) -> None:
        """What :meth:`gradients` takes from the scores of rows, and from their slopes, for as many rows as there are of
        32: lines of the result and of its gradient, and the logarithm of the sum, or the largest score and the sum,
        each with the step to the next one."""
        slope = how.slope if how.stored is None else 1.0
        numbers = (Ssa(number(value), "float") for value in (1 / how.own if is_exact(how.own) else 1.0, -slope))
        given = (*result, *gradient, *saved[0], *saved[-1], count, to, *numbers)
        parameters = (
            "ptr %result, i64 %result.step, ptr %gradient, i64 %gradient.step, ptr %tops, i64 %tops.step,"
            " ptr %sums, i64 %sums.step, i64 %count, ptr %to, float %factor, float %scale"
        )
        write = functools.partial(self._write_rows, how.divided)
        self.call("rows_divided" if how.divided else "rows", parameters, given, write)

    def _write_rows(self, divided: bool, em: Emitter) -> None:
        count, to = Ssa("%count", "i64"), Ssa("%to", "ptr")
        saved = ("tops", "sums") if divided else ("tops",)

        def row(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            lines = [
                self._line(em, Ssa(f"%{n}", "ptr"), em.mul(at, Ssa(f"%{n}.step", "i64")))
                for n in ("result", "gradient")
            ]
            total = Ssa("zeroinitializer", FLOATS)
            for vector in range(self.vectors):
                a, b = (self._read(em, line, vector) for line in lines)
                total = fma(em, a, b, total)
            dot = em.lane(across(em, total, sum_of), 0, "float")
            delta = em.here("float", f"fmul float {dot.text}, %scale")
            kept = [em.element("float", Ssa(f"%{n}", "ptr"), em.mul(at, Ssa(f"%{n}.step", "i64"))) for n in saved]
            known = [em.here("float", f"load float, ptr {place.text}, align 4") for place in kept]
            top = em.here("float", f"fmul float {known[0].text}, %factor")
            inverse = [em.here("float", f"fdiv float {number(1.0)}, {total.text}") for total in known[1:]]
            for k, value in enumerate((top, delta, *inverse)):
                em.effect(
                    f"store {value.typed}, ptr {em.element('float', to, em.add(at, imm(PANEL * k))).text}, align 4"
                )
            return []

        def missing(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            for k, value in enumerate((math.inf, 0.0, *([1.0] if divided else []))):
                place = em.element("float", to, em.add(at, imm(PANEL * k)))
                em.effect(f"store float {number(value)}, ptr {place.text}, align 4")
            return []

        em.loop(imm(0), count, 1, [], row, "row")
        em.loop(count, imm(PANEL), 1, [], missing, "row")

    # -- results -------------------------------------------------------------------------------------------

    def write_rows(self, sums: Ssa, to: Ssa, step: Ssa, count: Ssa, divisors: Ssa | None) -> None:
        """Write lines of a result, as many as there are of 32, from blocks of which each has 32 numbers of a line."""
        given = (sums, to, step, count, *([divisors] if divisors is not None else []))
        parameters = f"ptr %sums, ptr %to, i64 %step, i64 %count{', ptr %divisors' if divisors is not None else ''}"
        name = "divided" if divisors is not None else "lines"
        self.call(name, parameters, given, functools.partial(self._write_lines, divisors is not None))

    def _write_lines(self, divided: bool, em: Emitter) -> None:
        def row(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            cell = _cell(em, at)
            line = self._line(em, Ssa("%to", "ptr"), em.mul(at, Ssa("%step", "i64")))
            divisor = None
            if divided:
                place = em.element("float", Ssa("%divisors", "ptr"), at)
                divisor = em.splat(em.here("float", f"load float, ptr {place.text}, align 4"), GROUP)
            for vector in range(self.vectors):
                inside = imm(vector // 2 * BLOCK_BYTES + vector % 2 * TILE_BYTES)
                value = load(em, em.element("i8", Ssa("%sums", "ptr"), em.add(cell, inside)))
                if divisor is not None:
                    value = em.here(FLOATS, f"fdiv {value.typed}, {divisor.text}")
                self._write(em, line, vector, value, None)
            return []

        em.loop(imm(0), Ssa("%count", "i64"), 1, [], row, "row")

    def write_columns(self, sums: Ssa, to: Ssa, step: Ssa, count: Ssa) -> None:
        """The same from blocks of which each has 32 numbers of 32 lines: their lines are rows of these."""
        parameters = "ptr %sums, ptr %to, i64 %step, i64 %count"
        self.call("columns", parameters, (sums, to, step, count), self._write_columns)

    def _write_columns(self, em: Emitter) -> None:
        for half in range(2):
            for vector in range(self.vectors):
                inside = vector // 2 * BLOCK_BYTES + vector % 2 * 2 * TILE_BYTES + half * TILE_BYTES
                own = em.element("i8", Ssa("%sums", "ptr"), imm(inside))
                rows = [load(em, em.element("i8", own, imm(64 * line))) for line in range(GROUP)]
                for lane, value in enumerate(transpose(em, rows, "float", 32)):
                    key = interleaved_key(half, lane) if self.form.pieces == 1 else GROUP * half + lane
                    there = em.pure("i1", f"icmp sgt i64 %count, {key}")
                    line = self._line(em, Ssa("%to", "ptr"), em.mul(Ssa("%step", "i64"), imm(key)))
                    self._write(em, line, vector, value, there)

    # -- lines in memory -----------------------------------------------------------------------------------

    def _line(self, em: Emitter, pointer: Ssa, offset: Ssa) -> Ssa:
        return em.element("i16" if self.narrow else "float", pointer, offset)

    def _tail(self, vector: int) -> Ssa | None:
        """The lanes of a line's vector that are numbers, if not all."""
        left = self.head - vector * GROUP
        return None if left >= GROUP else these_lanes([lane < left for lane in range(GROUP)])

    def _read(self, em: Emitter, line: Ssa, vector: int) -> Ssa:
        return read_numbers(
            em,
            em.element("i16" if self.narrow else "float", line, imm(GROUP * vector)),
            self.narrow,
            self._tail(vector),
        )

    def _write(self, em: Emitter, line: Ssa, vector: int, value: Ssa, there: Ssa | None) -> None:
        """A vector of a line, if it is ``there``."""
        place, tail = em.element("i16" if self.narrow else "float", line, imm(GROUP * vector)), self._tail(vector)
        if there is not None:
            every = em.splat(there, GROUP)
            tail = every if tail is None else em.pure(BITS, f"and {every.typed}, {tail.text}", every)
        value = rounded(em, value) if self.narrow else value
        if tail is not None:
            store_lanes(em, place, value, tail)
            return
        em.effect(f"store {value.typed}, ptr {place.text}, align {2 if self.narrow else 4}")


def _write_hide(em: Emitter) -> None:
    def row(at: Ssa, _: list[Ssa]) -> list[Ssa]:
        own = em.element("i8", Ssa("%scores", "ptr"), _cell(em, at))
        last = em.minimum(em.add(em.add(at, Ssa("%relation", "i64")), imm(1)), Ssa("%left", "i64"))
        for half in range(2):
            place = em.element("i8", own, imm(TILE_BYTES * half))
            seen = first_lanes(em, em.sub(last, imm(GROUP * half)))
            value = em.here(FLOATS, f"select {seen.typed}, {load(em, place).typed}, {splat_of(-math.inf).typed}")
            store(em, value, place)
        return []

    em.loop(imm(0), imm(PANEL), 1, [], row, "row")


def _write_bias(added: str, seen: str, em: Emitter) -> None:
    narrow = added == "_bf16"
    kind = "i16" if narrow else "float"
    scale, hidden = (em.splat(Ssa(f"%{name}", "float"), GROUP) for name in ("scale", "hidden"))

    def row(at: Ssa, _: list[Ssa]) -> list[Ssa]:
        own = em.element("i8", Ssa("%scores", "ptr"), _cell(em, at))
        line = em.element(kind, Ssa("%added", "ptr"), em.mul(at, Ssa("%added.step", "i64")))
        bits = em.element("i8", Ssa("%seen", "ptr"), em.mul(at, Ssa("%seen.step", "i64")))
        for half in range(2):
            there = first_lanes(em, em.sub(Ssa("%left", "i64"), imm(GROUP * half)))
            bias = Ssa("zeroinitializer", FLOATS)
            if added:
                bias = read_numbers(em, em.element(kind, line, imm(GROUP * half)), narrow, there)
            shown = bytes_set(em, em.element("i8", bits, imm(GROUP * half)), there) if seen else there
            if seen == "_seen":
                bias = em.here(FLOATS, f"select {shown.typed}, {bias.typed}, {hidden.typed}")
            place = em.element("i8", own, imm(TILE_BYTES * half))
            made = fma(em, load(em, place), scale, bias)
            if seen == "_replaced":
                made = em.here(FLOATS, f"select {shown.typed}, {made.typed}, {hidden.typed}")
            store(em, made, place)
        return []

    em.loop(imm(0), Ssa("%rows", "i64"), 1, [], row, "row")
