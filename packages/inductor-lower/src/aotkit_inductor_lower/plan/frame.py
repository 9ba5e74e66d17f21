"""The memory of one call: the frame of addresses and sizes, and the arena for temporaries."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ..symbolic import Symbol, SymbolKind
from .launch_plan import LaunchPlan, PlannedBuffer
from .memory import ALIGNMENT, place_buffers

__all__ = ["Frame", "FramePool", "torch_dtype"]

KEPT_SIZES = 8  # frames of so many different size combinations are kept


class _Entries(Protocol):
    """A ctypes array of 64-bit integers."""

    def __setitem__(self, key: int | slice, value: int | Sequence[int]) -> None: ...


class Frame:
    """One invocation's frame and arena. ``tensors``: arena buffers as tensors, where ATen ops need them."""

    __slots__ = ("address", "arena", "slots", "tensors")

    def __init__(
        self, plan: LaunchPlan, constants: Mapping[str, torch.Tensor], sizes: Sequence[int], wanted: Sequence[str]
    ) -> None:
        entries = (ctypes.c_int64 * max(1, len(plan.slots)))()
        self.slots: _Entries = entries
        self.address = ctypes.addressof(entries)
        names = [name for name, *_ in plan.symbol_sources]
        env = {Symbol(name, SymbolKind.SIZE): size for name, size in zip(names, sizes, strict=True)}
        homes = {b.name: b for b in plan.buffers}
        nbytes = {a.buffer: _extent(homes[a.buffer], env) for a in plan.arena}
        offsets, total = place_buffers([(a.buffer, a.first, a.last) for a in plan.arena], nbytes)
        self.arena = torch.empty(total + ALIGNMENT, dtype=torch.uint8)
        start = -self.arena.data_ptr() % ALIGNMENT
        for position, slot in enumerate(plan.slots):
            if slot.startswith("$"):
                entries[position] = env[Symbol(slot[1:], SymbolKind.SIZE)]
            elif slot in offsets:
                entries[position] = self.arena.data_ptr() + start + offsets[slot]
            elif homes[slot].home == "constant":
                entries[position] = constants[slot].data_ptr()
        self.tensors = tuple(self._tensor(homes[name], start + offsets[name], env) for name in wanted)

    def _tensor(self, buffer: PlannedBuffer, offset: int, env: Mapping[Symbol, int]) -> torch.Tensor:
        dtype = torch_dtype(buffer.dtype)
        count = max(1, -(-_extent(buffer, env) // dtype.itemsize))
        memory = self.arena[offset : offset + count * dtype.itemsize].view(dtype)
        sizes = [int(s.evaluate(env)) for s in buffer.sizes]
        return memory.as_strided(sizes, [int(s.evaluate(env)) for s in buffer.strides])


def _extent(buffer: PlannedBuffer, env: Mapping[Symbol, int]) -> int:
    """Bytes from the first to the end of the last element."""
    last = 0
    for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
        count = int(size.evaluate(env))
        if count == 0:
            return 0
        last += (count - 1) * int(stride.evaluate(env))
    return (last + 1) * torch_dtype(buffer.dtype).itemsize


class FramePool:
    """Frames of a bound program, reused between calls. Each running call holds its own.

    ``lease`` and ``give_back`` may be called from any thread. A call that fails simply drops its frame.
    """

    def __init__(self, plan: LaunchPlan, constants: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> None:
        self._plan, self._constants, self._wanted = plan, constants, tuple(wanted)
        self._free: dict[tuple[int, ...], list[Frame]] = {}
        self._lock = threading.Lock()

    def lease(self, *sizes: int) -> Frame:
        """A frame nobody else uses, for these values of the plan's size symbols."""
        frames = self._free.get(sizes)
        if frames:
            try:
                return frames.pop()
            except IndexError:  # another thread took the last one
                pass
        return Frame(self._plan, self._constants, sizes, self._wanted)

    def free_list(self) -> list[Frame]:
        """The free frames of a plan without size symbols. ``pop`` and ``append`` on it are atomic."""
        return self._free.setdefault((), [])

    def give_back(self, frame: Frame, *sizes: int) -> None:
        """Keep the frame for the next call with these sizes."""
        frames = self._free.get(sizes)
        if frames is None:
            with self._lock:
                while len(self._free) >= KEPT_SIZES:
                    self._free.pop(next(iter(self._free)))
                frames = self._free.setdefault(sizes, [])
        frames.append(frame)


def torch_dtype(name: str) -> torch.dtype:
    """A torch dtype by its name (``"float32"``)."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
