"""The debug mode of a call's memory: every planned buffer between redzones, poisoned when it is born and when it dies.

Note [Redzones]
    A buffer of the arena gets ``REDZONE`` bytes of a pattern on both sides, a result that is allocated gets them
    behind its last element. They are written when the buffer is born and compared after every step of its life, so the
    step that wrote outside of its buffer is known. What a buffer holds at birth and after its last step is ``POISON``:
    NaN in every floating type, minus one in integers. Memory that is read before it is written, or after its plan says
    it is dead, so gives results that no test takes for right. Places come from the planner that is used without
    redzones, and dead memory is used again, but not by kernels of one segment: between these nothing can be looked at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from .._torch_compat import empty_strided_cpu
from ..launch_plan.records import CallExtern, CallSegment, Free, LaunchPlan
from ..memory.placement import place_buffers
from .errors import RedzoneError

__all__ = ["POISON", "REDZONE", "ArenaGuard", "guarded_empty", "place_with_redzones"]

REDZONE = 256  # bytes on each side: four of the widest vector registers, and a multiple of the arena's alignment
POISON = 0xFF
_PATTERN = b"\xa5\xff" * (REDZONE // 2)  # NaN as well, whichever element a stray load takes for one


class ArenaGuard:
    """Watches the memory of one frame. ``places``: address and bytes of each arena buffer, without its redzones."""

    def __init__(self, plan: LaunchPlan, places: Mapping[str, tuple[int, int]]) -> None:
        self._plan = plan
        self._places = places
        self._lives = _step_lives(plan)
        self._fresh: dict[str, tuple[torch.Tensor, int]] = {}

    def begin(self) -> None:
        """A call starts."""
        self._fresh.clear()  # of a call that failed

    def before(self, step: int) -> None:
        """Buffers that are born in this step get their redzones and hold poison."""
        for name, (first, _) in self._lives.items():
            if first != step:
                continue
            address, nbytes = self._places[name]
            ctypes.memmove(address - REDZONE, _PATTERN, REDZONE)
            ctypes.memmove(address + nbytes, _PATTERN, REDZONE)
            ctypes.memset(address, POISON, nbytes)

    def fresh(self, name: str, tensor: torch.Tensor) -> None:
        """A result that :func:`guarded_empty` allocated for the buffer."""
        storage = tensor.untyped_storage()  # an empty tensor has no address of its own
        self._fresh[name] = (tensor, storage.data_ptr() + storage.nbytes() - REDZONE)

    def after(self, step: int) -> None:
        """No redzone of what is alive has changed; what was used for the last time holds poison.

        Raises :class:`RedzoneError`, which names the buffer and the step.
        """
        for name, (first, last) in self._lives.items():
            if first <= step <= last:
                address, nbytes = self._places[name]
                self._compare(name, "before", address - REDZONE, step)
                self._compare(name, "behind", address + nbytes, step)
        for name, (_, address) in self._fresh.items():
            self._compare(name, "behind", address, step)
        for name, (_, last) in self._lives.items():
            if last == step:
                ctypes.memset(self._places[name][0], POISON, self._places[name][1])

    def end(self) -> None:
        """The call is over: nothing of its results is kept."""
        self._fresh.clear()

    def _compare(self, name: str, side: str, address: int, step: int) -> None:
        if ctypes.string_at(address, REDZONE) != _PATTERN:
            raise RedzoneError(
                f"{self._plan.name}: step {step} ({_describe(self._plan, step)}) wrote to memory {side} buffer {name}"
            )


def _describe(plan: LaunchPlan, step: int) -> str:
    found = plan.steps[step]
    if isinstance(found, CallSegment):
        return "kernels " + ", ".join(found.launches)
    return found.target if isinstance(found, CallExtern) else type(found).__name__


def guarded_empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A poisoned tensor whose storage ends in a redzone."""
    empty = any(size == 0 for size in sizes)
    last = 0 if empty else 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    count = last + REDZONE // dtype.itemsize
    memory = empty_strided_cpu((count,), (1,), dtype)
    ctypes.memset(memory.data_ptr(), POISON, last * dtype.itemsize)
    ctypes.memmove(memory.data_ptr() + last * dtype.itemsize, _PATTERN, REDZONE)
    whole = empty_strided_cpu((0,), (1,), dtype)
    return whole.set_(memory.untyped_storage(), 0, sizes, strides)  # no view, as without redzones


def place_with_redzones(plan: LaunchPlan, nbytes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of the arena's buffers, each between two redzones, and the arena's size in bytes."""
    lives = [(name, first, last) for name, (first, last) in _step_lives(plan).items()]
    offsets, total = place_buffers(lives, {name: size + 2 * REDZONE for name, size in nbytes.items()})
    return {name: offset + REDZONE for name, offset in offsets.items()}, total


def _step_lives(plan: LaunchPlan) -> dict[str, tuple[int, int]]:
    """First and last step (position in ``plan.steps``) of each arena buffer, from the plan's program points."""
    steps: list[int] = []  # of each program point
    for position, step in enumerate(plan.steps):
        if not isinstance(step, Free):
            steps += [position] * (len(step.launches) if isinstance(step, CallSegment) else 1)
    return {a.buffer: (steps[a.first], steps[a.last]) for a in plan.arena}
