"""What becomes of zero-copy results when their memory is taken."""

from __future__ import annotations

from typing import Any

import torch


class OverwrittenError(RuntimeError):
    """A zero-copy result was read after a later step took its memory."""


class OverwrittenTensor(torch.Tensor):
    """The class that a zero-copy result is given when its memory is taken: every use raises `OverwrittenError`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, OverwrittenTensor):
                raise OverwrittenError(value.__dict__["_why"])
        raise OverwrittenError("a tensor whose memory was taken by a later step of a CUDA graph was used")


def overwritten_message(name: str, leaf: int, is_backward: bool) -> str:
    """What a reader of an overwritten result is told."""
    text = (
        f"result {leaf} of {name} was read after a later step took its memory, which outputs='overwrite' allows. Clone "
        "it before the next step, call mark_step() only when results are done with, or use outputs='survive'"
    )
    if is_backward:
        text += ". It is a gradient: where it became a parameter's .grad, accumulating over steps needs 'survive'"
    return text


def overwrite(tensor: torch.Tensor, message: str) -> None:
    """Make every later use of this tensor object raise."""
    tensor.__dict__["_why"] = message
    tensor.__class__ = OverwrittenTensor
