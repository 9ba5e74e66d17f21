"""Whether Dynamo compiles a graph to save it, or keeps what is compiled."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["has_gradient", "is_saved_by_torch", "name_in_torchs_cache", "torch_keeps", "write_guards_readably"]


def is_saved_by_torch(gm: torch.fx.GraphModule) -> bool:
    """Whether torch wants a callable that it can save: it then names the graph before it calls the backend.

    It names it for its cache of guards and bytecode as well, which takes any callable.
    """
    return getattr(gm, "_backend_id", None) is not None and not torch_keeps()


def name_in_torchs_cache(gm: torch.fx.GraphModule) -> str | None:
    """Under which name torch's cache of guards and bytecode wants the compiled graph, if it is to keep it."""
    return getattr(gm, "_backend_id", None) if torch_keeps() else None


def has_gradient(value: Any) -> bool:
    """Whether this is a tensor with a gradient: of that, torch writes among the guards only that it is missing."""
    if not isinstance(value, torch.Tensor) or not (value.is_leaf or value.retains_grad):
        return False
    return value.grad is not None


def torch_keeps() -> bool:
    """Whether torch keeps guards and bytecode in its cache, by the setting ``caching_precompile``."""
    return bool(getattr(sys.modules.get("torch._dynamo.config"), "caching_precompile", False))


def write_guards_readably() -> None:
    """Before torch writes guards, see :func:`aotkit._torch_compat.write_defaults_readably`. It writes those of a frame
    without a graph too, for which no backend is called: so where torch keeps guards, this comes when a backend is
    made."""
    from .._torch_compat import write_defaults_readably  # which brings Dynamo

    write_defaults_readably()
