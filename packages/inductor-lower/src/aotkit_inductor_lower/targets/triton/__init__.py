"""Kernels for CUDA: Triton source from the loop IR, compiled to cubins, and the plan that launches them.

Nothing here imports Triton before a kernel is compiled or interpreted, and a process that only launches what was
compiled before imports neither the code generator nor the lowering.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .autotune import Candidate, Choice, Timer
    from .choose import DeviceTuning, Product, ProductChoice
    from .compile import KernelFacts, compile_kernel, resource_facts, vector_bytes
    from .drivers import CudaDriver, Driver, InterpreterDriver
    from .errors import DeviceTooOld, Tf32Advice, TritonError, TritonMissing
    from .generate import compile_program, generate_device, on_device
    from .graph import DeviceGraph, compile_device_graph, compile_device_program
    from .harness import harness_text
    from .jit import interpret_kernel, jit_function, standalone_text
    from .map_loops import TileLimits
    from .pipeline import LoweredForDevice, compile_graph_for_device, lower_for_device
    from .program import DeviceKernel, DeviceLaunch, DeviceProgram, device_from_json, device_to_json
    from .records import Config, Cubin, KernelArgument, KernelSource
    from .render.kernel import emit_kernel

__all__ = [
    "Candidate",
    "Choice",
    "Config",
    "Cubin",
    "CudaDriver",
    "DeviceGraph",
    "DeviceKernel",
    "DeviceLaunch",
    "DeviceProgram",
    "DeviceTooOld",
    "DeviceTuning",
    "Driver",
    "InterpreterDriver",
    "KernelArgument",
    "KernelFacts",
    "KernelSource",
    "LoweredForDevice",
    "Product",
    "ProductChoice",
    "Tf32Advice",
    "TileLimits",
    "Timer",
    "TritonError",
    "TritonMissing",
    "compile_device_graph",
    "compile_device_program",
    "compile_graph_for_device",
    "compile_kernel",
    "compile_program",
    "device_from_json",
    "device_to_json",
    "emit_kernel",
    "generate_device",
    "harness_text",
    "interpret_kernel",
    "jit_function",
    "lower_for_device",
    "on_device",
    "resource_facts",
    "standalone_text",
    "vector_bytes",
]

_HOMES = {
    name: home
    for home, names in {
        "autotune": "Candidate Choice Timer",
        "compile": "KernelFacts compile_kernel resource_facts vector_bytes",
        "drivers": "CudaDriver Driver InterpreterDriver",
        "errors": "DeviceTooOld Tf32Advice TritonError TritonMissing",
        "generate": "compile_program generate_device on_device",
        "graph": "DeviceGraph compile_device_graph compile_device_program",
        "harness": "harness_text",
        "render.kernel": "emit_kernel",
        "jit": "interpret_kernel jit_function standalone_text",
        "pipeline": "LoweredForDevice compile_graph_for_device lower_for_device",
        "choose": "DeviceTuning Product ProductChoice",
        "program": "DeviceKernel DeviceLaunch DeviceProgram device_from_json device_to_json",
        "records": "Config Cubin KernelArgument KernelSource",
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
