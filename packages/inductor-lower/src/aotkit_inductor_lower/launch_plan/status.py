"""The status that a segment returns: bits of errors, and above them the position of the launch that they are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import IndexOutOfRange
from .records import CompiledProgram

__all__ = ["INDEX_ERROR", "ZERO_DIVISION", "failure", "place_of", "status_at"]

INDEX_ERROR = 1
ZERO_DIVISION = 2


def status_at(position: int, error: int) -> int:
    """The status of an error in the launch at a position of its segment."""
    return (position + 1) << 8 | error


def failure(program: CompiledProgram) -> Callable[[int, Sequence[str]], None]:
    """A function that raises what eager raises for the error that a status stands for, naming the kernel and the
    user's line. It is given the names of the segment's launches."""
    place = place_of(program)

    def fail(status: int, launches: Sequence[str]) -> None:
        where = place(launches[(status >> 8) - 1])
        if status & INDEX_ERROR:
            raise IndexOutOfRange(f"an index is out of range for the dimension it selects from{where}")
        raise RuntimeError(f"an integer was divided by zero (ZeroDivisionError){where}")

    return fail


def place_of(program: CompiledProgram) -> Callable[[str], str]:
    """A function that tells, for the end of a message, a launch's kernel and the user's line that it comes from."""
    lines = {record.name: record.origin.line for record in program.kernels}

    def place(name: str) -> str:
        line = lines.get(name, "")
        return f"\n  kernel {name}" + (f", from:\n{line}" if line else "")

    return place
