"""The public face of the tree: wrap callables, mark steps, read the report."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._observer import SILENT, Observer
from ._torch_compat import stash_in_thread
from .cuda_driver import CudaDriver
from .driver import DeviceDriver
from .functions import Function, Role
from .manager import EagerRun, TreeManager
from .options import TreeOptions
from .placement import StaticInputs
from .reasons import CudagraphNotice, CudagraphSkipped, SkipKind, SkipReason
from .tree_report import TreeReport, report_on

__all__ = ["CudagraphTrees", "TreeFunction", "TreeReport", "reset_shared_trees", "shared_trees"]

_THREAD_KEY = "aotkit_cudagraphs.thread"


class _Thread:
    """Stands for a thread, and for the threads in which autograd works for it."""


class CudagraphTrees:
    """Recordings of many callables that share the memory of one device.

    Note [Threads]
    Each thread has recordings and pools of its own, so that no thread's replay touches memory of another's results. The
    threads in which autograd runs a backward belong to the thread that called `backward()`: torch hands them its
    thread-local objects, and one of those tells the threads apart here. What a thread recorded goes when it ends.

    Args:
        driver: the device; by default the current CUDA device. Where there is none, `wrap` returns callables as they
            are.
        options: see `TreeOptions`.
        observer: told about recordings and skips.

    Attributes:
        lock: held while anything about the device's recordings is decided or done.
    """

    def __init__(
        self,
        driver: DeviceDriver | None = None,
        options: TreeOptions | None = None,
        observer: Observer = SILENT,
    ) -> None:
        self.driver = CudaDriver() if driver is None and torch.cuda.is_available() else driver
        self.options = options or TreeOptions()
        self._observer = observer
        self.lock = threading.RLock()
        self._managers: weakref.WeakKeyDictionary[_Thread, TreeManager] = weakref.WeakKeyDictionary()
        self._noticed: set[object] = set()

    def wrap(
        self,
        fn: Callable[..., Any],
        *,
        static_input_indices: Sequence[int] = (),
        mutated_input_indices: Sequence[int] = (),
        training: bool = False,
        name: str | None = None,
    ) -> Callable[..., Any]:
        """A callable that gives what `fn` gives, from a recording where there can be one.

        Its first call with inputs of some layout runs `fn` as it is, the second records, later ones replay.

        Args:
            fn: works on tensors of the device. Called as `fn(*inputs)`, or as `fn(list)` if it has a true `_boxed_call`
                attribute; the wrapped callable is called likewise (and empties the list).
            static_input_indices: inputs that stay at their address (parameters, buffers): used in place, not copied.
            mutated_input_indices: inputs written by code that doesn't go through torch's dispatcher (own kernels).
            training: `fn` is a forward whose backward is to come: see `TreeFunction.backward`.
            name: for reports and messages; the callable's own by default.

        Returns:
            A `TreeFunction`; `fn` itself, with one `CudagraphNotice`, where there is no CUDA device.

        Raises:
            CudagraphSkipped: there is no device and `on_skip` is "raise".
        """
        if self.driver is None:
            reason = SkipReason(SkipKind.CPU_DEVICE, "this machine has no CUDA device")
            self.skipped((reason,), stacklevel=2)
            return fn
        role: Role = "forward" if training else "inference"
        return TreeFunction(self, fn, static_input_indices, mutated_input_indices, role, name)

    def mark_step(self) -> None:
        """A step of the program begins with the next call (of this thread); results of earlier ones stay valid."""
        with self.lock:
            self.manager().mark_step()

    def report(self) -> TreeReport:
        """What is recorded, in which memory, how often it ran, and what was skipped why."""
        with self.lock:
            managers = list(self._managers.values())
            for manager in managers:
                manager.release()
            return report_on(managers)

    def reset(self) -> None:
        """Drop all recordings of all threads; results stay valid, later calls record anew."""
        with self.lock:
            for manager in self._managers.values():
                manager.reset()

    def manager(self) -> TreeManager:
        """The calling thread's manager."""
        if not torch._C._is_key_in_tls(_THREAD_KEY):
            stash_in_thread(_THREAD_KEY, _Thread())
        thread = torch._C._get_obj_in_tls(_THREAD_KEY)
        manager = self._managers.get(thread)
        if manager is None:
            assert self.driver is not None
            manager = self._managers[thread] = TreeManager(self.driver, self.options, self._notify, self._observer)
            weakref.finalize(thread, _end, weakref.ref(manager), self.lock).atexit = False
        return manager

    def call(self, function: TreeFunction, given: list[Any]) -> Any:
        """One call of a wrapped callable."""
        with self.lock:
            manager = self.manager()
            record = function.record(manager)
            outcome = manager.call(record, given)
        if not isinstance(outcome, EagerRun):
            return outcome
        if outcome.reasons:
            self.skipped(outcome.reasons, stacklevel=3)
        result, written = manager.run_eagerly(record, outcome)
        with self.lock:
            manager.ran_eagerly(record, outcome, result, written)
        return result

    def skipped(self, reasons: tuple[SkipReason, ...], *, stacklevel: int) -> None:
        """Tell the observer and the user, or raise, as the options say."""
        fresh = [reason for reason in reasons if reason not in self._noticed]
        for reason in fresh:
            self._observer.event("cudagraphs.skip", {"kind": reason.kind.name, "reason": str(reason)})
        if self.options.on_skip == "raise":
            raise CudagraphSkipped(reasons)
        new_kinds = {reason.kind: reason for reason in reversed(reasons) if reason.kind not in self._noticed}
        self._noticed.update(reasons)
        self._noticed.update(reason.kind for reason in reasons)
        if new_kinds:
            text = "; ".join(map(str, reversed(new_kinds.values())))
            notice = f"runs without a CUDA graph: {text}. Said once per kind of reason."
            warnings.warn(notice, CudagraphNotice, stacklevel + 1)

    def _notify(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            warnings.warn(text, CudagraphNotice, stacklevel=6)


class TreeFunction:
    """A callable that replays recordings of another; made by `CudagraphTrees.wrap`. May be called from many threads."""

    def __init__(
        self,
        trees: CudagraphTrees,
        fn: Callable[..., Any],
        static: Sequence[int],
        mutated: Sequence[int],
        role: Role,
        name: str | None = None,
        forward: TreeFunction | None = None,
    ) -> None:
        self._trees = trees
        self._boxed_call = bool(getattr(fn, "_boxed_call", False))
        self._fn = fn
        self._static = StaticInputs(static)
        self._mutated = dict.fromkeys(mutated)
        self._role = role
        self._name = name or str(getattr(fn, "__name__", type(fn).__name__))
        self._forward = forward
        self._records: weakref.WeakKeyDictionary[TreeManager, Function] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any) -> Any:
        """Replay, recording first where that is needed; run the callable as it is where nothing can be recorded."""
        if self._boxed_call:
            given = list(args[0])
            args[0].clear()
        else:
            given = list(args)
        return self._trees.call(self, given)

    def backward(
        self,
        fn: Callable[..., Any],
        *,
        static_input_indices: Sequence[int] = (),
        mutated_input_indices: Sequence[int] = (),
        name: str | None = None,
    ) -> TreeFunction:
        """Wrap the backward of this forward, with the arguments of `CudagraphTrees.wrap`.

        It shares the forward's device and its fate: where the forward can't be recorded, neither is the backward.
        """
        return TreeFunction(
            self._trees,
            fn,
            static_input_indices,
            mutated_input_indices,
            "backward",
            name or f"{self._name} backward",
            self,
        )

    def record(self, manager: TreeManager) -> Function:
        """What a manager knows about this callable; it forgets it when this object dies."""
        found = self._records.get(manager)
        if found is None:
            partner = None if self._forward is None else self._forward.record(manager)
            fn, boxed = self._fn, self._boxed_call

            def call(inputs: list[Any]) -> Any:
                return fn(inputs) if boxed else fn(*inputs)

            found = Function(self._name, call, self._static, dict(self._mutated), self._role, partner)
            self._records[manager] = manager.add(found)
            weakref.finalize(self, _forget, weakref.ref(manager), found, self._trees.lock).atexit = False
        return found


def _end(manager: weakref.ref[TreeManager], lock: threading.RLock) -> None:
    """A thread ended: free its memory now, not when the garbage collector comes by."""
    found = manager()
    if found is not None:
        with lock:
            found.reset()


def _forget(manager: weakref.ref[TreeManager], function: Function, lock: threading.RLock) -> None:
    """A wrapped callable died, at a moment that nobody chose: drop its recordings now, or before the next call."""
    found = manager()
    if found is not None:
        found.released.append(function)
        if lock.acquire(blocking=False):
            try:
                found.release()
            finally:
                lock.release()


_shared: weakref.WeakValueDictionary[tuple[torch.device, TreeOptions], CudagraphTrees] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_trees(device: torch.device, options: TreeOptions | None = None) -> CudagraphTrees:
    """The trees of a CUDA device (and options) that separately compiled callables share, so that they use one pool.

    They exist as long as a callable wrapped by them does.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    options = options or TreeOptions()
    with _shared_lock:
        found = _shared.get((device, options))
        if found is None:
            found = _shared[device, options] = CudagraphTrees(CudaDriver(device), options)
        return found


def reset_shared_trees() -> None:
    """Drop all recordings of :func:`shared_trees`; what runs next is recorded anew."""
    with _shared_lock:
        found = list(_shared.values())
    for trees in found:
        trees.reset()
