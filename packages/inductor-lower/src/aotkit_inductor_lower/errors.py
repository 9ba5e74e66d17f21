"""What this package raises when a graph cannot be compiled."""

from __future__ import annotations

__all__ = [
    "BindError",
    "CodegenError",
    "FakeKernelError",
    "Fallback",
    "IRError",
    "IRSyntaxError",
    "IndexOutOfRange",
    "InputMismatchError",
    "LoweringError",
    "ProcessorError",
    "SizeOverflowError",
    "UnknownPassError",
    "UnsupportedGraphError",
]


class LoweringError(Exception):
    """Base of this package's refusals: what was asked, why it cannot be done, where, and what to do."""


class UnsupportedGraphError(LoweringError):
    """The graph holds something that this package cannot compile.

    ``what`` names it, ``why`` says why not, ``line`` is the user's source line if known, ``todo`` says what to do.
    """

    def __init__(self, what: str, why: str, *, line: str = "", todo: str = "") -> None:
        parts = [f"cannot compile {what}: {why}"]
        if line:
            parts.append(f"at {line}")
        if todo:
            parts.append(todo)
        super().__init__("; ".join(parts))
        self.what = what
        self.why = why
        self.line = line
        self.todo = todo


class InputMismatchError(LoweringError):
    """A compiled graph was called with a tensor of another type, size or stride than it was compiled for."""


class SizeOverflowError(LoweringError, OverflowError):
    """A size of a call, or a number that one is computed from, has no place in the 64 bits that kernels compute in."""


class FakeKernelError(LoweringError, RuntimeError):
    """A library call gave a result of another type or shape than its fake kernel said when the graph was captured."""


class IndexOutOfRange(IndexError, RuntimeError):
    """A call was given an index that is out of range. Eager mode raises an ``IndexError`` for some operators
    (``index_select``) and a ``RuntimeError`` for others (``gather``); kernels are of several operators, and raise this.
    """


class UnknownPassError(ValueError):
    """A pass was to be left out that does not exist."""


class BindError(RuntimeError):
    """A compiled program cannot be bound in this process. The message says what does not fit."""


class CodegenError(ValueError):
    """A program that no code can be generated for. The message names the step and the reason."""


class ProcessorError(LoweringError, CodegenError):
    """The options ask for a kind of processor that this one is not."""


class IRError(ValueError):
    """The IR breaks one of its rules. The message names the program part and the rule."""


class IRSyntaxError(IRError):
    """IR text that does not parse. ``line`` and ``column`` count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column


class Fallback(Exception):
    """A rule says that this use of its op is better left to ATen, and why. Not an error: the call is counted."""
