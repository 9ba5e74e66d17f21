"""Kernels for CUDA: Triton source from the loop IR, compiled to cubins, and the plan that launches them.

Nothing here imports Triton before a kernel is compiled or interpreted.
"""

from .errors import DeviceTooOld, TritonError, TritonMissing
from .kernel import KernelArgument, KernelSource, emit_kernel
from .load import interpret_kernel, jit_function, standalone_text
from .tiles import Config, TileLimits, TilePlan, plan_tiles

__all__ = [
    "Config",
    "DeviceTooOld",
    "KernelArgument",
    "KernelSource",
    "TileLimits",
    "TilePlan",
    "TritonError",
    "TritonMissing",
    "emit_kernel",
    "interpret_kernel",
    "jit_function",
    "plan_tiles",
    "standalone_text",
]
