"""Two nests become one: where each stage goes, and whether that keeps the meaning.

Note [Legality]
    Outer iterations of a nest are independent. So the second nest may read what the first one writes only in the
    same outer iteration: the parts of both row-major positions that depend on outer loops must be equal, and the
    inner part must run over the same digits. Within one outer iteration stages run in order; a stage of the
    second nest joins an equal stage of the first if everything it needs is ready there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..analysis.alignment import align_digits, digit_env, digits_of, digits_of_part, expand_ranges, loops_by_weight
from ..analysis.nests import (
    body_size,
    is_heavy,
    iteration_count,
    numel,
    ranges_of,
)
from ..ir import Buffer, Load, LoopNest, Range, Stage
from ..ir.builder import NestBuilder
from ..ir.positions import flat_index
from ..ir.walk import accesses, definitions, instructions, stores, used_values
from ..symbolic import Expr, Symbol, SymbolKind
from .inline_producers import join_origins

__all__ = ["Access", "Kernel", "merge_kernels"]


@dataclass(frozen=True, slots=True)
class Access:
    """A load or store: the row-major position, and the stage it is in."""

    buffer: str
    flat: Expr
    stage: int
    plain: bool  # no mask, not accumulating


@dataclass(slots=True)
class Kernel:
    """A nest on its way through fusion, with its accesses worked out."""

    nest: LoopNest
    members: int = 1
    loads: list[Access] = field(default_factory=list)
    stores: dict[str, Access] = field(default_factory=dict)
    sizes: dict[str, Expr] = field(default_factory=dict)
    size: int = 0
    rows: bool = False
    parts: frozenset[str] = frozenset()

    @staticmethod
    def of(
        nest: LoopNest, buffers: Mapping[str, Buffer], members: int = 1, parts: frozenset[str] = frozenset()
    ) -> Kernel:
        """Work out a nest's accesses. A buffer stored in several places counts as stored in none plainly. ``parts``:
        buffers of which no two kernels store the same element."""
        kernel = Kernel(nest, members, parts=parts)
        limits = ranges_of(nest)
        kernel.sizes = {s.name: size for s, size in limits.sizes.items()}
        kernel.rows = any(stage.ranges for stage in nest.stages)
        kernel.size = body_size(nest)
        for position, stage in enumerate(nest.stages):
            for instr in accesses(stage.body):
                flat = flat_index(buffers[instr.buffer], instr.indices, limits)
                if isinstance(instr, Load):
                    kernel.loads.append(Access(instr.buffer, flat, position, instr.mask is None))
                else:
                    plain = instr.plain and instr.buffer not in kernel.stores
                    kernel.stores[instr.buffer] = Access(instr.buffer, flat, position, plain)
        return kernel


@dataclass(slots=True)
class _Slot:
    """A stage of the merged nest: its loops and the pieces of source stages that run in it."""

    ranges: tuple[Range, ...]
    pieces: list[tuple[int, int]]  # (source nest, stage)
    scans: bool = False  # its iterations run one by one, in the order of its ranges
    heavy: bool = False

    @staticmethod
    def of(source: int, number: int, stage: Stage, ranges: tuple[Range, ...]) -> _Slot:
        """A slot with one piece."""
        return _Slot(ranges, [(source, number)], stage.scans, is_heavy(stage.body))

    @property
    def loops(self) -> frozenset[str]:
        return frozenset(loop.symbol for loop in self.ranges)

    def takes(self, stage: Stage, ranges: tuple[Range, ...]) -> bool:
        """Whether a stage over the same loops may run in this one: a scan fixes their order, and what is dear is
        better computed in vectors beside it."""
        if self.scans or stage.scans:
            return self.ranges == ranges and (self.scans == stage.scans or not (self.heavy or is_heavy(stage.body)))
        return True


@dataclass(slots=True)
class _Plan:
    """Both nests with their loops renamed: the outer loops and each source's stage loops and substitution."""

    outer: tuple[Range, ...]
    ranges: tuple[list[tuple[Range, ...]], list[tuple[Range, ...]]]
    envs: tuple[dict[Symbol, Expr], dict[Symbol, Expr]]


def merge_kernels(
    first: Kernel, second: Kernel, anchor: tuple[Access, Access], buffers: Mapping[str, Buffer], short_row: int = 0
) -> LoopNest | str:
    """The fused nest, ``first`` before ``second``, aligned through an access of each to the same buffer; or the reason
    why there is none. One unit of work walks over ``short_row`` elements in the time that it takes to start several;
    where that is something, both may also pass through one part of the buffer, and leave out the rest."""
    plan = _plan(first, second, anchor, buffers, short_row > 0)
    if isinstance(plan, str):
        return plan
    hazard = _illegal(first, second, plan)
    if hazard is not None:
        return hazard
    slots = _place(first, second, plan)
    passes = sum(bool(slot.ranges) for slot in slots)
    before = max(sum(bool(s.ranges) for s in k.nest.stages) for k in (first, second))
    short = all(_is_short(slot.ranges, short_row) for slot in slots)
    if iteration_count(plan.outer) == 1 and passes > before and not short:
        return "there is a single row, so its passes could not run in parallel"
    origin = join_origins([first.nest.origin, second.nest.origin])
    builder = NestBuilder(second.nest.name, plan.outer, origin, buffers)
    names: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for slot in slots:
        builder.begin_stage(slot.ranges)
        for source, stage in slot.pieces:
            nest = (first, second)[source].nest
            builder.copy(nest.stages[stage].body, plan.envs[source], names[source])
    return builder.finish()


def _is_short(ranges: Sequence[Range], most: int) -> bool:
    return all(r.size.constant is not None for r in ranges) and iteration_count(ranges) <= most


# -- loops -----------------------------------------------------------------------------------------------


def _plan(
    first: Kernel, second: Kernel, anchor: tuple[Access, Access], buffers: Mapping[str, Buffer], gaps: bool
) -> _Plan | str:
    shared = buffers[anchor[0].buffer]
    flats, total = [access.flat for access in anchor], numel(shared)
    a, b = digits_of(flats[0], first.sizes, total), digits_of(flats[1], second.sizes, total)
    if a is None or b is None:
        part = digits_of_part(flats, (first.sizes, second.sizes)) if gaps else None
        if part is None:
            return "one of them does not pass through all of the shared buffer in a regular way"
        a, b = part
    taken = first.sizes.keys() | second.sizes.keys()
    fresh = [name for name in (f"k{n}" for n in range(len(taken) + 4 * len(a) + 4 * len(b) + 8)) if name not in taken]
    alignment = align_digits(a, b, fresh)
    if alignment is None:
        return "their loops cannot be split into common parts"
    used = {r.symbol for loops in alignment.first.values() for r in loops}
    used |= {r.symbol for loops in alignment.second.values() for r in loops}
    fresh = [name for name in fresh if name not in used]
    second_map = dict(alignment.second)
    _rename_rest(first, second, second_map, alignment.first, fresh)
    first_outer = expand_ranges(first.nest.outer, alignment.first)
    second_outer = expand_ranges(second.nest.outer, second_map)
    first_ranges = [expand_ranges(s.ranges, alignment.first) for s in first.nest.stages]
    second_ranges = [expand_ranges(s.ranges, second_map) for s in second.nest.stages]
    envs = (digit_env(alignment.first), digit_env(second_map))
    outer = _common_outer(first, second, first_outer, second_outer, first_ranges, second_ranges)
    if isinstance(outer, str):
        return outer
    plan = _Plan(outer, (first_ranges, second_ranges), envs)
    return _layout_objection(first, second, plan, buffers) or plan


def _rename_rest(
    first: Kernel,
    second: Kernel,
    second_map: dict[str, tuple[Range, ...]],
    first_map: Mapping[str, tuple[Range, ...]],
    fresh: list[str],
) -> None:
    """Names for the second nest's loops that the anchor does not match: those of a first nest's stage with equal
    sizes, so that the stages can join, else new ones."""
    pool = iter(fresh)
    matched = {r.symbol for loops in second_map.values() for r in loops}
    for stage in second.nest.stages:
        free = [loop for loop in stage.ranges if loop.symbol not in second_map]
        if not free or len(free) != len(stage.ranges):
            continue
        for candidate in first.nest.stages:
            loops = expand_ranges(candidate.ranges, first_map)
            if [loop.size for loop in loops] == [loop.size for loop in free] and matched.isdisjoint(
                loop.symbol for loop in loops
            ):
                second_map.update((old.symbol, (new,)) for old, new in zip(free, loops, strict=True))
                break
    for name, size in second.sizes.items():
        if name not in second_map:
            second_map[name] = (Range(next(pool), size),)


def _common_outer(
    first: Kernel,
    second: Kernel,
    first_outer: tuple[Range, ...],
    second_outer: tuple[Range, ...],
    first_ranges: list[tuple[Range, ...]],
    second_ranges: list[tuple[Range, ...]],
) -> tuple[Range, ...] | str:
    """The outer loops of both; an elementwise nest may turn its other loops into a stage's."""
    a, b = {r.symbol for r in first_outer}, {r.symbol for r in second_outer}
    if a == b:
        return first_outer if first.rows or not second.rows else second_outer
    if not first.rows and not second.rows:
        return "one of them has more elements than the other"
    if not (first.rows and second.rows) and len((second if first.rows else first).nest.stages) > 1:
        return "values of one pass from stage to stage, so its loops cannot move into a stage"
    if first.rows and not second.rows and a < b:
        _lower(first_ranges, second_ranges, tuple(r for r in second_outer if r.symbol not in a))
        return first_outer
    if second.rows and not first.rows and b < a:
        _lower(second_ranges, first_ranges, tuple(r for r in first_outer if r.symbol not in b))
        return second_outer
    return "the rows of one are not the rows of the other"


def _lower(model: list[tuple[Range, ...]], changed: list[tuple[Range, ...]], rest: tuple[Range, ...]) -> None:
    """Give an elementwise nest's stages the loops ``rest``, in the order of an equal stage if there is one."""
    names = {r.symbol for r in rest}
    rest = next((ranges for ranges in model if {r.symbol for r in ranges} == names), rest)
    for position in range(len(changed)):
        changed[position] = rest


def _layout_objection(first: Kernel, second: Kernel, plan: _Plan, buffers: Mapping[str, Buffer]) -> str | None:
    """Why the fused loops would run across memory, or ``None``."""
    outer = {r.symbol for r in plan.outer}
    units: list[str | None] = []
    for source, kernel in enumerate((first, second)):
        if kernel.rows:
            continue
        unit = _unit_loop(kernel, plan.envs[source], buffers)
        units.append(unit)
        lowered = any(plan.ranges[source])
        inner = iteration_count(plan.ranges[source][-1]) if lowered else 1
        if lowered and unit in outer and inner >= 8:
            return "the rows run across memory, the elements of the other along it"
    if len(units) == 2 and units[0] != units[1] and None not in units:
        return "they write in different orders"
    return None


def _unit_loop(kernel: Kernel, env: Mapping[Symbol, Expr], buffers: Mapping[str, Buffer]) -> str | None:
    """The loop along which a nest's last store is contiguous."""
    store = stores(instructions(kernel.nest.stages))[-1]
    address = buffers[store.buffer].offset(store.indices).substitute(env)
    loops = (symbol for symbol in address.symbols if symbol.kind is SymbolKind.INDEX)
    return next((symbol.name for symbol in sorted(loops) if address.coefficient(symbol) == 1), None)


# -- legality --------------------------------------------------------------------------------------------


def _illegal(first: Kernel, second: Kernel, plan: _Plan) -> str | None:
    outer = {r.symbol for r in plan.outer}
    for access in second.loads:
        store = first.stores.get(access.buffer)
        if store is None:
            continue
        if not store.plain:
            return f"{access.buffer} is written in parts or piece by piece"
        written = loops_by_weight(store.flat.substitute(plan.envs[0]), outer)
        read = loops_by_weight(access.flat.substitute(plan.envs[1]), outer)
        if written is None or read is None or written[0] != read[0]:
            return f"it reads elements of {access.buffer} from other rows"
        sizes = {r.symbol: r.size for ranges in (*plan.ranges[0], *plan.ranges[1]) for r in ranges}
        if not _within(read[1], written[1], sizes):
            return f"it reads elements of {access.buffer} in another pattern than they are written"
    if any(access.buffer in second.stores for access in first.loads):
        return "the second overwrites what the first reads"
    if not first.parts >= first.stores.keys() & second.stores.keys():
        return "both write the same buffer"
    return None


def _within(read: Mapping[Expr, str], written: Mapping[Expr, str], sizes: Mapping[str, Expr]) -> bool:
    """Whether every position of ``read`` is one of ``written``."""
    return all(weight in written and sizes[name] == sizes[written[weight]] for weight, name in read.items())


# -- stages ----------------------------------------------------------------------------------------------


def _place(first: Kernel, second: Kernel, plan: _Plan) -> list[_Slot]:
    """The merged stages: the first nest's, each of the second's at the earliest equal stage that is late enough."""
    slots = [_Slot.of(0, k, first.nest.stages[k], ranges) for k, ranges in enumerate(plan.ranges[0])]
    own = list(slots)
    placed: list[_Slot] = []
    defined: dict[str, tuple[int, bool]] = {}
    for number, (stage, ranges) in enumerate(zip(second.nest.stages, plan.ranges[1], strict=True)):
        loops = frozenset(r.symbol for r in ranges)
        earliest = _earliest(first, second, plan, number, slots, own, placed, defined)
        fits = (s for s in slots[earliest:] if s.loops == loops and s.takes(stage, ranges))
        slot = next(fits, None)
        if slot is not None:
            slot.pieces.append((1, number))
            slot.scans, slot.heavy = slot.scans or stage.scans, slot.heavy or is_heavy(stage.body)
        else:
            slot = _Slot.of(1, number, stage, ranges)
            slots.insert(earliest if not ranges else len(slots), slot)
        placed.append(slot)
        defined.update(dict.fromkeys(definitions(stage.body), (number, bool(ranges))))
    return slots


def _earliest(
    first: Kernel,
    second: Kernel,
    plan: _Plan,
    number: int,
    slots: Sequence[_Slot],
    own: Sequence[_Slot],
    placed: Sequence[_Slot],
    defined: Mapping[str, tuple[int, bool]],
) -> int:
    """The first slot in which stage ``number`` of the second nest may run."""
    order = {id(slot): position for position, slot in enumerate(slots)}
    ranges = plan.ranges[1][number]
    earliest = 0
    for name in used_values(second.nest.stages[number].body):
        if name in defined:
            stage, ranged = defined[name]
            at = order[id(placed[stage])]
            earliest = max(earliest, at + 1 if ranged or ranges else at)
    for access in second.loads:
        if access.stage != number:
            continue
        store = first.stores.get(access.buffer)
        if store is not None:
            at = order[id(own[store.stage])]
            same = store.flat.substitute(plan.envs[0]) == access.flat.substitute(plan.envs[1]) and access.plain
            earliest = max(earliest, at if same else at + 1)
        store = second.stores.get(access.buffer)
        if store is not None and store.stage < number:
            earliest = max(earliest, order[id(placed[store.stage])] + 1)
    return earliest
