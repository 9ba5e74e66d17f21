"""The boxed calling convention: one list of arguments, which the callee empties.

Note [Why boxed]
    A compiled graph that gets its arguments in a list may drop them one by one when they are last used.
    With ``f(*args)`` the caller's frame keeps every argument alive until the call is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from .errors import CallingConventionError

__all__ = ["BoxedCallable", "ensure_boxed", "is_boxed", "make_boxed", "unboxed"]

BoxedCallable = Callable[[list[Any]], Any]
"""Takes a list of arguments, empties it, returns a list or tuple."""


def is_boxed(function: Callable[..., Any]) -> bool:
    """Whether ``function`` says (attribute ``_boxed_call``, as torch's own) that it takes one list."""
    return bool(getattr(function, "_boxed_call", False))


def make_boxed(function: Callable[..., Any]) -> BoxedCallable:
    """``function(*args)`` as a callable of one list; see Note [Why boxed]."""

    @wraps(function, updated=())
    def boxed(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        result = function(*values)
        return result if isinstance(result, list | tuple) else (result,)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def ensure_boxed(function: Callable[..., Any]) -> BoxedCallable:
    """``function`` itself if it is boxed, else :func:`make_boxed` of it."""
    if not callable(function):
        raise CallingConventionError(f"compiled code must be callable, not {type(function).__name__}")
    return function if is_boxed(function) else make_boxed(function)


def unboxed(function: BoxedCallable) -> Callable[..., Any]:
    """A boxed callable as ``f(*args)``, for callers that keep their arguments anyway."""

    def call(*args: Any) -> Any:
        return function(list(args))

    call.boxed = function  # type: ignore[attr-defined]
    return call
