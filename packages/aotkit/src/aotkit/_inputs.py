"""Fake inputs for a compile, made the way the frontend made its own so that symbols agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["fake_inputs", "has_lists", "symbolic_twins", "unsupported_input"]


def fake_inputs(example_inputs: Sequence[Any], gm: torch.fx.GraphModule) -> tuple[FakeTensorMode, list[Any]]:
    """Fakes of the frontend's example inputs of ``gm``, under its own fake mode when there is one.

    The frontend hands over real tensors. Converting each with the symbolic context that the frontend recorded for
    it gives the very symbols that its guards talk about; a tensor without one becomes static.
    """
    context = TracingContext.try_get()
    mode = (context.fake_mode if context is not None else None) or detect_fake_mode(example_inputs)
    mode = mode or FakeTensorMode(shape_env=ShapeEnv())
    fakes = [_fake(value, mode, context) for value in example_inputs]
    for fake, placeholder in zip(fakes, gm.graph.find_nodes(op="placeholder"), strict=True):
        if any(user.target == "item" for user in placeholder.users):
            _specialize_float(fake, placeholder.meta.get("example_value"))
    return mode, fakes


def symbolic_twins(values: Sequence[Any], gm: torch.fx.GraphModule, context: TracingContext | None) -> list[Any]:
    """Per input of ``gm`` (and tensor that it holds) a fake tensor with the frontend's symbols; ``None`` if static.

    Nothing is specialised here: a number that the frontend passes as a tensor keeps its symbol, in ``item_memo``.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    seen = [node.meta.get("example_value") for node in placeholders]
    mode = None if context is None else context.fake_mode
    if mode is None or mode.shape_env is None or not mode.shape_env.var_to_range:
        return [None] * len(values)
    twins: list[Any] = []
    for position, value in enumerate(values):
        shown = seen[position] if position < len(seen) else None
        if not isinstance(value, torch.Tensor) or context is None or context.tensor_to_context.get(value) is None:
            twins.append(None)
        elif isinstance(getattr(shown, "item_memo", None), torch.SymFloat):
            twins.append(shown)
        else:
            twins.append(_fake(value, mode, context))
    return twins


def _specialize_float(fake: Any, seen: Any) -> None:
    """Fix the value of an input that stands for a Python float, and have the frontend guard on it.

    Note [Python floats under dynamic shapes]
        With ``dynamic=True`` the frontend passes Python floats (the ``eps`` of a norm, say) as 0-d float64 tensors
        and reads them with ``.item()``, as a symbol. Evaluating that symbol installs a guard ``float == value``;
        the fake then carries the value, so the capture sees a plain number. A float that changes compiles again,
        unless ``floats_as_tensors`` has made a tensor of it before.
    """
    memo = getattr(seen, "item_memo", None) if isinstance(seen, FakeTensor) and seen.dim() == 0 else None
    if isinstance(memo, torch.SymFloat) and memo.node.has_hint() and isinstance(fake, FakeTensor):
        with unset_fake_temporarily():
            fake.constant = torch.tensor(float(memo), dtype=fake.dtype)


def _fake(value: Any, mode: FakeTensorMode, context: TracingContext | None) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    if context is not None:
        symbolic = context.tensor_to_context.get(value)
        if symbolic is not None:
            return mode.from_tensor(value, symbolic_context=symbolic, source=getattr(symbolic, "tensor_source", None))
    return mode.from_tensor(value, static_shapes=True)


def has_lists(example_inputs: Sequence[Any]) -> bool:
    """Whether an input is a list."""
    return any(isinstance(value, list | tuple) for value in example_inputs)


def unsupported_input(example_inputs: Sequence[Any], *, kernels: bool = True) -> str | None:
    """Why these inputs cannot be compiled, by kind, device or layout, or ``None``."""
    for position, value in enumerate(example_inputs):
        if isinstance(value, BackwardState):
            return f"input {position} is a BackwardState: hooks on values inside do not run under compiled autograd"
        if not isinstance(value, torch.Tensor):
            continue
        if kernels and value.device.type not in ("cpu", "cuda"):
            return f"input {position} is on device {value.device}; code is generated for the CPU and for CUDA only"
        if value.layout is not torch.strided:
            return f"input {position} has layout {value.layout}; only strided tensors are compiled"
    return None
