"""Object code to callable addresses."""

from __future__ import annotations

from collections.abc import Sequence

import llvmlite.binding as llvm

from .machine import ensure_llvm, host_machine, symbol_address, target_machine

__all__ = ["LoadedObject", "load_object"]


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
        self._jit = llvm.create_lljit_compiler(target_machine(host_machine()), use_jit_link=True)
        self._library = builder.link(self._jit, "kernels")
        self._exports = tuple(exports)

    def addresses(self) -> dict[str, int]:
        """Where the exported functions are."""
        return {name: int(self._library[name]) for name in self._exports}


def load_object(code: bytes, imports: Sequence[str], exports: Sequence[str]) -> LoadedObject:
    """Load object code for calling in this process (about a millisecond)."""
    return LoadedObject(code, imports, exports)
