"""Emitting the instructions of a stage body for the current block of lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from ....ir import CheckedIndex, Compute, Const, DType, Index, Instr, Load, Reduce, Store
from ....launch_plan.status import INDEX_ERROR
from ....ops.dtypes import is_half
from ....ops.reductions import store_op
from ....symbolic import Expr, Symbol, to_expr
from .context import KernelContext, Value, ramp_literal
from .emitter import Emitter, Ssa, imm, vector_type
from .lane_limits import limited
from .ops import emit_op
from .transpose import transpose
from .types import literal, memory_type, register_type, width
from .windows import window_load

__all__ = ["address_of", "emit_body", "out_of_sight"]


def _no_reduce(reduce: Reduce, value: Value) -> None:
    raise AssertionError(f"reduce {reduce.result} outside a loop")


def emit_body(
    ctx: KernelContext, body: Sequence[Instr], reduce: Callable[[Reduce, Value], Value | None] = _no_reduce
) -> None:
    """Emit ``body`` in order; ``reduce`` receives each reduction with the value to take in and gives the result of a
    running one."""
    for instr in body:
        if isinstance(instr, Load):
            ctx.values[instr.result] = _load(ctx, instr)
        elif isinstance(instr, Compute):
            ctx.values[instr.result] = _compute(ctx, instr)
        elif isinstance(instr, Const):
            constant = Ssa(literal(instr.value, instr.dtype), register_type(instr.dtype))
            ctx.values[instr.result] = Value(instr.dtype, (constant,))
        elif isinstance(instr, Store):
            _store(ctx, instr)
        elif isinstance(instr, Reduce):
            running = reduce(instr, ctx.values[instr.value])
            if running is not None:
                ctx.values[instr.result] = running
        elif isinstance(instr, Index):
            ctx.values[instr.result] = ctx.index_value(instr.expr, instr.dtype)
        elif isinstance(instr, CheckedIndex):
            ctx.values[instr.result] = _check_index(ctx, instr)
    ctx.ops.set_flags()


def _compute(ctx: KernelContext, instr: Compute) -> Value:
    args = [ctx.values[a] for a in instr.args]
    dtypes = [a.dtype for a in args]
    if ctx.vector is None or not any(a.varying for a in args):
        return Value(instr.dtype, (emit_op(ctx.ops, instr.op, [a.parts[0] for a in args], dtypes, instr.dtype),))
    within = limited(ctx, instr)
    if within is not None:
        return within
    lanes = ctx.vector.lanes
    parts = []
    for copy in range(ctx.vector.interleave):
        operands = [ctx.part(name, copy, lanes) for name in instr.args]
        parts.append(emit_op(ctx.ops, instr.op, operands, dtypes, instr.dtype))
    return Value(instr.dtype, tuple(parts), varying=True)


MOST_SPACED = 8  # from one lane to the next in memory
_UNIT_DEPTH = 1  # of the loop over units of work, the outermost one


def _check_index(ctx: KernelContext, instr: CheckedIndex) -> Value:
    value, ops, size = ctx.values[instr.value], ctx.ops, ctx.scalar(instr.size)
    parts = []
    for part in value.parts:
        lanes = ops.lanes(part)
        limit, zero = ctx.em.splat(size, lanes), ctx.em.splat(imm(0), lanes)
        wrapped = ops.select(ops.compare("icmp slt", part, zero), ops.op("add", part, limit), part)
        bad = ops.compare("icmp uge", wrapped, limit)
        ops.flag(bad, INDEX_ERROR)
        parts.append(ops.select(bad, zero, wrapped))
    if (instr.size.constant or 0) < 1:  # no element 0 may be read before the loop, which an empty dimension skips
        parts = [part._replace(depth=max(part.depth, _UNIT_DEPTH)) for part in parts]
    return Value(DType.I64, tuple(parts), value.varying)


# -- memory ----------------------------------------------------------------------------------------------


def _place(ctx: KernelContext, buffer: str, offset: Expr) -> Expr:
    """The offset in memory: scratch rows hold one element per lane of the vector variable of an outer loop."""
    spread = ctx.scratch.get(buffer, 1)
    return offset if spread == 1 else offset * spread


def _row_lanes(ctx: KernelContext, buffer: str) -> bool:
    return ctx.scratch.get(buffer, 1) != 1 and ctx.vector is not None


def _address(ctx: KernelContext, buffer: str, element: str, offset: Expr, skip: Symbol | None = None) -> Ssa:
    """The address of an offset without the terms in ``skip``. Constants come last, into the addressing mode."""
    constant = next((factor for monomial, factor in offset.terms if not monomial), 0)
    base = _gep(ctx, buffer, element, ctx.scalar(offset - constant, skip=skip))
    return _advance(ctx, base, element, imm(constant))


def _gep(ctx: KernelContext, buffer: str, element: str, offset: Ssa) -> Ssa:
    return ctx.em.element(element, ctx.pointers[buffer], offset)


def _advance(ctx: KernelContext, pointer: Ssa, element: str, steps: Ssa) -> Ssa:
    return ctx.em.element(element, pointer, steps)


def _read(ctx: KernelContext, buffer: str, type_: str, pointer: Ssa, align: int) -> Ssa:
    """A load instruction, hoisted out of loops only where the nest does not write that memory."""
    text = f"load {type_}, ptr {pointer.text}, align {align}"
    if buffer in ctx.written or pointer.depth < ctx.hoist_depth:
        if buffer in ctx.written:
            return ctx.em.here(type_, text)
        floor = Ssa("0", "i64", ctx.hoist_depth)
        return ctx.em.pure(type_, text, pointer, floor)
    return ctx.em.pure(type_, text, pointer)


def _to_register(ctx: KernelContext, value: Ssa, dtype: DType) -> Ssa:
    if dtype is not DType.BOOL:
        return value
    zero = Ssa("zeroinitializer" if value.type[0] == "<" else "0", value.type)
    return ctx.ops.compare("icmp ne", value, zero)


def _load(ctx: KernelContext, instr: Load) -> Value:
    dtype, element = instr.dtype, memory_type(instr.dtype)
    offset = _place(ctx, instr.buffer, instr.indices[0])
    mask_varies = instr.mask is not None and ctx.values[instr.mask].varying
    row_lanes = _row_lanes(ctx, instr.buffer)
    if not (ctx.varies(offset) or mask_varies or row_lanes):
        pointer = _address(ctx, instr.buffer, element, offset)
        mask = ctx.values[instr.mask].parts[0] if instr.mask is not None else None
        return Value(dtype, (_scalar_load(ctx, instr, pointer, mask, dtype),))
    vector = ctx.vector
    assert vector is not None
    slope = to_expr(1) if row_lanes and not ctx.varies(offset) else ctx.slope(offset)
    if _turned(ctx, instr, offset, slope):
        return Value(dtype, tuple(_turned_load(ctx, instr, offset)), varying=True)
    parts = []
    for copy in range(vector.interleave):
        if slope == 0 and instr.mask is None:
            pointer = _address(ctx, instr.buffer, element, vector.at(offset, copy))
            parts.append(ctx.em.splat(_scalar_load(ctx, instr, pointer, None, dtype), vector.lanes))
            continue
        if slope == 0 and not row_lanes:
            parts.append(_one_for_all(ctx, instr, vector.at(offset, copy), copy))
            continue
        if slope is not None and slope.constant in (1, -1) and _maskable(ctx, instr, dtype):
            raw = _unit_load(ctx, instr, offset, copy, int(slope.constant or 1))
            parts.append(_to_register(ctx, raw, dtype))
            continue
        if slope is not None and _is_spaced(ctx, slope) and _maskable(ctx, instr, dtype):
            raw = _spaced_load(ctx, instr, offset, copy, slope.constant or 0)
            parts.append(_to_register(ctx, raw, dtype))
            continue
        one_by_one = functools.partial(_lanes_apart, ctx, instr, offset, slope, copy)
        if slope is None and ctx.scratch.get(instr.buffer, 1) == 1:
            base = functools.partial(_address, ctx, instr.buffer, element)
            packed = window_load(ctx, instr, offset, copy, base, one_by_one)
        else:
            packed = one_by_one()
        parts.append(_to_register(ctx, packed, dtype))
    return Value(dtype, tuple(parts), varying=True)


def _one_for_all(ctx: KernelContext, instr: Load, offset: Expr, copy: int) -> Ssa:
    """The same element in the lanes of a mask: loaded once, where there is such a lane."""
    ops, lanes = ctx.ops, ctx.mask(instr.mask, copy)
    assert lanes is not None
    pointer = _address(ctx, instr.buffer, memory_type(instr.dtype), offset)
    value = ctx.em.splat(_scalar_load(ctx, instr, pointer, ops.any(lanes), instr.dtype), ops.lanes(lanes))
    return ops.select(lanes, value, ops.const(instr.other, instr.dtype, value))


def _lanes_apart(ctx: KernelContext, instr: Load, offset: Expr, slope: Expr | None, copy: int) -> Ssa:
    """The lanes loaded one by one, as they lie in memory."""
    scalars, lanes = [], ctx.mask(instr.mask, copy)
    for lane, pointer in enumerate(_lane_pointers(ctx, instr.buffer, memory_type(instr.dtype), offset, slope, copy)):
        mask = ctx.em.lane(lanes, lane, "i1") if lanes is not None else None
        scalars.append(_scalar_load(ctx, instr, pointer, mask, instr.dtype, keep_byte=True))
    return ctx.em.pack(scalars)


def _maskable(ctx: KernelContext, instr: Load | Store, dtype: DType) -> bool:
    """Whether a whole-vector access can carry the mask: narrow elements need AVX-512."""
    masked = instr.mask is not None or (ctx.vector is not None and ctx.vector.tail is not None)
    return not masked or width(dtype) >= 32 or ctx.ops.target.vector_bits == 512


def _scalar_load(
    ctx: KernelContext, instr: Load, pointer: Ssa, mask: Ssa | None, dtype: DType, keep_byte: bool = False
) -> Ssa:
    element = memory_type(dtype)
    if mask is not None:
        dummy = Ssa("@zero_element", "ptr")
        pointer = ctx.em.pure("ptr", f"select i1 {mask.text}, ptr {pointer.text}, ptr {dummy.text}", pointer, mask)
    value = _read(ctx, instr.buffer, element, pointer, width(dtype) // 8)
    if mask is not None:
        other = Ssa(_memory_literal(instr.other, dtype), element)
        value = ctx.ops.select(mask, value, other)
    return value if keep_byte else _to_register(ctx, value, dtype)


def _memory_literal(value: float | int | bool, dtype: DType) -> str:
    return str(int(bool(value))) if dtype is DType.BOOL else literal(value, dtype)


def _unit_pointer(ctx: KernelContext, buffer: str, element: str, offset: Expr, copy: int, step: int) -> Ssa:
    vector = ctx.vector
    assert vector is not None
    offset = vector.at(offset, copy)
    constant = next((factor for monomial, factor in offset.terms if not monomial), 0)
    base = _gep(ctx, buffer, element, ctx.scalar(offset - constant, skip=vector.symbol))
    if ctx.scratch.get(buffer, 1) != 1:
        return _advance(ctx, base, element, imm(constant + copy * vector.lanes))
    moved = _advance(ctx, base, element, ctx.em.mul(vector.base, imm(step)))
    if ctx.beside:  # LLVM would weigh every pair of addresses of the loop, to no avail: they are near to this one
        moved = ctx.em.pure("ptr", f'call ptr asm "", "=r,0"(ptr {moved.text})', moved)
    first = vector.first(copy) * step - (vector.lanes - 1 if step < 0 else 0)
    return _advance(ctx, moved, element, imm(constant + first))


def address_of(ctx: KernelContext, load: Load, offset: Expr, copy: int) -> Ssa:
    """Where a copy of the vector lies that ``load`` reads at ``offset``, which neighbours in memory follow."""
    return _unit_pointer(ctx, load.buffer, memory_type(load.dtype), offset, copy, 1)


def _unit_load(ctx: KernelContext, instr: Load, offset: Expr, copy: int, step: int) -> Ssa:
    vector, dtype = ctx.vector, instr.dtype
    assert vector is not None
    element, lanes, align = memory_type(dtype), vector.lanes, width(dtype) // 8
    pointer = _unit_pointer(ctx, instr.buffer, element, offset, copy, step)
    type_ = vector_type(element, lanes)
    mask = ctx.mask(instr.mask, copy)
    if mask is None:
        value = _read(ctx, instr.buffer, type_, pointer, align)
    else:
        if step < 0:
            mask = ctx.em.shuffle(mask, mask, "i1", range(lanes - 1, -1, -1))
        value = _kept_masked(ctx, instr, _masked_load(ctx, instr, pointer, mask))
    return ctx.em.shuffle(value, value, element, range(lanes - 1, -1, -1)) if step < 0 else value


def _is_spaced(ctx: KernelContext, slope: Expr) -> bool:
    """Whether lanes are so near to each other in memory that :func:`_spaced_load` takes less time than one by one."""
    assert ctx.vector is not None
    return slope.constant is not None and 2 <= slope.constant <= min(MOST_SPACED, ctx.vector.lanes // 2)


def _spaced_load(ctx: KernelContext, instr: Load, offset: Expr, copy: int, space: int) -> Ssa:
    """Every ``space``-th element, by whole vectors of all that lies from the first lane to the last, and not beyond."""
    vector, dtype, em = ctx.vector, instr.dtype, ctx.em
    assert vector is not None
    element, lanes, align = memory_type(dtype), vector.lanes, width(dtype) // 8
    type_ = vector_type(element, lanes)
    first = _unit_pointer(ctx, instr.buffer, element, offset, copy, space)
    mask = ctx.mask(instr.mask, copy)
    found: Ssa | None = None
    for begin in (*range(0, lanes * (space - 1), lanes), (lanes - 1) * (space - 1)):
        pointer = _advance(ctx, first, element, imm(begin))
        own = {lane: lane * space - begin for lane in range(lanes) if 0 <= lane * space - begin < lanes}
        if mask is None:
            value = _read(ctx, instr.buffer, type_, pointer, align)
        else:
            value = _masked_load(ctx, instr, pointer, _spread_mask(ctx, mask, {at: lane for lane, at in own.items()}))
        if found is None:
            found = em.shuffle(value, value, element, [own.get(lane, 0) for lane in range(lanes)])
        else:
            found = em.shuffle(found, value, element, [lanes + own[k] if k in own else k for k in range(lanes)])
    assert found is not None
    return found


def _spread_mask(ctx: KernelContext, mask: Ssa, lane_at: Mapping[int, int]) -> Ssa:
    """The mask of a vector, at some of whose places lanes of ``mask`` are."""
    lanes = ctx.ops.lanes(mask)
    none = Ssa("zeroinitializer", mask.type)
    return ctx.em.shuffle(mask, none, "i1", [lane_at.get(place, lanes) for place in range(lanes)])


def _masked_load(ctx: KernelContext, instr: Load, pointer: Ssa, mask: Ssa) -> Ssa:
    element = memory_type(instr.dtype)
    type_ = vector_type(element, ctx.ops.lanes(mask))
    other = ctx.em.splat(Ssa(_memory_literal(instr.other, instr.dtype), element), ctx.ops.lanes(mask))
    symbol = f"llvm.masked.load.v{ctx.ops.lanes(mask)}{_mangle(element)}.p0"
    ctx.em.declare(symbol, type_, ["ptr", mask.type, type_])
    given = f"ptr align {width(instr.dtype) // 8} {pointer.text}, {mask.typed}, {other.typed}"
    text = f"call {type_} @{symbol}({given})"
    if instr.buffer in ctx.written:
        return ctx.em.here(type_, text)
    here = Ssa("0", "i64", ctx.em.depth)  # it stays where it is, and what reads the same reads it once
    return ctx.em.pure(type_, text, pointer, mask, here)


def _kept_masked(ctx: KernelContext, instr: Load, value: Ssa) -> Ssa:
    """The vector that was loaded under a mask of the kernel's own, out of LLVM's sight.

    Note [Masked loads stay masked]
        With AVX-512, LLVM puts a masked load into a fused multiply-add under the same mask as its operand in memory,
        and where it must keep the third factor, it takes the load out again, without the mask: so it reads what the
        mask forbids, which may be no memory of this process. An empty piece of assembly keeps both apart.
    """
    if instr.mask is None or instr.dtype not in (DType.F32, DType.F64) or not ctx.ops.target.has("avx512f"):
        return value
    return out_of_sight(ctx.em, value, memory_type(instr.dtype), width(instr.dtype))


def out_of_sight(em: Emitter, value: Ssa, element: str, bits: int) -> Ssa:
    """Through an empty piece of assembly, register by register: LLVM ends the process at a vector that fills none."""
    lanes = int(value.type[1 : value.type.index(" ")])
    most, least = 512 // bits, 128 // bits
    if lanes > most:
        half = lanes // 2
        parts = (em.shuffle(value, value, element, range(low, low + half)) for low in (0, half))
        low, high = (out_of_sight(em, part, element, bits) for part in parts)
        return em.shuffle(low, high, element, range(lanes))
    if lanes < least:
        wide = out_of_sight(em, em.shuffle(value, value, element, [k % lanes for k in range(least)]), element, bits)
        return em.shuffle(wide, wide, element, range(lanes))
    return em.pure(value.type, f'call {value.type} asm "", "=v,0"({value.typed})', value)


def _mangle(element: str) -> str:
    return {"float": "f32", "double": "f64"}.get(element, element)


def _turned(ctx: KernelContext, instr: Load | Store, offset: Expr, slope: Expr | None) -> bool:
    """Whether the access has unit stride along the tile variable only, see Note [Tiles]."""
    vector = ctx.vector
    if vector is None or vector.tile is None or slope is None or slope.constant in (0, 1, -1) or instr.mask is not None:
        return False
    along = offset.coefficient(vector.tile)
    plain = not (isinstance(instr, Store) and instr.accumulates)
    return plain and along is not None and along.constant == 1 and vector.tile not in slope.symbols


def _turned_load(ctx: KernelContext, instr: Load, offset: Expr) -> list[Ssa]:
    element, align = memory_type(instr.dtype), width(instr.dtype) // 8
    rows = []
    for pointer in _lane_pointers(ctx, instr.buffer, element, offset, ctx.slope(offset), 0):
        assert ctx.vector is not None
        rows.append(_read(ctx, instr.buffer, vector_type(element, ctx.vector.lanes), pointer, align))
    columns = transpose(ctx.em, rows, element, width(instr.dtype))
    return [_to_register(ctx, column, instr.dtype) for column in columns]


def _turned_store(ctx: KernelContext, instr: Store, offset: Expr) -> None:
    vector, dtype = ctx.vector, ctx.values[instr.value].dtype
    assert vector is not None
    element, align = memory_type(dtype), width(dtype) // 8
    columns = [_to_memory(ctx, ctx.part(instr.value, copy, vector.lanes), dtype) for copy in range(vector.interleave)]
    rows = transpose(ctx.em, columns, element, width(dtype))
    pointers = _lane_pointers(ctx, instr.buffer, element, offset, ctx.slope(offset), 0)
    for row, pointer in zip(rows, pointers, strict=True):
        ctx.em.effect(f"store {row.typed}, ptr {pointer.text}, align {align}")


def _lane_pointers(
    ctx: KernelContext, buffer: str, element: str, offset: Expr, slope: Expr | None, copy: int
) -> list[Ssa]:
    """The address of each lane. Evenly spaced lanes step from one base pointer."""
    vector = ctx.vector
    assert vector is not None
    lanes = range(vector.first(copy), vector.first(copy) + vector.lanes)
    if slope is None:
        offsets = ctx.lanes_i64(offset, copy)
        if ctx.scratch.get(buffer, 1) != 1:  # each lane has its own element of a scratch row's place
            offsets = ctx.ops.op("add", offsets, ramp_literal(lanes, "i64"))
        return [_gep(ctx, buffer, element, ctx.em.lane(offsets, k, "i64")) for k in range(vector.lanes)]
    base = _address(ctx, buffer, element, vector.at(offset, copy), skip=vector.symbol)
    stride = ctx.scalar(slope)
    first = _advance(ctx, base, element, ctx.em.mul(vector.base, stride))
    return [_advance(ctx, first, element, ctx.em.mul(stride, imm(lane))) for lane in lanes]


def _store(ctx: KernelContext, instr: Store) -> None:
    dtype = ctx.values[instr.value].dtype
    element = memory_type(dtype)
    offset = _place(ctx, instr.buffer, instr.indices[0])
    vector = ctx.vector
    row_lanes = _row_lanes(ctx, instr.buffer)
    varies = ctx.varies(offset) or row_lanes
    names = [instr.value, *([instr.mask] if instr.mask is not None else [])]
    varies = varies or instr.accumulates  # equal elements for one place count as often as there are lanes
    if vector is None or not (varies or any(ctx.values[n].varying for n in names)):
        pointer = _address(ctx, instr.buffer, element, offset)
        mask = ctx.values[instr.mask].parts[0] if instr.mask is not None else None
        _scalar_store(ctx, instr, pointer, ctx.values[instr.value].parts[0], mask, dtype)
        return
    slope = to_expr(1) if row_lanes and not ctx.varies(offset) else ctx.slope(offset)
    if _turned(ctx, instr, offset, slope):
        _turned_store(ctx, instr, offset)
        return
    for copy in range(vector.interleave):
        if slope is not None and slope.constant in (1, -1) and _maskable(ctx, instr, dtype):
            _unit_store(ctx, instr, offset, copy, int(slope.constant or 1))
            continue
        value, lanes = ctx.part(instr.value, copy, vector.lanes), ctx.mask(instr.mask, copy)
        for lane, pointer in enumerate(_lane_pointers(ctx, instr.buffer, element, offset, slope, copy)):
            mask = ctx.em.lane(lanes, lane, "i1") if lanes is not None else None
            _scalar_store(ctx, instr, pointer, ctx.em.lane(value, lane, register_type(dtype)), mask, dtype)


def _to_memory(ctx: KernelContext, value: Ssa, dtype: DType) -> Ssa:
    return ctx.ops.convert("zext", value, "i8") if dtype is DType.BOOL else value


def _combined(ctx: KernelContext, mode: str, old: Ssa, value: Ssa, dtype: DType) -> Ssa:
    if not is_half(dtype):
        return emit_op(ctx.ops, store_op(mode, dtype), [old, value], [dtype, dtype], dtype)
    wide = [emit_op(ctx.ops, "cast", [v], [dtype], DType.F32) for v in (old, value)]
    result = emit_op(ctx.ops, store_op(mode, DType.F32), wide, [DType.F32, DType.F32], DType.F32)
    return emit_op(ctx.ops, "cast", [result], [DType.F32], dtype)


def _scalar_store(ctx: KernelContext, instr: Store, pointer: Ssa, value: Ssa, mask: Ssa | None, dtype: DType) -> None:
    element, align = memory_type(dtype), width(dtype) // 8
    if mask is not None:
        dummy = Ssa("%discard", "ptr")
        pointer = ctx.em.pure("ptr", f"select i1 {mask.text}, ptr {pointer.text}, ptr {dummy.text}", pointer, mask)
    if instr.accumulates:
        old = _to_register(ctx, ctx.em.here(element, f"load {element}, ptr {pointer.text}, align {align}"), dtype)
        value = _combined(ctx, instr.mode, old, value, dtype)
    stored = _to_memory(ctx, value, dtype)
    ctx.em.effect(f"store {stored.typed}, ptr {pointer.text}, align {align}")


def _unit_store(ctx: KernelContext, instr: Store, offset: Expr, copy: int, step: int) -> None:
    vector, dtype = ctx.vector, ctx.values[instr.value].dtype
    assert vector is not None
    element, lanes, align = memory_type(dtype), vector.lanes, width(dtype) // 8
    pointer = _unit_pointer(ctx, instr.buffer, element, offset, copy, step)
    type_ = vector_type(element, lanes)
    value = ctx.part(instr.value, copy, lanes)
    mask = ctx.mask(instr.mask, copy)
    if step < 0:
        backwards = range(lanes - 1, -1, -1)
        value = ctx.em.shuffle(value, value, register_type(dtype), backwards)
        mask = ctx.em.shuffle(mask, mask, "i1", backwards) if mask is not None else None
    if instr.accumulates:
        old = _masked_old(ctx, pointer, type_, mask, align)
        value = _combined(ctx, instr.mode, _to_register(ctx, old, dtype), value, dtype)
    stored = _to_memory(ctx, value, dtype)
    if mask is None:
        plain = f"store {stored.typed}, ptr {pointer.text}, align {align}"
        if step == 1 and _streams(ctx, instr, offset, lanes * width(dtype)):
            _stream(ctx, instr.buffer, f"store {stored.typed}, ptr {pointer.text}", plain)
        else:
            ctx.em.effect(plain)
        return
    symbol = f"llvm.masked.store.v{lanes}{_mangle(element)}.p0"
    ctx.em.declare(symbol, "void", [type_, "ptr", mask.type])
    ctx.em.effect(f"call void @{symbol}({stored.typed}, ptr align {align} {pointer.text}, {mask.typed})")


def _streams(ctx: KernelContext, instr: Store, offset: Expr, bits: int) -> bool:
    """Whether a store of a whole vector may bypass the caches, see the note.

    Note [Non-temporal stores]
        A result larger than the last cache is gone from it before anyone reads it, and an ordinary store first reads
        the line it is about to overwrite. Streaming stores write whole lines without reading them: a third less
        traffic for a normalization. They need addresses aligned to the vector, else the processor traps: the offset
        must be a multiple of the vector in every term (the vector variable always is), and the pointer is tested at
        run time. A fence before the kernel returns makes them visible to other threads.
    """
    vector = ctx.vector
    if instr.buffer not in ctx.nontemporal or instr.accumulates or vector is None or bits != ctx.ops.target.vector_bits:
        return False
    if offset.coefficient(vector.symbol) != 1:
        return False
    return all(factor % vector.lanes == 0 for monomial, factor in offset.terms if vector.symbol not in monomial)


def _stream(ctx: KernelContext, buffer: str, store: str, plain: str) -> None:
    em, pointer, size = ctx.em, ctx.pointers[buffer], ctx.ops.target.vector_bits // 8
    ctx.streams = True
    address = em.pure("i64", f"ptrtoint ptr {pointer.text} to i64", pointer)
    off = em.pure("i64", f"and i64 {address.text}, {size - 1}", address)
    aligned = em.pure("i1", f"icmp eq i64 {off.text}, 0", off)
    em.choose(
        aligned,
        None,
        lambda: em.effect(f"{store}, align {size}, !nontemporal !0"),
        lambda: em.effect(plain),
    )


def _masked_old(ctx: KernelContext, pointer: Ssa, type_: str, mask: Ssa | None, align: int) -> Ssa:
    if mask is None:
        return ctx.em.here(type_, f"load {type_}, ptr {pointer.text}, align {align}")
    lanes, element = ctx.ops.lanes(mask), type_.strip("<>").split()[-1]
    symbol = f"llvm.masked.load.v{lanes}{_mangle(element)}.p0"
    ctx.em.declare(symbol, type_, ["ptr", mask.type, type_])
    return ctx.em.here(
        type_, f"call {type_} @{symbol}(ptr align {align} {pointer.text}, {mask.typed}, {type_} zeroinitializer)"
    )
