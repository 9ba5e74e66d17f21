"""Errors of a compile that nobody raised on purpose: told to the user as what they are, bugs of ours.

Note [Internal errors]
    A compile refuses what it cannot do by a typed error. Whatever else it raises is a bug, of which the user's program
    must not die: the graph runs eagerly after one notice (an inference or a forward by Dynamo's graph, a backward
    by its functional graph, operator by operator), or, with ``fallback="error"``, :class:`.InternalError` is raised.
    Errors of what the user plugs in (compilers, passes, partitioners) stay as they are; they are marked where the
    user's code is called. So do those that are meant for Dynamo, and warnings that were made errors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

import torch

from ..errors import CompileError, FrozenParameterError, InternalError, PackageError, UnknownOption, notify_eager

__all__ = ["describe_bug", "first_line", "is_bug", "is_refusal", "line_of_function", "note_bug"]
__all__ += ["of_the_user", "raise_bug", "raised_by_user", "tell"]

_OWN = (CompileError, FrozenParameterError, InternalError, PackageError, UnknownOption)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)[^\n]*(?:\n\s*([^\n]*))?')
_MARK = "_aotkit_raised_by_user_code"


@contextmanager
def of_the_user() -> Iterator[None]:
    """Context in which code of the user's runs within a compile."""
    try:
        yield
    except Exception as error:
        setattr(error, _MARK, True)
        raise


def is_refusal(error: Exception) -> bool:
    """Whether a compile raised ``error`` on purpose."""
    from .refusals import REFUSALS

    return isinstance(error, REFUSALS) and not hasattr(error, _MARK)


def is_bug(error: Exception) -> bool:
    """Whether a compile raised ``error`` though nobody meant it to; see Note [Internal errors]."""
    from .refusals import REFUSALS, OptionErrors

    if hasattr(error, _MARK) or isinstance(error, (*REFUSALS, *_OWN, OptionErrors, Warning, MemoryError)):
        return False
    dynamo = sys.modules.get("torch._dynamo.exc")
    return dynamo is None or not isinstance(error, (dynamo.TorchDynamoException, torch.OutOfMemoryError))


def raised_by_user(error: Exception) -> bool:
    """Whether a captured function's own code raised ``error``: neither we, nor torch, nor another library."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    frame = traceback.tb_frame
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    ours = module in ("torch", "aotkit") or module.startswith("aotkit_")
    return not ours and "-packages" not in frame.f_code.co_filename


def note_bug(error: Exception, line: str, recorder: Any) -> None:
    """Tell the user, once, that a graph runs eagerly because of a bug of ours. ``line``: where the graph begins."""
    recorder.event("internal error", {"error": type(error).__name__})
    tell(describe_bug(error, line), recorder)


def tell(reason: str, recorder: Any) -> None:
    """Tell the user, once, that a graph runs eagerly, and why."""
    recorder.add_fallback(reason)
    notify_eager(reason)


def raise_bug(error: Exception, line: str) -> NoReturn:
    """Raise :class:`InternalError` from ``error``."""
    raise InternalError(describe_bug(error, line)) from error


def line_of_function(function: Any) -> str:
    """Where a function, or the ``forward`` of a module, is written; empty if that is not known."""
    code = getattr(getattr(function, "forward", function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}"


def first_line(graph: torch.fx.GraphModule) -> str:
    """The first line of the user's that a graph was made of; empty if none is known."""
    traces = (node.meta.get("stack_trace") or node.stack_trace for node in graph.graph.nodes)
    return next((line for line in map(_user_line, traces) if line), "")


def describe_bug(error: Exception, line: str) -> str:
    """What to tell the user of ``error``, and what to do with it."""
    stage = next((note.split("'")[1] for note in getattr(error, "__notes__", ()) if note.startswith("aotkit: ")), "")
    text = str(error).strip().partition("\n")[0]
    at = _line_in_work(error.__traceback__) or line
    return (
        f"an internal error{f' in the stage {stage!r}' if stage else ''}{f' at {at}' if at else ''}: "
        f"{type(error).__name__}{f': {text}' if text else ''}.\nThis is a bug in aotkit and not in your program. "
        "Please report it with this message, what `python -m aotkit doctor` prints, and the traceback "
        "(AOTKIT_FALLBACK=error raises the error)."
    )


def _line_in_work(traceback: TracebackType | None) -> str | None:
    """The user's line of the node of a graph that the innermost function with such a variable was at work on."""
    found = None
    while traceback is not None:
        values = traceback.tb_frame.f_locals
        for name in ("node", "n"):
            node = values.get(name)
            if isinstance(node, torch.fx.Node):
                found = _user_line(node.meta.get("stack_trace") or node.stack_trace) or found
        traceback = traceback.tb_next
    return found


def _user_line(stack_trace: str | None) -> str:
    """The innermost line of a stack as text."""
    frames = _FRAME.findall(stack_trace or "")
    return "{}:{}: {}".format(*frames[-1]) if frames else ""
