"""One recording of a callable: its input buffers, its captured work, its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .dispatch import UndoWrites
from .driver import DeviceDriver
from .eligibility import check_outputs
from .liveness import Layout
from .options import CudagraphOptions
from .reasons import CaptureError, CudagraphSkipped, SkipKind, SkipReason
from .static_inputs import buffer_like, copy_into_buffer, expanded_dims, is_aligned, sharing_memory


@dataclass(frozen=True, slots=True)
class InputPlan:
    """What happens to each input on a call.

    Attributes:
        static: indices used in place; their addresses are part of the recording.
        copied: (index, its expanded dimensions) of tensors that are copied into a buffer.
    """

    static: tuple[int, ...]
    copied: tuple[tuple[int, tuple[int, ...]], ...]


def plan_inputs(inputs: Sequence[object], static_indices: frozenset[int], alignment: int) -> InputPlan:
    """Static are the tensors declared so whose memory is aligned; the other tensors are copied."""
    static: list[int] = []
    copied: list[tuple[int, tuple[int, ...]]] = []
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            continue
        if index in static_indices and is_aligned(value, alignment):
            static.append(index)
        else:
            copied.append((index, expanded_dims(value)))
    return InputPlan(tuple(static), tuple(copied))


class Recording:
    """Captured work of `fn` for inputs of one layout.

    Note [What a replay returns]
    The captured work always writes the same memory. A result that shares its memory with an input is handed out as a
    view of that input, as the callable itself would have done; one that shares it with a tensor the callable holds
    (a buffer) is handed out as it is. Other results are copies by default (one copy per storage, so that results
    which are views of each other stay that), because the next replay overwrites theirs.

    Args:
        fn: takes a list of inputs.
        inputs: of the first call; tensors must be real.
        plan: which inputs are copied.
        mutated: indices that `fn` writes without the dispatcher knowing.

    Raises:
        CudagraphSkipped: `fn` can't be recorded; nothing that it wrote during the attempt remains.
    """

    def __init__(
        self,
        fn: Callable[[list[Any]], object],
        inputs: Sequence[object],
        plan: InputPlan,
        *,
        mutated: Sequence[int],
        driver: DeviceDriver,
        options: CudagraphOptions,
    ) -> None:
        self._driver = driver
        self._options = options
        self.plan = plan
        self.pool = driver.new_pool()
        self._inputs = self._make_static(inputs)
        self.addresses = tuple(_address(self._inputs[index]) for index in plan.static)
        try:
            with driver.preserve_rng(), torch.no_grad():
                self._capture(fn, mutated)
        except BaseException:
            driver.release_pool(self.pool)
            raise
        self._sources = self._input_storages()

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool that the recording's results occupy now."""
        return self._driver.pool_bytes(self.pool)

    def release(self) -> None:
        """Give the pool back; the recording can't run any more."""
        self._outputs.clear()
        self._driver.release_pool(self.pool)

    def lost_writes(self, inputs: Sequence[object]) -> tuple[SkipReason, ...]:
        """Why it can't run for these inputs: one that is a copy shares memory with one that is written."""
        copied = [index for index, _ in self.plan.copied]
        lost = sharing_memory(inputs, copied, self._written) if self._written else []
        if not lost:
            return ()
        names = ", ".join(f"input {index}" for index in lost)
        return (SkipReason(SkipKind.MUTATED_INPUT, f"{names} shares memory with one that is written, but is a copy"),)

    def run(self, inputs: Sequence[object]) -> object:
        """Copy the inputs in, replay, and return the results for these inputs."""
        for index, dims in self.plan.copied:
            copy_into_buffer(self._inputs[index], _tensor(inputs[index]), dims)
        self._driver.replay(self._graph)
        if self._options.outputs == "overwrite":
            return pytree.tree_unflatten(self._outputs, self._structure)
        return pytree.tree_unflatten(self._surviving(inputs), self._structure)

    def _make_static(self, inputs: Sequence[object]) -> list[Any]:
        buffers: list[Any] = list(inputs)
        for index in self.plan.static:
            # Holding the memory keeps its address from being given to another tensor.
            buffers[index] = _tensor(inputs[index]).detach()
        for index, dims in self.plan.copied:
            source = _tensor(inputs[index]).detach()
            buffers[index] = buffer_like(source)
            copy_into_buffer(buffers[index], source, dims)
        return buffers

    def _capture(self, fn: Callable[[list[Any]], object], mutated: Sequence[int]) -> None:
        stream = self._driver.new_stream()
        warm = self._warm_up(fn, stream, mutated)
        try:
            captured = self._driver.capture(lambda: fn(list(self._inputs)), pool=self.pool, stream=stream)
        except CaptureError as error:
            raise CudagraphSkipped((SkipReason(SkipKind.CAPTURE_FAILED, str(error)),)) from error
        self._graph, result = captured
        self._outputs, self._structure = pytree.tree_flatten(result)
        reasons = check_outputs(self._outputs, self._driver.device)
        if reasons:
            raise CudagraphSkipped(reasons)
        # The warm-up's results still live, so the capture made other storages: where one is the same, neither made it.
        self._held = {_storage_id(value) for value in self._outputs} & set(map(_storage_id, pytree.tree_leaves(warm)))
        self._held.discard(None)

    def _warm_up(self, fn: Callable[[list[Any]], object], stream: Any, mutated: Sequence[int]) -> object:
        """Run `fn` on a side stream, so that what it sets up once is set up, then take back what it wrote.

        Returns:
            What the last run returned.
        """
        driver = self._driver
        undo = UndoWrites()
        for index in mutated:
            undo.save(self._inputs[index])
        outer = driver.current_stream()
        driver.synchronize()
        driver.wait_event(stream, driver.record_event(outer))
        try:
            for _ in range(self._options.warmup_iterations):
                with driver.use_stream(stream), undo:
                    result = fn(list(self._inputs))
        finally:
            # Also where the callable raised: what it issued before still writes.
            driver.wait_event(outer, driver.record_event(stream))
            driver.synchronize()
            undo.undo()
            driver.wait_event(stream, driver.record_event(outer))  # whose memory the old contents are in
        written = [index for index, _ in self.plan.copied if undo.wrote(self._inputs[index])]
        self._written = tuple(index for index in self.plan.static if undo.wrote(self._inputs[index]))
        if written:
            names = ", ".join(f"input {index}" for index in written)
            raise CudagraphSkipped((SkipReason(SkipKind.MUTATED_INPUT, f"{names} is written, but would be a copy"),))
        return result

    def _input_storages(self) -> dict[int, int]:
        """Which input a storage belongs to, by the storage's address."""
        tensors = [*self.plan.static, *(index for index, _ in self.plan.copied)]
        return {self._inputs[index].untyped_storage().data_ptr(): index for index in reversed(tensors)}

    def _surviving(self, inputs: Sequence[object]) -> list[object]:
        """Results that the next replay does not touch; see Note [What a replay returns]."""
        copies: dict[int, torch.Tensor] = {}
        results: list[object] = []
        for value in self._outputs:
            if not isinstance(value, torch.Tensor):
                results.append(value)
                continue
            storage = value.untyped_storage()
            source = self._sources.get(storage.data_ptr()) if storage.nbytes() else None
            if source is not None:
                results.append(_same_view(value, self._inputs[source], _tensor(inputs[source])))
                continue
            if _storage_id(value) in self._held:
                results.append(value.detach())
                continue
            copy, layout = copies.get(storage._cdata), Layout.of(value)
            made = layout.on(storage.clone()) if copy is None else layout.beside(copy)
            copies.setdefault(storage._cdata, made)
            results.append(made)
        return results


def _same_view(view: torch.Tensor, buffer: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """The view of `given` that `view` is of `buffer`, which has the layout of `given`."""
    nbytes = view.storage_offset() * view.element_size() - buffer.storage_offset() * buffer.element_size()
    start = given.storage_offset() * given.element_size() + nbytes
    if start % view.element_size():
        return view.clone()  # another dtype at an odd address: no such view of the given tensor exists
    return Layout.of(view).beside(given, int(start) // view.element_size())


def _storage_id(value: object) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def _address(value: object) -> int:
    return _tensor(value).data_ptr()
