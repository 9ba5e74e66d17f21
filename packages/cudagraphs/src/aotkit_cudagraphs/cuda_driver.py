"""The driver for NVIDIA GPUs, on torch.cuda."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ._torch_compat import allocator_is_on, cuda_function, memory_segments
from .attempt import record
from .cuda_attempt import CudaAttempt
from .reasons import CaptureError

T = TypeVar("T")


_MOST_STREAMS = 64  # that are remembered: torch has 32 of each kind


@dataclass(frozen=True, slots=True)
class CudaPool:
    """A private pool of the caching allocator.

    Attributes:
        handle: its id.
        keeper: an empty recording; as long as it exists, the allocator keeps the pool's segments.
    """

    handle: Any
    keeper: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True)
class CudaPoolState:
    """An allocation state: the allocator's own record of it, and the addresses in use."""

    opaque: Any
    addresses: tuple[int, ...]


class CudaDriver:
    """Records and replays on one CUDA device.

    Args:
        device: a CUDA device; without an index, the current one.

    Raises:
        RuntimeError: there is no CUDA device.
    """

    def __init__(self, device: torch.device | str | int = "cuda") -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "CudaDriver needs a CUDA device and a CUDA build of torch; SimulatedDriver needs neither"
            )
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._streams: dict[int, torch.cuda.Stream] = {}

    @property
    def device(self) -> torch.device:
        """The CUDA device, with its index."""
        return self._device

    def current_stream(self) -> torch.cuda.Stream:
        """The current stream of the device."""
        # It is asked for by every replay, and to make the object takes longer than all else there.
        address = cuda_function("_cuda_getCurrentRawStream")(self._device.index)
        known = self._streams.get(address)
        if known is None:
            known = torch.cuda.current_stream(self._device)
            self._streams = {**self._streams, address: known} if len(self._streams) < _MOST_STREAMS else {}
        return known

    def new_stream(self) -> torch.cuda.Stream:
        """A stream from torch's pool of streams."""
        return torch.cuda.Stream(self._device)

    def use_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make `stream` current inside."""
        return torch.cuda.stream(stream)

    def record_event(self, stream: Any) -> torch.cuda.Event:
        """An event recorded on `stream`."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        """Order `stream` after `event`, on the device."""
        stream.wait_event(event)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured, in whatever mode."""
        return bool(cuda_function("_cuda_isCurrentStreamCapturing")())

    def new_pool(self) -> CudaPool:
        """A private pool, kept by an empty recording until nothing refers to it."""
        handle = torch.cuda.graph_pool_handle()
        graph, _ = self._record(lambda: None, handle, torch.cuda.Stream(self._device))
        return CudaPool(handle, graph)

    @contextlib.contextmanager
    def use_pool(self, pool: CudaPool) -> Iterator[None]:
        """Send this thread's allocations to `pool`."""
        index = self._device.index
        cuda_function("_cuda_beginAllocateCurrentThreadToPool")(index, pool.handle)
        try:
            yield
        finally:
            cuda_function("_cuda_endAllocateToPool")(index, pool.handle)
            # The pool counts each begin as a user; its empty recording is the one that stays.
            cuda_function("_cuda_releasePool")(index, pool.handle)

    def release_pool(self, pool: CudaPool) -> None:
        """Nothing: the allocator frees the pool's memory when its recordings and blocks are gone."""
        del pool

    def pool_bytes(self, pool: CudaPool) -> int:
        """Bytes of the pool's segments that are allocated now."""
        return sum(int(segment["allocated_size"]) for segment in memory_segments(pool.handle))

    def reserved_bytes(self, pool: CudaPool) -> int:
        """Bytes of the pool's segments."""
        return sum(int(segment["total_size"]) for segment in memory_segments(pool.handle))

    def live_blocks(self, pool: CudaPool) -> dict[int, int]:
        """Address and requested bytes of allocated blocks."""
        found: dict[int, int] = {}
        for segment in memory_segments(pool.handle):
            address = int(segment["address"])
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found[address] = int(block.get("requested_size", block["size"]))
                address += int(block["size"])
        return found

    def storage_at(self, pool: CudaPool, address: int, nbytes: int) -> torch.UntypedStorage:
        """A storage without a deleter on the pool's memory."""
        storage: Any = cuda_function("_construct_storage_from_data_pointer")(address, self._device, nbytes)
        storage._pool = pool  # torch keeps a storage's Python object, and so its attributes, as long as the storage
        return storage

    def checkpoint(self, pool: CudaPool) -> CudaPoolState:
        """The caching allocator's state of the pool."""
        opaque = cuda_function("_cuda_getCheckpointState")(self._device.index, pool.handle)
        return CudaPoolState(opaque, tuple(self.live_blocks(pool)))

    def restore(self, pool: CudaPool, state: CudaPoolState, live: Mapping[int, int]) -> list[torch.UntypedStorage]:
        """Set the caching allocator's state of the pool, then free what `live` does not name.

        Note [Restoring an allocation state]
        The allocator re-allocates every block of the state. Storages passed along get the deleters of their blocks, if
        they have none yet: so new storages are made here, and those that the caller's results use stay without. The
        allocator refuses to drop blocks that are in use now, hence the protocol's rule that there are none.
        """
        storages = [self.storage_at(pool, address, nbytes) for address, nbytes in live.items()]
        cuda_function("_cuda_setCheckpointPoolState")(
            self._device.index, state.opaque, [], [storage._cdata for storage in storages]
        )
        for address in state.addresses:
            if address not in live:
                cuda_function("_cuda_cudaCachingAllocator_raw_delete")(address)
        return storages

    def invalidate(self, storage: torch.UntypedStorage, message: str) -> None:
        """Reads of the storage's data raise `message` from now on, through whatever view."""
        cuda_function("_set_storage_data_ptr_access_error_msg")(storage._cdata, message)

    def unusable_reason(self) -> str | None:
        """Pools need torch's own caching allocator."""
        if not allocator_is_on():
            return "torch's caching allocator is off"
        backend = torch.cuda.get_allocator_backend()
        return None if backend == "native" else f"the allocator {backend!r} keeps no states of pools"

    def allocate(self, nbytes: int) -> torch.Tensor:
        """From the caching allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def free(self, tensor: torch.Tensor) -> None:
        """Shrink the storage to nothing."""
        tensor.untyped_storage().resize_(0)

    def capture(self, fn: Callable[[], T], *, pool: CudaPool, stream: Any) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture into a graph; other threads may go on using the device.

        Workspaces of cuBLAS are dropped before, so that recorded work never points to one that a later drop frees, and
        after, so that they are not left in the pool: a replay uses the memory they had.
        """
        clear_workspaces = cuda_function("_cuda_clearCublasWorkspaces")
        clear_workspaces()
        try:
            return self._record(fn, pool.handle, stream)
        except RuntimeError as error:  # torch.AcceleratorError is one
            raise CaptureError(f"the CUDA stream capture failed: {error}") from error
        finally:
            clear_workspaces()

    def _record(self, fn: Callable[[], T], handle: Any, stream: Any) -> tuple[torch.cuda.CUDAGraph, T]:
        """As torch.cuda.graph does it, but for what that leaves behind when a capture fails."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a capture can't free what other pools hold when it needs memory
        with torch.cuda.stream(stream):
            attempt = CudaAttempt(handle, self._device.index)
            result = record(attempt, fn)
        return attempt.graph, result

    def replay(self, recording: Any) -> None:
        """Launch the graph on the current stream."""
        recording.replay()

    @contextlib.contextmanager
    def preserve_rng(self) -> Iterator[None]:
        """Save and restore the states of the CPU's and the device's default generators."""
        with torch.random.fork_rng(devices=[self._device.index], device_type="cuda"):
            yield
