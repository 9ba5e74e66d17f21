"""Compile the backward when it is first needed: programs that never call it do not pay for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ._observer import SILENT, Observer
from .boxed import BoxedCallable, ensure_boxed
from .errors import BackwardCompileError

__all__ = ["LazyBackward", "Missing"]


Missing = tuple[bool, ...]
"""Per tangent of a plan, whether autograd left it out in this call."""


class LazyBackward:
    """A backward that ``factory()`` compiles at its first use, once, whatever thread comes first.

    ``compiled`` is ``None`` until then. A failure raises :class:`BackwardCompileError` from the cause and
    changes nothing, so the next backward tries again.

    Where the first backward comes with tangents missing, ``specialize(missing)`` may give one that does without them;
    it serves the calls in which the same ones are missing. ``None`` from it: there is none. Calls in which others are
    missing share the backward of ``factory``, which gets zeros. ``runs``: what :meth:`choose` has found so far.
    ``unreached(missing)`` tells which results such a call must not have: it gives ``None`` there, as eager mode does.
    """

    __slots__ = ("_factory", "_lock", "_observer", "_specialize", "compiled", "runs", "unreached")

    def __init__(
        self,
        factory: Callable[[], Callable[..., Any]],
        observer: Observer = SILENT,
        specialize: Callable[[Missing], Callable[..., Any] | None] | None = None,
        unreached: Callable[[Missing], Sequence[int]] | None = None,
    ) -> None:
        self._factory: Callable[[], Callable[..., Any]] | None = factory
        self._lock = threading.RLock()
        self._observer = observer
        self._specialize = specialize
        self.unreached = unreached
        self.compiled: BoxedCallable | None = None
        self.runs: dict[Missing, tuple[BoxedCallable, bool]] = {}

    def get(self) -> BoxedCallable:
        """The compiled backward, compiled now if need be."""
        if self.compiled is not None:
            return self.compiled
        with self._lock:
            if self.compiled is None:
                assert self._factory is not None
                self.compiled = self._compile(self._factory)
                assert self.compiled is not None
                self._factory = None  # lets go of the graph and the example inputs
            return self.compiled

    def choose(self, missing: Missing) -> tuple[BoxedCallable, bool]:
        """The backward for a call in which these tangents are missing, and whether it wants zeros in their place."""
        with self._lock:
            found = self.runs.get(missing)
            if found is None:
                special = self._specialize if any(missing) and self.compiled is None and not self.runs else None
                run = None if special is None else self._compile(lambda: special(missing))
                unreached = () if self.unreached is None else self.unreached(missing)
                found = (self.get(), True) if run is None else (run, False)
                found = self.runs[missing] = (_leaving_out(found[0], frozenset(unreached)), found[1])
            return found

    def _compile(self, factory: Callable[[], Callable[..., Any] | None]) -> BoxedCallable | None:
        start = time.perf_counter()
        try:
            made = factory()
            if made is None:
                return None
            compiled = ensure_boxed(made)
        except Exception as error:
            raise BackwardCompileError(
                "the backward of this graph is compiled at its first use, and that failed: "
                f"{type(error).__name__}: {error}. Forward results are not affected. The next backward tries again; "
                "to see the error at the forward instead, compile the backward eagerly"
            ) from error
        self._observer.event("wrappers.lazy_backward", {"seconds": time.perf_counter() - start})
        return compiled


def _leaving_out(run: BoxedCallable, unreached: frozenset[int]) -> BoxedCallable:
    """``run`` with ``None`` in the place of these results."""
    if not unreached:
        return run

    def only_reached(box: list[Any]) -> list[Any]:
        return [None if number in unreached else grad for number, grad in enumerate(run(box))]

    only_reached._boxed_call = True  # type: ignore[attr-defined]
    return only_reached
