"""Kernels for other processors, run here: user-mode emulation (qemu) executes their machine code.

The object code of a program is linked for the other processor and called by a small server (``runner.c``), which the
emulator runs. Everything else of the program, its plan and its calls of ATen, runs in this process.
"""

from .processors import ARM, PROCESSORS, X86_64, X86_64_V2, X86_64_V3, Emulated
from .programs import emulated_loader, generate_for
from .server import EmulationError, Server

__all__ = [
    "ARM",
    "PROCESSORS",
    "X86_64",
    "X86_64_V2",
    "X86_64_V3",
    "EmulationError",
    "Emulated",
    "Server",
    "emulated_loader",
    "generate_for",
]
