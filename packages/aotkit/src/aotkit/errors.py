"""Errors and notices of the meta-package."""

from __future__ import annotations

from ._notices import warn_user

__all__ = ["CompileError", "EagerFallback", "FrozenParameterError", "GuardError", "InternalError", "PackageError"]
__all__ += ["RanksDisagree", "UnknownOption"]


class CompileError(RuntimeError):
    """A graph could not be compiled. Says in which stage, and what to do; the cause is chained."""


class FrozenParameterError(RuntimeError):
    """A parameter that is a constant of a frozen graph has changed, or was discarded and is needed."""


class GuardError(ValueError):
    """A saved function was called in a way that it was not compiled for. Names the input and what differs."""


class InternalError(RuntimeError):
    """A bug in aotkit: a compile raised what it did not mean to raise, which is the cause. Says how to report it."""


class PackageError(RuntimeError):
    """A package can't be written or loaded. Says why, and what to do."""


class RanksDisagree(CompileError):
    """Ranks of a process group did not compile the same collectives, or one of them did not compile at all.

    It is raised on every rank that takes part, before any of them runs the graph, and shows the first that differs.
    """


class UnknownOption(ValueError):
    """An option, a mode or a value that this release does not know. Names the closest known ones."""


class EagerFallback(UserWarning):
    """The one notice given when a graph runs eagerly because a part of it is not supported."""


def notify_eager(reason: str) -> None:
    """Tell the user, once per reason, that a graph runs eagerly."""
    warn_user(
        f"aotkit runs one graph eagerly: {reason}\n"
        "Results are eager's own. Pass options={'fallback': 'error'} to get an error instead.",
        EagerFallback,
    )
