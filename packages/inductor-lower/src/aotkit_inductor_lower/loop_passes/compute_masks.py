"""Pass: masks and biases of attention are computed in its kernels, where they follow from positions.

Note [Masks that are computed]
    What hides keys, or is added to scores, is often a function of the head, the query and the key: a slope times their
    distance, ``table[query - key]``, whether both are of one document. As a tensor it is as large as the scores. Here
    the load of such a mask becomes what computes it, in nests of attention only, and a target writes that for each
    block of scores (:class:`~..kernel_ir.attention_site.Places`).

    A mask is computed there if it is made of elementwise operations, few of them dear, that read vectors and tables
    which lie in a cache or are much smaller than itself, or one tensor of its own size; and if nothing else needs it in
    memory. Places in tables must lie in range for certain: a kernel of attention reports no errors. Whole numbers that
    are sums of positions become index expressions, so most places are known as such. If the target knows no form for
    what comes out, masks stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..analysis.dependencies import Dependencies
from ..analysis.nests import body_size, buffer_bytes, heavy_count, ranges_of
from ..ir import (
    CONTRACTIONS,
    Alias,
    Buffer,
    BufferKind,
    BufferRef,
    CheckedIndex,
    Compute,
    Const,
    DType,
    Index,
    Instr,
    LoopNest,
    Program,
    Reduce,
    Stage,
    Step,
    Store,
)
from ..ir.builder import NestBuilder
from ..ir.inlining import Inlinable
from ..ir.walk import (
    buffers_of,
    computes,
    contains,
    definitions,
    instructions,
    loads,
    operands,
    step_reads,
    stores,
    substitute,
)
from ..lowering.attention import ATTENTIONS
from ..ops.scalar import TRAPPING
from ..passes import NO_FUEL, Decision, Pass, PassContext
from ..symbolic import Expr, Ranges, Symbol, SymbolKind, bounds, prove_lt, prove_nonnegative, to_expr
from .drop_dead_steps import drop_dead_steps
from .inline_producers import join_origins

__all__ = ["PASS", "compute_masks"]

_SMALL = 8  # times that what is read is smaller than the mask
_CACHED = 32 << 10  # bytes that every multiprocessor has at hand
_DEAR = 3  # operations of a mask that may be divisions, roots and the like
_LARGEST = 64  # instructions of a mask
_INTEGERS = {DType.I32: 31, DType.I64: 63}
_ALWAYS = "a mask that follows from positions is not in memory"


def compute_masks(program: Program, ctx: PassContext) -> Program:
    """The program with nests of attention that compute their masks, without masks that nothing reads any more."""
    nests = [step for step in program.steps if isinstance(step, LoopNest) and _is_attention(step)]
    if not nests or not ctx.target.capabilities.attention_bodies:
        return program
    buffers, makers = buffers_of(program), _Makers.of(program)
    made: dict[str, LoopNest] = {}
    for nest in nests:
        own = _computed(nest, makers, buffers, ctx)
        if own is not nest:
            made[nest.name] = own
    if not made:
        return program
    steps: list[Step] = [made.get(step.name, step) for step in program.steps]
    return drop_dead_steps(_without_dead_stores(replace(program, steps=tuple(steps))))


def _is_attention(nest: LoopNest) -> bool:
    return any(op in ATTENTIONS for op in nest.origin.ops)


def _computed(nest: LoopNest, makers: _Makers, buffers: Mapping[str, Buffer], ctx: PassContext) -> LoopNest:
    """The nest with as many of its masks computed as the target has a form for."""
    for name in _masks(nest):
        whole = makers.of_mask(name)
        if whole is None:
            continue
        tried = _expanded(nest, whole)
        if tried is None or ctx.target.choose_attention(tried, buffers, ctx.options).form != "attention":
            continue
        taken = ctx.fuel.take()
        ctx.decisions.append(Decision("inline", name, nest.name, taken, _ALWAYS if taken else NO_FUEL))
        nest = tried if taken else nest
    return nest


def _masks(nest: LoopNest) -> list[str]:
    """Buffers with an element for each score that the nest reads: where scores are no sums yet."""
    found: dict[str, None] = {}
    for stage in nest.stages:
        if not stage.ranges or any(i.op in CONTRACTIONS.values() for i in computes(stage.body)):
            continue
        column = Symbol(stage.ranges[-1].symbol)
        found |= {i.buffer: None for i in loads(stage.body) if any(column in index.symbols for index in i.indices)}
    return list(found)


class _Makers:
    """What computes buffers that are one elementwise nest's."""

    def __init__(self, nests: Mapping[str, Inlinable], buffers: Mapping[str, Buffer], kept: set[str]) -> None:
        self._nests, self._buffers, self._kept = nests, buffers, kept

    @staticmethod
    def of(program: Program) -> _Makers:
        """Of all buffers of a program."""
        dependencies, buffers = Dependencies.of(program), buffers_of(program)
        found: dict[str, Inlinable] = {}
        for step in program.steps:
            if isinstance(step, Alias) and step.base in found:
                seen = _seen_through(step, buffers, found[step.base])
                found |= {step.result: seen} if seen is not None else {}
            if not isinstance(step, LoopNest) or len(step.stages) != 1 or step.stages[0].ranges:
                continue
            if any(dependencies.root[name] in dependencies.unstable for name in step.reads) or not _is_plain(step):
                continue
            for store in stores(step.stages[0].body):
                symbols = _places(store, step, buffers[store.buffer])
                alone = len(dependencies.writers[store.buffer]) == 1
                if symbols is not None and alone and buffers[store.buffer].kind is BufferKind.TEMPORARY:
                    found[store.buffer] = Inlinable(_part(step, store), symbols)
        return _Makers(found, buffers, _kept(program))

    def of_mask(self, name: str) -> dict[str, Inlinable] | None:
        """What computes a mask, with all that is computed for it; nothing where it is better read."""
        if name not in self._nests or name in self._kept:
            return None
        found: dict[str, Inlinable] = {}
        pending, read = [name], dict[str, None]()
        while pending:
            each = pending.pop()
            maker = self._nests.get(each)
            if maker is None:
                read[each] = None
            elif each not in found:
                found[each] = maker
                pending += maker.nest.reads
        nests = [maker.nest for maker in found.values()]
        little = self._reads_little(name, list(read))
        small = sum(map(body_size, nests)) <= _LARGEST and sum(map(heavy_count, nests)) <= _DEAR
        return found if little and small else None

    def _reads_little(self, name: str, read: Sequence[str]) -> bool:
        whole = buffer_bytes(self._buffers[name])
        sizes = [buffer_bytes(self._buffers[each]) for each in read]
        large = [size for size in sizes if size > max(whole // _SMALL, _CACHED)]
        return not large or (len(large) == 1 and large[0] <= whole)


def _kept(program: Program) -> set[str]:
    """Buffers that a call or the caller needs in memory."""
    found = {out.name for out in program.outputs if isinstance(out, BufferRef)}
    for step in reversed(program.steps):
        if isinstance(step, Alias):
            found |= {step.base} if step.result in found else set()
        elif not isinstance(step, LoopNest):
            found.update(step_reads(step))
    return found


def _seen_through(step: Alias, buffers: Mapping[str, Buffer], maker: Inlinable) -> Inlinable | None:
    """What computes another view of a buffer: with dimensions of one element more or less, or repeated ones."""
    base, view = buffers[step.base], buffers[step.result]
    if step.reuses or step.offset != 0 or base.dtype != view.dtype:
        return None
    left = [each for each in zip(base.sizes, base.strides, maker.symbols, strict=True) if each[0] != 1]
    symbols: list[Symbol | None] = []
    for size, stride in zip(view.sizes, view.strides, strict=True):
        if size == 1 or stride == 0:
            symbols.append(None)
        elif left and left[0][:2] == (size, stride):
            symbols.append(left.pop(0)[2])
        else:
            return None
    return None if left else Inlinable(maker.nest, tuple(symbols))


def _is_plain(nest: LoopNest) -> bool:
    """Whether a nest is elementwise, without accesses under a mask, and reports no error but of a place."""
    body = instructions(nest.stages)
    whole = all(i.mask is None for i in loads(body)) and all(i.plain for i in stores(body))
    return whole and not contains(body, Reduce) and not _may_trap(body)


def _may_trap(body: Sequence[Instr]) -> bool:
    """Whether an operation may report an error: a division by anything but a number that is greater than 0."""
    known = definitions(body)
    for instr in computes(body):
        divisor = known.get(instr.args[-1]) if instr.op in TRAPPING else None
        if instr.op in TRAPPING and not (isinstance(divisor, Const) and divisor.value > 0):
            return True
    return False


def _places(store: Store, nest: LoopNest, buffer: Buffer) -> tuple[Symbol | None, ...] | None:
    """The loop of each dimension of a buffer that a store fills; ``None`` where it does not."""
    left = {loop.symbol: loop.size for loop in nest.outer}
    found: list[Symbol | None] = []
    for index, size in zip(store.indices, buffer.sizes, strict=True):
        symbol = index.symbol
        if symbol is not None and left.pop(symbol.name, None) == size:
            found.append(symbol)
        elif index.constant == 0 and size == 1:
            found.append(None)
        else:
            return None
    return None if any(size != 1 for size in left.values()) else tuple(found)


def _part(nest: LoopNest, store: Store) -> LoopNest:
    """What of a nest makes one of its results."""
    return replace(nest, stages=(Stage((), _needed(nest.stages[0].body, [store])),))


def _needed(body: Sequence[Instr], ends: Sequence[Instr]) -> tuple[Instr, ...]:
    """The instructions of a body that some need, and these."""
    wanted = {name for instr in ends for name in operands(instr)}
    kept: list[Instr] = []
    for instr in reversed(body):
        if any(instr is end for end in ends) or (not isinstance(instr, Store) and instr.result in wanted):
            kept.append(instr)
            wanted.update(operands(instr))
    return tuple(reversed(kept))


def _expanded(nest: LoopNest, inlinable: Mapping[str, Inlinable]) -> LoopNest | None:
    """The nest with these buffers computed; ``None`` where a place in a tensor might be out of range."""
    origin = join_origins([*(maker.nest.origin for maker in inlinable.values()), nest.origin])
    builder = NestBuilder(nest.name, nest.outer, origin, None, inlinable, share=False)
    builder.copy_stages(nest.stages, {})
    made = builder.finish()
    stages = tuple(_with_positions(old, new, made) for old, new in zip(nest.stages, made.stages, strict=True))
    if any(contains(stage.body, CheckedIndex) for stage in stages):
        return None
    return replace(made, stages=stages)


def _with_positions(old: Stage, stage: Stage, nest: LoopNest) -> Stage:
    """A stage that had masks computed, with sums of positions as index expressions."""
    if len(old.body) == len(stage.body):
        return stage
    ranges = ranges_of(replace(nest, stages=(stage,)))
    body = _Positions(ranges).read(stage.body)
    ends = [i for i in body if isinstance(i, Store | Reduce)]
    return stage.with_body(_needed(body, ends))


class _Positions:
    """Finds whole numbers that are sums of loop variables."""

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.known: dict[str, Expr] = {}
        self.places: dict[Symbol, Expr] = {}

    def read(self, body: Sequence[Instr]) -> list[Instr]:
        """The body with index expressions in their place."""
        found: list[Instr] = []
        for instr in body:
            instr = substitute(instr, self.places) if self.places else instr
            if isinstance(instr, CheckedIndex):
                place = self.known.get(instr.value)
                if place is not None and self._lies_within(place, instr.size):
                    self.places[Symbol(instr.result, SymbolKind.VALUE)] = place
                    continue
            elif isinstance(instr, Index | Const | Compute) and instr.dtype in _INTEGERS:
                value = self._value(instr)
                if value is not None and self._fits(value, instr.dtype):
                    self.known[instr.result] = value
                    if isinstance(instr, Compute):
                        instr = Index(instr.result, value, instr.dtype)
            found.append(instr)
        return found

    def _value(self, instr: Index | Const | Compute) -> Expr | None:
        if isinstance(instr, Index):
            return None if any(s.kind is SymbolKind.VALUE for s in instr.expr.symbols) else instr.expr
        if isinstance(instr, Const):
            return to_expr(int(instr.value))
        args = [self.known.get(name) for name in instr.args]
        if None in args:
            return None
        first, *rest = (arg for arg in args if arg is not None)
        if instr.op == "cast":
            return first
        if instr.op == "neg":
            return first * -1
        if instr.op in ("add", "sub"):
            return first + rest[0] if instr.op == "add" else first - rest[0]
        constant = instr.op == "mul" and (first.constant is not None or rest[0].constant is not None)
        return first * rest[0] if constant else None

    def _fits(self, value: Expr, dtype: DType) -> bool:
        """Whether a value is one of the type, whatever the positions are."""
        found, most = bounds(value, self.ranges), 1 << _INTEGERS[dtype]
        return found.low is not None and found.high is not None and -most <= found.low and found.high < most

    def _lies_within(self, place: Expr, size: Expr) -> bool:
        return prove_nonnegative(place, self.ranges) and prove_lt(place, size, self.ranges)


def _without_dead_stores(program: Program) -> Program:
    """Without stores to temporaries that nothing reads, in nests that have others."""
    dependencies, buffers = Dependencies.of(program), buffers_of(program)
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, LoopNest) and len(step.writes) > 1 and len(step.stages) == 1:
            body = step.stages[0].body
            dead = {name for name in step.writes if _is_dead(name, dependencies, buffers)}
            ends = [i for i in body if isinstance(i, Store | Reduce) and not _goes_to(i, dead)]
            if dead and ends:
                step = replace(step, stages=(step.stages[0].with_body(_needed(body, ends)),))
        steps.append(step)
    return replace(program, steps=tuple(steps))


def _is_dead(name: str, dependencies: Dependencies, buffers: Mapping[str, Buffer]) -> bool:
    temporary = buffers[name].kind is BufferKind.TEMPORARY and dependencies.root[name] == name
    return temporary and name not in dependencies.escapes and not dependencies.readers.get(name)


def _goes_to(instr: Store | Reduce, names: set[str]) -> bool:
    return isinstance(instr, Store) and instr.buffer in names


PASS = Pass(
    "compute-masks",
    compute_masks,
    why="masks as large as the scores are neither written nor read",
    after=("generate-attention",),
)
