"""Fake inputs for a compile, made the way the frontend made its own so that symbols agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode

__all__ = ["fake_inputs", "unsupported_device"]


def fake_inputs(example_inputs: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Fakes of the frontend's example inputs, under its own fake mode when there is one.

    The frontend hands over real tensors. Converting each with the symbolic context that the frontend recorded for
    it gives the very symbols that its guards talk about; a tensor without one becomes static.
    """
    context = TracingContext.try_get()
    mode = (context.fake_mode if context is not None else None) or detect_fake_mode(example_inputs) or FakeTensorMode()
    return mode, [_fake(value, mode, context) for value in example_inputs]


def _fake(value: Any, mode: FakeTensorMode, context: TracingContext | None) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    if context is not None:
        symbolic = context.tensor_to_context.get(value)
        if symbolic is not None:
            return mode.from_tensor(value, symbolic_context=symbolic, source=getattr(symbolic, "tensor_source", None))
    return mode.from_tensor(value, static_shapes=True)


def unsupported_device(example_inputs: Sequence[Any]) -> str | None:
    """Why these inputs cannot be compiled, by device or layout, or ``None``."""
    for position, value in enumerate(example_inputs):
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type != "cpu":
            return f"input {position} is on device {value.device}, and this release generates code for the CPU only"
        if value.layout is not torch.strided:
            return f"input {position} has layout {value.layout}; only strided tensors are compiled"
    return None
