"""Loads of places that are computed, where all lanes lie near to each other.

Note [Windows]
    Where an image is resampled, the places of the lanes are no line, but they rise, and it is not far from the first to
    the last: so whole vectors are loaded from the first on, and the lanes are picked out of them by one permutation,
    where loads one by one take a load and an insertion per lane. Whether it is so is asked where the kernel runs, and
    otherwise the lanes are loaded one by one. Nothing is read but what lies between the first lane's place and the
    last one's.
"""

from __future__ import annotations

from collections.abc import Callable

from ....ir import Load
from ....symbolic import Expr
from .context import KernelContext, ramp_literal
from .emitter import Ssa, imm, vector_type
from .types import memory_type, width

__all__ = ["window_load"]

_REGISTER = 512


def window_load(
    ctx: KernelContext, load: Load, offset: Expr, copy: int, base: Callable[[Expr], Ssa], rest: Callable[[], Ssa]
) -> Ssa:
    """The lanes of ``load`` at ``offset``: through a window where they fit, else what ``rest`` gives, which is always
    where there are no such permutations. ``base``: the address of an offset that is the same in all lanes."""
    vector, em, ops = ctx.vector, ctx.em, ctx.ops
    assert vector is not None
    bits = max(32, width(load.dtype))
    if load.mask is not None or vector.tail is not None or vector.lanes * bits != _REGISTER:
        return rest()
    if ops.target.vector_bits != _REGISTER or not ops.target.has("avx512bw"):
        return rest()
    varying = Expr(tuple(term for term in offset.terms if ctx.across_lanes(Expr((term,)))))
    places = ctx.lanes_i64(varying, copy)
    first, last = em.lane(places, 0, "i64"), em.lane(places, vector.lanes - 1, "i64")
    steps = ops.op("sub", places, em.splat(first, vector.lanes))
    most = ops.intrinsic("umin", em.sub(last, first), imm(2 * vector.lanes - 1))
    fit = ops.all(ops.compare("icmp ule", steps, em.splat(most, vector.lanes)))

    def window() -> Ssa:
        pointer = em.element(memory_type(load.dtype), base(vector.at(offset - varying, copy)), first)
        return _picked(ctx, load, pointer, steps, most)

    found = em.choose(fit, vector_type(memory_type(load.dtype), vector.lanes), window, rest)
    assert found is not None
    return found


def _picked(ctx: KernelContext, load: Load, pointer: Ssa, steps: Ssa, most: Ssa) -> Ssa:
    """Lane by lane, the element ``steps`` behind ``pointer``, none of them more than ``most``."""
    em, ops, bits = ctx.em, ctx.ops, width(load.dtype)
    lanes, wide = ops.lanes(steps), max(32, bits)
    item, register = f"i{bits}", f"i{wide}"
    end = em.splat(ops.convert("trunc", most, register), lanes)
    halves = []
    for begin in (0, lanes):
        here = ops.compare("icmp ule", ramp_literal(range(begin, begin + lanes), register), end)
        part = em.element(item, pointer, imm(begin))
        halves.append(ops.convert("zext", _masked(ctx, part, here, item), register))
    picks = ops.convert("trunc", steps, register)
    symbol = f"llvm.x86.avx512.vpermi2var.{'d' if wide == 32 else 'q'}.512"
    em.declare(symbol, picks.type, [picks.type] * 3)
    given = f"{halves[0].typed}, {picks.typed}, {halves[1].typed}"
    found = em.pure(picks.type, f"call {picks.type} @{symbol}({given})", *halves, picks)
    return ops.convert("bitcast", ops.convert("trunc", found, item), memory_type(load.dtype))


def _masked(ctx: KernelContext, pointer: Ssa, mask: Ssa, item: str) -> Ssa:
    type_ = ctx.ops.typed(item, mask)
    symbol = f"llvm.masked.load.v{ctx.ops.lanes(mask)}{item}.p0"
    ctx.em.declare(symbol, type_, ["ptr", mask.type, type_])
    align = int(item[1:]) // 8
    given = f"ptr align {align} {pointer.text}, {mask.typed}, {type_} zeroinitializer"
    return ctx.em.here(type_, f"call {type_} @{symbol}({given})")
