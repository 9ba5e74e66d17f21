"""Freed memory that the C library keeps for the next step.

Note [Freed memory is kept]
    The C library of most Linux systems (glibc) gives memory back to the system when more is free at the end of its heap
    than twice the largest block that was ever freed, if that had at most 32 MiB; before a large one was freed, 128 KiB.
    A step of training frees all activations by its end, so that each step begins with memory that does not exist yet,
    and touching a new page takes longer than writing it. That was a sixth of a step of a small
    ResNet (`python -m tools.bench.faults`).

    A block of 32 MiB that is asked for and freed raises these bounds to 32 and 64 MiB, as it does in any program that
    frees a tensor of that size. Nobody writes to the block, so it takes no memory. What is free at the end of the heap
    stays with the process, up to 64 MiB, and blocks of some MiB have no memory of their own any more, so that a process
    is up to some tens of MiB larger at its peak (`python -m tools.bench.resident`). Other libraries ignore it.
"""

from __future__ import annotations

from .._torch_compat import own_memory

__all__ = ["keep_freed_memory"]

_LARGEST = 32 << 20  # bytes: larger blocks change no bounds
_AROUND = 1 << 16  # what stands around the block: a header, and the way to an aligned address


def keep_freed_memory() -> None:
    """Let the C library keep tens of MiB that are freed, instead of asking the system for them in every step.

    For processes that allocate and free the same memory again and again, as those that train do. See Note [Freed memory
    is kept].
    """
    own_memory(_LARGEST - _AROUND)
