"""Gradients that are zeros without memory, which become ordinary ones while a backward is recorded.

Some derivatives are zeros that take no memory, that of a sign for one; second derivatives meet them. torch reshapes
such a functional tensor with a kernel that takes it for a plain one, and what comes next reads memory that is not its
own. So each backward function is given copies, which have memory and the same history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from . import _torch_compat as compat
from .reach import backward_functions

__all__ = ["gradients_in_memory", "zeros_in_memory"]

Given = tuple[torch.Tensor | None, ...]


def zeros_in_memory(given: Given) -> Given | None:
    """What a backward function is given instead of ``given``, or ``None`` if nothing has to be replaced."""
    if not any(map(compat.is_without_memory, given)):
        return None
    return tuple(g.clone() if g is not None and compat.is_without_memory(g) else g for g in given)


@contextmanager
def gradients_in_memory(outputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context in which the gradients of ``outputs`` are taken."""
    hooks = [fn.register_prehook(zeros_in_memory) for fn in backward_functions(outputs)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
