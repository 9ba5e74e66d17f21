"""What the instructions of AVX-512 that kernels name do, as functions in LLVM's text.

Everything else that kernels do with vectors of 512 bits is LLVM's own language, of which it makes whatever instructions
a processor has. Such a function is called instead of the intrinsic, takes and gives the same, and does what Intel's
manual (Software Developer's Manual, volume 2) says. No pass of LLVM's optimiser runs, so it stays a call.

Note [What instructions for bfloat16 do]
    VDPBF16PS adds two products to a sum by two fused multiply-adds, that of the second numbers of the pairs (the upper
    halves) first; each rounds to the nearest. Subnormal numbers are read as zero and become zero. VCVTNEPS2BF16 and
    VCVTNE2PS2BF16 round to the nearest, ties to even; subnormal numbers become zeros of their sign, and a nan keeps its
    upper bits and becomes quiet. None of them heeds the settings of the thread. ``fptrunc`` to bfloat16 is the first
    of the two conversions on processors that have it, so here it is a call, too.

Note [What VSCALEFPS does]
    ``a`` times two to the power of ``floor(b)``, rounded once. An infinite ``b`` gives infinity or zero with the sign
    of ``a``, also for a quiet nan ``a``, where the sign is plus; infinity times two to the power of minus infinity is
    nan, and so is zero times two to the power of infinity. Otherwise a nan stays one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

__all__ = ["FUNCTIONS", "needed_of"]

_BFLOAT16 = """
; Subnormal numbers become zeros of their sign.
define internal <16 x float> @wide.without_subnormal(<16 x float> %x) {
  %bits = bitcast <16 x float> %x to <16 x i32>
  %exponent = and <16 x i32> %bits, splat (i32 2139095040)
  %sign = and <16 x i32> %bits, splat (i32 -2147483648)
  %tiny = icmp eq <16 x i32> %exponent, zeroinitializer
  %kept = select <16 x i1> %tiny, <16 x i32> %sign, <16 x i32> %bits
  %y = bitcast <16 x i32> %kept to <16 x float>
  ret <16 x float> %y
}

define internal <16 x float> @wide.add_products(<16 x float> %sum, <16 x i32> %left, <16 x i32> %right) {
  %a.raw = bitcast <16 x i32> %left to <16 x float>
  %a = call <16 x float> @wide.without_subnormal(<16 x float> %a.raw)
  %b.raw = bitcast <16 x i32> %right to <16 x float>
  %b = call <16 x float> @wide.without_subnormal(<16 x float> %b.raw)
  %more = call <16 x float> @llvm.fma.v16f32(<16 x float> %a, <16 x float> %b, <16 x float> %sum)
  %flushed = call <16 x float> @wide.without_subnormal(<16 x float> %more)
  ret <16 x float> %flushed
}

define internal <16 x float> @wide.avx512bf16.dpbf16ps.512(
    <16 x float> %sum, <32 x bfloat> %left, <32 x bfloat> %right) {
  %start = call <16 x float> @wide.without_subnormal(<16 x float> %sum)
  %a = bitcast <32 x bfloat> %left to <16 x i32>
  %b = bitcast <32 x bfloat> %right to <16 x i32>
  %a.high = and <16 x i32> %a, splat (i32 -65536)
  %b.high = and <16 x i32> %b, splat (i32 -65536)
  %first = call <16 x float> @wide.add_products(<16 x float> %start, <16 x i32> %a.high, <16 x i32> %b.high)
  %a.low = shl <16 x i32> %a, splat (i32 16)
  %b.low = shl <16 x i32> %b, splat (i32 16)
  %both = call <16 x float> @wide.add_products(<16 x float> %first, <16 x i32> %a.low, <16 x i32> %b.low)
  ret <16 x float> %both
}

define internal <16 x i16> @wide.rounded(<16 x float> %given) {
  %x = call <16 x float> @wide.without_subnormal(<16 x float> %given)
  %bits = bitcast <16 x float> %x to <16 x i32>
  %upper = lshr <16 x i32> %bits, splat (i32 16)
  %odd = and <16 x i32> %upper, splat (i32 1)
  %bias = add <16 x i32> %odd, splat (i32 32767)
  %more = add <16 x i32> %bits, %bias
  %rounded = lshr <16 x i32> %more, splat (i32 16)
  %quiet = or <16 x i32> %upper, splat (i32 64)
  %nan = fcmp uno <16 x float> %x, zeroinitializer
  %all = select <16 x i1> %nan, <16 x i32> %quiet, <16 x i32> %rounded
  %short = trunc <16 x i32> %all to <16 x i16>
  ret <16 x i16> %short
}

define internal <16 x bfloat> @wide.fptrunc(<16 x float> %given) {
  %short = call <16 x i16> @wide.rounded(<16 x float> %given)
  %numbers = bitcast <16 x i16> %short to <16 x bfloat>
  ret <16 x bfloat> %numbers
}

; The second vector fills the lower half of the result.
define internal <32 x bfloat> @wide.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low) {
  %first = call <16 x i16> @wide.rounded(<16 x float> %low)
  %second = call <16 x i16> @wide.rounded(<16 x float> %high)
  %both = shufflevector <16 x i16> %first, <16 x i16> %second, <32 x i32> <LANES>
  %numbers = bitcast <32 x i16> %both to <32 x bfloat>
  ret <32 x bfloat> %numbers
}
""".replace("LANES", ", ".join(f"i32 {lane}" for lane in range(32)))

_BYTES = """
; Four products each, of an unsigned and a signed byte, without saturation.
define internal <16 x i32> @wide.byte_product(<16 x i32> %sum, <16 x i32> %unsigned, <16 x i32> %signed, i32 %up) {
  %one = insertelement <16 x i32> poison, i32 %up, i32 0
  %all = shufflevector <16 x i32> %one, <16 x i32> poison, <16 x i32> zeroinitializer
  %a.high = shl <16 x i32> %unsigned, %all
  %a = lshr <16 x i32> %a.high, splat (i32 24)
  %b.high = shl <16 x i32> %signed, %all
  %b = ashr <16 x i32> %b.high, splat (i32 24)
  %product = mul <16 x i32> %a, %b
  %more = add <16 x i32> %sum, %product
  ret <16 x i32> %more
}

define internal <16 x i32> @wide.avx512.vpdpbusd.512(<16 x i32> %sum, <64 x i8> %left, <64 x i8> %right) {
  %a = bitcast <64 x i8> %left to <16 x i32>
  %b = bitcast <64 x i8> %right to <16 x i32>
  %one = call <16 x i32> @wide.byte_product(<16 x i32> %sum, <16 x i32> %a, <16 x i32> %b, i32 24)
  %two = call <16 x i32> @wide.byte_product(<16 x i32> %one, <16 x i32> %a, <16 x i32> %b, i32 16)
  %three = call <16 x i32> @wide.byte_product(<16 x i32> %two, <16 x i32> %a, <16 x i32> %b, i32 8)
  %four = call <16 x i32> @wide.byte_product(<16 x i32> %three, <16 x i32> %a, <16 x i32> %b, i32 0)
  ret <16 x i32> %four
}

; Sums of two products of signed words, which wrap around where all four are the least number.
define internal <16 x i32> @wide.avx512.pmaddw.d.512(<32 x i16> %left, <32 x i16> %right) {
  %a = bitcast <32 x i16> %left to <16 x i32>
  %b = bitcast <32 x i16> %right to <16 x i32>
  %a.up = shl <16 x i32> %a, splat (i32 16)
  %a.low = ashr <16 x i32> %a.up, splat (i32 16)
  %a.high = ashr <16 x i32> %a, splat (i32 16)
  %b.up = shl <16 x i32> %b, splat (i32 16)
  %b.low = ashr <16 x i32> %b.up, splat (i32 16)
  %b.high = ashr <16 x i32> %b, splat (i32 16)
  %low = mul <16 x i32> %a.low, %b.low
  %high = mul <16 x i32> %a.high, %b.high
  %sum = add <16 x i32> %low, %high
  ret <16 x i32> %sum
}
"""

_SCALE = """
; Of finite numbers: the product is exact in float64, and rounded once.
define internal <16 x float> @wide.times_power(<16 x float> %a, <16 x float> %b) {
  %high = fcmp olt <16 x float> %b, splat (float 4.0e+02)
  %b.high = select <16 x i1> %high, <16 x float> %b, <16 x float> splat (float 4.0e+02)
  %low = fcmp ogt <16 x float> %b.high, splat (float -4.0e+02)
  %b.low = select <16 x i1> %low, <16 x float> %b.high, <16 x float> splat (float -4.0e+02)
  %floor = call <16 x float> @llvm.floor.v16f32(<16 x float> %b.low)
  %n = fptosi <16 x float> %floor to <16 x i64>
  %biased = add <16 x i64> %n, splat (i64 1023)
  %bits = shl <16 x i64> %biased, splat (i64 52)
  %power = bitcast <16 x i64> %bits to <16 x double>
  %wide = fpext <16 x float> %a to <16 x double>
  %product = fmul <16 x double> %wide, %power
  %result = fptrunc <16 x double> %product to <16 x float>
  ret <16 x float> %result
}

define internal <16 x float> @wide.scaled(<16 x float> %a, <16 x float> %b) {
  %finite = call <16 x float> @wide.times_power(<16 x float> %a, <16 x float> %b)
  %up = fcmp oeq <16 x float> %b, splat (float 0x7FF0000000000000)
  %down = fcmp oeq <16 x float> %b, splat (float 0xFFF0000000000000)
  %a.times = fmul <16 x float> %a, splat (float 0x7FF0000000000000)
  %with.up = select <16 x i1> %up, <16 x float> %a.times, <16 x float> %finite
  %a.zero = fmul <16 x float> %a, zeroinitializer
  %with.down = select <16 x i1> %down, <16 x float> %a.zero, <16 x float> %with.up
  %b.nan = fcmp uno <16 x float> %b, zeroinitializer
  %b.quiet = fadd <16 x float> %b, %b
  %with.nan = select <16 x i1> %b.nan, <16 x float> %b.quiet, <16 x float> %with.down
  %a.nan = fcmp uno <16 x float> %a, zeroinitializer
  %a.bits = bitcast <16 x float> %a to <16 x i32>
  %quiet.bit = and <16 x i32> %a.bits, splat (i32 4194304)
  %is.quiet = icmp ne <16 x i32> %quiet.bit, zeroinitializer
  %a.quiet = fadd <16 x float> %a, %a
  %up.quiet = and <16 x i1> %up, %is.quiet
  %down.quiet = and <16 x i1> %down, %is.quiet
  %infinite = select <16 x i1> %up.quiet, <16 x float> splat (float 0x7FF0000000000000), <16 x float> %a.quiet
  %of.nan = select <16 x i1> %down.quiet, <16 x float> zeroinitializer, <16 x float> %infinite
  %result = select <16 x i1> %a.nan, <16 x float> %of.nan, <16 x float> %with.nan
  ret <16 x float> %result
}

define internal <16 x float> @wide.avx512.mask.scalef.ps.512(
    <16 x float> %a, <16 x float> %b, <16 x float> %other, i16 %mask, i32 %rounding) {
  %scaled = call <16 x float> @wide.scaled(<16 x float> %a, <16 x float> %b)
  %lanes = bitcast i16 %mask to <16 x i1>
  %result = select <16 x i1> %lanes, <16 x float> %scaled, <16 x float> %other
  ret <16 x float> %result
}
"""


def _permutation(symbol: str, lanes: int, element: str, index: str, tables: int) -> str:
    """Each lane is that of one table, or of two one behind the other, which the last bits of its index name."""
    vector, places = f"<{lanes} x {element}>", f"<{lanes} x {index}>"
    given = [f"{vector} %table", f"{places} %picks"]
    if tables == 2:  # the indices stand between them
        given.append(f"{vector} %second")
    room = f"[{tables} x {vector}]"
    second = f"""  %behind = getelementptr {vector}, ptr %kept, i64 1
  store {vector} %second, ptr %behind, align 64
"""
    return f"""
define internal {vector} @wide.{symbol}({", ".join(given)}) {{
entry:
  %kept = alloca {room}, align 64
  %indices = alloca {places}, align 64
  %found = alloca {vector}, align 64
  store {vector} %table, ptr %kept, align 64
{second if tables == 2 else ""}  store {places} %picks, ptr %indices, align 64
  br label %lane
lane:
  %k = phi i64 [ 0, %entry ], [ %next, %lane ]
  %index.at = getelementptr {index}, ptr %indices, i64 %k
  %index = load {index}, ptr %index.at
  %known = and {index} %index, {tables * lanes - 1}
  %place = {"add" if index == "i64" else "zext"} {index} %known{", 0" if index == "i64" else " to i64"}
  %from = getelementptr {element}, ptr %kept, i64 %place
  %value = load {element}, ptr %from
  %to = getelementptr {element}, ptr %found, i64 %k
  store {element} %value, ptr %to
  %next = add i64 %k, 1
  %more = icmp ult i64 %next, {lanes}
  br i1 %more, label %lane, label %done
done:
  %result = load {vector}, ptr %found, align 64
  ret {vector} %result
}}
"""


_PERMUTATIONS = (
    ("avx512.permvar.sf.512", 16, "float", "i32", 1),
    ("avx512.permvar.hi.512", 32, "i16", "i16", 1),
    ("avx512.permvar.qi.512", 64, "i8", "i8", 1),
    ("avx512.vpermi2var.d.512", 16, "i32", "i32", 2),
    ("avx512.vpermi2var.q.512", 8, "i64", "i64", 2),
)

_DEFINED = re.compile(r"^define internal [^@]*@([\w.]+)\(.*?^\}\n", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"call [^@\n]*@([\w.]+)\(")


@functools.cache
def _functions() -> dict[str, str]:
    text = "".join([_BFLOAT16, _BYTES, _SCALE, *(_permutation(*row) for row in _PERMUTATIONS)])
    return {found[1]: found[0] for found in _DEFINED.finditer(text)}


#: By name, the text of each.
FUNCTIONS = _functions()

_INTRINSICS = {
    "llvm.fma.v16f32": "declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)",
    "llvm.floor.v16f32": "declare <16 x float> @llvm.floor.v16f32(<16 x float>)",
}


def needed_of(names: Iterable[str], declared: str) -> list[str]:
    """The texts of these functions and of those that they call, for a module that declares what it does."""
    found: dict[str, str] = {}
    ahead = list(names)
    while ahead:
        name = ahead.pop()
        if name in found:
            continue
        if name in FUNCTIONS:
            found[name] = FUNCTIONS[name]
            ahead += _CALLED.findall(FUNCTIONS[name])
        elif f"declare {_INTRINSICS[name].split(' ', 1)[1]}" not in declared:
            found[name] = _INTRINSICS[name]
    return list(found.values())
