"""The driver for NVIDIA GPUs, on torch.cuda."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from ._torch_compat import cuda_function
from .reasons import CaptureError

T = TypeVar("T")


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
        self._begun: Counter[tuple[int, int]] = Counter()

    @property
    def device(self) -> torch.device:
        """The CUDA device, with its index."""
        return self._device

    def current_stream(self) -> torch.cuda.Stream:
        """The current stream of the device."""
        return torch.cuda.current_stream(self._device)

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

    def new_pool(self) -> Any:
        """A handle for a private pool; memory comes with the first recording."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def use_pool(self, pool: Any) -> Iterator[None]:
        """Send this thread's allocations to `pool`."""
        index = self._device.index
        self._begun[tuple(pool)] += 1
        cuda_function("_cuda_beginAllocateCurrentThreadToPool")(index, pool)
        try:
            yield
        finally:
            cuda_function("_cuda_endAllocateToPool")(index, pool)

    def release_pool(self, pool: Any) -> None:
        """Drop the uses of the pool that `use_pool` took; recordings drop theirs when they die."""
        for _ in range(self._begun.pop(tuple(pool), 0)):
            cuda_function("_cuda_releasePool")(self._device.index, pool)

    def pool_bytes(self, pool: Any) -> int:
        """Bytes of the pool's segments that are allocated now."""
        segments = torch.cuda.memory_snapshot()
        return sum(
            int(segment["allocated_size"]) for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool)
        )

    def checkpoint(self, pool: Any) -> Any:
        """The caching allocator's state of the pool."""
        return cuda_function("_cuda_getCheckpointState")(self._device.index, pool)

    def restore(self, pool: Any, state: Any, live: Sequence[torch.UntypedStorage]) -> None:
        """Set the caching allocator's state of the pool; `live` storages get their deleters back."""
        del pool  # the state knows its pool
        cuda_function("_cuda_setCheckpointPoolState")(
            self._device.index, state, [], [storage._cdata for storage in live]
        )

    def allocate(self, nbytes: int) -> torch.Tensor:
        """From the caching allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def free(self, tensor: torch.Tensor) -> None:
        """Shrink the storage to nothing."""
        tensor.untyped_storage().resize_(0)

    def capture(self, fn: Callable[[], T], *, pool: Any, stream: Any) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture under torch.cuda.graph; other threads may go on using the device."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = fn()
        except RuntimeError as error:  # torch.AcceleratorError is one
            raise CaptureError(f"the CUDA stream capture failed: {error}") from error
        return graph, result

    def replay(self, recording: Any) -> None:
        """Launch the graph on the current stream."""
        recording.replay()

    @contextlib.contextmanager
    def preserve_rng(self) -> Iterator[None]:
        """Save and restore the states of the CPU's and the device's default generators."""
        with torch.random.fork_rng(devices=[self._device.index], device_type="cuda"):
            yield
