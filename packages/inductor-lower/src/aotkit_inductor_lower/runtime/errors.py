"""What generated code raises."""

from __future__ import annotations

from ..errors import BindError

__all__ = ["BindError", "RedzoneError"]


class RedzoneError(RuntimeError):
    """With redzones: a step wrote to memory beside its buffer. The message names the step and the buffer."""
