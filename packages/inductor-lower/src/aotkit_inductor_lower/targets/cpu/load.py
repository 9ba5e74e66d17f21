"""Object code to functions of this process. It imports no code generator."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

import llvmlite.binding as llvm
import torch

from ... import _torch_compat
from ...errors import BindError
from ...launch_plan.loaded import Loaded
from ...launch_plan.records import CallSegment, CompiledProgram
from ...launch_plan.status import INDEX_ERROR
from .machine import ensure_llvm, host_machine, symbol_address, target_machine

__all__ = ["LoadedObject", "load", "load_object"]

_SEGMENT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)
_CONTEXT = (
    "n = threads()",
    "if n > 1 and getpid() != owner: n = 1  # a forked child has no thread pool",
)


def load(program: CompiledProgram) -> Loaded:
    """Load a program's object code. Raises :class:`~.errors.BindError` if it is damaged or does not load here."""
    names = {"threads": torch.get_num_threads, "getpid": os.getpid, "owner": os.getpid()}
    segments, empty = _segments(program), _torch_compat.empty_strided_cpu
    return Loaded(program.plan, segments, _CONTEXT, names, _failure(program), empty)


def _segments(program: CompiledProgram) -> dict[str, Callable[[int, int], int]]:
    names = [step.function for step in program.plan.steps if isinstance(step, CallSegment)]
    if not names:
        return {}
    ((_, code),) = program.binary.sections
    try:
        loaded = load_object(code, program.binary.facts["imports"], names)
    except (RuntimeError, LookupError) as error:
        raise BindError(f"the object code of {program.plan.name} does not load here: {error}; compile again") from error
    functions: dict[str, Callable[[int, int], int]] = {}
    for name, address in loaded.addresses().items():
        function = _SEGMENT(address)
        function.keep_alive = loaded  # type: ignore[attr-defined]
        functions[name] = function
    return functions


def _failure(program: CompiledProgram) -> Callable[[int, Sequence[str]], None]:
    lines = {record.name: record.origin.line for record in program.kernels}

    def fail(status: int, launches: Sequence[str]) -> None:
        _raise_status(status, tuple(launches), lines)

    return fail


def _raise_status(status: int, launches: tuple[str, ...], lines: dict[str, str]) -> None:
    """Raise what eager raises for the error a segment reported, naming the kernel and the user's line."""
    name = launches[(status >> 8) - 1]
    place = lines.get(name, "")
    where = f"\n  kernel {name}" + (f", from:\n{place}" if place else "")
    if status & INDEX_ERROR:
        raise IndexError(f"an index is out of range for the dimension it selects from{where}")
    raise RuntimeError(f"an integer was divided by zero (ZeroDivisionError){where}")


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
