"""The memory of one call: the frame of addresses and sizes, and the arena for temporaries."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from .._torch_compat import modes_and_autocast_off, own_memory
from ..errors import SizeOverflowError
from ..launch_plan.records import LaunchPlan, PlannedBuffer, View
from ..memory.placement import ALIGNMENT, place_buffers
from ..symbolic import Symbol, SymbolKind, largest_fitting_size, too_wide
from .arena import ArenaBlock, ArenaPool
from .redzones import ArenaGuard, place_with_redzones

__all__ = ["Frame", "FramePool", "arena_views", "torch_dtype"]

KEPT_SIZES = 8  # frames of so many different size combinations are kept
SMALL_ARENA = 1 << 16  # bytes; up to here a plan keeps its own, which is quicker to take


class _Entries(Protocol):
    """A ctypes array of 64-bit integers."""

    def __setitem__(self, key: int | slice, value: int | Sequence[int]) -> None: ...


class Frame:
    """One invocation's frame, with the arena in ``memory`` from byte ``start`` on. ``tensors``: arena buffers and views
    of them, where ATen ops need them. ``guard``: what watches the memory, with redzones. ``inputs``: the addresses of
    all inputs that were written last by :meth:`write_inputs`."""

    __slots__ = ("address", "guard", "inputs", "memory", "slots", "tensors")

    def __init__(self, pool: FramePool, sizes: Sequence[int], memory: torch.Tensor, start: int) -> None:
        plan, buffers, env = pool.plan, pool.buffers, pool.env(sizes)
        entries = (ctypes.c_int64 * max(1, len(plan.slots)))()
        self.slots: _Entries = entries
        self.address = ctypes.addressof(entries)
        self.memory = memory
        self.inputs: tuple[int, ...] = ()
        offsets, _ = pool.layout(sizes)
        computed = pool.entries(env)
        for position, slot in enumerate(plan.slots):
            if slot in computed:
                entries[position] = computed[slot]
            elif slot.startswith("$"):
                entries[position] = env[Symbol(slot[1:], SymbolKind.SIZE)]
            elif slot in offsets:
                entries[position] = memory.data_ptr() + start + offsets[slot]
        if pool.redzones:
            origin = memory.data_ptr() + start
            places = {a.buffer: (origin + offsets[a.buffer], _extent(buffers[a.buffer], env)) for a in plan.arena}
            self.guard = ArenaGuard(plan, places)
        self.tensors: tuple[torch.Tensor, ...] = ()
        if pool.wanted:
            with modes_and_autocast_off(), torch.inference_mode(False):  # calls of any kind may come later
                self.tensors = tuple(_tensor(buffers[name], memory, start + offsets[name], env) for name in pool.wanted)

    def write_inputs(self, places: Sequence[int], addresses: tuple[int, ...]) -> None:
        """Write the addresses of inputs that are not where they were in the last call; ``places``: their slots."""
        before = self.inputs or (None,) * len(addresses)
        for place, address, held in zip(places, addresses, before, strict=True):
            if address != held:
                self.slots[place] = address
        self.inputs = addresses

    def write_moved(self, places: Sequence[int], addresses: tuple[int, ...], moved: Sequence[int]) -> None:
        """The same where it is known which inputs are not where they were."""
        for k in moved:
            self.slots[places[k]] = addresses[k]
        self.inputs = addresses


def _tensor(buffer: PlannedBuffer, memory: torch.Tensor, offset: int, env: Mapping[Symbol, int]) -> torch.Tensor:
    dtype = torch_dtype(buffer.dtype)
    count = max(1, -(-_extent(buffer, env) // dtype.itemsize))
    typed = memory[offset : offset + count * dtype.itemsize].view(dtype)
    sizes = [int(s.evaluate(env)) for s in buffer.sizes]
    return typed.as_strided(sizes, [int(s.evaluate(env)) for s in buffer.strides])


def arena_views(plan: LaunchPlan) -> dict[str, View]:
    """Views of arena buffers as their own type, in order: they are the same in every call, so a frame holds them."""
    buffers = {b.name: b for b in plan.buffers}
    inside = {a.buffer for a in plan.arena}
    views: dict[str, View] = {}
    for step in plan.steps:
        if isinstance(step, View) and step.base in inside and buffers[step.base].dtype == buffers[step.result].dtype:
            inside.add(step.result)
            views[step.result] = step
    return views


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

    Plans whose temporaries are small, or that have none, have ``own`` frames; the others lay theirs out in the blocks
    of an :class:`ArenaPool`, which other plans use in turn. All methods may be called from any thread. A call that
    fails simply drops its frame and block.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        constants: Mapping[str, torch.Tensor],
        wanted: Sequence[str],
        arenas: ArenaPool,
        redzones: bool = False,
        entries: Callable[[Mapping[Symbol, int]], Mapping[str, int]] = lambda env: {},
    ) -> None:
        self.redzones, self.entries = redzones, entries
        self.plan, self.constants, self.wanted = plan, constants, tuple(wanted)
        self.buffers = {b.name: b for b in plan.buffers}
        self.arenas, self._key = arenas, object()
        self._symbols = [Symbol(name, SymbolKind.SIZE) for name in plan.size_symbols]
        self._fitting_size = largest_fitting_size(plan.wide_sizes)
        self._layouts: dict[tuple[int, ...], tuple[dict[str, int], int]] = {}
        self._lock = threading.Lock()
        self.own = not plan.arena or (not self._symbols and self.layout(())[1] <= SMALL_ARENA)
        self._free: dict[tuple[int, ...], list[Frame]] = {}

    def env(self, sizes: Sequence[int]) -> dict[Symbol, int]:
        """The values of the plan's size symbols."""
        return dict(zip(self._symbols, sizes, strict=True))

    def layout(self, sizes: Sequence[int]) -> tuple[dict[str, int], int]:
        """Where the arena's buffers and the views of them start, and how many bytes there are, for these sizes.

        Raises :class:`SizeOverflowError`, see Note [Sizes beyond 64 bits].
        """
        key = tuple(sizes)
        found = self._layouts.get(key)
        if found is not None:
            return found
        env = self.env(sizes)
        if any(abs(size) > self._fitting_size for size in key):
            self._check_width(env)
        nbytes = {a.buffer: _extent(self.buffers[a.buffer], env) for a in self.plan.arena}
        if self.redzones:
            offsets, total = place_with_redzones(self.plan, nbytes)
        else:
            over = {a.buffer: a.reuses for a in self.plan.arena if a.reuses}
            offsets, total = place_buffers([(a.buffer, a.first, a.last) for a in self.plan.arena], nbytes, over)
        for view in arena_views(self.plan).values():
            width = torch_dtype(self.buffers[view.result].dtype).itemsize
            offsets[view.result] = offsets[view.base] + int(view.offset.evaluate(env)) * width
        with self._lock:
            while len(self._layouts) >= KEPT_SIZES:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[key] = offsets, total
        return offsets, total

    def _check_width(self, env: Mapping[Symbol, int]) -> None:
        """Refuse a call whose sizes kernels would compute as other numbers than the host."""
        found = too_wide(self.plan.wide_sizes, env)
        if found:
            sizes = ", ".join(f"{symbol} = {value}" for symbol, value in env.items())
            raise SizeOverflowError(
                f"{self.plan.name} computes the size {found}, and with {sizes} a part of it is beyond the integers of "
                "64 bits that kernels compute in, or divided beyond 2^53, where floats are not exact; run it eagerly "
                "for such sizes, or compute the size outside of what is compiled"
            )

    def lease(self, *sizes: int) -> Frame:
        """An own frame nobody else uses, for these values of the plan's size symbols."""
        frames = self._free.get(sizes)
        if frames:
            try:
                return frames.pop()
            except IndexError:  # another thread took the last one
                pass
        memory = own_memory(self.layout(sizes)[1] + ALIGNMENT)
        return Frame(self, sizes, memory, -memory.data_ptr() % ALIGNMENT)

    def lease_block(self, *sizes: int) -> tuple[ArenaBlock, Frame]:
        """A block of memory nobody else uses, and this plan's frame in it."""
        key = (self._key, sizes)
        block = self.arenas.take(self.layout(sizes)[1])
        frame = block.frames.get(key)
        if frame is None:
            frame = Frame(self, sizes, block.memory, block.start)
            block.keep(key, frame)
        return block, frame

    def free_list(self) -> list[Frame]:
        """The free own frames of a plan without size symbols. ``pop`` and ``append`` on it are atomic."""
        return self._free.setdefault((), [])

    def give_back(self, frame: Frame, *sizes: int) -> None:
        """Keep an own frame for the next call with these sizes."""
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
