"""What differs between torch 2.11 and 2.15, and what CPU builds lack. Each name is looked up where it is used."""

from __future__ import annotations

from typing import Any

import torch


def cuda_function(name: str) -> Any:
    """The allocator function `torch._C.<name>`.

    Raises:
        RuntimeError: this build of torch does not have it.
    """
    found = getattr(torch._C, name, None)
    if found is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch._C.{name}, which CUDA graph pools need; "
            "use a CUDA build of torch 2.11 to 2.15"
        )
    return found
