"""All that this package needs from a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class DeviceDriver(Protocol):
    """The device behind recordings. Streams, events, pools, recordings and pool states are opaque to callers.

    Note [One narrow protocol]
    Everything that touches a device's graphs, memory pools and streams goes through these methods, so that the
    logic above (which inputs are copied, what stays alive, when to record again) runs and is tested on any machine.
    """

    @property
    def device(self) -> torch.device:
        """The device whose tensors can be recorded."""
        ...

    def current_stream(self) -> Any:
        """The stream that work is issued to now."""
        ...

    def new_stream(self) -> Any:
        """A stream beside the current one."""
        ...

    def use_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Issue work to `stream` inside."""
        ...

    def record_event(self, stream: Any) -> Any:
        """Mark what was issued to `stream` so far."""
        ...

    def wait_event(self, stream: Any, event: Any) -> None:
        """Work issued to `stream` from now on runs after the mark."""
        ...

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        ...

    def is_capturing(self) -> bool:
        """Whether what this thread issues now is being recorded, by us or by the caller: nothing may replay then."""
        ...

    def new_pool(self) -> Any:
        """A pool of memory for recordings."""
        ...

    def use_pool(self, pool: Any) -> AbstractContextManager[object]:
        """Allocations of this thread come from `pool` inside (begin and end)."""
        ...

    def release_pool(self, pool: Any) -> None:
        """Give the pool's memory back once nothing in it is used."""
        ...

    def pool_bytes(self, pool: Any) -> int:
        """Bytes allocated in the pool now."""
        ...

    def reserved_bytes(self, pool: Any) -> int:
        """Bytes that the pool holds, in use or not: the most it ever needed."""
        ...

    def live_blocks(self, pool: Any) -> dict[int, int]:
        """Address and bytes of each block in use."""
        ...

    def storage_at(self, pool: Any, address: int, nbytes: int) -> torch.UntypedStorage:
        """A storage on memory of the pool that is not a use of it, but keeps the pool's memory from going away."""
        ...

    def checkpoint(self, pool: Any) -> Any:
        """The pool's allocation state: which blocks are in use."""
        ...

    def restore(self, pool: Any, state: Any, live: Mapping[int, int]) -> list[torch.UntypedStorage]:
        """Go back to a state in which only some blocks are in use; contents stay. No block may be in use before.

        Args:
            pool: of the state.
            state: from `checkpoint`.
            live: address and bytes of the blocks to be in use; all are blocks of the state.

        Returns:
            For each of `live` a storage that owns its block: the block is free again when the storage dies.
        """
        ...

    def invalidate(self, storage: torch.UntypedStorage, message: str) -> None:
        """Make later accesses to the data of `storage` fail with `message`, where the device can do that."""
        ...

    def unusable_reason(self) -> str | None:
        """Why nothing at all can be recorded on this device now; None if it can."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A `uint8` tensor of that size, from the pool in use if there is one."""
        ...

    def free(self, tensor: torch.Tensor) -> None:
        """Free the tensor's memory now, whoever still refers to it."""
        ...

    def capture(self, fn: Callable[[], T], *, pool: Any, stream: Any) -> tuple[Any, T]:
        """Run `fn` on `stream` without executing its device work; return the recording and what `fn` returned.

        Tensors made inside live in `pool`, with contents undefined until the first replay.

        Raises:
            CaptureError: `fn` did something that can't be recorded.
        """
        ...

    def replay(self, recording: Any) -> None:
        """Execute the recorded work on the current stream, on the memory it was recorded with."""
        ...

    def preserve_rng(self) -> AbstractContextManager[object]:
        """The device's random generator continues after the block as if the block had not been."""
        ...
