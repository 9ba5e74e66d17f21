"""Calls of graphs that turn grad mode on themselves.

Note [Inference mode and enable_grad]
    Eager mode records nothing under ``torch.inference_mode()``, whatever grad mode is, and autograd saves no tensor
    that was made there. Dynamo compiles such a call with inference mode off and grad mode off, as one under
    ``no_grad``, so only the call itself can tell: then it runs the forward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ForwardAlone", "with_grad_enabled"]


class ForwardAlone:
    """The context of a forward whose backward never runs; it keeps nothing."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Nothing is saved."""

    def set_materialize_grads(self, value: bool) -> None:
        """There are no gradients."""


def with_grad_enabled(apply: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """``apply`` with grad mode on; under inference mode ``forward``, which ``apply`` calls with a context."""
    recorded = torch.enable_grad()(apply)

    def call(*args: Any) -> Any:
        if torch.is_inference_mode_enabled():  # see Note [Inference mode and enable_grad]
            return forward(ForwardAlone(), *args)
        return recorded(*args)

    return call
