"""What the tools of the loop IR raise."""

from __future__ import annotations

__all__ = ["IRError", "IRSyntaxError"]


class IRError(ValueError):
    """The IR breaks one of its rules. The message names the program part and the rule."""


class IRSyntaxError(IRError):
    """IR text that does not parse. ``line`` and ``column`` count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column
