"""LLVM text to object code, and object code to callable addresses.

Note [Passes]
    The emitted text is already vectorised, unrolled and hoisted, so the optimiser has little left to do; see
    ``benchmarks/kernels.py --passes`` for what each costs and gains. Instruction selection does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import llvmlite.binding as llvm

from .target import CpuTarget, ensure_llvm, host_target, target_machine

__all__ = ["LoadedObject", "compile_text", "load_object"]


def compile_text(text: str, target: CpuTarget) -> bytes:
    """Object code of a module's LLVM text. Raises ``RuntimeError`` with LLVM's message if the text is malformed."""
    ensure_llvm()
    machine = target_machine(target)
    module = llvm.parse_assembly(text)
    return bytes(machine.emit_object(module))


class LoadedObject:
    """Object code in memory; alive as long as its functions may be called."""

    def __init__(self, code: bytes, target: CpuTarget | None = None) -> None:
        ensure_llvm()
        empty = llvm.parse_assembly("")
        self._machine = target_machine(target or host_target())
        self._engine = llvm.create_mcjit_compiler(empty, self._machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def addresses(self, names: Sequence[str]) -> list[int]:
        """Where the functions are. Raises ``LookupError`` for a missing one."""
        found = [int(self._engine.get_function_address(name)) for name in names]
        missing = [name for name, address in zip(names, found, strict=True) if not address]
        if missing:
            raise LookupError(f"the object code defines no function {', '.join(missing)}")
        return found


def load_object(code: bytes, target: CpuTarget | None = None) -> LoadedObject:
    """Load object code for calling in this process (about a millisecond)."""
    return LoadedObject(code, target)
