"""What is private to torch or differs between its versions (2.11 to 2.15), in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

__all__ = [
    "advance_version",
    "autocast_enabled",
    "backward_can_be_pasted",
    "disable_autocast",
    "dtype_from_name",
    "fake_mode_of",
    "fast_apply",
    "forward_ad",
    "graph_is_kept",
    "is_transformed",
    "lazy_backward_info",
    "move_versions",
    "profiler",
    "put_versions",
    "record_range",
    "recorded_tangents",
    "saving_hooks",
    "set_grad_enabled",
    "transforms_active",
    "unsafe_view",
]

autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device type."""

graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs was asked to retain the graph."""

saving_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""The user's saved-tensor hooks in effect, or ``None``; the argument asks for those that survive tracing only."""

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether the caller runs under a ``torch.func`` transform such as ``vmap``."""

forward_ad: Any = torch.autograd.forward_ad
"""Its number ``_current_level`` is not negative while dual tensors of forward mode may be made."""

profiler: Any = torch.autograd.profiler
"""Its flag ``_is_profiler_enabled`` says whether a profiler records."""

record_range: Callable[[str], AbstractContextManager[Any]] = torch._C._profiler._RecordFunctionFast
"""A named range in what a profiler records."""

move_versions: Callable[[Iterable[Tensor]], None] = torch._C._increment_version  # type: ignore[assignment]
"""Tell autograd that each of these tensors was written to once. Inference tensors are left out."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Grad mode as a plain call, without the context manager object of ``torch.set_grad_enabled``."""


def backward_can_be_pasted() -> bool:
    """Whether compiled autograd asks a compiled function for its own prologue and epilogue: from torch 2.13 on.

    Before that it runs AOTAutograd's, on AOTAutograd's records, and so cannot take anyone else's backward apart.
    """
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def disable_autocast() -> AbstractContextManager[Any]:
    """A context in which no autocast applies, for any device type."""
    context: AbstractContextManager[Any] = torch._C._DisableAutocast()
    return context


def unsafe_view(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: no view as far as autograd knows, own version counter."""
    result: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.size())
    return result


def advance_version(tensor: Tensor, times: int) -> None:
    """Tell autograd that ``tensor`` was written to ``times`` times. Inference tensors have no version counter."""
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + times,))


def put_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set version counters, one after the other."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its Python layer, which only serves ``torch.func`` transforms and ``setup_context``.

    The caller has to make sure that no transform is active.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def dtype_from_name(name: str) -> torch.dtype:
    """``"float32"`` or ``"torch.float32"`` to the dtype. Raises ``ValueError`` for anything else."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype


def fake_mode_of(values: Iterable[Any]) -> Any:
    """The fake mode that is active, or that of the first fake tensor among ``values``, or ``None``."""
    active = torch._guards.active_fake_mode()
    if active is not None:
        return active
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def lazy_backward_info(graph: torch.fx.GraphModule) -> Any:
    """The record in which compiled autograd looks for a backward graph."""
    from torch._dynamo import compiled_autograd  # not before it is in use: it takes a second to import

    return compiled_autograd.AutogradLazyBackwardCompileInfo(graph, [], None, None)  # type: ignore[attr-defined]


def recorded_tangents() -> Sequence[Any] | None:
    """The tangents of the compiled backward that compiled autograd takes apart right now, ``None`` for missing ones."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    for node in () if mode is None else reversed(mode.tracer.graph.nodes):  # its prologue is the last that was recorded
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "call_aot_bwd_prologue":
            tangents: Sequence[Any] = node.args[-1]
            return tangents
    return None


def is_transformed(value: torch.Tensor | None) -> bool:
    """Whether a tensor is one that ``torch.func`` (or autograd's own older ``vmap``) computes with, without memory."""
    functions = torch._C._functorch
    return value is not None and bool(
        functions.is_functorch_wrapped_tensor(value) or functions.is_legacy_batchedtensor(value)
    )
