"""What a trace must leave as it found it, and the lock around tracing.

Note [One lock around tracing]
    torch keeps the recording in progress in process-wide variables, so two traces at once corrupt each
    other. Every capture of this package takes one re-entrant lock; a caller that traces by other means may
    take it as well (:data:`TRACING_LOCK`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["TRACING_LOCK", "autocast_state", "preserved_state"]

TRACING_LOCK = threading.RLock()


def autocast_state() -> tuple[object, ...]:
    """Autocast as it is now, for the devices that this process can use."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices) + (
        torch.is_autocast_cache_enabled(),
    )


@contextmanager
def preserved_state() -> Iterator[None]:
    """Restore random state, grad mode and autocast, whatever happens inside."""
    cpu_rng = torch.get_rng_state()
    cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    grad_mode = torch.is_grad_enabled()
    autocast = autocast_state()
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        torch._C._set_grad_enabled(grad_mode)
        _restore_autocast(autocast, nesting)
        torch.set_rng_state(cpu_rng)
        if cuda_rng is not None:
            torch.cuda.set_rng_state_all(cuda_rng)


def _restore_autocast(state: tuple[object, ...], nesting: int) -> None:
    for device, enabled, dtype in state[:-1]:  # type: ignore[misc]
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(state[-1])
    now = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    for _ in range(now - nesting):
        torch.autocast_decrement_nesting()
    for _ in range(nesting - now):
        torch.autocast_increment_nesting()
