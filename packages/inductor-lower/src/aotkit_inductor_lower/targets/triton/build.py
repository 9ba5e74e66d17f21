"""A scheduled program to what is launched: its kernels rendered, compiled if there is a device, and their plan."""

from __future__ import annotations

from ..._observer import Observer
from ...ir import Program
from ...kernel_ir.nodes import KernelModule
from ...kernel_passes.linearize import extents_of
from ...launch_plan import CompiledProgram
from ...options import LowerOptions
from ...passes import stage
from .checks import advise_tf32, check_types
from .choose import shares_launches
from .compile import Compiler, compile_by, compile_kernel
from .generate import Rendered, assemble, render_program, to_program
from .harness import harness_text
from .map_loops import TileLimits
from .records import Gpu
from .tune import assumed_sizes, kernel_timer
from .workers import shared_workers, worker_count

__all__ = ["build"]


def build(
    program: Program,
    kernels: KernelModule,
    device: str,
    gpu: Gpu | None,
    *,
    tune: bool,
    tf32: bool,
    options: LowerOptions,
    observer: Observer | None,
) -> CompiledProgram:
    """The compiled program, for a device; ``None`` leaves its kernels to the interpreter. For the others see
    :func:`.generate.render_program`."""
    asserts, fast = options.index_asserts, options.numerics == "fast"
    limits = TileLimits(together=shares_launches(options), gpu=gpu or Gpu())
    rendered = render_program(program, device, kernels, limits, tune=tune, tf32=tf32, asserts=asserts, fast=fast)
    if observer is not None:
        observer.dump(f"{program.name}.py", "kernels", lambda: _texts(rendered))
    if gpu is not None:
        check_types(program, gpu.arch)
        advise_tf32(program, gpu.arch)
        with stage(observer, "compile-kernels"):
            timer = kernel_timer(device, program) if tune else None
            rendered = assemble(rendered, gpu.arch, timer, _compiler(options, observer))
    return to_program(rendered)


def _compiler(options: LowerOptions, observer: Observer | None) -> Compiler:
    count = worker_count(options.compile_workers)
    return compile_by(shared_workers(count), observer) if count else compile_kernel


def _texts(rendered: Rendered) -> str:
    """Each kernel as a script that times it."""
    extents, sizes = extents_of(rendered.program.buffers), assumed_sizes(rendered.program)
    return "\n\n".join(harness_text(kernel.source, extents, sizes) for kernel in rendered.kernels)
