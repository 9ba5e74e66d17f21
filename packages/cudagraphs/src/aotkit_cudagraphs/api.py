"""`cudagraphify`: one callable in, one that replays recordings out."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._observer import SILENT, Observer
from .cuda_driver import CudaDriver
from .driver import DeviceDriver
from .eligibility import check_inputs, has_fake, input_device
from .options import CudagraphOptions
from .placement import calling_state
from .reasons import CudagraphNotice, CudagraphSkipped, SkipKind, SkipReason
from .recording import Recording, plan_inputs


@dataclass(frozen=True, slots=True)
class RecordingReport:
    """One recording.

    Attributes:
        inputs: readable layouts of its inputs.
        pool_bytes: bytes of its pool in use.
    """

    inputs: str
    pool_bytes: int


@dataclass(frozen=True, slots=True)
class CudagraphReport:
    """What a recorded callable holds and did.

    Attributes:
        recordings: those held now.
        replays: calls answered by a replay.
        uncaptured: calls that ran the callable as it is.
        rerecords: recordings replaced because a static input moved.
        skips: distinct reasons for uncaptured calls.
    """

    recordings: tuple[RecordingReport, ...]
    replays: int
    uncaptured: int
    rerecords: int
    skips: tuple[SkipReason, ...]

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools in use."""
        return sum(recording.pool_bytes for recording in self.recordings)

    def __str__(self) -> str:
        summary = (
            f"{len(self.recordings)} recordings, {self.pool_bytes} bytes; {self.replays} replays, "
            f"{self.uncaptured} uncaptured calls, {self.rerecords} re-recorded"
        )
        lines = [summary]
        lines += [f"  recorded {recording.inputs}: {recording.pool_bytes} bytes" for recording in self.recordings]
        return "\n".join([*lines, *(f"  skipped: {reason}" for reason in self.skips)])


def cudagraphify(
    fn: Callable[..., Any],
    example_inputs: Sequence[object],
    *,
    static_input_indices: Sequence[int] = (),
    mutated_input_indices: Sequence[int] = (),
    driver: DeviceDriver | None = None,
    observer: Observer = SILENT,
    options: CudagraphOptions | None = None,
) -> Callable[..., Any]:
    """Record `fn` once per input layout and replay it from then on.

    Args:
        fn: works on tensors of one device. Called as `fn(*inputs)`, or as `fn(list)` if it has a true
            `_boxed_call` attribute; the result is called likewise (and empties the list).
        example_inputs: inputs of the first recording, made at once. With fake tensors among them, the first real
            call records.
        static_input_indices: inputs that stay at their address (parameters, buffers): used in place, not copied. One
            that does move causes a new recording.
        mutated_input_indices: inputs written by code that doesn't go through torch's dispatcher (own kernels);
            writes of ATen calls are seen. Written inputs must be static.
        driver: the device; by default the CUDA device of the inputs.
        observer: told of the events `cudagraphs.record` (`seconds`, `pool_bytes`, `recordings`) and
            `cudagraphs.skip` (`kind`, `reason`).
        options: see `CudagraphOptions`.

    Returns:
        A `CudagraphedFunction`, or `fn` itself, with one `CudagraphNotice`, where nothing could ever be recorded
        (inputs on the CPU).

    Raises:
        CudagraphSkipped: with `on_skip="raise"`, where nothing can be recorded.
        IndexError: a static or mutated index is not the index of an input.
    """
    options = options or CudagraphOptions()
    for index in (*static_input_indices, *mutated_input_indices):
        if not 0 <= index < len(example_inputs):
            raise IndexError(f"there is no input {index}: {len(example_inputs)} example inputs were given")
    if driver is None:
        reason = _no_driver_reason(example_inputs)
        if reason is not None:
            _report_skip((reason,), options, observer, stacklevel=3)
            return fn
        driver = CudaDriver(input_device(example_inputs) or "cuda")
    function = CudagraphedFunction(
        fn, frozenset(static_input_indices), tuple(mutated_input_indices), driver, observer, options
    )
    if not has_fake(example_inputs):
        function.record(example_inputs)
    return function


class CudagraphedFunction:
    """A callable that replays recordings of another; made by `cudagraphify`. May be called from many threads."""

    def __init__(
        self,
        fn: Callable[..., Any],
        static: frozenset[int],
        mutated: tuple[int, ...],
        driver: DeviceDriver,
        observer: Observer,
        options: CudagraphOptions,
    ) -> None:
        self._fn = fn
        self._boxed_call = bool(getattr(fn, "_boxed_call", False))
        self._static = static
        self._mutated = mutated
        self._driver = driver
        self._observer = observer
        self._options = options
        self._lock = threading.RLock()
        self._recordings: dict[tuple[object, ...], Recording] = {}
        self._unrecordable: dict[tuple[object, ...], tuple[SkipReason, ...]] = {}
        self._skips: dict[SkipReason, None] = {}
        self._noticed: set[SkipKind] = set()
        self._last_use: tuple[Any, Any] | None = None
        self._replays = self._uncaptured = self._rerecords = 0

    def __call__(self, *args: Any) -> Any:
        """Replay, recording first where that is needed; run the callable as it is where nothing can be recorded."""
        inputs = args[0] if self._boxed_call else args
        with self._lock:
            recording = self._find(inputs)
            if recording is not None:
                return self._replay(recording, inputs)
            self._uncaptured += 1
        return self._call(inputs)

    def record(self, inputs: Sequence[object]) -> bool:
        """Record for inputs like these, if that has not been done; False if it can't be."""
        with self._lock:
            return self._find(list(inputs)) is not None

    def report(self) -> CudagraphReport:
        """Recordings with their memory, counts of calls, reasons of skips."""
        with self._lock:
            recordings = tuple(
                RecordingReport(_describe(key), recording.pool_bytes) for key, recording in self._recordings.items()
            )
            return CudagraphReport(recordings, self._replays, self._uncaptured, self._rerecords, tuple(self._skips))

    def reset(self) -> None:
        """Drop all recordings and their memory; later calls record anew."""
        with self._lock:
            for recording in self._recordings.values():
                recording.release()
            self._recordings.clear()
            self._unrecordable.clear()
            self._last_use = None

    def _find(self, inputs: Sequence[object]) -> Recording | None:
        """The recording that fits these inputs, made now if need be; None, with notice, if there can't be one. None
        as well while the caller makes a recording of its own, which the callable is part of then."""
        if self._driver.is_capturing():
            return None
        found = self._find_or_record(inputs)
        reasons = found.lost_writes(inputs) if isinstance(found, Recording) else found
        if reasons:
            self._skip(reasons)
            return None
        return found if isinstance(found, Recording) else None

    def _find_or_record(self, inputs: Sequence[object]) -> Recording | tuple[SkipReason, ...]:
        key = _layout_key(inputs, self._options.alignment, self._static)
        recording = self._recordings.get(key)
        if recording is not None and self._is_in_place(recording, inputs):
            return recording  # the key holds all that `check_inputs` looks at
        reasons = check_inputs(inputs, self._driver.device) or self._unrecordable.get(key, ())
        if reasons:
            return reasons
        unusable = self._driver.unusable_reason()
        if unusable is not None:
            return (SkipReason(SkipKind.NO_CACHING_ALLOCATOR, unusable),)
        reason = self._limit_reason(moved=recording is not None)
        return self._record(key, inputs) if reason is None else (reason,)

    def _record(self, key: tuple[object, ...], inputs: Sequence[object]) -> Recording | tuple[SkipReason, ...]:
        began = time.perf_counter()
        old = self._recordings.pop(key, None)
        if old is not None:
            old.release()
            self._rerecords += 1
        plan = plan_inputs(inputs, self._static, self._options.alignment)
        self._order_after_last_use()
        try:
            recording = Recording(
                self._call, inputs, plan, mutated=self._mutated, driver=self._driver, options=self._options
            )
        except CudagraphSkipped as skipped:
            self._unrecordable[key] = skipped.reasons
            return skipped.reasons
        self._recordings[key] = recording
        fields = {
            "seconds": time.perf_counter() - began,
            "pool_bytes": recording.pool_bytes,
            "recordings": len(self._recordings),
        }
        self._observer.event("cudagraphs.record", fields)
        return recording

    def _replay(self, recording: Recording, inputs: Any) -> Any:
        self._order_after_last_use()
        result = recording.run(inputs)
        stream = self._driver.current_stream()
        self._last_use = (stream, self._driver.record_event(stream))
        self._replays += 1
        if self._boxed_call:
            inputs.clear()
        return result

    def _order_after_last_use(self) -> None:
        """Buffers and results are shared by all calls: work on another stream must wait for the last one's."""
        if self._last_use is not None:
            stream = self._driver.current_stream()
            if stream != self._last_use[0]:
                self._driver.wait_event(stream, self._last_use[1])

    def _is_in_place(self, recording: Recording, inputs: Sequence[object]) -> bool:
        if not self._options.check_static_addresses:
            return True
        found = tuple(value.data_ptr() for i in recording.plan.static if isinstance(value := inputs[i], torch.Tensor))
        return found == recording.addresses

    def _limit_reason(self, *, moved: bool) -> SkipReason | None:
        if moved and self._rerecords >= self._options.max_rerecords:
            text = f"static inputs have moved {self._rerecords} times"
            return SkipReason(SkipKind.RERECORD_LIMIT, text)
        if not moved and len(self._recordings) >= self._options.max_recordings:
            text = f"there are {len(self._recordings)} recordings for other input layouts"
            return SkipReason(SkipKind.RECORDING_LIMIT, text)
        return None

    def _skip(self, reasons: tuple[SkipReason, ...]) -> None:
        fresh = tuple(reason for reason in reasons if reason.kind not in self._noticed)
        self._skips.update(dict.fromkeys(reasons))
        self._noticed.update(reason.kind for reason in reasons)
        if fresh or self._options.on_skip == "raise":
            _report_skip(reasons, self._options, self._observer, stacklevel=5)

    def _call(self, inputs: Any) -> Any:
        return self._fn(inputs) if self._boxed_call else self._fn(*inputs)


def _no_driver_reason(inputs: Sequence[object]) -> SkipReason | None:
    device = input_device(inputs)
    if device is None:
        return SkipReason(SkipKind.NO_DEVICE_TENSOR, "no input is a tensor")
    if device.type != "cuda":
        return SkipReason(SkipKind.CPU_DEVICE, f"the inputs are on {device}, and CUDA graphs need a CUDA device")
    return None


def _report_skip(
    reasons: tuple[SkipReason, ...], options: CudagraphOptions, observer: Observer, *, stacklevel: int
) -> None:
    """Tell the observer, then raise or warn as the options say."""
    for reason in reasons:
        observer.event("cudagraphs.skip", {"kind": reason.kind.name, "reason": str(reason)})
    if options.on_skip == "raise":
        raise CudagraphSkipped(reasons)
    text = "; ".join(map(str, reasons))
    warnings.warn(f"runs without a CUDA graph: {text}. Said once per kind of reason.", CudagraphNotice, stacklevel)


def _layout_key(inputs: Sequence[object], alignment: int, static: frozenset[int]) -> tuple[object, ...]:
    """What a recording depends on beside addresses: layouts of tensors, values of the rest."""
    grad = torch.is_grad_enabled()
    key: list[object] = [calling_state()]
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            # Only integers tell recordings apart; whatever else can't be recorded need not be hashable.
            key.append((type(value), value if type(value) in (int, bool) else None))
        elif value.layout is not torch.strided:
            key.append((type(value), value.layout))
        else:
            in_place = index in static and value.data_ptr() % alignment == 0
            kind = torch.Tensor if type(value) is torch.nn.Parameter else type(value)
            lazy = value.is_neg() or value.is_conj()
            layout = value.dtype, value.shape, value.stride(), value.device, kind, lazy
            key.append((*layout, in_place, grad and value.requires_grad))
    return tuple(key)


def _describe(key: tuple[object, ...]) -> str:
    parts = []
    for item in key[1:]:
        assert isinstance(item, tuple)
        parts.append(f"{str(item[0]).removeprefix('torch.')}{list(item[1])}" if len(item) > 2 else str(item[1]))
    return f"({', '.join(parts)})"
