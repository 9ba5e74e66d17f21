"""Operators that move a tensor to pinned memory of the host and back, on a stream of their own.

Note [Transfers beside computation]
    A transfer is two operators. The first starts it: the stream of transfers waits for what the computation has issued
    so far, and copies. The second, ``..ed``, gives back what the first one made, and the computation waits for the
    transfer; it also takes what the transfer reads, so that nobody gives this memory away before. The event to wait for
    travels as an attribute of the tensor; where that is lost, the computation waits for all transfers. The stream is
    one per device, so transfers run one after the other, and a value comes back only after it has left: no wait is
    needed between the two. On the CPU both transfers are plain copies.

    What streams do stands behind :class:`Streams`, so that the same code runs over simulated ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["OFFLOAD", "OFFLOADED", "RELOAD", "RELOADED", "Streams", "Transfers"]


class Streams(Protocol):
    """The stream that computes, and that of transfers, of one device."""

    def transferring(self) -> AbstractContextManager[Any]:
        """What is issued within is a transfer, and comes after what the computation has issued by then."""

    def issued(self) -> Any:
        """An event that has happened when the transfers that are issued by now are done."""

    def computation_waits(self, event: Any) -> None:
        """What is issued for the computation from now on comes after ``event``; ``None``: after all transfers."""

    def hold(self, memory: Tensor, by_transfers: bool) -> None:
        """``memory`` was made for the one stream and is used by the other one: that of transfers, or not."""


class CudaStreams:
    """Of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._computes = torch.cuda.current_stream(device)
        self._transfers = _stream_of_transfers(self._computes.device_index)

    def transferring(self) -> AbstractContextManager[Any]:
        """See :class:`Streams`."""
        self._transfers.wait_stream(self._computes)
        return torch.cuda.stream(self._transfers)

    def issued(self) -> Any:
        """See :class:`Streams`."""
        return self._transfers.record_event()

    def computation_waits(self, event: Any) -> None:
        """See :class:`Streams`."""
        self._computes.wait_event(self.issued() if event is None else event)

    def hold(self, memory: Tensor, by_transfers: bool) -> None:
        """See :class:`Streams`."""
        memory.record_stream(self._transfers if by_transfers else self._computes)


@functools.cache
def _stream_of_transfers(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


class Transfers:
    """The four operators over given streams.

    Args:
        streams: of a device; ``None`` where a copy is done when the call returns.
    """

    def __init__(self, streams: Callable[[torch.device], Streams | None]) -> None:
        self._streams = streams

    def offload(self, value: Tensor, device: torch.device) -> Tensor:
        """Start to copy ``value`` to ``device``: pinned memory, if that is the host."""
        streams = self._streams(value.device)
        if streams is None:
            return value.to(device, copy=True)
        made = torch.empty_like(value, device=device, pin_memory=device.type == "cpu" and value.is_cuda)
        with streams.transferring():
            made.copy_(value, non_blocking=True)
        streams.hold(value, by_transfers=True)
        return _with_event(made, streams.issued())

    def offloaded(self, made: Tensor, value: Tensor) -> Tensor:
        """``made``, once ``value`` is copied."""
        streams = self._streams(value.device)
        if streams is not None:
            streams.computation_waits(getattr(made, _EVENT, None))
        return made

    def reload(self, value: Tensor, device: torch.device) -> Tensor:
        """Start to copy ``value``, from where it waits, to ``device``."""
        streams = self._streams(device)
        if streams is None:
            return value.to(device, copy=True)
        with streams.transferring():
            made = value.to(device, copy=True, non_blocking=True)
        return _with_event(made, streams.issued())

    def reloaded(self, made: Tensor, value: Tensor) -> Tensor:
        """``made``, once ``value`` is copied."""
        streams = self._streams(made.device)
        if streams is not None:
            streams.computation_waits(getattr(made, _EVENT, None))
            streams.hold(made, by_transfers=False)
        return made


_EVENT = "_aotkit_transfer"


def _with_event(made: Tensor, event: Any) -> Tensor:
    setattr(made, _EVENT, event)
    return made


def _streams_of(device: torch.device) -> Streams | None:
    return CudaStreams(device) if device.type == "cuda" else None


_NAME = "aotkit_partition"
_library = torch.library.Library(_NAME, "DEF")
_transfers = Transfers(_streams_of)
for _name, _run, _fake in (
    ("offload", _transfers.offload, lambda value, device: torch.empty_like(value, device=device)),
    ("reload", _transfers.reload, lambda value, device: torch.empty_like(value, device=device)),
    ("offloaded", _transfers.offloaded, lambda made, value: made),
    ("reloaded", _transfers.reloaded, lambda made, value: made),
):
    _starts = not _name.endswith("ed")
    _library.define(
        f"{_name}(Tensor value, Device device) -> Tensor"
        if _starts
        else f"{_name}(Tensor(a) made, Tensor value) -> Tensor(a)"
    )
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAME}::{_name}", _fake, lib=_library)

_ops = torch.ops.aotkit_partition
OFFLOAD, OFFLOADED = _ops.offload.default, _ops.offloaded.default
RELOAD, RELOADED = _ops.reload.default, _ops.reloaded.default
