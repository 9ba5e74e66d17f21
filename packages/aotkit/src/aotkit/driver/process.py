"""What a compile asks of the Python process: room for deep recursion, and no collection of garbage meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._guards import CompileContext

__all__ = ["collections_put_off", "deep_recursion", "spare_traces_full_collections"]

# Note [Garbage of a compile]
# Python collects when the number of objects has grown by a share, and walks all of them: Dynamo has left a large heap,
# and next to nothing that a load or a compile makes is garbage before its end (`python -m tools.bench.layers --collect`
# shows what the walks take). What waits is what lies in circles only, such as copies of graphs. With several threads
# the first that ends its compile turns collections on again for all: then the others take longer, no more.
#
# What a load makes stays as long as the model does. Counted as new it brings the next walk over everything closer, in a
# warm start of GPT-2 into the first backward; so it joins what is old at once, where the next such walk looks at it.

_frozen_by_others: list[bool] = []  # once it is known of this process: to count such objects is to walk all of them


@contextmanager
def collections_put_off(*, keeps: bool = True) -> Iterator[None]:
    """No collection of garbage inside, see Note [Garbage of a compile]. What is due happens right after it. ``keeps``:
    what is made inside, like all that is young, counts as old afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if keeps and not _frozen_by_others:
            _join_what_is_old()
        if enabled:
            gc.enable()


def _join_what_is_old() -> None:
    """What is young counts as old; not in a process in which somebody has frozen objects, which would be thawed."""
    if gc.get_freeze_count():
        _frozen_by_others.append(True)
        return
    gc.freeze()
    gc.unfreeze()


def spare_traces_full_collections() -> None:
    """From now on Python's own collections of the oldest generation find nothing to walk over while Dynamo compiles a
    function in the thread in which they are due, see Note [Garbage of a compile]."""
    if not any(isinstance(callback, _SpareTraces) for callback in gc.callbacks):
        gc.callbacks.append(_SpareTraces())


class _SpareTraces:
    """A callback of the collector; collections don't nest, so what it remembers is of the one that runs."""

    def __init__(self) -> None:
        self._frozen = False

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] != 2:
            return
        if phase == "stop":
            if self._frozen:
                gc.unfreeze()
                self._frozen = False
        elif _is_due() and CompileContext.try_get() is not None and not gc.get_freeze_count():
            gc.freeze()
            self._frozen = True


def _is_due() -> bool:
    """Whether this full collection comes of Python's own counting, and not of a call of ``gc.collect``."""
    count, threshold = gc.get_count(), gc.get_threshold()
    return count[0] > threshold[0] and count[2] > threshold[2]


@contextmanager
def deep_recursion(least: int = 10_000) -> Iterator[None]:
    """Context in which Python's recursion limit is at least this high; it is set back, whatever happens inside."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, least))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
