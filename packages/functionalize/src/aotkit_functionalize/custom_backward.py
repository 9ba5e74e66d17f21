"""Outputs that share memory with another value but have a backward of their own.

Note [Views with a backward of their own]
    An output that is a view is usually regenerated from its base after the call, and its gradient is then that of the
    view. That would be wrong for the result of a user's ``torch.autograd.Function`` that returns a view, and for a
    tensor on which the function has put a hook. Such an output comes out of the graph itself: it shares the
    memory, and its gradient goes through the recorded backward.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import Unsupported
from .layouts import before_reshapes

__all__ = ["carries_gradient", "has_custom_backward", "note_hook"]

_HOOKED = "aotkit: has a hook"


def note_hook(value: torch.Tensor) -> None:
    """Remember that a hook is put on ``value``: autograd does not tell afterwards."""
    function: Any = value.grad_fn if carries_gradient(value) else None
    if function is not None:
        function.metadata[_HOOKED] = True


def carries_gradient(value: torch.Tensor) -> bool:
    """Whether a gradient given to ``value`` would flow anywhere.

    A view taken under ``no_grad`` claims ``requires_grad`` if its base does, but has no gradient function.
    """
    try:
        return value.grad_fn is not None
    except (RuntimeError, ValueError, IndexError) as error:
        if "created in no_grad mode" in str(error):  # eager mode refuses to differentiate through it as well
            return False
        # Autograd rebuilds the gradient function of a view whose base was written to by taking the view again.
        raise Unsupported(
            "a view is used whose base was written to and changed its shape in place",
            str(error).splitlines()[0],
            "Change the shape with the operation that returns a new tensor",
        ) from error


def has_custom_backward(output: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a gradient of ``output`` would pass a hook or a user's function on its way to ``base``."""
    if not carries_gradient(output):
        return False
    if output._backward_hooks:  # also one that a higher-order operator has put on it, which nobody saw
        return True
    function: Any = output.grad_fn
    ends = set(before_reshapes(base.grad_fn))
    while function is not None and function not in ends and len(function.next_functions) == 1:
        if isinstance(function, torch.autograd.function.BackwardCFunction) or _HOOKED in function.metadata:
            return True
        function = function.next_functions[0][0]
    return isinstance(function, torch.autograd.function.BackwardCFunction) and function not in ends
