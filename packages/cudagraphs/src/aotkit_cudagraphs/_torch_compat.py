"""What differs between torch 2.11 and 2.15, and what CPU builds lack. Each name is looked up where it is used."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch


def stash_in_thread(key: str, value: object) -> None:
    """Keep `value` among the calling thread's objects, which torch hands to the threads of autograd.

    Torch gives a reference back when the thread ends. Before torch 2.12 it takes none: without one of ours it would be
    left with the address of a dead object.
    """
    references = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(key, value)
    if sys.getrefcount(value) == references:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


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


def memory_segments(pool: Any) -> list[Any]:
    """Segments of the caching allocator in the pool with this handle.

    Torch describes that pool alone, and without the history of allocations: a description of all of a large process
    takes longer than making a recording does.
    """
    segments = torch.cuda.memory_snapshot(mempool_id=pool, include_traces=False)
    return [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool)]


def allocator_is_on() -> bool:
    """Whether the caching allocator is on. From torch 2.12 on torch itself says so; before, it reads a variable."""
    enabled = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    return bool(enabled()) if enabled is not None else "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
