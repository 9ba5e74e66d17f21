"""LLVM IR text for loop nests, and its way to object code."""

from .kernel import KernelText, emit_kernel
from .module import Launch, ModuleText
from .nest import FlatNest, Memory, flatten_nest
from .object import LoadedObject, compile_text, load_object
from .target import CpuTarget, generic_target, host_target

__all__ = [
    "CpuTarget",
    "FlatNest",
    "KernelText",
    "Launch",
    "LoadedObject",
    "Memory",
    "ModuleText",
    "compile_text",
    "emit_kernel",
    "flatten_nest",
    "generic_target",
    "host_target",
    "load_object",
]
