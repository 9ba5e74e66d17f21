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
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TRACING_LOCK", "AutocastState", "preserved_state"]

TRACING_LOCK = threading.RLock()


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Autocast as it is set: per device whether it is on and its dtype, whether it caches casts, and nesting."""

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool
    nesting: int

    @staticmethod
    def now() -> AutocastState:
        """The state of this thread, for the devices that this process can use."""
        names = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        return AutocastState(
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in names),
            torch.is_autocast_cache_enabled(),
            nesting,
        )

    def restore(self) -> None:
        """Make it the state of this thread again."""
        for device, enabled, dtype in self.devices:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)
        extra = AutocastState.now().nesting - self.nesting
        for _ in range(abs(extra)):
            if extra > 0:
                torch.autocast_decrement_nesting()
            else:
                torch.autocast_increment_nesting()


@dataclass(frozen=True, slots=True)
class TransformState:
    """What the transforms of ``torch.func`` change for what runs inside of them.

    A graph of Dynamo enters and leaves them by calls of their own, so that one which fails in between leaves none.
    """

    depth: int
    in_place: bool
    hooks_refused: str | None
    forward_mode: bool
    dual: bool

    @staticmethod
    def now() -> TransformState:
        """The state of this thread."""
        return TransformState(
            torch._C._functorch.get_dynamic_layer_stack_depth(),
            torch._C._functorch.get_inplace_requires_grad_allowed(),
            torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
            torch._C._is_fwd_grad_enabled(),
            _is_dual(),
        )

    def restore(self) -> None:
        """Make it the state of this thread again."""
        now = TransformState.now()
        if now == self:
            return
        if now.dual and not self.dual:
            torch._C._exit_dual_level(level=0)
        for _ in range(now.depth - self.depth):  # torch 2.11 can't undo several of different kinds at once
            _leave_transform()
        torch._C._functorch.set_inplace_requires_grad_allowed(self.in_place)
        torch._C._set_fwd_grad_enabled(self.forward_mode)
        if self.hooks_refused is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(self.hooks_refused, False)


def _leave_transform() -> None:
    """Undo the innermost transform of ``torch.func``."""
    levels: Any = torch._C._functorch
    kinds = levels.TransformType
    leave = {
        kinds.Grad: levels._grad_decrement_nesting,
        kinds.Jvp: levels._jvp_decrement_nesting,
        kinds.Vmap: levels._vmap_decrement_nesting,
        kinds.Functionalize: levels._func_decrement_nesting,
    }
    leave[levels.peek_interpreter_stack().key()]()


def _is_dual() -> bool:
    """Whether the one level of forward mode that torch has is entered."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


@contextmanager
def preserved_state() -> Iterator[None]:
    """Restore random state, grad mode and autocast, whatever happens inside, and transforms if it fails."""
    cpu_rng = torch.get_rng_state()
    cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    grad_mode = torch.is_grad_enabled()
    autocast, transforms, done = AutocastState.now(), TransformState.now(), False
    try:
        yield
        done = True
    finally:
        if not done:
            transforms.restore()
        torch._C._set_grad_enabled(grad_mode)
        autocast.restore()
        torch.set_rng_state(cpu_rng)
        if cuda_rng is not None:
            torch.cuda.set_rng_state_all(cuda_rng)
