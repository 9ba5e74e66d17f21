"""Numbers as whole numbers of some digits, for instructions that multiply bytes; see Note [Digits of groups]."""

from __future__ import annotations

from collections.abc import Sequence

from .arithmetic import Ops
from .emitter import Ssa, imm, vector_type

__all__ = ["FRACTION", "digits_of", "dot_bytes", "float_sum", "larger_size", "next_power", "powers_of", "whole_sum"]

LEAST = 27  # the biased exponent of 2**-100: of less than ``2**(-100 - bits)`` another way computes each product
DOT = "llvm.x86.avx512.vpdpbusd.512"
FRACTION = 23  # bits of a float behind its exponent
SIGNIFICANT = 8  # bits of a bfloat16


def larger_size(ops: Ops, before: Ssa, value: Ssa) -> Ssa:
    """The larger one of ``before``, a vector of i32, and the bits of the floats ``value`` without their signs: as whole
    numbers these have the same order."""
    em, lanes = ops.em, ops.lanes(value)
    wide = vector_type("i32", lanes)
    bits = em.pure(wide, f"bitcast {value.typed} to {wide}", value)
    return ops.intrinsic("umax", before, ops.op("and", bits, em.splat(imm((1 << 31) - 1, "i32"), lanes)))


def next_power(ops: Ops, largest: Ssa) -> Ssa:
    """The bits of a bfloat16 as a float, of which 255 in the last 8 bits count as the next power of two: their first
    digit would be 128."""
    return ops.em.here("i32", f"add {largest.typed}, {1 << (FRACTION - SIGNIFICANT + 1)}")


def powers_of(ops: Ops, largest: Ssa, bits: int) -> tuple[Ssa, Ssa]:
    """The power of two that makes the largest number ``2**bits`` or up to twice that, as a float, and the bits of the
    one that undoes it. ``largest``: the bits of a float without a sign, an i32."""
    em = ops.em
    exponent = em.here("i32", f"and {largest.typed}, {255 << FRACTION}")
    em.declare("llvm.umax.i32", "i32", ["i32", "i32"])
    exponent = em.here("i32", f"call i32 @llvm.umax.i32({exponent.typed}, i32 {max(LEAST, bits + 1) << FRACTION})")
    power = em.here("i32", f"sub i32 {((bits + 2 * 127) << FRACTION) - (1 << 32)}, {exponent.text}")
    unit = em.here("i32", f"sub {exponent.typed}, {bits << FRACTION}")
    return em.here("float", f"bitcast {power.typed} to float"), unit


def digits_of(ops: Ops, value: Ssa, count: int, bits: int) -> tuple[Ssa, list[Ssa], Ssa]:
    """The whole numbers of a vector of floats, each in an i32; ``count`` digits of ``bits`` bits of them, each with a
    sign and in an i32, the lowest first; and for each lane -1 where they are not the float, else 0."""
    em, lanes = ops.em, ops.lanes(value)
    wide = vector_type("i32", lanes)
    whole = rest = em.pure(wide, f"fptosi {value.typed} to {wide}", value)
    back = em.pure(value.type, f"sitofp {rest.typed} to {value.type}", rest)
    differs = ops.compare("fcmp une", back, value)
    above, by = em.splat(imm(32 - bits, "i32"), lanes), em.splat(imm(bits, "i32"), lanes)
    digits = []
    for _ in range(count - 1):
        digits.append(ops.op("ashr", ops.op("shl", rest, above), above))
        rest = ops.op("ashr", ops.op("sub", rest, digits[-1]), by)
    return whole, [*digits, rest], em.pure(wide, f"sext {differs.typed} to {wide}", differs)


def dot_bytes(ops: Ops, total: Ssa, unsigned: Ssa, signed: Ssa) -> Ssa:
    """Products of bytes, added to ``total`` in groups of four."""
    ops.em.declare(DOT, total.type, [total.type, unsigned.type, signed.type])
    text = f"call {total.type} @{DOT}({total.typed}, {unsigned.typed}, {signed.typed})"
    return ops.em.pure(total.type, text, total, unsigned, signed)


def whole_sum(ops: Ops, sums: Sequence[Ssa]) -> Ssa:
    """The float, rounded once, that vectors of sums of three digits of 8 bits are, the lowest first."""
    em, lanes = ops.em, ops.lanes(sums[0])
    last, middle, first = sums
    low = ops.op("add", ops.op("shl", middle, em.splat(imm(8, "i32"), lanes)), last)
    high = ops.op("add", first, ops.op("ashr", low, em.splat(imm(16, "i32"), lanes)))
    low = ops.op("and", low, em.splat(imm(0xFFFF, "i32"), lanes))
    return float_sum(ops, (low, high), 16)


def float_sum(ops: Ops, sums: Sequence[Ssa], bits: int) -> Ssa:
    """The floats that sums of digits of so many bits are, the lowest first. Each is a float if it is below 2**24, and
    what adding them rounds is little against the products of the numbers' sizes."""
    base = ops.em.splat(Ssa(f"{float(1 << bits)}", "float"), ops.lanes(sums[0]))
    *others, total = (ops.convert("sitofp", part, "float") for part in sums)
    for lower in reversed(others):
        total = ops.intrinsic("fma", total, base, lower)
    return total
