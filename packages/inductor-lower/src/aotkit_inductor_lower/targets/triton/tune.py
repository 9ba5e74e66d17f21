"""What ``tune`` measures on a device: block sizes of every kernel, and ATen against generated matrix products."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...ir import Arg, Buffer, BufferRef, ExternCall, Literal, Program
from ...kernel_passes.linearize import extents_of
from ...ops.aten import resolve_target
from ...target import CompileCall, Measure
from .autotune import Timer
from .drivers import CudaDriver
from .map_loops import SIZE_HINT

__all__ = ["assumed_sizes", "kernel_timer", "product_times"]


def kernel_timer(device: str, program: Program) -> Timer:
    """The timer of a program's kernels. Sizes known at run time only count as long ones."""
    from .timing import device_timer

    return device_timer(CudaDriver(device), extents_of(program.buffers), assumed_sizes(program))


def assumed_sizes(program: Program) -> dict[str, int]:
    """What the sizes of a program count as."""
    return dict.fromkeys(program.size_symbols, SIZE_HINT)


def product_times(
    device: str, compiled: CompileCall, seconds: Callable[[Callable[[], object]], float] | None = None
) -> Measure:
    """Seconds of ATen's product or convolution and of the generated one, which ``compiled`` compiles; one of sizes that
    are known at run time only is ATen's. ``seconds(call)``: how long a call takes."""
    measured = seconds or _seconds

    def times(product: ExternCall, buffers: Mapping[str, Buffer]) -> tuple[float, float]:
        operands = [buffers[a.name] for a in _arguments(product) if isinstance(a, BufferRef)]
        tensors = _examples(operands, torch.device(device))
        if tensors is None:
            return 0.0, float("inf")
        op = _call_of(product)
        bound = compiled(op, tensors)
        return measured(lambda: op(*tensors)), measured(lambda: bound(list(tensors)))

    return times


def _call_of(product: ExternCall) -> Callable[..., Any]:
    """A call with what is no tensor filled in, of its tensors. Of several results it gives the one that is wanted."""
    op = resolve_target(product.target)
    if all(isinstance(arg, BufferRef) for arg in _arguments(product)):
        return op
    names = [name for name, _ in product.kwargs]

    def call(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        args = [next(given) if isinstance(arg, BufferRef) else _plain(arg) for arg in _arguments(product)]
        count = len(product.args)
        found = op(*args[:count], **dict(zip(names, args[count:], strict=True)))
        if isinstance(found, torch.Tensor):
            return found
        return next(each for each, name in zip(found, product.results, strict=True) if name is not None)

    return call


def _arguments(product: ExternCall) -> tuple[Arg, ...]:
    return (*product.args, *(arg for _, arg in product.kwargs))


def _plain(arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return [_plain(item) for item in arg]
    if not isinstance(arg, Literal):
        return None
    return getattr(torch, str(arg.value).removeprefix("torch.")) if arg.kind == "dtype" else arg.value


def _examples(operands: list[Buffer], device: torch.device) -> list[torch.Tensor] | None:
    tensors = []
    for operand in operands:
        dtype = getattr(torch, operand.dtype)
        sizes, strides = ([e.constant for e in exprs] for exprs in (operand.sizes, operand.strides))
        if None in sizes or None in strides:
            return None
        empty = torch.empty_strided(sizes, strides, dtype=dtype, device=device)  # type: ignore[arg-type]
        if dtype.is_floating_point and dtype.itemsize == 1:
            empty.copy_(torch.empty(empty.shape, device=device).normal_())
        else:
            empty.normal_()
        tensors.append(empty)
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
