"""The functions that stand for instructions of AVX-512, against what the manual says of each, in Python's numbers."""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from aotkit_inductor_lower.native import compile_for, load_object
from aotkit_inductor_lower.ops.packed_weights import panels_of_layout
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.machine import target_machine
from aotkit_inductor_lower.targets.cpu.render import emitter
from tools.emulation import wide_packing
from tools.emulation.kinds import all_kinds
from tools.emulation.wide import PROCESSORS, half_of, with_short_vectors
from tools.emulation.wide_functions import FUNCTIONS

SINGLE, BFLOAT16, WORDS = "<16 x float>", "<32 x bfloat>", "<16 x i32>"
Bits = list[int]

pytestmark = pytest.mark.skipif(host_machine().vector_bits < 256, reason="only processors with AVX2 stand for others")


def called(symbol: str, result: str, given: tuple[str, ...], last: str = "") -> Callable[..., bytes]:
    """A function that gets the bytes of vectors, calls the intrinsic with them, and gives what it gave."""
    loads = [f"  %x{n} = load {kind}, ptr %p{n}, align 1" for n, kind in enumerate(given)]
    arguments = ", ".join(f"{kind} %x{n}" for n, kind in enumerate(given))
    text = "\n".join(
        [
            f"declare {result} @llvm.x86.{symbol}({', '.join(given)}{', i32 immarg' if last else ''})",
            f"define void @run(ptr %to, {', '.join(f'ptr %p{n}' for n in range(len(given)))}) {{",
            *loads,
            f"  %y = call {result} @llvm.x86.{symbol}({arguments}{last})",
            f"  store {result} %y, ptr %to, align 1",
            "  ret void",
            "}\n",
        ]
    )
    loaded = load_object(compile_for(target_machine(generic_machine(256)), with_short_vectors(text)), [], ["run"])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (1 + len(given)))(loaded.addresses()["run"])

    def run(*vectors: bytes) -> bytes:
        assert loaded is not None
        room = ctypes.create_string_buffer(64)
        call(room, *(ctypes.create_string_buffer(vector, max(64, len(vector))) for vector in vectors))
        return room.raw

    return run


def single(bits: int) -> float:
    """The float32 with these bits."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits_of(value: float) -> int:
    """The bits of a number that float32 has."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def rounded(exact: Fraction, sign: int) -> int:
    """The bits of the float32 nearest to it, an even one of two; ``sign``: of zero."""
    if not exact:
        return sign << 31
    sign, size = int(exact < 0), abs(exact)
    exponent = max(math.floor(math.log2(size.numerator) - math.log2(size.denominator)) - 2, -126)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    count = round(size / unit)  # Python's, to an even one
    value = count * unit
    return sign << 31 | (0x7F800000 if value >= Fraction(2) ** 128 else bits_of(float(value)))


def flushed(bits: int) -> int:
    """A subnormal number as the zero of its sign."""
    return bits if bits >> 23 & 255 else bits & 0x80000000


def is_nan(bits: int) -> bool:
    """Whether these are of a nan."""
    return bits & 0x7FFFFFFF > 0x7F800000


def multiply_add(a: int, b: int, c: int) -> int:
    """``a * b + c`` of float32, rounded once; nan is one of them all."""
    x, y, z = single(a), single(b), single(c)
    if not all(map(math.isfinite, (x, y, z))):
        inner = x * y + z  # of such numbers float64 computes the same
        return 0x7FC00000 if math.isnan(inner) else bits_of(inner)
    sign = int(math.copysign(1, x) * math.copysign(1, y) < 0 and math.copysign(1, z) < 0)
    return rounded(Fraction(x) * Fraction(y) + Fraction(z), sign)


SPECIAL = [0, 1 << 31, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F808000, 0x3F818000]
SPECIAL += [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F7F7FFF, 0x7F7F8000, 0x00FF8000]
QUIET_OR_NOT = [*SPECIAL, 0x7F800001, 0xFFA00000]


def drawn(count: int, seed: int) -> Bits:
    """Bits of random numbers of float32, and special ones among them."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(0, 1 << 32, (count,), generator=generator).tolist()
    near = torch.randn(count, generator=generator).view(torch.int32).tolist()
    picks = torch.randint(0, 3 * len(QUIET_OR_NOT), (count,), generator=generator).tolist()
    return [
        QUIET_OR_NOT[k] if k < len(QUIET_OR_NOT) else s if k % 2 else n & 0xFFFFFFFF
        for k, s, n in zip(picks, some, near, strict=True)
    ]


def packed(bits: Bits) -> bytes:
    """Words as they lie in memory."""
    return struct.pack(f"<{len(bits)}I", *bits)


def words(data: bytes) -> Bits:
    """Words that lie in memory."""
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def same(got: int, want: int) -> bool:
    """Equal, or both nan."""
    return got == want or (is_nan(got) and is_nan(want))


def test_pairs_of_bfloat16_are_multiplied_and_added_one_after_the_other() -> None:
    run = called("avx512bf16.dpbf16ps.512", SINGLE, (SINGLE, BFLOAT16, BFLOAT16))
    for seed in range(12):
        sums, left, right = (drawn(16, 3 * seed + n) for n in range(3))
        got = words(run(*map(packed, (sums, left, right))))
        for c, a, b, found in zip(sums, left, right, got, strict=True):
            upper = flushed(multiply_add(flushed(a & 0xFFFF0000), flushed(b & 0xFFFF0000), flushed(c)))
            a_low, b_low = (flushed(pair << 16 & 0xFFFFFFFF) for pair in (a, b))
            want = flushed(multiply_add(a_low, b_low, upper))
            assert same(found, want), (hex(c), hex(a), hex(b), hex(found), hex(want))


def test_the_second_numbers_of_pairs_come_first_and_no_sum_is_subnormal() -> None:
    run = called("avx512bf16.dpbf16ps.512", SINGLE, (SINGLE, BFLOAT16, BFLOAT16))

    def dot(total: float, first: tuple[float, float], second: tuple[float, float]) -> float:
        pairs = [bits_of(high) | bits_of(low) >> 16 for low, high in zip(first, second, strict=True)]
        return single(words(run(*(packed([bits] * 16) for bits in (bits_of(total), *pairs))))[0])

    assert dot(-(2.0**24), (2.0**-10, 1.0), (2.0**24, 1.0)) == 2.0**-10
    assert dot(0.0, (0.0, 0.0), (2.0**-70, 2.0**-60)) == 0.0
    assert dot(0.0, (2.0**-70, 2.0**-60), (0.0, 0.0)) == 0.0
    assert dot(0.0, (2.0**-64, 2.0**-62), (2.0**-64, 2.0**-63)) == 2.0**-126  # the first sum is 2**-127


def to_bfloat16(bits: int) -> int:
    """As the instructions convert."""
    if is_nan(bits):
        return bits >> 16 | 64
    bits = flushed(bits)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def test_floats_are_rounded_to_bfloat16_and_the_second_vector_comes_first() -> None:
    run = called("avx512bf16.cvtne2ps2bf16.512", BFLOAT16, (SINGLE, SINGLE))
    for seed in range(8):
        high, low = drawn(16, seed), drawn(16, 100 + seed)
        got = struct.unpack("<32H", run(packed(high), packed(low)))
        assert list(got) == [to_bfloat16(bits) for bits in (*low, *high)]


def test_bytes_are_multiplied_without_saturation() -> None:
    run = called("avx512.vpdpbusd.512", WORDS, (WORDS, "<64 x i8>", "<64 x i8>"))
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(0, 256, (16, 4), generator=generator)
    right = torch.randint(-128, 128, (16, 4), generator=generator)
    left[0], right[0] = 255, -128
    sums = torch.randint(-(1 << 31), 1 << 31, (16,), generator=generator)
    sums[0] = -(1 << 31)
    want = (sums + (left * right).sum(1)).int()
    given = (bytes(x.contiguous().numpy().tobytes()) for x in (sums.int(), left.byte(), right.to(torch.int8)))
    assert run(*given) == want.numpy().tobytes()


def test_words_are_multiplied_and_added_in_pairs() -> None:
    run = called("avx512.pmaddw.d.512", WORDS, ("<32 x i16>", "<32 x i16>"))
    left, right = (
        torch.randint(-(1 << 15), 1 << 15, (16, 2), generator=torch.Generator().manual_seed(n)) for n in (0, 1)
    )
    left[0] = right[0] = -(1 << 15)
    want = (left * right).sum(1).int()
    assert run(*(x.short().numpy().tobytes() for x in (left, right))) == want.numpy().tobytes()


@pytest.mark.parametrize(
    ("symbol", "lanes", "element", "size"),
    [("sf", 16, "float", 4), ("hi", 32, "i16", 2), ("qi", 64, "i8", 1)],
)
def test_lanes_are_picked_by_the_last_bits_of_an_index(symbol: str, lanes: int, element: str, size: int) -> None:
    index = f"<{lanes} x i{8 * size}>"
    run = called(f"avx512.permvar.{symbol}.512", f"<{lanes} x {element}>", (f"<{lanes} x {element}>", index))
    generator = torch.Generator().manual_seed(0)
    table, picks = (torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8).numpy() for _ in range(2))
    got, given = run(table.tobytes(), picks.tobytes()), picks.tobytes()
    for lane in range(lanes):
        at = int.from_bytes(given[lane * size : (lane + 1) * size], "little") % lanes
        assert got[lane * size : (lane + 1) * size] == table.tobytes()[at * size : (at + 1) * size]


@pytest.mark.parametrize(("symbol", "lanes", "size"), [("d", 16, 4), ("q", 8, 8)])
def test_lanes_are_picked_of_two_vectors(symbol: str, lanes: int, size: int) -> None:
    kind = f"<{lanes} x i{8 * size}>"
    run = called(f"avx512.vpermi2var.{symbol}.512", kind, (kind, kind, kind))
    generator = torch.Generator().manual_seed(0)
    given = [torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8).numpy().tobytes() for _ in range(3)]
    got, both = run(*given), given[0] + given[2]
    for lane in range(lanes):
        at = int.from_bytes(given[1][lane * size : (lane + 1) * size], "little") % (2 * lanes)
        assert got[lane * size : (lane + 1) * size] == both[at * size : (at + 1) * size]


def scaled(a: int, b: int) -> int:
    """VSCALEFPS: the manual's table of special numbers, and what is computed else."""
    x, y, quiet = single(a), single(b), bool(a & 0x400000)
    if is_nan(a):
        return {math.inf: 0x7F800000, -math.inf: 0}.get(y, 0x7FC00000) if quiet and not is_nan(b) else 0x7FC00000
    if is_nan(b) or (math.isinf(x) and y == -math.inf) or (x == 0 and y == math.inf):
        return 0x7FC00000
    if math.isinf(x) or x == 0:
        return a
    if math.isinf(y):
        return a & 0x80000000 | (0x7F800000 if y > 0 else 0)
    power = max(min(math.floor(y), 400), -400)
    return rounded(Fraction(x) * Fraction(2) ** power, a >> 31) | a & 0x80000000


def test_numbers_are_scaled_by_powers_of_two() -> None:
    run = called("avx512.mask.scalef.ps.512", SINGLE, (SINGLE, SINGLE, SINGLE, "i16"), ", i32 4")
    pairs = [(a, b) for a in QUIET_OR_NOT for b in QUIET_OR_NOT]
    powers = [*range(-280, 280, 7), -150.0, -149.5, -126.25, 0.75, -0.25, 127.999, 128.0]
    pairs += [(bits, bits_of(float(power))) for bits in (*drawn(6, 5), 0x3FFFFFFF, 1) for power in powers]
    pairs += [pairs[0]] * (-len(pairs) % 16)
    other, mask = [0x42280000] * 16, 0b1011_0111_1101_1110
    for start in range(0, len(pairs), 16):
        left, right = map(list, zip(*pairs[start : start + 16], strict=True))
        for kept in (0xFFFF, mask):
            got = words(run(packed(left), packed(right), packed(other), struct.pack("<H", kept)))
            for lane, (a, b) in enumerate(pairs[start : start + 16]):
                want = scaled(a, b) if kept >> lane & 1 else other[lane]
                assert same(got[lane], want), (hex(a), hex(b), hex(got[lane]), hex(want))


def test_vector_math_is_asked_for_halves() -> None:
    text = """declare <16 x float> @Sleef_powf16_u10avx512f(<16 x float>, <16 x float>)
define void @run(ptr %to, ptr %p0, ptr %p1) {
  %x = load <16 x float>, ptr %p0, align 1
  %y = load <16 x float>, ptr %p1, align 1
  %z = call <16 x float> @Sleef_powf16_u10avx512f(<16 x float> %x, <16 x float> %y)
  store <16 x float> %z, ptr %to, align 1
  ret void
}
"""
    half = half_of("Sleef_powf16_u10avx512f")
    code = compile_for(target_machine(generic_machine(256)), with_short_vectors(text))
    loaded = load_object(code, [half], ["run"])
    x, y, z = torch.rand(16) * 3, torch.randn(16) * 3, torch.zeros(16)
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(loaded.addresses()["run"])(z.data_ptr(), x.data_ptr(), y.data_ptr())
    torch.testing.assert_close(z, x**y)


def test_what_is_hidden_from_llvm_stays_what_it_is_and_an_unknown_instruction_is_an_error() -> None:
    hidden = (
        'define void @f(<16 x float> %x) {\n  %y = call <16 x float> asm "", "=v,0"(<16 x float> %x)\n  ret void\n}\n'
    )
    assert "  %y = freeze <16 x float> %x\n" in with_short_vectors(hidden)
    unknown = "define void @f(<16 x i32> %x) {\n  call void @llvm.x86.avx512.new.512(<16 x i32> %x)\n  ret void\n}\n"
    with pytest.raises(AssertionError, match=r"not emulated: wide\.avx512\.new\.512"):
        with_short_vectors(unknown)


@pytest.mark.parametrize("columns", [64, 80, 192])
def test_weights_of_four_bits_are_packed_and_multiplied_in_panels_of_64(columns: int) -> None:
    assert panels_of_layout(wide_packing.pack) == 64
    numbers, x, scales = torch.randint(0, 16, (columns, 64)).int(), torch.randn(3, 64), torch.rand(2, columns, 2)
    packed = wide_packing.pack(numbers, 2)
    assert packed.shape == (columns, 32) and packed.dtype is torch.uint8
    whole = numbers.view(columns, 2, 32).double() - 8
    weight = (whole * scales[..., 0].t()[..., None] + scales[..., 1].t()[..., None]).view(columns, 64)
    want = x.double() @ weight.t()
    torch.testing.assert_close(wide_packing.product(x, packed, 32, scales).double(), want, rtol=1e-4, atol=1e-4)
    rest = 64 * (columns // 64)
    assert torch.equal(packed.flatten()[32 * rest :].int() & 15, numbers[rest::2].t().flatten())  # of neighbours


def test_short_elements_are_loaded_and_stored_under_a_mask_in_one_place() -> None:
    text = """declare <16 x i16> @llvm.masked.load.v16i16.p0(ptr, <16 x i1>, <16 x i16>)
declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, <16 x i1>)
define void @run(ptr %to, ptr %from, i16 %bits) {
  %m = bitcast i16 %bits to <16 x i1>
  %x = call <16 x i16> @llvm.masked.load.v16i16.p0(ptr align 2 %from, <16 x i1> %m, <16 x i16> splat (i16 7))
  store <16 x i16> %x, ptr %to, align 2
  %second = getelementptr <16 x i16>, ptr %to, i64 1
  call void @llvm.masked.store.v16i16.p0(<16 x i16> %x, ptr align 2 %second, <16 x i1> %m)
  ret void
}
"""
    short = with_short_vectors(text)
    assert short.count("@llvm.masked.load.v16i16.p0(") == short.count("@llvm.masked.store.v16i16.p0(") == 2
    loaded = load_object(compile_for(target_machine(generic_machine(256)), short), [], ["run"])
    given, got, lanes = torch.arange(100, 116).short(), torch.full((32,), -1).short(), 0b0110_0000_0001_0011
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint16)(loaded.addresses()["run"])
    call(got.data_ptr(), given.data_ptr(), lanes)
    there = torch.tensor([bool(lanes >> lane & 1) for lane in range(16)])
    assert torch.equal(got, torch.cat([given.where(there, 7), given.where(there, -1)]).short())


def test_whatever_kernels_name_of_avx512_is_emulated() -> None:
    sources = Path(emitter.__file__).parent.rglob("*.py")
    named = {name for path in sources for name in re.findall(r"llvm\.x86\.(avx512[\w.]*\w)", path.read_text())}
    assert len(named) > 5
    assert not [name for name in named if not any(known.startswith(f"wide.{name}") for known in FUNCTIONS)]


def test_each_processor_is_looked_at_for_what_those_before_it_have_not() -> None:
    _, before, last = PROCESSORS
    assert all_kinds(last.machine()) - all_kinds(before.machine()) == {
        *("way attention", "way attention backward", "way product in tile registers")
    }
    assert {"way few rows in digits", "way product of bytes"} <= all_kinds(before.machine())
