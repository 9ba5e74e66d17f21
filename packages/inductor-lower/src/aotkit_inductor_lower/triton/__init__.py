"""Kernels for CUDA: Triton source from the loop IR, compiled to cubins, and the plan that launches them.

Nothing here imports Triton before a kernel is compiled or interpreted.
"""

from .autotune import Candidate, Choice, Timer, choose
from .bind import BoundDeviceProgram, bind_device
from .compile import Cubin, KernelFacts, compile_kernel, resource_facts, vector_bytes
from .drivers import CudaDriver, Driver, InterpreterDriver
from .errors import DeviceTooOld, TritonError, TritonMissing
from .generate import compile_program, generate_device, on_device
from .kernel import KernelArgument, KernelSource, emit_kernel
from .load import interpret_kernel, jit_function, standalone_text
from .pipeline import LoweredForDevice, compile_graph_for_device, lower_for_device
from .products import DeviceTuning, Product, ProductChoice
from .program import DeviceKernel, DeviceLaunch, DeviceProgram, device_from_json, device_to_json
from .tiles import Config, TileLimits, TilePlan, plan_tiles

__all__ = [
    "BoundDeviceProgram",
    "Candidate",
    "Choice",
    "Config",
    "Cubin",
    "CudaDriver",
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
    "TileLimits",
    "TilePlan",
    "Timer",
    "TritonError",
    "TritonMissing",
    "bind_device",
    "choose",
    "compile_graph_for_device",
    "compile_kernel",
    "compile_program",
    "device_from_json",
    "device_to_json",
    "emit_kernel",
    "generate_device",
    "interpret_kernel",
    "jit_function",
    "lower_for_device",
    "on_device",
    "plan_tiles",
    "resource_facts",
    "standalone_text",
    "vector_bytes",
]
