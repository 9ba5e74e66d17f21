"""Typed refusals: what was asked, why it cannot be done, which user line, and what to do."""

from __future__ import annotations

__all__ = [
    "DataDependent",
    "NeedsDispatcherLayer",
    "OverlappingMutation",
    "OverlappingWrite",
    "Unsupported",
    "user_line",
]


class Unsupported(RuntimeError):
    """A function does something that cannot be captured faithfully.

    Args:
        what: what the function does, as a clause ("input 0 is given another storage").
        why: why it cannot be captured.
        do: what the user can do about it.
        stack_trace: the user's stack, as text, if it is known; its last line goes into the message.
    """

    def __init__(self, what: str, why: str, do: str, *, stack_trace: str | None = None) -> None:
        self.what = what
        self.why = why
        self.do = do
        self.stack_trace = stack_trace
        line = user_line(stack_trace)
        where = f" (at {line})" if line else ""
        super().__init__(f"{what}{where}: {why}. {do}")

    def at(self, stack_trace: str | None) -> Unsupported:
        """The same refusal with the user's line, unless it has one already."""
        if self.stack_trace is not None or stack_trace is None:
            return self
        located = type(self).__new__(type(self))
        located.__dict__.update(self.__dict__)
        Unsupported.__init__(located, self.what, self.why, self.do, stack_trace=stack_trace)
        return located


class OverlappingWrite(Unsupported):
    """A write to a view of which several elements are the same memory. ``view`` names it as the function made it."""

    def __init__(self, view: str) -> None:
        super().__init__(
            f"{view} is written to, and several of its elements are the same memory",
            "which of their new values remains is not defined",
            "Write to a clone of it, or to a view without overlap",
        )


class NeedsDispatcherLayer(Unsupported):
    """``what`` is something that only :attr:`.FunctionalLayer.DISPATCHER` can follow; capture again in it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what,
            "a tensor subclass, which the functional mode uses, cannot change its storage",
            "Capture with FunctionalLayer.DISPATCHER",
        )


class DataDependent(Unsupported):
    """A size or a Python number depends on the elements of a tensor, and the capture was not to record such numbers."""


class OverlappingMutation(Unsupported):
    """One of several inputs that share memory is mutated; capture again over one synthetic base.

    Attributes:
        groups: indices of the flat inputs that overlap, one tuple per storage.
        mutated: indices of the inputs that are written to.
    """

    def __init__(self, groups: tuple[tuple[int, ...], ...], mutated: tuple[int, ...]) -> None:
        self.groups = groups
        self.mutated = mutated
        named = "; ".join(", ".join(f"input {i}" for i in group) for group in groups)
        super().__init__(
            f"inputs that share memory are mutated ({named}; written to: {', '.join(map(str, mutated))})",
            "each input is captured as a tensor of its own, so the other inputs would miss the new values",
            "Pass tensors that do not overlap, or capture over one base that covers them all",
        )


def user_line(stack_trace: str | None) -> str | None:
    """The innermost source line of a Python stack as text, as ``file:line: code``."""
    if not stack_trace:
        return None
    lines = [line.strip() for line in stack_trace.strip().splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    if not frames:
        return lines[-1]
    file, _, rest = lines[frames[-1]].removeprefix('File "').partition('", line ')
    number = rest.partition(",")[0]
    code = lines[frames[-1] + 1] if frames[-1] + 1 < len(lines) else ""
    return f"{file}:{number}: {code}"
