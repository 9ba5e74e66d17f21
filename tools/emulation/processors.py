"""The processors that are emulated: what kernels are generated for, and which compiler and emulator run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from aotkit_inductor_lower.targets.cpu import Machine, arm_machine, processor_machine

__all__ = ["ARM", "PROCESSORS", "X86_64", "X86_64_V2", "X86_64_V3", "Emulated"]


@dataclass(frozen=True)
class Emulated:
    """A processor. ``compiler`` links for it; ``emulator`` is a command that runs its programs, as the oldest model
    that has the ``level``, so that an instruction beyond it is an error and not a wrong number."""

    name: str
    compiler: str
    emulator: tuple[str, ...]
    make_machine: Callable[[], Machine]

    def machine(self) -> Machine:
        """What kernels are generated for: threads, but no vector math library, which the emulated process has not."""
        return replace(self.make_machine(), vector_math=(), threads=True)


def _level(name: str, model: str) -> Emulated:
    return Emulated(name, "gcc", ("qemu-x86_64", "-cpu", model), lambda: processor_machine(name))


ARM = Emulated(
    "aarch64",
    "aarch64-linux-gnu-gcc",
    ("qemu-aarch64", "-cpu", "cortex-a53", "-L", "/usr/aarch64-linux-gnu"),
    arm_machine,
)
X86_64 = _level("x86-64", "qemu64,-sse3,-ssse3,-sse4.1,-sse4.2,-popcnt")
X86_64_V2 = _level("x86-64-v2", "Nehalem")
X86_64_V3 = _level("x86-64-v3", "Haswell")
PROCESSORS = (ARM, X86_64, X86_64_V2, X86_64_V3)
