"""LLVM text to object code.

Note [Passes]
    The emitted text is already vectorised, unrolled, hoisted and free of common subexpressions, so no pass of LLVM's
    optimiser runs; instruction selection, scheduling and register allocation do the rest. That is 5 to 8 ms of
    processor time for a typical kernel.
"""

from __future__ import annotations

import time

from ...memory.code_pages import release_code_pages
from ...native import compile_for
from .machine import Machine, target_machine

__all__ = ["compile_text"]

#: A compile by LLVM of so many seconds is followed by many steps, not by another compile.
_LONG = 0.1


def compile_text(text: str, target: Machine) -> bytes:
    """Object code of a module's LLVM text. Raises ``RuntimeError`` with LLVM's message if the text is malformed."""
    started = time.perf_counter()
    code = compile_for(target_machine(target), text)
    if time.perf_counter() - started > _LONG:
        release_code_pages("llvmlite")
    return code
