"""One attempt to record: begun, ended, and undone where it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from .reasons import CaptureError

T = TypeVar("T")


class Attempt(Protocol):
    """The steps of a recording on a device, each on the stream that is recorded.

    Note [A recording that fails]
    An operation that can't be recorded invalidates the recording, and then a device's own end of it fails half-way:
    allocations of the stream go on to the pool, the pool accepts no other recording, the pool counts a user that will
    never go, and the random generator believes that it is being recorded. So whatever fails, `abandon` follows, and
    after it the stream, the pool and the generator are as they were before `begin`.
    """

    def begin(self) -> None:
        """From now on the stream's work is recorded, and its memory is the pool's."""
        ...

    def end(self) -> None:
        """The recording is whole. Raises `RuntimeError` if something in it could not be recorded."""
        ...

    def abandon(self) -> bool:
        """Give up, wherever `begin` or `end` got to. True if nothing was wrong with the recording until then."""
        ...


def record(attempt: Attempt, fn: Callable[[], T]) -> T:
    """What `fn` returns, recorded; see Note [A recording that fails].

    Raises:
        CaptureError: `fn` failed, with whatever error, and had done something before that can't be recorded.
        Exception: what `fn` raised by itself.
    """
    try:
        attempt.begin()
        result = fn()
        attempt.end()
    except BaseException as error:  # an interrupt, too, leaves the device recording; nothing is swallowed
        sound = attempt.abandon()
        if sound or isinstance(error, CaptureError) or not isinstance(error, Exception):
            raise
        raise CaptureError(f"the recording is invalid since before this: {error!r}") from error
    return result
