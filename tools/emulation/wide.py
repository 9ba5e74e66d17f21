"""A pytest plugin: kernels for processors with vectors of 512 bits, on any x86-64 that has AVX2.

``pytest -p tools.emulation.wide --wide znver4 packages/inductor-lower/tests/test_inductor_lower_cpu_few_rows.py``
``python -m tools.emulation.wide sapphirerapids tools.fuzz.layers --programs 100`` (any module, in this process)

The CPU target takes this processor for the named one: kernels are chosen, packed, written and checked as there, and
LLVM's text of them is the one made there. LLVM then makes instructions of AVX2 from it, two for each vector of 512
bits. What the text names of AVX-512 are calls of functions that do the same (:mod:`.wide_functions`), as are the tile
registers (:mod:`.tiles`); torch's vector math library is asked twice, for half of the lanes each. torch itself stays
what it is here, but for the layout of weights of 4 bits (:mod:`.wide_packing`). Speed says nothing.

What it can't show is what LLVM's code generator makes of the text for such a processor.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.binding as llvm
import pytest

from aotkit_inductor_lower import native
from aotkit_inductor_lower.targets.cpu import load, machine
from aotkit_inductor_lower.targets.cpu import object as objects

from . import tiles
from .wide_functions import FUNCTIONS, needed_of
from .wide_packing import pack_as_there

__all__ = ["PROCESSORS", "Wide", "emulate", "emulate_named", "main", "with_short_vectors"]

#: Tests that compare with what torch itself computes on such a processor, and does not on this one.
NOT_EMULATED = {
    "test_pairs_of_subnormal_numbers_are_zeros_as_in_eager_mode": "eager's product here keeps subnormal numbers",
}

NEEDED = ("avx2", "fma", "f16c", "bmi2")
SHORT = "x86-64-v3"  # what LLVM makes instructions of
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_LATER = ("avx512bf16", "avx512vnni", "avx512vbmi", "avx512vbmi2", "avx512bitalg", "avx512ifma", "avx512vpopcntdq")


@dataclass(frozen=True)
class Wide:
    """A processor by LLVM's name, and what it has that the CPU target may ask for."""

    name: str
    features: tuple[str, ...]

    def machine(self) -> machine.Machine:
        """What kernels are generated for, but for symbols."""
        level = machine.generic_machine(512)
        flags = ",".join(f"+{feature}" for feature in self.features)
        return replace(level, cpu=self.name, features=f"{level.features},{flags}")


#: The first one with AVX-512, AMD's first one, and the first one with tile registers.
PROCESSORS = (
    Wide("skylake-avx512", _V4),
    Wide("znver4", (*_V4, *_LATER)),
    Wide("sapphirerapids", (*_V4, *_LATER, "avx512fp16", *tiles.FEATURES)),
)

_KEPT: list[object] = []  # what ATen's operators are as long as it lives
_CALL = re.compile(r"@llvm\.x86\.(avx512(?:bf16)?\.[\w.]+)\(")
_DECLARED = re.compile(r"^declare [^\n]*@llvm\.x86\.avx512[\w.]*\([^\n]*\n", re.MULTILINE)
_ROUNDED = re.compile(r"fptrunc (<16 x float> [^\n]*?) to <16 x bfloat>")
#: An empty piece of assembly, which takes a whole register that this processor has not.
_UNSEEN = re.compile(r'call (<(?:16 x float|8 x double|64 x i8)>) asm "", "=v,0"\(\1 ([^\n]*)\)')
_VECTOR_MATH = re.compile(r"^declare <(\d+) x (float|double)> @(Sleef_\w+avx512f)\(([^\n]*)\)\n", re.MULTILINE)
_MASKED = re.compile(r"(call [^@\n]*@)llvm\.masked\.(load|store)\.v(\d+)i(8|16)\.p0\(")


def _masked(kind: str, lanes: str, bits: str) -> str:
    """A function of such an access, which AVX2 has to make element by element: once in a module, and not in each
    place, which would take LLVM seconds."""
    vector, mask, align = f"<{lanes} x i{bits}>", f"<{lanes} x i1>", int(bits) // 8
    symbol = f"masked.{kind}.v{lanes}i{bits}"
    if kind == "load":
        given, result = f"ptr %at, {mask} %mask, {vector} %other", vector
        made = [f"  %y = call {vector} @llvm.{symbol}.p0(ptr align {align} %at, {mask} %mask, {vector} %other)"]
        made.append(f"  ret {vector} %y")
    else:
        given, result = f"{vector} %x, ptr %at, {mask} %mask", "void"
        made = [f"  call void @llvm.{symbol}.p0({vector} %x, ptr align {align} %at, {mask} %mask)", "  ret void"]
    return "\n".join([f"define internal {result} @emulated.{symbol}({given}) {{", *made, "}", ""])


def half_of(symbol: str) -> str:
    """The function of torch's vector math library for half as many lanes."""
    lanes = {"f16_": "f8_", "d8_": "d4_"}
    found = re.fullmatch(r"(Sleef_\w+?)(f16_|d8_)(\w*)avx512f", symbol)
    assert found is not None, symbol
    return f"{found[1]}{lanes[found[2]]}{found[3]}avx2"


def _in_halves(found: re.Match[str]) -> str:
    """Such a function, by two calls of that for half of the lanes."""
    lanes, element, symbol, count = int(found[1]), found[2], found[3], found[4].count("<")
    half, whole, short = lanes // 2, f"<{lanes} x {element}>", f"<{lanes // 2} x {element}>"
    parts = [f"<{half} x i32> <{', '.join(f'i32 {k}' for k in range(at, at + half))}>" for at in (0, half)]
    lines = [f"declare {short} @{half_of(symbol)}({', '.join([short] * count)})"]
    lines.append(f"define internal {whole} @{symbol}({', '.join(f'{whole} %x{n}' for n in range(count))}) {{")
    for which, part in enumerate(parts):
        for n in range(count):
            lines.append(f"  %x{n}.{which} = shufflevector {whole} %x{n}, {whole} poison, {part}")
        given = ", ".join(f"{short} %x{n}.{which}" for n in range(count))
        lines.append(f"  %y.{which} = call {short} @{half_of(symbol)}({given})")
    every = ", ".join(f"i32 {k}" for k in range(lanes))
    lines.append(f"  %y = shufflevector {short} %y.0, {short} %y.1, <{lanes} x i32> <{every}>")
    return "\n".join([*lines, f"  ret {whole} %y", "}", ""])


def with_short_vectors(text: str) -> str:
    """A module's LLVM text, with functions in place of what only processors with vectors of 512 bits have."""
    text = tiles.with_emulated_tiles(text)
    text = _VECTOR_MATH.sub(_in_halves, _DECLARED.sub("", text))
    text = _UNSEEN.sub(r"freeze \1 \2", text)
    text = _ROUNDED.sub(r"call <16 x bfloat> @wide.fptrunc(\1)", text)
    text = _CALL.sub(r"@wide.\1(", text)
    accesses = sorted({found.groups()[1:] for found in _MASKED.finditer(text)})
    text = "\n".join([_MASKED.sub(r"\1emulated.masked.\2.v\3i\4(", text), *(_masked(*access) for access in accesses)])
    names = set(re.findall(r"@(wide\.[\w.]+)\(", text))
    unknown = names - set(FUNCTIONS)
    assert not unknown, f"not emulated: {', '.join(sorted(unknown))}"
    return "\n".join([text, *needed_of(sorted(names), text)]) if names else text


def why_not() -> str:
    """Why such processors are not emulated here; nothing where they are."""
    features = llvm.get_host_cpu_features()
    missing = [name for name in NEEDED if not features.get(name)]
    return f"this processor lacks {', '.join(missing)}" if missing else ""


def emulate(wanted: Wide) -> None:
    """Take this processor for another one; tests have not been imported yet."""
    features = llvm.get_host_cpu_features()
    for feature in features:
        if feature.startswith(("avx512", "amx")):
            features[feature] = feature in wanted.features
    of_host: Any = llvm
    of_host.get_host_cpu_features = lambda: features
    of_host.get_host_cpu_name = lambda: wanted.name
    for asked_before in (native.host_processor, machine.host_machine):
        asked_before.cache_clear()
    for module in (native, machine, load):
        asked: Any = module
        asked.tiles_allowed = lambda: "amx-tile" in wanted.features
    machine_for, load_object, compile_for = native.machine_for, native.load_object, native.compile_for

    def machine_for_short(triple: str, cpu: str, flags: str, opt_level: int = 2) -> llvm.TargetMachine:
        if not triple.startswith("x86_64") or "+avx512f" not in flags.split(","):
            return machine_for(triple, cpu, flags, opt_level)
        made: Any = machine_for(triple, SHORT, machine.LEVELS[SHORT][1], opt_level)
        made.stands_for_wide = True
        return made

    def compile_for_short(made: llvm.TargetMachine, text: str) -> bytes:
        return compile_for(made, with_short_vectors(text) if hasattr(made, "stands_for_wide") else text)

    def load_with_halves(code: bytes, imports: Sequence[str], exports: Sequence[str]) -> native.LoadedObject:
        halves = [half_of(symbol) for symbol in imports if symbol.endswith("avx512f")]
        return load_object(code, [*imports, *halves], exports)

    for module in (native, machine):
        asked = module
        asked.machine_for = machine_for_short
    for module in (native, objects):
        asked = module
        asked.compile_for = compile_for_short
    loading: Any = load
    loading.load_object = load_with_halves
    _KEPT.append(pack_as_there())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which processor."""
    parser.addoption("--wide", choices=[processor.name for processor in PROCESSORS], default="sapphirerapids")


def emulate_named(name: str) -> None:
    """Take this processor for one of :data:`PROCESSORS`."""
    if why_not():
        raise pytest.UsageError(f"vectors of 512 bits are not emulated: {why_not()}")
    emulate(next(each for each in PROCESSORS if each.name == name))


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported."""
    emulate_named(config.getoption("--wide"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What can't be shown here is skipped, and says why."""
    for item in items:
        reason = NOT_EMULATED.get(getattr(item, "originalname", item.name))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header(config: pytest.Config) -> str:
    """Say so at the top of the run."""
    return f"kernels: for {config.getoption('--wide')}, on vectors of 256 bits"


def main() -> None:
    """Run a module as on such a processor."""
    name, module, *_ = sys.argv[1:]
    emulate_named(name)
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
