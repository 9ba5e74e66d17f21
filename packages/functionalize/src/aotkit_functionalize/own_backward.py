"""Outputs that share memory with another value but have a backward of their own.

Note [Views with a backward of their own]
    An output that is a view is usually regenerated from its base after the call, and its gradient is then that of the
    view. That would be wrong for the result of a user's ``torch.autograd.Function`` that returns a view, and for a
    tensor on which the function has put a hook. Such an output comes out of the graph itself: it shares the
    memory, and its gradient goes through the recorded backward.
"""

from __future__ import annotations

import torch

__all__ = ["has_own_backward"]


def has_own_backward(output: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a gradient of ``output`` would pass a hook or a user's function on its way to ``base``."""
    if not output.requires_grad:
        return False
    if output._backward_hooks:
        return True
    function = output.grad_fn
    while function is not None and function is not base.grad_fn and len(function.next_functions) == 1:
        if isinstance(function, torch.autograd.function.BackwardCFunction):
            return True
        function = function.next_functions[0][0]
    return isinstance(function, torch.autograd.function.BackwardCFunction) and function is not base.grad_fn
