"""The CPU's own LSTM, which decides by grad mode and by autocast what it computes."""

from __future__ import annotations

from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["lstm_apart"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)  # that oneDNN computes with


def lstm_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.lstm``, taken apart by torch's Python kernels, with results of the type that eager mode gives.

    The CPU's own kernel keeps what its backward needs by grad mode, and compiled code runs with grad mode off. Under
    autocast it has results of autocast's type; taken apart, only the products are computed in that type, and states
    that were float32 stay so. Before torch 2.12 the last states have a dimension more there.
    """
    packed = len(args) < 3 or isinstance(args[1], torch.Tensor)  # which no kernel of oneDNN takes
    narrowed = not packed and _in_autocast(*args[:3])
    if not packed:
        args = (_as_trained(*args[:3]), *args[1:])
    with compat.enable_python_dispatcher():
        output, *last = func(*args, **kwargs)
    states = args[2] if packed else args[1]
    results = (output, *(value.view(state.shape) for value, state in zip(last, states, strict=True)))
    if not narrowed:
        return results
    narrow = torch.get_autocast_dtype("cpu")
    return tuple(result.to(narrow) if result.dtype == torch.float32 else result for result in results)


def _as_trained(inputs: torch.Tensor, states: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    """The input, as one that requires grad if states or weights do.

    By the input alone torch's Python kernels decide whether they call the kernel for inference, which has no backward.
    """
    if inputs.requires_grad or not torch.is_grad_enabled():
        return inputs
    trained = any(tensor.requires_grad for tensor in (*states, *weights))
    return inputs.detach().requires_grad_() if trained else inputs


def _in_autocast(inputs: torch.Tensor, states: list[torch.Tensor], weights: list[torch.Tensor]) -> bool:
    """Whether eager mode calls oneDNN's kernel, in autocast's type."""
    if not torch.is_autocast_enabled("cpu") or not torch._C._get_mkldnn_enabled():
        return False
    if any(tensor.device.type != "cpu" for tensor in (inputs, *states, *weights)):
        return False
    projected = states[0].shape[2] != states[1].shape[2]
    return inputs.dtype in _NARROW and not projected and not compat.is_known(inputs.numel() == 0)
