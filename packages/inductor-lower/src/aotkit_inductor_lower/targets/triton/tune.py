"""What ``tune`` measures on a device: block sizes of every kernel, and ATen against generated matrix products."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ...ops.aten import resolve_target
from ...ops.dtypes import dtype_from_torch_name, to_torch_dtype
from ...options import LowerOptions
from ...runtime import bind_to
from ...symbolic import Expr, to_expr
from .autotune import Timer
from .choose import DeviceTuning, Product
from .drivers import CudaDriver, Driver
from .generate import compile_program
from .map_loops import SIZE_HINT
from .program import DeviceProgram

__all__ = ["Tuner", "device_tuner", "extents_of"]

_OPERAND = re.compile(r"\[([\d', ]*)\]:\[([\d', ]*)\]")


@dataclass(frozen=True, slots=True)
class Tuner:
    """Measures for one device. ``timer(extents, sizes)`` gives the timer of a program's kernels, ``seconds(call)`` is
    how long a call takes. ``arch``: 90 for sm_90; ``None`` leaves kernels uncompiled, for the interpreter."""

    driver: Driver
    arch: int | None
    timer: Callable[[Mapping[str, Expr], Mapping[str, int]], Timer]
    seconds: Callable[[Callable[[], object]], float]

    def tuning(self) -> DeviceTuning:
        """What to compare while a graph is lowered."""
        return DeviceTuning(kernels=True, products=self.product, tf32=torch.backends.cuda.matmul.allow_tf32)

    def compiled(self, program: DeviceProgram) -> DeviceProgram:
        """The program with the fastest form of each kernel. Sizes known at run time only count as long ones."""
        if self.arch is None:
            return program
        sizes = dict.fromkeys((name for name, *_ in program.plan.symbol_sources), SIZE_HINT)
        return compile_program(program, self.arch, self.timer(extents_of(program), sizes))

    def product(self, product: Product) -> tuple[float, float]:
        """Seconds of ATen's product and of the generated one; a product of sizes known at run time is ATen's."""
        from .pipeline import lower_for_device

        tensors = _examples(product, torch.device(self.driver.device))
        if tensors is None:
            return 0.0, float("inf")
        op = resolve_target(product.target)
        graph = make_fx(lambda *args: (op(*args),), tracing_mode="fake")(*tensors)
        device = self.driver.device if self.arch is not None else "cuda:0"
        tune = DeviceTuning(kernels=True, every_product=True, tf32=torch.backends.cuda.matmul.allow_tf32)
        lowered = lower_for_device(graph, options=LowerOptions(), device=device, tune=tune)
        bound = bind_to(self.compiled(lowered.program), self.driver, lowered.constants)
        return self.seconds(lambda: op(*tensors)), self.seconds(lambda: bound(list(tensors)))


def device_tuner(device: str) -> Tuner:
    """The tuner of a CUDA device."""
    from .timing import device_timer

    driver = CudaDriver(device)
    return Tuner(driver, driver.arch, lambda extents, sizes: device_timer(driver, extents, sizes), _seconds)


def extents_of(program: DeviceProgram) -> dict[str, Expr]:
    """How many elements the memory of each buffer has."""
    found: dict[str, Expr] = {}
    for buffer in program.plan.buffers:
        last = to_expr(0)
        for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
            last = last + (size - 1) * stride
        found[buffer.name] = last + 1
    return found


def _examples(product: Product, device: torch.device) -> list[torch.Tensor] | None:
    dtype = dtype_from_torch_name(product.dtype)
    tensors = []
    for operand in product.operands:
        match = _OPERAND.fullmatch(operand)
        if match is None or dtype is None:
            return None
        sizes, strides = ([int(n) for n in re.findall(r"\d+", part)] for part in match.groups())
        tensors.append(torch.empty_strided(sizes, strides, dtype=to_torch_dtype(dtype), device=device).normal_())
    return tensors


def _seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median of ``repeats`` calls by the device's events."""
    times = []
    for _ in range(repeats + 3):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times[3:])
