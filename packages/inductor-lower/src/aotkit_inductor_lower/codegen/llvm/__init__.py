"""LLVM IR text for loop nests, and its way to object code.

Names are imported when asked for: a process that only loads object code needs :mod:`.object` and :mod:`.target`, and
none of the generator.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernel import KernelText, emit_kernel
    from .module import Launch, ModuleText
    from .nest import FlatNest, Memory, flatten_nest
    from .object import LoadedObject, compile_text, load_object
    from .target import CpuTarget, arm_target, generic_target, host_target, processor_target

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
    "KernelText": "kernel",
    "emit_kernel": "kernel",
    "Batch": "module",
    "Launch": "module",
    "ModuleText": "module",
    "FlatNest": "nest",
    "Memory": "nest",
    "flatten_nest": "nest",
    "LoadedObject": "object",
    "compile_text": "object",
    "load_object": "object",
    "CpuTarget": "target",
    "arm_target": "target",
    "generic_target": "target",
    "host_target": "target",
    "processor_target": "target",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
