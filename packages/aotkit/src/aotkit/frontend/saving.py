"""Whether Dynamo compiles a graph to save it."""

from __future__ import annotations

import sys

import torch

__all__ = ["is_saved_by_torch"]


def is_saved_by_torch(gm: torch.fx.GraphModule) -> bool:
    """Whether torch wants a callable that it can save: it then names the graph before it calls the backend.

    It names it for its cache of guards and bytecode as well, which takes any callable.
    """
    config = sys.modules.get("torch._dynamo.config")
    return getattr(gm, "_backend_id", None) is not None and not getattr(config, "caching_precompile", False)
