"""One attempt to record on a CUDA device."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from functools import cache
from typing import Any

import torch

from ._torch_compat import cuda_function

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

#: Graphs whose end failed for good. Torch's allocators may go on asking them whose memory an allocation is.
_unfinished: list[torch.cuda.CUDAGraph] = []


class CudaAttempt:
    """See `attempt.Attempt`. To be made, and used, while the stream to record is current.

    Note [Ending what the driver gave up]
    Torch's end of a capture asks the driver for the graph first, and does the rest (both allocators, the generators)
    only if there is one. Of an invalidated capture there is none, but the stream is free again: an empty capture begun
    on it, past torch, gives torch's end a graph to find, and it runs to its end.

    Args:
        pool: handle of the pool that its memory comes from.
        device: index of the device.

    Attributes:
        graph: whole after `end`.
    """

    def __init__(self, pool: Any, device: int) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._device = device
        self._has_begun = False

    def begin(self) -> None:
        """Other threads may go on using the device."""
        self.graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._has_begun = True

    def end(self) -> None:
        """Ends the capture, and makes the graph executable."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*graph is empty.*")
            self.graph.capture_end()

    def abandon(self) -> bool:
        """See Note [Ending what the driver gave up]. What failed is told already, so nothing is raised.

        Where torch did not even begin, there is nothing for it to end: then the device's allocator is told, and an
        empty recording sets the generators right. The allocator of pinned memory (from torch 2.13 on) can't be told: it
        refuses other recordings in the pool.
        """
        sound = self._has_begun and self._ends()
        with contextlib.suppress(RuntimeError):
            if self._is_open():
                self._begin_empty_capture()
                self.end()
        if self._end_allocations():
            _unfinished.append(self.graph)
            self._set_generators_right()
        self.graph.reset()
        return sound

    def _ends(self) -> bool:
        try:
            self.end()
        except RuntimeError:
            return False
        return True

    def _is_open(self) -> bool:
        """Whether torch still takes the graph for one that is being captured."""
        try:
            self.graph.pool()
        except RuntimeError:
            return True
        return False

    def _begin_empty_capture(self) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        status = _driver_library().cuStreamBeginCapture_v2(ctypes.c_void_p(stream), _THREAD_LOCAL)
        if status:
            raise RuntimeError(f"the CUDA driver does not begin a capture ({status})")

    def _end_allocations(self) -> bool:
        """Tell the device's allocator, and let the pool go; False if torch did both."""
        try:
            cuda_function("_cuda_endAllocateToPool")(self._device, self._pool)
        except RuntimeError:
            return False
        cuda_function("_cuda_releasePool")(self._device, self._pool)
        return True

    def _set_generators_right(self) -> None:
        other = CudaAttempt(torch.cuda.graph_pool_handle(), self._device)
        with contextlib.suppress(RuntimeError):
            other.begin()
            other.end()
        other.graph.reset()


@cache
def _driver_library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"no CUDA driver library: {error}") from error
