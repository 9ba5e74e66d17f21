"""The whole way from a graph to a program for a CUDA device."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule

from ...graph_passes.fake_values import describe_constants, graph_constants, with_fake_values
from ...ir import Program
from ...ir.print import print_program
from ...ir.verify import verify_program
from ...lowering.graph import lower_graph
from ...options import LowerOptions
from ...pass_lists import rewrite_graph, schedule
from ...passes import Decision, Observer, PassContext, stage
from ...report import LoweringReport, make_report
from ...runtime import BoundProgram, bind_to
from ..select import target_for
from .choose import DeviceTuning
from .drivers import CudaDriver, Driver
from .errors import DeviceTooOld, Tf32Advice, TritonError
from .generate import compile_program, generate_device, on_device
from .program import DeviceProgram, device_from_json, device_to_json
from .render.matmul import with_nests

__all__ = ["LoweredForDevice", "compile_graph_for_device", "lower_for_device"]
__all__ += ["advise_tf32", "check_device", "check_types"]

OLDEST = (7, 0)
FIRST_WITH_BFLOAT16 = 80
FIRST_WITH_TF32 = 80
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm"))


@dataclass(frozen=True, slots=True)
class LoweredForDevice:
    """A graph lowered for a device: scheduled loop IR, fusion decisions, the device program (sources or cubins), the
    tensors of the graph's attributes, per matrix product who computes it and why, and the report."""

    scheduled: Program
    records: tuple[Decision, ...]
    program: DeviceProgram
    constants: dict[str, torch.Tensor]
    choices: tuple[str, ...]
    report: LoweringReport


def lower_for_device(
    gm: GraphModule,
    example_inputs: Any = None,
    *,
    options: LowerOptions | None = None,
    device: str | None = None,
    tune: DeviceTuning | None = None,
    observer: Observer | None = None,
) -> LoweredForDevice:
    """Lower a functional ATen graph to Triton sources and a launch plan. No GPU and no Triton is needed.

    Kernels are for the CUDA device that most of the graph is on; what is elsewhere stays an ATen call. ``device``:
    compile for that one although the graph was traced on another. ``tune``: what is compared, see
    :class:`DeviceTuning`. Raises :class:`~..errors.UnsupportedGraphError` for what can be neither generated nor called.
    """
    options = options or LowerOptions()
    gm = with_fake_values(gm, example_inputs)
    describe_constants(gm)
    # By the rules for a device, also if the graph was traced on the CPU.
    target = target_for(gm, replace(options, processor="triton-interpreter"))
    ctx = PassContext.of(options, observer, target)
    with stage(observer, "graph-passes"):
        graph = rewrite_graph(gm, ctx)
    with stage(observer, "lowering"):
        lowered = lower_graph(graph, options, capabilities=target.capabilities)
        if device is not None:
            lowered = on_device(lowered, device)
        if options.verify:
            verify_program(lowered)
        tune = tune or DeviceTuning()
        chosen = tuple(tune.choose_products(lowered))
        lowered = with_nests(lowered, frozenset(name for name, choice in chosen if choice.template))
    with stage(observer, "schedule"):
        scheduled = schedule(lowered, ctx)
        if options.verify:
            verify_program(scheduled)
    if observer is not None:
        observer.dump(lowered.name, "ir", lambda: print_program(scheduled))
    with stage(observer, "codegen"):
        program = generate_device(scheduled, tune=tune.kernels, tf32=tune.tf32, asserts=options.index_asserts)
    if options.verify and device_from_json(device_to_json(program)) != program:
        raise AssertionError(f"the device program {program.plan.name} changed when it was written and read back")
    reasons = tuple(choice.reason for _, choice in chosen)
    report = make_report(graph, lowered, scheduled, ctx.decisions)
    return LoweredForDevice(scheduled, tuple(ctx.decisions), program, graph_constants(graph), reasons, report)


def compile_graph_for_device(
    gm: GraphModule,
    example_inputs: Any = None,
    *,
    options: LowerOptions | None = None,
    driver: Driver | None = None,
) -> BoundProgram[DeviceProgram]:
    """Compile a graph of CUDA tensors and bind it to the device it was traced on.

    With another ``driver``, such as :class:`~.drivers.InterpreterDriver`, the graph runs there and nothing is compiled.
    """
    lowered = lower_for_device(gm, example_inputs, options=options, device=None if driver is None else driver.device)
    if driver is not None:
        return bind_to(lowered.program, driver, lowered.constants)
    arch = check_device(lowered.program.device)
    check_types(lowered.scheduled, arch)
    advise_tf32(lowered.scheduled, arch)
    return bind_to(compile_program(lowered.program, arch), CudaDriver(lowered.program.device), lowered.constants)


def check_types(program: Program, arch: int) -> None:
    """Raise :class:`~.errors.TritonError` for a type that ``sm_<arch>`` does not convert: bfloat16 before sm_80."""
    found = next((b.name for b in program.buffers if b.dtype == "bfloat16"), None)
    if arch < FIRST_WITH_BFLOAT16 and found is not None:
        raise TritonError(
            f"{found} is bfloat16, which sm_{arch} does not convert in hardware; use float16, or run the graph eagerly"
        )


def advise_tf32(program: Program, arch: int) -> None:
    """Warn, once a process, that float32 products of ``program`` could run on tensor cores of ``sm_<arch>``."""
    if arch < FIRST_WITH_TF32 or torch.get_float32_matmul_precision() != "highest":
        return
    for step in program.steps:
        names = [result for result in getattr(step, "results", ()) if result is not None]
        if getattr(step, "target", "") in _PRODUCTS and program.buffer(names[0]).dtype == "float32":
            tell_tf32()
            return


@cache  # filters of warnings are reset by whoever catches some, so they do not keep to one
def tell_tf32() -> None:
    """Warn, the first time."""
    warnings.warn(
        "a compiled graph multiplies float32 matrices, and this device has tensor cores that do so faster with "
        "10 bits of mantissa (TF32); torch.set_float32_matmul_precision('high') allows that",
        Tf32Advice,
        stacklevel=3,
    )


def check_device(device: str) -> int:
    """The architecture (90 for sm_90) of a CUDA device. Raises :class:`~.errors.TritonError` if it is none, and
    :class:`~.errors.DeviceTooOld` for one that kernels are not generated for."""
    if torch.device(device).type != "cuda":
        raise TritonError(f"kernels are generated for CUDA devices, not for {device}")
    if not torch.cuda.is_available():
        raise TritonError(f"the graph is on {device}, and this process has no CUDA device; run it eagerly")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise DeviceTooOld(torch.cuda.get_device_name(device), capability)
    return capability[0] * 10 + capability[1]
