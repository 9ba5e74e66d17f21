"""How long a kernel takes on a device, measured with its events."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Mapping

import torch

from ...ops.dtypes import is_float, to_torch_dtype
from ...symbolic import Expr, Symbol, SymbolKind
from .drivers import CudaDriver
from .errors import TritonError
from .launcher import LaunchRow, LaunchTable, segment_runner
from .records import Cubin, KernelSource, TritonKernel

__all__ = ["device_timer"]

_CACHE_BYTES = 256 << 20  # more than the device's second cache holds


def device_timer(
    driver: CudaDriver, extents: Mapping[str, Expr], sizes: Mapping[str, int], repeats: int = 20
) -> Callable[[KernelSource, Cubin], float]:
    """A timer of kernels on made-up arguments: normal numbers, or zeros for integers, as many elements as
    ``extents`` says per buffer, with size symbols as in ``sizes``. Median of ``repeats`` launches, each with a
    cold second cache."""
    env = {Symbol(name, SymbolKind.SIZE): value for name, value in sizes.items()}
    flush = torch.empty(_CACHE_BYTES, dtype=torch.int8, device=driver.device)

    def measure(source: KernelSource, cubin: Cubin) -> float:
        kept, slots = [], []
        for argument in source.arguments:
            if argument.kind == "size":
                slots.append(sizes[argument.name])
                continue
            extent = argument.extent if argument.kind in ("scratch", "descriptors") else extents[argument.name]
            made = torch.zeros(extent.evaluate(env), dtype=to_torch_dtype(argument.dtype), device=driver.device)
            if is_float(argument.dtype) and argument.kind == "pointer":
                made.normal_()  # a device multiplies zeros faster than numbers: it takes less power for them
            kept.append(made)
            slots.append(kept[-1].data_ptr())
        count = 1
        for size, block in source.grid:
            count *= -(-size.evaluate(env) // (source.config.block(block) if block else 1))
        frame = (ctypes.c_int64 * (len(slots) + 2))(*slots, 0, count)
        arguments = (*range(len(slots)), *[len(slots)] * cubin.hidden)
        function = driver.load(TritonKernel(source, cubin=cubin))
        row = LaunchRow(function, len(slots) + 1, cubin.threads, cubin.shared, arguments)
        run = segment_runner(driver.launch, LaunchTable([row]))
        times = []
        for _ in range(repeats + 2):
            flush.zero_()
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            status = run(ctypes.addressof(frame), driver.stream())
            after.record()
            if status:
                raise TritonError(str(driver.failure(status & 0xFFFFFFFF)))
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
        return statistics.median(times[2:])

    return measure
