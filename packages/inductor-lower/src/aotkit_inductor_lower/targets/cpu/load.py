"""A program's object code to functions of this process. It imports no code generator."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch

from ... import _torch_compat
from ...errors import BindError
from ...launch_plan.loaded import Loaded
from ...launch_plan.records import CallSegment, CompiledProgram
from ...launch_plan.status import failure
from ...memory.huge_pages import allocator_of_large
from ...native import load_object, tiles_allowed

__all__ = ["load"]

_SEGMENT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)
_CONTEXT = (
    "n = threads()",
    "if n > 1 and getpid() != owner: n = 1  # a forked child has no thread pool",
)


def load(program: CompiledProgram) -> Loaded:
    """Load a program's object code. Raises :class:`~.errors.BindError` if it is damaged or does not load here."""
    names = {"threads": torch.get_num_threads, "getpid": os.getpid, "owner": os.getpid()}
    segments, empty = _segments(program), _torch_compat.empty_strided_cpu
    large = allocator_of_large(empty)
    return Loaded(program.plan, segments, _CONTEXT, names, failure(program), empty, empty_large=large)


def _segments(program: CompiledProgram) -> dict[str, Callable[[int, int], int]]:
    names = [step.function for step in program.plan.steps if isinstance(step, CallSegment)]
    if not names:
        return {}
    ((_, code),) = program.binary.sections
    if program.binary.facts.get("tiles") and not tiles_allowed():
        raise BindError(
            f"{program.plan.name} was compiled for a processor with AMX, and this process may not use it: the "
            "processor lacks it, or the system does not allow it; compile again here, or for a level of x86-64"
        )
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
