"""A pytest plugin: the tile registers of AMX on a processor that has none, by functions on the stack's memory.

``pytest -p tools.emulation.tiles packages/inductor-lower/tests/test_inductor_lower_cpu_tile_registers.py``

LLVM's text of a kernel is the one that a processor with AMX would get; only the instructions of the tiles are
calls of functions that do the same, so that what is packed, checked, computed again and stored is what runs there. It
needs AVX-512 and its conversions to bfloat16. Speed says nothing here: a product of two tiles takes a microsecond.

Note [What a product of tiles computes]
    By Intel's manual (Software Developer's Manual, TDPBF16PS): numbers of a pair are summed apart, the first numbers of
    all pairs and the second ones, each by fused multiply-adds that round to the nearest, from zero; the two sums are
    added, and what that gives is added to the tile. Subnormal numbers are read as zero and become zero everywhere,
    whatever the settings of the thread are. Products of bytes (TDPBSSD) are summed in 32 bits, without saturation.

Note [Shapes of tiles]
    Tiles are always 16 rows of 64 bytes here, so nothing goes wrong in a run where a kernel does not set their shapes
    before it uses them (a processor refuses that), or leaves them set. That is read in the text instead.
"""

from __future__ import annotations

import re
from typing import Any

import llvmlite.binding as llvm
import pytest

from aotkit_inductor_lower import native
from aotkit_inductor_lower.targets.cpu import load, machine
from aotkit_inductor_lower.targets.cpu import object as objects

__all__ = ["unset_shapes", "with_emulated_tiles"]

FEATURES = ("amx-tile", "amx-bf16", "amx-int8")
NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16")

TILES, TILE_BYTES, ROWS = 8, 1024, 16

_CALL = re.compile(r"call void @llvm\.x86\.(tilezero|tileloadd64|tileloaddt164|tilestored64|tdpbf16ps|tdpbssd)\(")
_DECLARED = re.compile(r"^declare void @llvm\.x86\.(?:tile\w+|ldtilecfg|tdp\w+)\(.*\n?", re.MULTILINE)
_SETTINGS = re.compile(r"^ *call void @llvm\.x86\.(?:ldtilecfg|tilerelease)\(.*\n?", re.MULTILINE)
_DEFINED = re.compile(r"^define [^@\n]*@([\w.]+)\([^\n]*\{[^\n]*\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"\bcall [^@\n]*@([\w.]+)\(")
_FUNCTION = re.compile(r"^define [^\n]*\{\nentry:\n.*?^\}", re.MULTILINE | re.DOTALL)

_FUNCTIONS = """
; A line is 64 bytes, a tile 16 of them; %tiles are eight tiles.
define internal ptr @tile_line(ptr %tiles, i8 %tile, i64 %line) {
entry:
  %tile64 = zext i8 %tile to i64
  %start = mul i64 %tile64, 1024
  %offset = mul i64 %line, 64
  %at = add i64 %start, %offset
  %place = getelementptr i8, ptr %tiles, i64 %at
  ret ptr %place
}

define internal void @emulated_tileloaddt164(ptr %tiles, i8 %tile, ptr %from, i64 %stride) {
entry:
  call void @emulated_tileloadd64(ptr %tiles, i8 %tile, ptr %from, i64 %stride)
  ret void
}

; Subnormal numbers become zeros of their sign.
define internal <16 x float> @without_subnormal(<16 x float> %x) {
entry:
  %bits = bitcast <16 x float> %x to <16 x i32>
  %exponent = and <16 x i32> %bits, splat (i32 2139095040)
  %sign = and <16 x i32> %bits, splat (i32 -2147483648)
  %tiny = icmp eq <16 x i32> %exponent, zeroinitializer
  %kept = select <16 x i1> %tiny, <16 x i32> %sign, <16 x i32> %bits
  %y = bitcast <16 x i32> %kept to <16 x float>
  ret <16 x float> %y
}

; The first (bits 0 to 15) or second numbers of sixteen pairs of bfloat16.
define internal <16 x float> @number_of_pairs(<16 x i32> %pairs, i1 %second) {
entry:
  %low = shl <16 x i32> %pairs, splat (i32 16)
  %high = and <16 x i32> %pairs, splat (i32 -65536)
  %bits = select i1 %second, <16 x i32> %high, <16 x i32> %low
  %raw = bitcast <16 x i32> %bits to <16 x float>
  %x = call <16 x float> @without_subnormal(<16 x float> %raw)
  ret <16 x float> %x
}

define internal <16 x float> @tile_term(<16 x i32> %lefts, <16 x i32> %rights, <16 x float> %sum, i1 %second) {
entry:
  %x = call <16 x float> @number_of_pairs(<16 x i32> %lefts, i1 %second)
  %y = call <16 x float> @number_of_pairs(<16 x i32> %rights, i1 %second)
  %more = call <16 x float> @llvm.fma.v16f32(<16 x float> %x, <16 x float> %y, <16 x float> %sum)
  %flushed = call <16 x float> @without_subnormal(<16 x float> %more)
  ret <16 x float> %flushed
}

; The numbers of bits %at to %at + 7 of sixteen words.
define internal <16 x i32> @byte_of_words(<16 x i32> %words, i32 %at) {
entry:
  %left = sub i32 24, %at
  %one = insertelement <16 x i32> poison, i32 %left, i32 0
  %all = shufflevector <16 x i32> %one, <16 x i32> poison, <16 x i32> zeroinitializer
  %high = shl <16 x i32> %words, %all
  %byte = ashr <16 x i32> %high, splat (i32 24)
  ret <16 x i32> %byte
}

define internal void @emulated_tdpbssd(ptr %tiles, i8 %to, i8 %left, i8 %right) {
entry:
  br label %row
row:
  %m = phi i64 [ 0, %entry ], [ %m.next, %summed ]
  %lefts = call ptr @tile_line(ptr %tiles, i8 %left, i64 %m)
  %place = call ptr @tile_line(ptr %tiles, i8 %to, i64 %m)
  br label %four
four:
  %k = phi i64 [ 0, %row ], [ %k.next, %fourth ]
  %a.at = getelementptr i32, ptr %lefts, i64 %k
  %a = load i32, ptr %a.at, align 4
  %a.one = insertelement <16 x i32> poison, i32 %a, i32 0
  %a.all = shufflevector <16 x i32> %a.one, <16 x i32> poison, <16 x i32> zeroinitializer
  %b.at = call ptr @tile_line(ptr %tiles, i8 %right, i64 %k)
  %b = load <16 x i32>, ptr %b.at, align 64
  br label %byte
byte:
  %at = phi i32 [ 0, %four ], [ %at.next, %byte ]
  %x = call <16 x i32> @byte_of_words(<16 x i32> %a.all, i32 %at)
  %y = call <16 x i32> @byte_of_words(<16 x i32> %b, i32 %at)
  %term = mul <16 x i32> %x, %y
  %old = load <16 x i32>, ptr %place, align 64
  %sum = add <16 x i32> %old, %term
  store <16 x i32> %sum, ptr %place, align 64
  %at.next = add i32 %at, 8
  %at.more = icmp ult i32 %at.next, 32
  br i1 %at.more, label %byte, label %fourth
fourth:
  %k.next = add i64 %k, 1
  %k.more = icmp ult i64 %k.next, 16
  br i1 %k.more, label %four, label %summed
summed:
  %m.next = add i64 %m, 1
  %m.more = icmp ult i64 %m.next, 16
  br i1 %m.more, label %row, label %done
done:
  ret void
}

define internal void @emulated_tdpbf16ps(ptr %tiles, i8 %to, i8 %left, i8 %right) {
entry:
  br label %row
row:
  %m = phi i64 [ 0, %entry ], [ %m.next, %summed ]
  %lefts = call ptr @tile_line(ptr %tiles, i8 %left, i64 %m)
  br label %pair
pair:
  %k = phi i64 [ 0, %row ], [ %k.next, %pair ]
  %first = phi <16 x float> [ zeroinitializer, %row ], [ %first.next, %pair ]
  %second = phi <16 x float> [ zeroinitializer, %row ], [ %second.next, %pair ]
  %a.at = getelementptr i32, ptr %lefts, i64 %k
  %a = load i32, ptr %a.at, align 4
  %a.one = insertelement <16 x i32> poison, i32 %a, i32 0
  %a.all = shufflevector <16 x i32> %a.one, <16 x i32> poison, <16 x i32> zeroinitializer
  %b.at = call ptr @tile_line(ptr %tiles, i8 %right, i64 %k)
  %b = load <16 x i32>, ptr %b.at, align 64
  %first.next = call <16 x float> @tile_term(<16 x i32> %a.all, <16 x i32> %b, <16 x float> %first, i1 false)
  %second.next = call <16 x float> @tile_term(<16 x i32> %a.all, <16 x i32> %b, <16 x float> %second, i1 true)
  %k.next = add i64 %k, 1
  %k.more = icmp ult i64 %k.next, 16
  br i1 %k.more, label %pair, label %summed
summed:
  %both = fadd <16 x float> %first.next, %second.next
  %both.flushed = call <16 x float> @without_subnormal(<16 x float> %both)
  %place = call ptr @tile_line(ptr %tiles, i8 %to, i64 %m)
  %old = load <16 x float>, ptr %place, align 64
  %old.flushed = call <16 x float> @without_subnormal(<16 x float> %old)
  %sum = fadd <16 x float> %old.flushed, %both.flushed
  %sum.flushed = call <16 x float> @without_subnormal(<16 x float> %sum)
  store <16 x float> %sum.flushed, ptr %place, align 64
  %m.next = add i64 %m, 1
  %m.more = icmp ult i64 %m.next, 16
  br i1 %m.more, label %row, label %done
done:
  ret void
}
"""


#: Instructions that go through the lines of a tile: what they are given beside it, and what becomes of line %k.
_BY_LINE = {
    "tilezero": ("", "  store <16 x i32> zeroinitializer, ptr %place, align 64"),
    "tileloadd64": (
        ", ptr %memory, i64 %stride",
        """  %offset = mul i64 %k, %stride
  %source = getelementptr i8, ptr %memory, i64 %offset
  %values = load <16 x i32>, ptr %source, align 1
  store <16 x i32> %values, ptr %place, align 64""",
    ),
    "tilestored64": (
        ", ptr %memory, i64 %stride",
        """  %values = load <16 x i32>, ptr %place, align 64
  %offset = mul i64 %k, %stride
  %target = getelementptr i8, ptr %memory, i64 %offset
  store <16 x i32> %values, ptr %target, align 1""",
    ),
}


def _by_line(name: str, given: str, step: str) -> str:
    """The function of such an instruction."""
    return f"""define internal void @emulated_{name}(ptr %tiles, i8 %tile{given}) {{
entry:
  br label %line
line:
  %k = phi i64 [ 0, %entry ], [ %next, %line ]
  %place = call ptr @tile_line(ptr %tiles, i8 %tile, i64 %k)
{step}
  %next = add i64 %k, 1
  %more = icmp ult i64 %next, {ROWS}
  br i1 %more, label %line, label %done
done:
  ret void
}}
"""


_FMA = "declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)"


def with_emulated_tiles(text: str) -> str:
    """A module's LLVM text, with functions in place of the instructions for tiles; each function that uses tiles has
    eight of its own."""
    wrong = unset_shapes(text)
    assert not wrong, f"tiles are used before their shapes are set, or stay set: {', '.join(wrong)}"
    if not _CALL.search(text):
        return _DECLARED.sub("", _SETTINGS.sub("", text))
    text = _FUNCTION.sub(lambda found: _on_the_stack(found.group()), text)
    rest = _DECLARED.sub("", _SETTINGS.sub("", text))
    assert "@llvm.x86.tile" not in rest, "an instruction for tiles is left"
    by_line = (_by_line(name, *what) for name, what in _BY_LINE.items())
    return "\n".join([rest, *([] if "@llvm.fma.v16f32(" in rest else [_FMA]), _FUNCTIONS, *by_line])


def unset_shapes(text: str) -> list[str]:
    """The functions that use tiles, themselves or by others that they call, and do not set the shapes of these before
    and release them behind; see Note [Shapes of tiles]."""
    functions = {found[1]: found[2] for found in _DEFINED.finditer(text)}
    calls = {name: _CALLED.findall(body) for name, body in functions.items()}
    own = {name for name, body in functions.items() if _SETTINGS.search(body)}
    users = {name for name, body in functions.items() if _CALL.search(body)}
    while more := {name for name in functions.keys() - own - users if users.intersection(calls[name])}:
        users |= more
    begun = {called for names in calls.values() for called in names}
    wrong = [name for name in users - own if name not in begun]
    return sorted([*wrong, *(name for name in own if not _is_framed(functions[name], users))])


def _is_framed(body: str, users: set[str]) -> bool:
    """Whether all that a function does with tiles is between the instructions that set their shapes and release them,
    and nothing returns before that."""
    lines = [line.strip() for line in body.splitlines()]
    settings = [k for k, line in enumerate(lines) if _SETTINGS.match(line)]
    uses = [k for k, line in enumerate(lines) if _CALL.search(line) or users.intersection(_CALLED.findall(line))]
    returns = [k for k, line in enumerate(lines) if line.startswith("ret ")]
    if len(settings) != 2 or "ldtilecfg" not in lines[settings[0]] or "tilerelease" not in lines[settings[1]]:
        return False
    return all(settings[0] < use < settings[1] for use in uses) and all(settings[1] < end for end in returns)


def _on_the_stack(function: str) -> str:
    emulated, count = _CALL.subn(r"call void @emulated_\1(ptr %emulated_tiles, ", function)
    room = f"  %emulated_tiles = alloca [{TILES * TILE_BYTES} x i8], align 64\n"
    return emulated.replace("entry:\n", f"entry:\n{room}", 1) if count else function


def why_not() -> str:
    """Why tile registers are not emulated here; nothing where they are."""
    features = llvm.get_host_cpu_features()
    if all(features.get(name) for name in FEATURES):
        return "this processor has its own"
    missing = [name for name in NEEDED if not features.get(name)]
    return f"this processor lacks {', '.join(missing)}" if missing else ""


def emulate() -> None:
    """Give this processor tile registers, as far as the CPU target knows; tests have not been imported yet."""
    features = llvm.get_host_cpu_features()
    features.update(dict.fromkeys(FEATURES, True))
    of_host: Any = llvm
    of_host.get_host_cpu_features = lambda: features
    for module in (native, machine, load):
        asked: Any = module
        asked.tiles_allowed = lambda: True
    # What LLVM knows of the first processor with AMX is more than what is emulated.
    named: Any = machine
    named._WITH_TILES = llvm.get_host_cpu_name()
    compiling: Any = objects
    compile_for = objects.compile_for
    compiling.compile_for = lambda target, text: compile_for(target, with_emulated_tiles(text))
    for asked_before in (native.host_processor, machine.host_machine):
        asked_before.cache_clear()


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported."""
    if why_not():
        raise pytest.UsageError(f"tile registers are not emulated: {why_not()}")
    emulate()


def pytest_report_header() -> str:
    """Say so at the top of the run."""
    return "tile registers: emulated"
