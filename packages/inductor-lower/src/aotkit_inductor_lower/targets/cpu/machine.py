"""Which machine the kernels are generated for, and which run-time symbols they may call."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import llvmlite.binding as llvm

from ...errors import ProcessorError
from ...native import ensure_llvm, machine_for, symbol_address, tiles_allowed
from ...ops.scalar import MATH, MathSymbol
from .threads import why_one_thread

__all__ = [
    "LEVELS",
    "Machine",
    "arm_machine",
    "generic_machine",
    "host_machine",
    "level_machine",
    "processor_machine",
    "target_machine",
]


@dataclass(frozen=True, slots=True)
class Machine:
    """A processor as code generation sees it.

    ``vector_bits``: width of the vector registers used (512, 256 or 128). ``vector_math``: symbols of torch's
    vector math library that exist, by IR op and element type (``("exp", "f32")``); ops without one are computed
    by scalar libm calls. ``threads``: whether torch's OpenMP runtime can be entered
    (:func:`.threads.why_one_thread` says why not).
    """

    triple: str
    cpu: str
    features: str
    vector_bits: int
    vector_math: tuple[tuple[str, str, str], ...] = ()
    threads: bool = False

    def lanes(self, element_bits: int) -> int:
        """Elements of that width in one vector register."""
        return self.vector_bits // element_bits

    def has(self, feature: str) -> bool:
        """Whether the instruction set extension (LLVM's name, ``"f16c"``) is on, or 64-bit ARM's own for it."""
        if self.triple.startswith("aarch64"):
            return feature in ("fma", "f16c")  # part of every such processor
        return f"+{feature}" in self.features.split(",")

    def vector_function(self, op: str, element: str) -> str | None:
        """The vector math symbol computing ``op`` on a full register of ``element`` (``"f32"``, ``"f64"``)."""
        for name, kind, symbol in self.vector_math:
            if name == op and kind == element:
                return symbol
        return None


@functools.cache
def host_machine() -> Machine:
    """The processor this process runs on, with the symbols found in its libraries."""
    ensure_llvm()
    features = llvm.get_host_cpu_features()
    flat = features.flatten()
    if features.get("amx-tile") and not tiles_allowed():
        flat = ",".join(f"-{name[1:]}" if name.startswith("+amx") else name for name in flat.split(","))
    bits = 512 if features.get("avx512f") and features.get("avx512bw") and features.get("avx512vl") else 0
    bits = bits or (256 if features.get("avx2") and features.get("fma") else 128)
    if bits == 512:
        flat += ",-prefer-256-bit"
    # LLVM knows processors by their numbers, some of which it takes for older ones.
    name = _WITH_TILES if "+amx-tile" in flat.split(",") else llvm.get_host_cpu_name()
    base = Machine(llvm.get_process_triple(), name, flat, bits)
    return with_symbols(base)


_V4 = "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx2,+fma,+f16c,+bmi2,-prefer-256-bit"
_WITH_TILES = "sapphirerapids"  # LLVM's name of the first processor with AMX

#: Levels of x86-64: the width of vectors, and the features that kernels are generated with.
LEVELS = {
    "x86-64": (128, "+sse2"),
    "x86-64-v2": (128, "+sse4.2,+popcnt"),
    "x86-64-v3": (256, "+avx2,+fma,+f16c,+bmi2"),
    "x86-64-v4": (512, _V4),
    "x86-64-amx": (512, f"{_V4},+avx512bf16,+amx-tile,+amx-bf16,+amx-int8"),
}


def generic_machine(vector_bits: int = 128) -> Machine:
    """A plain x86-64 (128), AVX2 (256) or AVX-512 (512) processor of this operating system."""
    return level_machine({128: "x86-64", 256: "x86-64-v3", 512: "x86-64-v4"}[vector_bits])


def level_machine(name: str) -> Machine:
    """The processor of a level of x86-64, whether this one has it or not."""
    ensure_llvm()
    bits, features = LEVELS[name]
    cpu = _WITH_TILES if name == "x86-64-amx" else name
    return with_symbols(Machine(llvm.get_process_triple(), cpu, features, bits))


def arm_machine() -> Machine:
    """Any 64-bit ARM processor under Linux. Its code can be generated everywhere; the C library does its math."""
    ensure_llvm()
    return Machine("aarch64-unknown-linux-gnu", "generic", "+neon", 128, threads=True)


def processor_machine(name: str) -> Machine:
    """``"host"``, or a level of x86-64 (``"x86-64"``, ``"x86-64-v2"``, ``"x86-64-v3"``, ``"x86-64-v4"``, and with AMX
    ``"x86-64-amx"``) that this processor has.

    Raises :class:`.ProcessorError` for a level that it lacks: what is compiled is also run.
    """
    host = host_machine()
    if name == "host":
        return host
    bits, _features = LEVELS[name]
    wanted = {"x86-64-v2": ("sse4.2",), "x86-64-amx": ("amx-bf16", "amx-int8")}.get(name, ())
    lacks = bits > host.vector_bits or not all(map(host.has, wanted))
    if not host.triple.startswith(("x86_64", "i686")) or lacks:
        raise ProcessorError(f"this processor ({host.cpu}) can't run code for {name}; compile with processor='host'")
    return level_machine(name)


def with_symbols(target: Machine) -> Machine:
    """The target with what this process's libraries offer looked up."""
    found = []
    for op, function in MATH.items():
        for element in ("f32", "f64"):
            symbol = _first_present(_vector_symbols(function, element, target.vector_bits))
            if symbol:
                found.append((op, element, symbol))
    return replace(target, vector_math=tuple(found), threads=not why_one_thread())


def _vector_symbols(function: MathSymbol, element: str, bits: int) -> Iterable[str]:
    """What torch's CPU library may call its version of a function."""
    op, accuracy = function.name, function.accuracy
    letter, width = ("f", bits // 32) if element == "f32" else ("d", bits // 64)
    suffix = {512: "avx512f", 256: "avx2"}.get(bits)
    if suffix is None:
        return
    tail = f"{accuracy}{suffix}" if accuracy else suffix
    yield f"Sleef_{op}{letter}{width}_{tail}"
    yield f"Sleef_{op}{letter}{width}_{accuracy}" if accuracy else f"Sleef_{op}{letter}{width}"


def _first_present(symbols: Iterable[str]) -> str | None:
    return next((symbol for symbol in symbols if symbol_address(symbol)), None)


def target_machine(target: Machine, opt_level: int = 2) -> llvm.TargetMachine:
    """LLVM's target machine, see :func:`.native.machine_for`."""
    return machine_for(target.triple, target.cpu, target.features, opt_level)
