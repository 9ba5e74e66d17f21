"""LLVM IR text for loop nests, and its way to object code.

Names are imported when asked for: a process that only loads object code needs :mod:`.load` and :mod:`.machine`, and
none of the generator.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .load import LoadedObject, load_object
    from .machine import CpuTarget, arm_target, generic_target, host_target, processor_target
    from .module import ModuleText
    from .object import compile_text
    from .render.kernel import emit_kernel

__all__ = [
    "CpuTarget",
    "LoadedObject",
    "ModuleText",
    "arm_target",
    "compile_text",
    "emit_kernel",
    "generic_target",
    "host_target",
    "load_object",
    "processor_target",
]

_HOMES = {
    "emit_kernel": "render.kernel",
    "ModuleText": "module",
    "LoadedObject": "load",
    "compile_text": "object",
    "load_object": "load",
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
