"""The backward of a graph, compiled while its forward runs for the first time.

Note [A backward ahead of its call]
    A backward is compiled when autograd first asks for it. On a CUDA device the forward's first run loads libraries and
    kernels for a second or more, in which Python has nothing to do; so the compile of the backward begins then, in a
    thread. What it does is what would be done later, in the same order, and no tracing is left to do: tracing changes
    state of FX that the program's own modules meet. If autograd comes with other tangents than were guessed (a model
    that gives a loss and other results is mostly asked for the gradients of its loss), that backward is compiled then,
    as without all this. What goes wrong is raised where the backward is asked for.

    Not begun for graphs with sizes known at run time only, since torch's record of what is assumed about them belongs
    to the thread that traces. Two compiles of one graph never run at once: another backward waits for the guessed one.
    A program that never calls the backward has compiled it for nothing: the option ``backward_ahead`` says whether to
    begin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import GraphModule

from aotkit_runtime_wrappers import WrapperPlan

from ..artifact.records import Artifact, CompiledGraph

__all__ = ["BackwardAhead", "backward_ahead", "begun_by_first_call", "guess_missing"]

Boxed = Callable[[list[Any]], Sequence[Any]]
Missing = tuple[bool, ...]
Compile = Callable[[Missing], CompiledGraph | None]


class BackwardAhead:
    """A backward whose compile may begin before it is asked for.

    Args:
        compile_backward: compiles it for calls in which given tangents are missing; ``None`` if there is none for them.
        missing: those that are guessed to be.
        device: on which the graph runs.
    """

    def __init__(self, compile_backward: Compile, missing: Missing, device: torch.device) -> None:
        self._compile = compile_backward
        self._missing = missing
        self._device = device
        self._lock = threading.Lock()
        self._asked_for = False
        self._thread: threading.Thread | None = None
        self._outcome: CompiledGraph | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Start the compile in a thread; of several calls the first does, and none once a backward was asked for."""
        with self._lock:
            if self._thread is None and not self._asked_for:
                self._thread = threading.Thread(target=self._run, name="aotkit backward")
                self._thread.start()

    def take(self, missing: Missing) -> CompiledGraph | None:
        """The backward for calls in which these tangents are ``missing``; ``None`` if there is none. What was begun is
        waited for, and if it is that one, it is given, once, and what went wrong there is raised."""
        with self._lock:
            begun, self._thread, self._asked_for = self._thread, None, True
        if begun is None:
            return self._compile(missing)
        begun.join()
        outcome, error = self._outcome, self._error
        self._outcome = self._error = None
        if _told(missing) != self._missing:
            return self._compile(missing)
        if error is not None:
            raise error
        return outcome

    def _run(self) -> None:
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        try:
            with on_device, torch.no_grad():
                self._outcome = self._compile(self._missing)
        except BaseException as error:  # noqa: BLE001  # raised where the backward is asked for
            self._error = error


def _told(missing: Missing) -> Missing:
    return missing if any(missing) else ()


def backward_ahead(artifact: Artifact, compile_backward: Compile, asked: bool | None) -> BackwardAhead | None:
    """What begins the compile of the backward early, where that is ``asked`` for (or, for ``None``, of use) and can be
    done."""
    backward = None if artifact.graphs is None else artifact.graphs.backward
    if not isinstance(backward, GraphModule) or not artifact.plan.call.tangents:
        return None
    values = [node.meta.get("val") for node in backward.graph.find_nodes(op="placeholder")]
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    if len(devices) != 1 or _known_at_run_time(values):
        return None
    (device,) = devices
    begins = device.type == "cuda" if asked is None else asked
    return BackwardAhead(compile_backward, guess_missing(artifact.plan), device) if begins else None


def _known_at_run_time(values: Sequence[Any]) -> bool:
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in (*value.shape, *value.stride())]
    return any(isinstance(value, kinds) for value in (*values, *sizes))


def guess_missing(plan: WrapperPlan) -> Missing:
    """The tangents that the first backward will most likely come without: of a single number among other results, its
    gradients are asked for. In the form of a :class:`.LazyBackward`: none are ``()``."""
    numbers = [not tangent.nested and tangent.meta.sizes == () for tangent in plan.call.tangents]
    return tuple(not is_number for is_number in numbers) if numbers.count(True) == 1 and len(numbers) > 1 else ()


def begun_by_first_call(forward: Boxed, ahead: BackwardAhead) -> Boxed:
    """``forward``, whose first call begins the compile of its backward."""
    first = [ahead]

    def call(args: list[Any]) -> Sequence[Any]:
        if first:  # of several threads that come here at once all begin the compile, which it does once
            ahead.begin()
            first.clear()
        return forward(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    call.moves_no_versions = getattr(forward, "moves_no_versions", False)  # type: ignore[attr-defined]
    return call
