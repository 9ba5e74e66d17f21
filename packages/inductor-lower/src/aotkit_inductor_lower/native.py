"""Native code in this process, through LLVM: text to object code, object code to functions.

Whoever has native code uses it: the CPU target for its kernels, and the Triton target for the loop that launches those
of a device. It knows nothing of kernels.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import torch

from .errors import UnsupportedGraphError

__all__ = [
    "LoadedObject",
    "code_generator",
    "compile_for",
    "ensure_llvm",
    "host_processor",
    "load_object",
    "machine_for",
]
__all__ += ["symbol_address", "tiles_allowed"]

_LOCK = threading.Lock()

#: The oldest LLVM whose code generator takes every kernel: 20 ends the process on some.
_OLDEST_LLVM = 22

#: By ``sys.platform``, what torch's library of operators and the OpenMP runtimes beside it are called.
_LIBRARIES = {
    "linux": ("libtorch_cpu.so*", "libgomp*.so*", "libomp*.so*", "libiomp5*.so*"),
    "darwin": ("libtorch_cpu.dylib", "libomp*.dylib", "libiomp5*.dylib"),
    "win32": ("torch_cpu.dll", "libiomp5md.dll", "libomp*.dll"),
}


def code_generator() -> str:
    """The name and version of what makes machine code."""
    return f"LLVM {'.'.join(map(str, llvm.llvm_version_info))} of llvmlite {llvmlite.__version__}"


@functools.cache
def _initialise() -> bool:
    """Set LLVM up, for other machines too, and make torch's libraries visible to generated code."""
    if llvm.llvm_version_info[0] < _OLDEST_LLVM:
        version = ".".join(map(str, llvm.llvm_version_info))
        raise UnsupportedGraphError(
            "anything to native code", f"LLVM {version} is too old", todo="install llvmlite 0.48 or newer"
        )
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for library in library_files(Path(torch.__file__).parent / "lib", sys.platform):
        try:
            llvm.load_library_permanently(str(library))
        except RuntimeError:
            continue  # a library that does not load offers no symbols; lookups then fall back
    return True


def library_files(folder: Path, platform: str) -> list[Path]:
    """torch's own libraries in its folder whose functions kernels may call, as they are named on a platform."""
    patterns = _LIBRARIES.get(platform, _LIBRARIES["linux"])
    return [library for pattern in patterns for library in sorted(folder.glob(pattern))]


def ensure_llvm() -> None:
    """Initialise LLVM once. Safe to call from any thread.

    Raises:
        UnsupportedGraphError: the installed llvmlite is too old.
    """
    with _LOCK:
        _initialise()


@functools.cache
def host_processor() -> tuple[str, str, str]:
    """Triple, name and features of the processor that this process runs on, as LLVM has them; asked once."""
    ensure_llvm()
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # arch_prctl's ARCH_REQ_XCOMP_PERM; XFEATURE_XTILEDATA
_ARCH_PRCTL = 158  # on x86-64


@functools.cache
def tiles_allowed() -> bool:
    """Ask the kernel to let this process use the tile registers of AMX, once. They are 8 KiB that a context switch
    saves, so Linux has each process ask; other systems are not asked."""
    triple, _, features = host_processor()
    there = "+amx-tile" in features.split(",")
    if not there or not sys.platform.startswith("linux") or not triple.startswith("x86_64"):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def machine_for(triple: str, cpu: str, features: str, opt_level: int = 2) -> llvm.TargetMachine:
    """An LLVM target machine for a processor. Not shared between threads: each user makes its own (1 ms).

    Position independent with near addresses, so that constants are operands of instructions instead of being kept
    in (and spilled from) registers. The loader keeps all sections within reach of each other.
    """
    ensure_llvm()
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=opt_level, reloc="pic", codemodel="small", jit=True
    )


def compile_for(machine: llvm.TargetMachine, text: str) -> bytes:
    """Object code of a module's LLVM text. Raises ``RuntimeError`` with LLVM's message if the text is malformed."""
    return bytes(machine.emit_object(llvm.parse_assembly(text)))


def symbol_address(symbol: str) -> int:
    """Where a function of this process is, 0 if it has none of that name."""
    return llvm.address_of_symbol(symbol) or _process_address(symbol)


def _process_address(symbol: str) -> int:
    if sys.platform == "win32":
        return 0  # a process has no table of all its functions there; those of loaded libraries were found before
    try:
        return ctypes.cast(getattr(ctypes.CDLL(None), symbol), ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


class LoadedObject:
    """Object code in memory; alive as long as its functions may be called.

    ``imports``: the functions it calls, looked up here and now. Raises ``LookupError`` for one that this process does
    not have, and ``RuntimeError`` if the code does not link.
    """

    def __init__(self, code: bytes, imports: Sequence[str], exports: Sequence[str]) -> None:
        ensure_llvm()
        builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
        for name in imports:
            address = symbol_address(name)
            if not address:
                raise LookupError(f"this process has no function {name}")
            builder.import_symbol(name, address)
        for name in exports:
            builder.export_symbol(name)
        # JITLink places all sections within reach of each other, as the near code model needs.
        self._jit = llvm.create_lljit_compiler(machine_for(*host_processor()), use_jit_link=True)
        self._library = builder.link(self._jit, "kernels")
        self._exports = tuple(exports)

    def addresses(self) -> dict[str, int]:
        """Where the exported functions are."""
        return {name: int(self._library[name]) for name in self._exports}


def load_object(code: bytes, imports: Sequence[str], exports: Sequence[str]) -> LoadedObject:
    """Load object code for calling in this process (about a millisecond)."""
    return LoadedObject(code, imports, exports)
