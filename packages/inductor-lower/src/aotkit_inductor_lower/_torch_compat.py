"""What differs between torch 2.11 and 2.15. Nothing else in this package asks for torch's version."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import _disable_current_modes

from ._kept_calls import drop_dead_code, has_effect, keep_checks

__all__ = ["RecordRange", "drop_dead_code", "empty_strided_cpu", "has_effect", "keep_checks", "lazy_graph_module"]
__all__ += ["large_numbers_become_float8", "lone_nan_bound_counts", "modes_and_autocast_off", "own_memory"]
__all__ += ["scattered_strides"]

EmptyStrided = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]

#: torch's allocation without argument parsing: half the time of ``torch.empty_strided``.
empty_strided_cpu: EmptyStrided = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]


def own_memory(nbytes: int) -> torch.Tensor:
    """So many bytes on the CPU, which no mode of the caller's sees or puts elsewhere, as ``torch.empty`` would under
    ``torch.set_default_device``. Calls in inference mode and others may write to it."""
    with torch.inference_mode(False):
        return empty_strided_cpu((nbytes,), (1,), torch.uint8)


#: A range of a profiler's trace, without the microseconds of ``torch.profiler.record_function``.
RecordRange: Any = torch._C._profiler._RecordFunctionFast


@contextmanager
def modes_and_autocast_off() -> Iterator[None]:
    """Context in which no mode of the caller's is active, so that tensors have values, on the CPU unless something else
    is said (``torch.set_default_device`` is a mode), and operators compute in their arguments' types."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.autocast("cpu", enabled=False):
        yield


@functools.cache
def lone_nan_bound_counts() -> bool:
    """Whether ``clamp`` with one bound, the number nan, gives nan, as it does with two: from torch 2.12 on. Before that
    such a bound changes nothing. Eager itself is asked."""
    with modes_and_autocast_off():
        return bool(torch.zeros(1, device="cpu").clamp(min=math.nan).isnan())


@functools.cache
def large_numbers_become_float8() -> bool:
    """Whether eager makes the largest ``float8_e4m3fn`` of what is too large for it: from torch 2.13 on. Before that it
    makes nan of it. Eager itself is asked."""
    with modes_and_autocast_off():
        return not bool(torch.full((1,), 1e3, device="cpu").to(torch.float8_e4m3fn).float().isnan())


def scattered_strides(x: torch.Tensor, result: torch.Tensor) -> tuple[Any, ...]:
    """The strides of a copy of ``x`` that something was put into, where ``result`` is a fake one. Before torch 2.12
    fake kernels keep dimensions that repeat elements; eager gives each element a place of its own."""
    kept = zip(result.shape, result.stride(), strict=True)
    if not any(type(step) is int and step == 0 and not (type(size) is int and size == 1) for size, step in kept):
        return result.stride()
    return x.clone().stride()


def lazy_graph_module(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """A GraphModule that writes its Python code when it is first called; compilers never call it."""
    return _LazyGraphModule(root, graph)


keep_checks()
