"""Kernels for CUDA: Triton source from the loop IR, compiled to cubins, and the plan that launches them.

Nothing here imports Triton before a kernel is compiled or interpreted, and a process that only launches what was
compiled before imports neither the code generator nor the lowering.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .autotune import Candidate, Choice, Timer
    from .binary import Contents, Launch, contents_of, kernels_of
    from .compile import KernelFacts, compile_kernel, resource_facts, vector_bytes
    from .drivers import CudaDriver, Driver, InterpreterDriver
    from .errors import DeviceTooOld, Tf32Advice, TritonError, TritonMissing
    from .generate import Rendered, assemble, render_program, to_program
    from .harness import harness_text
    from .jit import interpret_kernel, jit_function, standalone_text
    from .load import load_on
    from .map_loops import TileLimits
    from .records import Config, Cubin, KernelArgument, KernelSource, TritonKernel
    from .render.kernel import emit_kernel

__all__ = [
    "Candidate",
    "Choice",
    "Config",
    "Contents",
    "Cubin",
    "CudaDriver",
    "DeviceTooOld",
    "Driver",
    "InterpreterDriver",
    "KernelArgument",
    "KernelFacts",
    "KernelSource",
    "Launch",
    "Rendered",
    "Tf32Advice",
    "TileLimits",
    "Timer",
    "TritonError",
    "TritonKernel",
    "TritonMissing",
    "assemble",
    "compile_kernel",
    "contents_of",
    "emit_kernel",
    "harness_text",
    "interpret_kernel",
    "jit_function",
    "kernels_of",
    "load_on",
    "render_program",
    "resource_facts",
    "standalone_text",
    "to_program",
    "vector_bytes",
]

_HOMES = {
    name: home
    for home, names in {
        "autotune": "Candidate Choice Timer",
        "compile": "KernelFacts compile_kernel resource_facts vector_bytes",
        "drivers": "CudaDriver Driver InterpreterDriver",
        "errors": "DeviceTooOld Tf32Advice TritonError TritonMissing",
        "binary": "Contents Launch contents_of kernels_of",
        "generate": "Rendered assemble render_program to_program",
        "harness": "harness_text",
        "render.kernel": "emit_kernel",
        "jit": "interpret_kernel jit_function standalone_text",
        "load": "load_on",
        "records": "Config Cubin KernelArgument KernelSource TritonKernel",
        "map_loops": "TileLimits",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
