"""The device functions that a kernel's text calls, as text."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from .combining import generated_functions

__all__ = ["device_function_names", "prelude_for"]

_NAME = re.compile(r"(?<![\w.])([a-z_]\w*)\b")


@cache
def _functions() -> dict[str, str]:
    """Name to source, in file order."""
    source = (Path(__file__).parent / "device_functions.py").read_text()
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = "\n".join(lines[node.lineno - 2 : node.end_lineno])
    return found | generated_functions()


def device_function_names() -> tuple[str, ...]:
    """Every device function."""
    return tuple(_functions())


def prelude_for(body: str) -> str:
    """The functions that ``body`` calls, and those that these call, each before its callers."""
    functions = _functions()
    wanted: set[str] = set()
    pending = [body]
    while pending:
        for name in _NAME.findall(pending.pop()):
            if name in functions and name not in wanted:
                wanted.add(name)
                pending.append(functions[name].split("\n", 2)[2])
    return "".join(f"{text}\n\n\n" for name, text in functions.items() if name in wanted)
