"""Whether Dynamo compiles a graph to save it, or keeps what is compiled."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["has_gradient", "is_saved_by_torch", "name_in_torchs_cache"]


def is_saved_by_torch(gm: torch.fx.GraphModule) -> bool:
    """Whether torch wants a callable that it can save: it then names the graph before it calls the backend.

    It names it for its cache of guards and bytecode as well, which takes any callable.
    """
    return getattr(gm, "_backend_id", None) is not None and not _torch_keeps()


def name_in_torchs_cache(gm: torch.fx.GraphModule) -> str | None:
    """Under which name torch's cache of guards and bytecode wants the compiled graph, if it is to keep it."""
    return getattr(gm, "_backend_id", None) if _torch_keeps() else None


def has_gradient(value: Any) -> bool:
    """Whether this is a tensor with a gradient: of that, torch writes among the guards only that it is missing."""
    if not isinstance(value, torch.Tensor) or not (value.is_leaf or value.retains_grad):
        return False
    return value.grad is not None


def _torch_keeps() -> bool:
    return bool(getattr(sys.modules.get("torch._dynamo.config"), "caching_precompile", False))
