"""Subinterpreters, which torch cannot be imported into."""

from __future__ import annotations

from typing import Any

__all__ = ["refuse_subinterpreters"]

try:
    import _interpreters as _module  # type: ignore[import-not-found]  # from Python 3.13 on
except ImportError:
    try:
        import _xxsubinterpreters as _module
    except ImportError:  # an implementation of Python that has one interpreter
        _module = None


def refuse_subinterpreters(module: Any = _module) -> None:
    """Say so before torch is imported: depending on the versions that hangs, crashes later, or fails with other words.

    Raises:
        ImportError: this interpreter is not the process's first.
    """
    if module is not None and module.get_current() != module.get_main():
        raise ImportError(
            "aotkit does not run in a subinterpreter, because torch does not (its import may hang): "
            "use threads of the main interpreter, or processes"
        )
