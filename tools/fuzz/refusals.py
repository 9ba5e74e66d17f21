"""Whether an error is a refusal: raised on purpose, with a type and a sentence, wherever it was wrapped."""

from __future__ import annotations

from aotkit import CompileError
from aotkit.driver.refusals import REFUSALS
from aotkit_runtime_wrappers.errors import BackwardCompileError

__all__ = ["refusal"]


def refusal(error: BaseException | None) -> str | None:
    """Class and sentence of the typed refusal that ``error`` is, or was raised from; ``None`` for any other error.

    What a backward raises where its compile failed is one only if that was refused.
    """
    while error is not None:
        if isinstance(error, (*REFUSALS, CompileError)) and not isinstance(error, BackwardCompileError):
            return f"{type(error).__name__}: {error}"
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None
