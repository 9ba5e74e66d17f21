"""Subinterpreters, which torch cannot be imported into."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["refuse_subinterpreters"]

_NAMES = ("_interpreters", "_xxsubinterpreters")  # from Python 3.13 on, and before


def refuse_subinterpreters() -> None:
    """Say so before torch is imported: depending on the versions that hangs, crashes later, or fails with other words.

    Raises:
        ImportError: this interpreter is not the process's first.
    """
    found = next((name for name in _NAMES if find_spec(name)), None)
    module: Any = import_module(found) if found else None  # none where Python has one interpreter only
    if module is not None and module.get_current() != module.get_main():
        raise ImportError(
            "aotkit does not run in a subinterpreter, because torch does not (its import may hang): "
            "use threads of the main interpreter, or processes"
        )
