"""What a compile asks of the Python process: room for deep recursion, and no collection of garbage meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collections_put_off", "deep_recursion", "put_full_collections_off_while_tracing"]

# Note [Garbage of a compile]
# Python collects when the number of objects has grown by a share, and walks all of them: Dynamo has left a large heap,
# and next to nothing that a load or a compile makes is garbage before its end (`python -m tools.bench.layers --collect`
# shows what the walks take). What waits is what lies in circles only, such as copies of graphs. With several threads
# the first that ends its compile turns collections on again for all: then the others take longer, no more.
#
# What a load makes stays as long as the model does. Counted as new it brings the next walk over everything closer, in a
# warm start of GPT-2 into the first backward; so it joins what is old at once, where the next such walk looks at it.
#
# Dynamo's trace comes before that, and in it Python walks over all objects of the process once or twice (0.2 s each
# beside torch's and transformers' modules, an eighth of a warm start of GPT-2), and finds little that is garbage. So
# from the begin of a compile of Dynamo's to its end the count at which that is due is out of reach. Younger objects are
# collected as ever, garbage among the old ones after the compile, and whoever calls `gc.collect` gets what he asks for.

_NEVER = 2**31 - 1  # collections of the middle generation, after which one of all is due
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


def put_full_collections_off_while_tracing() -> None:
    """Ask Dynamo, where it is imported, to say when it begins and ends compiling a function: in between no collection
    of the oldest generation becomes due by itself, see Note [Garbage of a compile]. ``torch._dynamo.reset`` forgets
    that it was asked."""
    dynamo = sys.modules.get("torch._dynamo.callback")
    if dynamo is None:
        return
    handler = dynamo.callback_handler
    if not any(isinstance(each, _BeginTracing) for each in handler.start_callbacks):
        begin = _BeginTracing()
        handler.register_start_callback(begin)
        handler.register_end_callback(begin.end)


class _BeginTracing:
    """Dynamo calls this once when the first of several threads begins, and :meth:`end` when the last one ends."""

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None

    def __call__(self, _: object) -> None:
        self._before = gc.get_threshold()
        gc.set_threshold(*self._before[:2], _NEVER)

    def end(self, _: object) -> None:
        before, self._before = self._before, None
        if before is None or gc.get_threshold()[2] != _NEVER:
            return  # somebody has set another one meanwhile
        gc.set_threshold(*gc.get_threshold()[:2], before[2])
        if not _frozen_by_others:
            _join_what_is_old()


@contextmanager
def deep_recursion(least: int = 10_000) -> Iterator[None]:
    """Context in which Python's recursion limit is at least this high; it is set back, whatever happens inside."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, least))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
