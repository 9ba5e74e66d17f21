"""Which machine the kernels are generated for, and which run-time symbols they may call."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import llvmlite.binding as llvm
import torch

from ...errors import CodegenError
from ...ops.scalar import MATH, MathSymbol

__all__ = [
    "Machine",
    "arm_machine",
    "ensure_llvm",
    "generic_machine",
    "host_machine",
    "processor_machine",
    "symbol_address",
    "target_machine",
]

_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@dataclass(frozen=True, slots=True)
class Machine:
    """A processor as code generation sees it.

    ``vector_bits``: width of the vector registers used (512, 256 or 128). ``vector_math``: symbols of torch's
    vector math library that exist, by IR op and element type (``("exp", "f32")``); ops without one are computed
    by scalar libm calls. ``threads``: whether torch's OpenMP runtime can be entered.
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


_LOCK = threading.Lock()


@functools.cache
def _initialise() -> bool:
    """Set LLVM up, for other machines too, and make torch's libraries visible to generated code."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    folder = Path(torch.__file__).parent / "lib"
    for pattern in ("libtorch_cpu.*", "libgomp*", "libomp*"):
        for library in sorted(folder.glob(pattern)):
            if library.suffix in (".so", ".dylib", ".dll") or ".so" in library.suffixes:
                try:
                    llvm.load_library_permanently(str(library))
                except RuntimeError:
                    continue  # a library that does not load offers no symbols; lookups then fall back
    return True


def ensure_llvm() -> None:
    """Initialise LLVM once. Safe to call from any thread."""
    with _LOCK:
        _initialise()


@functools.cache
def host_machine() -> Machine:
    """The processor this process runs on, with the symbols found in its libraries."""
    ensure_llvm()
    features = llvm.get_host_cpu_features()
    flat = features.flatten()
    bits = 512 if features.get("avx512f") and features.get("avx512bw") and features.get("avx512vl") else 0
    bits = bits or (256 if features.get("avx2") and features.get("fma") else 128)
    if bits == 512:
        flat += ",-prefer-256-bit"
    base = Machine(llvm.get_process_triple(), llvm.get_host_cpu_name(), flat, bits)
    return with_symbols(base)


def generic_machine(vector_bits: int = 128) -> Machine:
    """A plain x86-64 (128), AVX2 (256) or AVX-512 (512) processor of this operating system."""
    ensure_llvm()
    cpu = {128: "x86-64", 256: "x86-64-v3", 512: "x86-64-v4"}[vector_bits]
    features = {
        128: "+sse2",
        256: "+avx2,+fma,+f16c,+bmi2",
        512: "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx2,+fma,+f16c,+bmi2,-prefer-256-bit",
    }[vector_bits]
    return with_symbols(Machine(llvm.get_process_triple(), cpu, features, vector_bits))


def arm_machine() -> Machine:
    """Any 64-bit ARM processor under Linux. Its code can be generated everywhere; the C library does its math."""
    ensure_llvm()
    return Machine("aarch64-unknown-linux-gnu", "generic", "+neon", 128, threads=True)


def processor_machine(name: str) -> Machine:
    """``"host"``, or a level of x86-64 (``"x86-64"``, ``"x86-64-v3"``, ``"x86-64-v4"``) that this processor has.

    Raises :class:`CodegenError` for a level that it lacks: what is compiled is also run.
    """
    host = host_machine()
    if name == "host":
        return host
    bits = {"x86-64": 128, "x86-64-v3": 256, "x86-64-v4": 512}[name]
    if not host.triple.startswith(("x86_64", "i686")) or bits > host.vector_bits:
        raise CodegenError(f"this processor ({host.cpu}) can't run code for {name}; compile with processor='host'")
    return generic_machine(bits)


def with_symbols(target: Machine) -> Machine:
    """The target with what this process's libraries offer looked up."""
    found = []
    for op, function in MATH.items():
        for element in ("f32", "f64"):
            symbol = _first_present(_vector_symbols(function, element, target.vector_bits))
            if symbol:
                found.append((op, element, symbol))
    threads = all(symbol_address(name) for name in _OPENMP)
    return replace(target, vector_math=tuple(found), threads=threads)


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


def symbol_address(symbol: str) -> int:
    """Where a function of this process is, 0 if it has none of that name."""
    return llvm.address_of_symbol(symbol) or _process_address(symbol)


def _process_address(symbol: str) -> int:
    try:
        return ctypes.cast(getattr(ctypes.CDLL(None), symbol), ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


def target_machine(target: Machine, opt_level: int = 2) -> llvm.TargetMachine:
    """An LLVM target machine for ``target``. Not shared between threads: each user makes its own (1 ms).

    Position independent with near addresses, so that constants are operands of instructions instead of being kept
    in (and spilled from) registers. The loader keeps all sections within reach of each other.
    """
    ensure_llvm()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=opt_level, reloc="pic", codemodel="small", jit=True
    )
