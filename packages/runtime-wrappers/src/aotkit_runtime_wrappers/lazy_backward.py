"""Compile the backward when it is first needed: programs that never call it do not pay for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .boxed import BoxedCallable, ensure_boxed
from .errors import BackwardCompileError
from .observer import Observer

__all__ = ["LazyBackward"]


class LazyBackward:
    """A backward that ``factory()`` compiles at its first use, once, whatever thread comes first.

    ``compiled`` is ``None`` until then. A failure raises :class:`BackwardCompileError` from the cause and
    changes nothing, so the next backward tries again.
    """

    __slots__ = ("_factory", "_lock", "_observer", "compiled")

    def __init__(self, factory: Callable[[], Callable[..., Any]], observer: Observer | None = None) -> None:
        self._factory: Callable[[], Callable[..., Any]] | None = factory
        self._lock = threading.RLock()
        self._observer = observer
        self.compiled: BoxedCallable | None = None

    def get(self) -> BoxedCallable:
        """The compiled backward, compiled now if need be."""
        if self.compiled is not None:
            return self.compiled
        with self._lock:
            if self.compiled is None:
                self.compiled = self._compile()
                self._factory = None  # lets go of the graph and the example inputs
            return self.compiled

    def _compile(self) -> BoxedCallable:
        assert self._factory is not None
        start = time.perf_counter()
        try:
            compiled = ensure_boxed(self._factory())
        except Exception as error:
            raise BackwardCompileError(
                "the backward of this graph is compiled at its first use, and that failed: "
                f"{type(error).__name__}: {error}. Forward results are not affected. The next backward tries again; "
                "to see the error at the forward instead, compile the backward eagerly"
            ) from error
        if self._observer is not None:
            self._observer.event("wrappers.lazy_backward", {"seconds": time.perf_counter() - start})
        return compiled
