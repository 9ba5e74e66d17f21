"""What generated code raises."""

from __future__ import annotations

from ..launch_plan.status import INDEX_ERROR

__all__ = ["BindError", "RedzoneError", "raise_status"]


class BindError(RuntimeError):
    """A compiled program cannot be bound in this process. The message says what does not fit."""


class RedzoneError(RuntimeError):
    """With redzones: a step wrote to memory beside its buffer. The message names the step and the buffer."""


def raise_status(status: int, launches: tuple[str, ...], lines: dict[str, str]) -> None:
    """Raise what eager raises for the error a segment reported, naming the kernel and the user's line."""
    name = launches[(status >> 8) - 1]
    place = lines.get(name, "")
    where = f"\n  kernel {name}" + (f", from:\n{place}" if place else "")
    if status & INDEX_ERROR:
        raise IndexError(f"an index is out of range for the dimension it selects from{where}")
    raise RuntimeError(f"an integer was divided by zero (ZeroDivisionError){where}")
