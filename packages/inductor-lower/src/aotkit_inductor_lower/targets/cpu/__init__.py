"""LLVM IR text for loop nests, and its way to object code.

Names are imported when asked for: a process that only loads object code needs :mod:`.object` and :mod:`.machine`, and
none of the generator.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...kernel_ir.nests import FlatNest, Memory, flatten_nest
    from .machine import CpuTarget, arm_target, generic_target, host_target, processor_target
    from .module import Launch, ModuleText
    from .object import LoadedObject, compile_text, load_object
    from .render.kernel import KernelText, emit_kernel

__all__ = [
    "Batch",
    "CpuTarget",
    "FlatNest",
    "KernelText",
    "Launch",
    "LoadedObject",
    "Memory",
    "ModuleText",
    "arm_target",
    "compile_text",
    "emit_kernel",
    "flatten_nest",
    "generic_target",
    "host_target",
    "load_object",
    "processor_target",
]

_HOMES = {
    "KernelText": "render.kernel",
    "emit_kernel": "render.kernel",
    "Batch": "module",
    "Launch": "module",
    "ModuleText": "module",
    "FlatNest": "..kernel_ir.nests",
    "Memory": "..kernel_ir.nests",
    "flatten_nest": "..kernel_ir.nests",
    "LoadedObject": "object",
    "compile_text": "object",
    "load_object": "object",
    "CpuTarget": "machine",
    "arm_target": "machine",
    "generic_target": "machine",
    "host_target": "machine",
    "processor_target": "machine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
