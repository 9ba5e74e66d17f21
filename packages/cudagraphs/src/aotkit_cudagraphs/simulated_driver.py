"""A device in host memory: capture, replay, pools and streams on CPU tensors.

Note [Simulated capture]
A capture runs `fn` under a dispatch mode. Each ATen call runs, its new outputs move into the pool, and the call
is recorded with raw addresses instead of tensors. Afterwards it is as if nothing had run: storages that were written
get their old contents back, the pool's new blocks are poisoned, the random generator is where it was. A replay
runs the recorded calls again on the tensors found at the recorded addresses. So, as on a GPU, a replay does not keep
its inputs alive, writes where it wrote before whoever lives there now, and draws new random numbers. Unlike a GPU, it
notices a stale address.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .attempt import record
from .dispatch import map_tensors, tensors_in, written_tensors
from .reasons import CaptureError
from .simulated_pool import PoolState, SimulatedMemoryError, SimulatedPool
from .simulated_streams import SimulatedEvent, SimulatedStream, StreamClocks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """A tensor as a kernel knows it: an address and a layout, no ownership."""

    address: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One ATen call of a recording.

    Attributes:
        func: the operator.
        args: positional arguments, tensors as `TensorAddress`.
        kwargs: keyword arguments likewise.
        outputs: per tensor the call returned, where to put it; None if it is one of the arguments or a view of one.
    """

    func: Any
    args: tuple[object, ...]
    kwargs: dict[str, object]
    outputs: tuple[TensorAddress | None, ...]


@dataclass(slots=True)
class SimulatedRecording:
    """What a capture recorded.

    Attributes:
        pool: where its own memory is.
        calls: in order.
        external: storages it uses and did not make, by address, held weakly.
        own: address and size of each block it allocated.
        results: address and size of those of them that were still in use at its end, in order.
    """

    pool: SimulatedPool
    calls: list[RecordedCall] = field(default_factory=list)
    external: dict[int, StorageWeakRef] = field(default_factory=dict)
    own: dict[int, int] = field(default_factory=dict)
    results: list[tuple[int, int]] = field(default_factory=list)


class SimulatedDriver:
    """A `DeviceDriver` on CPU tensors; see Note [Simulated capture] and Note [Simulated memory].

    Args:
        capacity: bytes per pool.
        granularity: allocation unit in bytes.
    """

    def __init__(self, *, capacity: int = 256 << 20, granularity: int = 512) -> None:
        self._capacity = capacity
        self._granularity = granularity
        self._pools: list[SimulatedPool] = []
        self._clocks = StreamClocks(lambda address: any(pool.owns(address) for pool in self._pools))
        self._used_pools: list[SimulatedPool] = []
        self._capturing: set[int] = set()  # threads

    @property
    def device(self) -> torch.device:
        """The CPU: simulated device tensors are CPU tensors."""
        return torch.device("cpu")

    def current_stream(self) -> SimulatedStream:
        """The stream in use; the default stream outside `use_stream`."""
        return self._clocks.current

    def new_stream(self) -> SimulatedStream:
        """A stream that is ordered after nothing yet."""
        return self._clocks.new_stream()

    @contextlib.contextmanager
    def use_stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Issue work to `stream`; the order of its memory accesses is checked."""
        before, self._clocks.current = self._clocks.current, stream
        try:
            with _DeviceMode(self, None):
                yield
        finally:
            self._clocks.current = before

    def record_event(self, stream: SimulatedStream) -> SimulatedEvent:
        """Mark the work issued to `stream`."""
        return self._clocks.record(stream)

    def wait_event(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Order `stream` after the mark."""
        self._clocks.wait(stream, event)

    def _refuse_in_capture(self, what: str) -> None:
        if self.is_capturing():
            raise CaptureError(f"{what} can't be part of a recording")

    def synchronize(self) -> None:
        """Order everything after everything issued so far."""
        self._refuse_in_capture("waiting for the device")
        self._clocks.synchronize()

    def is_capturing(self) -> bool:
        """Whether this thread is in `capture`."""
        return threading.get_ident() in self._capturing

    def new_pool(self) -> SimulatedPool:
        """An empty pool."""
        pool = SimulatedPool(self._capacity, self._granularity)
        self._pools.append(pool)
        return pool

    @contextlib.contextmanager
    def use_pool(self, pool: SimulatedPool) -> Iterator[None]:
        """Results of ATen calls inside live in `pool`."""
        self._used_pools.append(pool)
        try:
            with _DeviceMode(self, pool):
                yield
        finally:
            self._used_pools.pop()

    def release_pool(self, pool: SimulatedPool) -> None:
        """Forget the pool; its memory goes with the last storage in it."""
        self._pools.remove(pool)

    def pool_bytes(self, pool: SimulatedPool) -> int:
        """Bytes of live blocks."""
        return pool.live_bytes

    def checkpoint(self, pool: SimulatedPool) -> PoolState:
        """The live blocks."""
        return pool.checkpoint()

    def restore(self, pool: SimulatedPool, state: PoolState, live: Mapping[int, int]) -> list[torch.UntypedStorage]:
        """Only the blocks of `live`, which must be blocks of `state`, are in use afterwards."""
        return pool.restore(state, live)

    def reserved_bytes(self, pool: SimulatedPool) -> int:
        """Bytes up to the highest address that was ever in use."""
        return pool.extent

    def live_blocks(self, pool: SimulatedPool) -> dict[int, int]:
        """What is in use, after freeing what died."""
        return {address: block.requested for address, block in pool.blocks()}

    def storage_at(self, pool: SimulatedPool, address: int, nbytes: int) -> torch.UntypedStorage:
        """A storage on the pool's bytes, which it keeps alive."""
        return pool.storage_at(address, nbytes)

    def invalidate(self, storage: torch.UntypedStorage, message: str) -> None:
        """Nothing: host memory can't refuse to be read. Readers see what the next replay writes."""
        del storage, message

    def unusable_reason(self) -> str | None:
        """None: there is always host memory."""
        return None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Poisoned bytes of the pool in use, or plain memory outside any."""
        if not self._used_pools:
            return torch.empty(nbytes, dtype=torch.uint8)
        with _disable_current_modes():
            return torch.empty(0, dtype=torch.uint8).set_(self.allocate_in(self._used_pools[-1], nbytes))

    def allocate_in(self, pool: SimulatedPool, nbytes: int) -> torch.UntypedStorage:
        """A new storage in `pool`; what streams did with the memory before does not matter any more."""
        storage = pool.allocate(nbytes)
        self._clocks.forget(storage.data_ptr())
        return storage

    def free(self, tensor: torch.Tensor) -> None:
        """Free the tensor's block; using it later reads poison, or what lives there by then."""
        address = tensor.untyped_storage().data_ptr()
        for pool in self._pools:
            if pool.owns(address):
                pool.free(address)
                return
        raise SimulatedMemoryError(f"the tensor at {address:#x} is in none of this driver's pools")

    def capture(
        self, fn: Callable[[], T], *, pool: SimulatedPool, stream: SimulatedStream
    ) -> tuple[SimulatedRecording, T]:
        """Record `fn`; see Note [Simulated capture]."""
        self._refuse_in_capture("a recording")
        before, self._clocks.current = self._clocks.current, stream
        self.synchronize()  # as a capture on a device does first
        self._capturing.add(threading.get_ident())
        try:
            attempt = _SimulatedAttempt(self, pool)
            result = record(attempt, fn)
        finally:
            self._capturing.discard(threading.get_ident())
            self._clocks.current = before
        return attempt.recording, result

    def replay(self, recording: SimulatedRecording) -> None:
        """Run the recorded calls on the memory at the recorded addresses.

        Raises:
            SimulatedMemoryError: a tensor that the recording uses but does not own has died.
        """
        self._refuse_in_capture("a replay")
        pool = recording.pool
        pool.collect()
        for address, weak in recording.external.items():
            if weak.expired():
                raise SimulatedMemoryError(f"the recording reads the memory at {address:#x}, whose tensor has died")
        with _disable_current_modes(), torch.no_grad():
            for call in recording.calls:
                self._replay_call(recording, call)
            for address, nbytes in recording.own.items():
                pool.poison_unused(address, nbytes, recording.results)

    def preserve_rng(self) -> AbstractContextManager[object]:
        """Save and restore the default CPU generator."""
        return torch.random.fork_rng(devices=[])

    def issued(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
        """Check one call's memory accesses against the order of streams."""
        writes = [tensor.untyped_storage() for tensor in written_tensors(func, args, kwargs)]
        reads = [tensor.untyped_storage() for tensor in tensors_in([*args, *kwargs.values()]) if _is_plain(tensor)]
        known = {storage.data_ptr() for storage in reads}
        fresh = [tensor.untyped_storage() for tensor in tensors_in(result) if _is_plain(tensor)]
        writes += [storage for storage in fresh if storage.data_ptr() not in known]
        if getattr(func, "is_view", False):
            return  # a view moves no data
        self._clocks.access(reads, writes, str(func))

    def _replay_call(self, recording: SimulatedRecording, call: RecordedCall) -> None:
        args = _materialize(recording, call.args)
        kwargs = {name: _materialize(recording, value) for name, value in call.kwargs.items()}
        result = call.func(*args, **kwargs)
        placed: list[torch.Tensor] = []
        for value, target in zip(tensors_in(result), call.outputs, strict=True):
            if target is not None:
                placed.append(_tensor_at(recording, target))
                placed[-1].copy_(value)
        self.issued(call.func, args, kwargs, placed)


class _SimulatedAttempt:
    """See `attempt.Attempt`. As on a device, `end` fails half-way if anything could not be recorded."""

    def __init__(self, driver: SimulatedDriver, pool: SimulatedPool) -> None:
        self.recording = SimulatedRecording(pool)
        self._pool = pool
        self._mode = _CaptureMode(driver, pool, self.recording)
        self._stack = contextlib.ExitStack()
        self._driver = driver
        self._contents: list[tuple[int, torch.Tensor]] = []
        self._has_begun = False

    def begin(self) -> None:
        """From now on ATen calls are recorded."""
        self._pool.begin_recording()
        self._has_begun = True
        # What the callable frees, it may allocate anew and write; on a device, nothing is written during a capture.
        self._contents = [(address, self._pool.read(address, block.size)) for address, block in self._pool.blocks()]
        self._stack.enter_context(self._driver.preserve_rng())
        self._stack.enter_context(self._mode)

    def end(self) -> None:
        """Nothing has run. Raises `CaptureError` after a call that could not be recorded, whoever caught its error."""
        if self._mode.refused is not None:
            raise CaptureError(f"the recording is invalid since this: {self._mode.refused}")
        self._stack.close()
        own, blocks = self.recording.own, self._pool.blocks()
        self.recording.results = [(address, block.size) for address, block in blocks if address in own]
        self._undo()

    def abandon(self) -> bool:
        """Nothing has run, and nothing is recorded."""
        if self._has_begun:
            self._stack.close()
            self._undo()
        return self._mode.refused is None

    def _undo(self) -> None:
        self._pool.end_recording()
        self._mode.undo()
        for address, contents in self._contents:
            self._pool.write(address, contents)
        for address, _ in self.recording.results:
            self._pool.keep_quiet(address)


class _DeviceMode(TorchDispatchMode):
    """Work on the simulated device: results go to a pool if one is in use, stream order is checked."""

    supports_higher_order_operators = True

    def __init__(self, driver: SimulatedDriver, pool: SimulatedPool | None) -> None:
        super().__init__()
        self._driver = driver
        self._pool = pool

    def _place(self, nbytes: int) -> torch.UntypedStorage:
        assert self._pool is not None
        return self._driver.allocate_in(self._pool, nbytes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._pool is not None:
            result, _ = _move_fresh(self._place, args, kwargs, result)
        self._driver.issued(func, args, kwargs, result)
        return result


class _CaptureMode(_DeviceMode):
    """Runs calls for their results' layouts and records them; `undo` takes back what they did."""

    def __init__(self, driver: SimulatedDriver, pool: SimulatedPool, recording: SimulatedRecording) -> None:
        super().__init__(driver, pool)
        self._recording = recording
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.refused: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        try:
            return self._recorded(func, args, kwargs or {})
        except CaptureError as error:
            self.refused = str(error)
            raise

    def _recorded(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        _refuse_uncapturable(func, kwargs)
        recording = self._recording
        for tensor in tensors_in([*args, *kwargs.values()]):
            self._note_external(tensor)
        for tensor in written_tensors(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() in recording.external and storage.data_ptr() not in self._saved:
                self._saved[storage.data_ptr()] = (storage, storage.clone())
        result = func(*args, **kwargs)
        result, outputs = _move_fresh(self._place, args, kwargs, result)
        for target in outputs:
            if target is not None:
                recording.own[target.address] = max(target.nbytes, recording.own.get(target.address, 0))
        frozen = (
            map_tensors(args, _address_of),
            {name: map_tensors(value, _address_of) for name, value in kwargs.items()},
        )
        recording.calls.append(RecordedCall(func, frozen[0], frozen[1], tuple(outputs)))
        return result

    def undo(self) -> None:
        """Old contents for what was written, poison for what was allocated."""
        for storage, contents in self._saved.values():
            storage.copy_(contents)
        for address, nbytes in self._recording.own.items():
            if self._recording.pool.is_live(address):
                self._recording.pool.poison_contents(address)
            else:
                self._recording.pool.poison_unused(address, nbytes)

    def _note_external(self, tensor: torch.Tensor) -> None:
        if not _is_plain(tensor):
            raise CaptureError(f"a {tensor.layout} tensor can't be used in a simulated capture")
        if tensor.is_conj() or tensor.is_neg():
            raise CaptureError("a lazily conjugated or negated tensor can't be used in a simulated capture")
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        known = address in self._recording.own or address in self._recording.external
        if storage.nbytes() and not known and not self._recording.pool.owns(address):
            self._recording.external[address] = StorageWeakRef(storage)


def _move_fresh(
    place: Callable[[int], torch.UntypedStorage], args: tuple[object, ...], kwargs: dict[str, object], result: object
) -> tuple[Any, list[TensorAddress | None]]:
    """Move results that own new memory to where `place` says; also tell where each returned tensor went."""
    known = {tensor.untyped_storage()._cdata for tensor in tensors_in([*args, *kwargs.values()]) if _is_plain(tensor)}
    moved: dict[int, torch.UntypedStorage] = {}
    outputs: list[TensorAddress | None] = []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata in known or storage.nbytes() == 0:
            outputs.append(None)
            return tensor
        if storage._cdata not in moved:
            moved[storage._cdata] = place(storage.nbytes())
            moved[storage._cdata].copy_(storage)
        home = moved[storage._cdata]
        placed = torch.empty(0, dtype=tensor.dtype).set_(home, tensor.storage_offset(), tensor.shape, tensor.stride())
        outputs.append(_address_of(placed))
        return placed

    with _disable_current_modes():
        return map_tensors(result, move), outputs


def _refuse_uncapturable(func: Any, kwargs: dict[str, object]) -> None:
    """Calls that on a GPU would wait for the device, depend on data on the host, or draw from a generator that does not
    know that it is being recorded: torch tells the default one only."""
    if any(isinstance(value, torch.Generator) and value is not torch.default_generator for value in kwargs.values()):
        raise CaptureError(f"{func} draws from a generator that is not the device's default one")
    if isinstance(func, torch._ops.HigherOrderOperator):
        if not func.name().startswith("triton_kernel_wrapper"):
            raise CaptureError(f"{func.name()} calls what a simulated capture does not see")
        return
    tags = func.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        raise CaptureError(f"{func} needs values from the device, which a capture does not compute")
    if func is torch.ops.aten.lift_fresh.default:
        raise CaptureError("a tensor made from Python values inside a capture would be copied from the host")


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _address_of(tensor: torch.Tensor) -> TensorAddress:
    storage = tensor.untyped_storage()
    return TensorAddress(
        storage.data_ptr(),
        storage.nbytes(),
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
    )


def _tensor_at(recording: SimulatedRecording, where: TensorAddress) -> torch.Tensor:
    """The tensor that a kernel would see at an address."""
    if where.nbytes == 0:
        return torch.empty_strided(where.shape, where.stride, dtype=where.dtype)
    if recording.pool.owns(where.address):
        storage = recording.pool.storage_at(where.address, where.nbytes)
    else:
        storage = torch.UntypedStorage._new_with_weak_ptr(recording.external[where.address].cdata)
    return torch.empty(0, dtype=where.dtype).set_(storage, where.offset, where.shape, where.stride)


def _materialize(recording: SimulatedRecording, value: object) -> Any:
    if isinstance(value, TensorAddress):
        return _tensor_at(recording, value)
    if isinstance(value, list):
        return [_materialize(recording, item) for item in value]
    if isinstance(value, tuple):
        return tuple(_materialize(recording, item) for item in value)
    if isinstance(value, dict):
        return {key: _materialize(recording, item) for key, item in value.items()}
    return value
