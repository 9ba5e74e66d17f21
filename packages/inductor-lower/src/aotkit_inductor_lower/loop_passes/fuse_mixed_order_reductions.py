"""Pass: sums over rows and sums over columns of the same data, in one walk over it.

Note [Rows and columns at once]
    A layer norm's backward needs sums along each row for the gradient of its input, and sums down each column for those
    of weight and bias; a linear layer's bias gradient sums the columns of what another kernel has just written. Apart,
    the data is read twice. Together, the row kernel adds each row's share to one line of partial sums:

        part[c, j] += value(i, j)         for the rows i of chunk c
        out[j] = sum of part[c, j] over c

    A chunk is one unit of work for a thread, so nothing is shared between threads, and its line of sums stays in
    the nearest cache. That pays where the data does not: two kernels over little data keep their sums in registers, and
    stay as they are. So do elementwise kernels that are busy with arithmetic rather than with memory.

    A device keeps the line of sums in registers, so a row must fit there, and chunks are short: as many rows as
    :attr:`~..target.SplitPolicy.walked`, so that there are enough program instances. Its lines of sums are then worth
    something, too: what is not read again must be twice as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..analysis.alignment import align_digits, digit_env, digits_of, expand_ranges
from ..analysis.dependencies import memory_roots
from ..analysis.nests import body_size, buffer_bytes, heavy_count, hint, numel
from ..ir import Buffer, BufferKind, DType, Instr, Load, LoopNest, Program, Range, Reduce, Stage, Step, Store
from ..ir.builder import NestBuilder
from ..ir.walk import accesses, buffers_of, contains, ranges_within, reduces, step_reads, step_writes
from ..ops.dtypes import dtype_from_torch_name
from ..passes import Decision, Pass, PassContext, fuses
from ..symbolic import Expr, Symbol, contiguous_strides, product, sym, to_expr
from .inline_producers import join_origins
from .merge_nests import Access, Kernel

__all__ = ["PASS", "fuse_mixed_order_reductions"]

LEAST_SHARED = 1 << 19  # bytes of data that need not be read again
MOST_CHUNKS = 16  # of many columns
MOST_PARTS = 1 << 14  # partial sums of few columns, in chunks of at least LEAST_CHUNK rows
LEAST_CHUNK, LONGEST_CHUNK = 64, 1 << 13  # rows; what is added up one by one loses digits
_WIDE = {DType.F32: "float32", DType.F64: "float64"}


@dataclass(frozen=True, slots=True)
class _OuterReduction:
    """A nest that sums columns: the stage with the sums, and what follows for each column."""

    sums: Stage
    rest: tuple[Stage, ...]
    reduces: tuple[Reduce, ...]


@dataclass(frozen=True, slots=True)
class _Match:
    """How the loops of the row nest and the column nest agree: loops that replace theirs, by name."""

    rows: Mapping[str, tuple[Range, ...]]
    columns: Mapping[str, tuple[Range, ...]]
    outer: tuple[Range, ...]  # over the rows
    inner: frozenset[str]  # loops over the columns


@dataclass(frozen=True, slots=True)
class _Chunks:
    """``parts``: the loops that each have sums of their own; ``rows``: those that are added up. ``shift``: what a loop
    that is cut becomes."""

    parts: tuple[Range, ...]
    rows: tuple[Range, ...]
    shift: Mapping[Symbol, Expr]


@dataclass(frozen=True, slots=True)
class _Limits:
    """``walked``, ``row``: see :class:`~..target.SplitPolicy`; ``instructions`` of a kernel."""

    walked: int
    row: int
    instructions: int


def fuse_mixed_order_reductions(program: Program, ctx: PassContext) -> Program:
    """The program with column sums brought into kernels that walk over the same rows."""
    done: set[str] = set()
    policy = ctx.target.split_policy
    walked, row = (policy.walked, policy.longest_walked) if policy is not None else (0, 0)
    limits = _Limits(walked, row, ctx.options.max_fusion_instructions)
    while ctx.fuel.left > 0:
        mixed = _fuse_one(program, ctx.decisions, limits, done)
        if mixed is None:
            break
        ctx.fuel.take()
        program = mixed
    return program


def _fuse_one(program: Program, records: list[Decision], limits: _Limits, done: set[str]) -> Program | None:
    """The program with one more column nest brought into another, or ``None``. ``done``: names of those looked at."""
    buffers = buffers_of(program)
    candidates = [
        (position, columns)
        for position, step in enumerate(program.steps)
        if isinstance(step, LoopNest) and step.name not in done and (columns := _outer_reduction(step)) is not None
    ]
    if not candidates:
        return None
    root = memory_roots(program)
    for position, columns in candidates:
        column_nest = program.steps[position]
        assert isinstance(column_nest, LoopNest)
        done.add(column_nest.name)
        for other, anchor in _partners(program, position, buffers):
            row_nest = program.steps[other]
            assert isinstance(row_nest, LoopNest)
            made = _written_otherwise(row_nest, column_nest, position < other, root) or _mixed(
                row_nest, column_nest, columns, anchor, buffers, limits
            )
            place = _place(program.steps, other, position, root) if not isinstance(made, str) else None
            if place is None:
                reason = made if isinstance(made, str) else "another step must run between them"
                records.append(Decision("mixed-order", row_nest.name, column_nest.name, False, reason))
                continue
            assert not isinstance(made, str)
            nests, added = made
            records.append(Decision("mixed-order", row_nest.name, column_nest.name, True, f"through {anchor.buffer}"))
            steps: list[Step] = []
            for at, step in enumerate(program.steps):
                if at == place:
                    steps.extend(nests)
                elif at not in (other, position):
                    steps.append(step)
            return replace(program, steps=tuple(steps), buffers=(*program.buffers, *added))
    return None


# -- who may join ----------------------------------------------------------------------------------------


def _outer_reduction(nest: LoopNest) -> _OuterReduction | None:
    """The parts of a nest that does nothing but sum columns, in single or double precision."""
    if len(nest.stages) < 2 or not nest.stages[0].ranges or any(stage.ranges for stage in nest.stages[1:]):
        return None
    sums = nest.stages[0]
    found = tuple(reduces(sums.body))
    plain = all(r.kind == "sum" and not r.running and r.dtype in _WIDE for r in found)
    if not found or not plain or contains(sums.body, Store):
        return None
    if any(r.size.constant is None for r in (*nest.outer, *sums.ranges)):
        return None  # chunks of rows are cut at compile time
    return _OuterReduction(sums, nest.stages[1:], found)


def _partners(program: Program, position: int, buffers: Mapping[str, Buffer]) -> Iterator[tuple[int, Access]]:
    """Nests that walk over large data which the column nest reads, the nearest first, and an access of that data."""
    column_nest = program.steps[position]
    assert isinstance(column_nest, LoopNest)
    wanted = {name for name in column_nest.reads if buffer_bytes(buffers[name]) >= LEAST_SHARED}
    if not wanted:
        return
    for other in sorted(range(len(program.steps)), key=lambda at: abs(at - position)):
        step = program.steps[other]
        if other == position or not isinstance(step, LoopNest) or wanted.isdisjoint((*step.reads, *step.writes)):
            continue
        if step.combines or _outer_reduction(step):
            continue
        kernel = Kernel.of(step, buffers)
        accesses = (*kernel.stores.values(), *kernel.loads)
        anchor = next((a for a in accesses if a.plain and a.buffer in wanted), None)
        if anchor is not None:
            yield other, anchor


def _place(steps: Sequence[Step], rows: int, columns: int, root: Mapping[str, str]) -> int | None:
    """Where both can run as one: where the later one stands, or the earlier one; ``None`` if a step between forbids."""
    first, last = sorted((rows, columns))
    between = steps[first + 1 : last]
    for moved, place in ((steps[last], first), (steps[first], last)):
        reads, writes = ({root[n] for n in names} for names in (step_reads(moved), step_writes(moved)))
        clear = all(
            writes.isdisjoint(root[n] for n in (*step_reads(s), *step_writes(s)))
            and reads.isdisjoint(root[n] for n in step_writes(s))
            for s in between
        )
        if clear:
            return place
    return None


def _written_otherwise(rows: LoopNest, columns: LoopNest, columns_first: bool, root: Mapping[str, str]) -> str | None:
    """Why the column nest would read other numbers in the row nest than in its own place, or ``None``."""
    written, read = {root[name] for name in rows.writes}, [name for name in columns.reads if name not in rows.writes]
    if columns_first and not written.isdisjoint(root[name] for name in columns.reads):
        return "the rows overwrite what is summed"
    if not written.isdisjoint(root[name] for name in read):
        return "the rows write what is summed under another name"
    touched = written.union(root[name] for name in rows.reads)
    return None if touched.isdisjoint(root[name] for name in columns.writes) else "the one uses the sums of the other"


# -- the nests -------------------------------------------------------------------------------------------


def _mixed(
    rows: LoopNest,
    columns: LoopNest,
    parts: _OuterReduction,
    anchor: Access,
    buffers: Mapping[str, Buffer],
    limits: _Limits,
) -> tuple[list[LoopNest], list[Buffer]] | str:
    """The nests that replace both, with the buffers for partial sums; or why there are none."""
    if body_size(rows) + body_size(columns) > limits.instructions:
        return "the kernel would get too large"
    if not limits.walked and not rows_has_ranges(rows) and heavy_count(rows) > 1:
        return "its arithmetic takes longer than to read its result again"
    match = _match(rows, columns, parts, anchor, buffers)
    if isinstance(match, str):
        return match
    chunks = _few_rows(match, rows, columns, parts, buffers, limits) if limits.walked else _many(match, columns)
    if isinstance(chunks, str):
        return chunks
    row_env = _composed(digit_env(match.rows), rows, chunks.shift)
    column_env = _composed(digit_env(match.columns), columns, chunks.shift)
    stages = _stages(rows, match)
    joined = max((k for k, (ranges, _) in enumerate(stages) if {r.symbol for r in ranges} == match.inner), default=None)
    if joined is None:
        return "the one has no pass over the columns of the other"
    illegal = _illegal(rows, columns, match, joined, buffers)
    if illegal is not None:
        return illegal
    added = [
        _partial(
            f"{columns.name}_part{k}",
            (*chunks.parts, *columns.outer),
            _WIDE[reduce.dtype],
            buffers[anchor.buffer].device,
        )
        for k, reduce in enumerate(parts.reduces)
    ]
    known = {**buffers, **{b.name: b for b in added}}
    origin = join_origins([rows.origin, columns.origin])
    builder = NestBuilder(rows.name, (*chunks.parts, *chunks.rows), origin, known)
    names: dict[str, str] = {}
    column_names: dict[str, str] = {}
    for position, (ranges, body) in enumerate(stages):
        builder.begin_stage(ranges)
        builder.copy(body, row_env, names)
        if position == joined:
            _add_shares(builder, parts, added, chunks.parts, columns, column_env, column_names)
    lines = tuple(Range(f"k_line{k}", loop.size) for k, loop in enumerate(chunks.parts))
    zeros, finish = _zeros(added, lines, columns, known), _finish(columns, parts, added, lines, known)
    return [zeros, builder.finish(), finish], added


def _many(match: _Match, columns: LoopNest) -> _Chunks | str:
    """Chunks of many rows, of which a processor holds one at a time."""
    first, *others = match.outer
    size = first.size.constant
    assert size is not None
    most = max(
        MOST_CHUNKS, min(MOST_PARTS // max(1, hint(product(r.size for r in columns.outer))), size // LEAST_CHUNK)
    )
    count = max(c for c in range(1, most + 1) if size % c == 0)
    if size // count > LONGEST_CHUNK:
        return "the rows cannot be cut into chunks that are short enough"
    chunk, inside = Range(f"{first.symbol}c", to_expr(count)), Range(first.symbol, to_expr(size // count))
    shift = {Symbol(first.symbol): sym(chunk.symbol) * inside.size + sym(first.symbol)}
    return _Chunks((chunk,), (inside, *others), shift)


def _few_rows(
    match: _Match,
    rows: LoopNest,
    columns: LoopNest,
    parts: _OuterReduction,
    buffers: Mapping[str, Buffer],
    limits: _Limits,
) -> _Chunks | str:
    """Chunks of few rows, each a program instance's, which keeps the sums in registers."""
    stages = [product(r.size for r in stage.ranges) for stage in rows.stages if stage.ranges]
    width = hint(product(r.size for r in columns.outer))
    if any(size.constant is None or size.constant > limits.row for size in (*stages, to_expr(width))):
        return "a row does not fit into registers"
    if not _lie_side_by_side(rows, parts, match, buffers):
        return "the rows do not lie side by side"
    cuts = [(r, n) for r in match.outer for n in range(2, 2 * limits.walked + 1) if (r.size.constant or 1) % n == 0]
    if not cuts:
        return "there are no rows to walk over"
    loop, count = min(cuts, key=lambda cut: (abs(cut[1] - limits.walked), -match.outer.index(cut[0])))
    assert loop.size.constant is not None
    saved = sum(buffer_bytes(buffers[name]) for name in {*columns.reads} & {*rows.reads, *rows.writes})
    lines = hint(product(r.size for r in match.outer)) // count
    if saved < 2 * 2 * 4 * width * lines * len(parts.reduces):  # written and read again
        return "the partial sums are as much to write as the rows are to read"
    chunk, inside = Range(f"{loop.symbol}c", to_expr(loop.size.constant // count)), Range(loop.symbol, to_expr(count))
    shift = {Symbol(loop.symbol): sym(chunk.symbol) * inside.size + sym(loop.symbol)}
    others = tuple(r for r in match.outer if r is not loop)
    return _Chunks((*others, chunk), (inside,), shift)


def _lie_side_by_side(rows: LoopNest, parts: _OuterReduction, match: _Match, buffers: Mapping[str, Buffer]) -> bool:
    """Whether all that differs in each element of each row is read and written along the rows."""
    outer, columns = {Symbol(r.symbol) for r in match.outer}, {Symbol(name) for name in match.inner}
    stages = [(s, expand_ranges(s.ranges, match.rows), digit_env(match.rows)) for s in rows.stages]
    for stage, loops, env in (*stages, (parts.sums, (), digit_env(match.columns))):
        inner = {Symbol(r.symbol) for r in loops} or columns
        for i in accesses(stage.body):
            offset = buffers[i.buffer].offset(i.indices).substitute(env)
            large = not offset.symbols.isdisjoint(outer) and not offset.symbols.isdisjoint(inner)
            if large and not any(offset.coefficient(symbol) == 1 for symbol in inner):
                return False
    return True


def rows_has_ranges(nest: LoopNest) -> bool:
    """Whether a nest walks over rows in stages, and not element by element."""
    return any(stage.ranges for stage in nest.stages)


def _match(
    rows: LoopNest, columns: LoopNest, parts: _OuterReduction, anchor: Access, buffers: Mapping[str, Buffer]
) -> _Match | str:
    row_kernel, column_kernel = Kernel.of(rows, buffers), Kernel.of(columns, buffers)
    own = next((a for a in column_kernel.loads if a.buffer == anchor.buffer and a.plain), None)
    if own is None:
        return "the data is read under a mask"
    total = numel(buffers[anchor.buffer])
    a = digits_of(anchor.flat, row_kernel.sizes, total)
    b = digits_of(own.flat, column_kernel.sizes, total)
    if a is None or b is None:
        return "one of them does not pass through all of the shared buffer in a regular way"
    taken = row_kernel.sizes.keys() | column_kernel.sizes.keys()
    fresh = [name for name in (f"k{n}" for n in range(len(taken) + 4 * len(a) + 4 * len(b) + 8)) if name not in taken]
    alignment = align_digits(a, b, fresh)
    if alignment is None:
        return "their loops cannot be split into common parts"
    if column_kernel.sizes.keys() - alignment.second.keys():
        return "the shared buffer does not have all of the columns' loops"
    over = {r.symbol for r in expand_ranges(parts.sums.ranges, alignment.second)}
    inner = frozenset(r.symbol for r in expand_ranges(columns.outer, alignment.second))
    outer = expand_ranges(rows.outer, alignment.first)
    if not rows_has_ranges(rows):
        if len(rows.stages) > 1 or {r.symbol for r in outer} != over | inner:
            return "the one has other elements than the other"
        outer = tuple(r for r in outer if r.symbol in over)
    if {r.symbol for r in outer} != over or not outer:
        return "the rows of the one are not what the other sums over"
    return _Match(alignment.first, alignment.second, outer, inner)


def _composed(env: dict[Symbol, Expr], nest: LoopNest, shift: Mapping[Symbol, Expr]) -> dict[Symbol, Expr]:
    """Old loop variables in terms of the new loops: first the digits, then the chunk."""
    symbols = (Symbol(r.symbol) for r in ranges_within(nest))
    return {s: env.get(s, to_expr(s)).substitute(shift) for s in symbols}


def _stages(rows: LoopNest, match: _Match) -> list[tuple[tuple[Range, ...], tuple[Instr, ...]]]:
    """The loops and the body of each stage of the row nest; of an elementwise one its loops over the columns."""
    if rows_has_ranges(rows):
        return [(expand_ranges(stage.ranges, match.rows), stage.body) for stage in rows.stages]
    walked = {r.symbol for r in match.outer}
    inner = tuple(r for r in expand_ranges(rows.outer, match.rows) if r.symbol not in walked)
    return [(inner, stage.body) for stage in rows.stages]


def _illegal(
    rows: LoopNest, columns: LoopNest, match: _Match, joined: int, buffers: Mapping[str, Buffer]
) -> str | None:
    """Why the columns' elements cannot be computed at the end of stage ``joined`` of the row nest, or ``None``."""
    row_kernel, column_kernel = Kernel.of(rows, buffers), Kernel.of(columns, buffers)
    row_env, column_env = digit_env(match.rows), digit_env(match.columns)
    for access in column_kernel.loads:
        store = row_kernel.stores.get(access.buffer)
        if store is None:
            continue
        if not store.plain or store.flat.substitute(row_env) != access.flat.substitute(column_env):
            return f"it reads other elements of {access.buffer} than the row in hand"
        if store.stage > joined:
            return f"{access.buffer} is known after the last pass over the columns only"
    return None


def _partial(name: str, loops: Sequence[Range], dtype: str, device: str) -> Buffer:
    sizes = tuple(loop.size for loop in loops)
    return Buffer(name, dtype, sizes, contiguous_strides(sizes), BufferKind.TEMPORARY, device)


def _indices(chunks: Sequence[Range], columns: LoopNest) -> tuple[Expr, ...]:
    return tuple(sym(loop.symbol) for loop in (*chunks, *columns.outer))


def _add_shares(
    builder: NestBuilder,
    parts: _OuterReduction,
    added: Sequence[Buffer],
    chunks: Sequence[Range],
    columns: LoopNest,
    env: dict[Symbol, Expr],
    names: dict[str, str],
) -> None:
    """Append what the column nest computes for one element, added to its column's partial sums."""
    builder.copy([i for i in parts.sums.body if not isinstance(i, Reduce)], env, names)
    column = tuple(sym(loop.symbol).substitute(env) for loop in columns.outer)
    place = (*(sym(loop.symbol) for loop in chunks), *column)
    for buffer, reduce in zip(added, parts.reduces, strict=True):
        builder.copy([Store(buffer.name, place, reduce.value, "add")], {}, names)


def _zeros(
    added: Sequence[Buffer], chunks: Sequence[Range], columns: LoopNest, buffers: Mapping[str, Buffer]
) -> LoopNest:
    builder = NestBuilder(f"{columns.name}_zeros", (*chunks, *columns.outer), columns.origin, buffers)
    for buffer in added:
        dtype = dtype_from_torch_name(buffer.dtype)
        assert dtype is not None
        builder.store_to(buffer, _indices(chunks, columns), builder.const(0.0, dtype))
    return builder.finish()


def _finish(
    columns: LoopNest,
    parts: _OuterReduction,
    added: Sequence[Buffer],
    chunks: Sequence[Range],
    buffers: Mapping[str, Buffer],
) -> LoopNest:
    """The column nest over the partial sums of the chunks."""
    builder = NestBuilder(columns.name, columns.outer, columns.origin, buffers)
    builder.begin_stage(tuple(chunks))
    names: dict[str, str] = {}
    for buffer, reduce in zip(added, parts.reduces, strict=True):
        load = Load(f"{reduce.result}:part", buffer.name, _indices(chunks, columns), reduce.dtype)
        builder.copy([load, replace(reduce, value=load.result)], {}, names)
    builder.copy_stages(parts.rest, {}, names=names)
    return builder.finish()


PASS = Pass(
    "fuse-mixed-order-reductions",
    fuse_mixed_order_reductions,
    why="sums over rows and over columns of the same data read it once",
    after=("fuse-kernels",),
    when=fuses,
)
