"""What code generation refuses."""

from __future__ import annotations

__all__ = ["CodegenError"]


class CodegenError(ValueError):
    """A program that no code can be generated for. The message names the step and the reason."""
