"""Compare the public names and signatures of every package with the committed snapshots in tools/api.

    python -m tools.check_api [--update] [package ...]

A package's public names are the `__all__` of its root, and of its modules that are public by name: `cache.txt`,
`cache.stores.txt`. A snapshot holds one entry per name: a function's signature, a class's bases, fields, public methods
and properties, a constant's type. Run it with all packages installed.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args, get_origin

from tools.workspace import PACKAGES, PUBLIC_MODULES, ROOT, import_name

SNAPSHOTS = ROOT / "tools" / "api"


def signature_text(function: object) -> str:
    """A signature without memory addresses; `(...)` where Python cannot tell."""
    try:
        text = str(inspect.signature(function))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text.replace("'", "")


def class_lines(name: str, cls: type) -> Iterator[str]:
    """A class with its fields and public members, members of its bases left out."""
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    yield f"class {name}({bases}):" if bases else f"class {name}:"
    if issubclass(cls, enum.Enum):
        for member in cls:
            yield f"    {member.name} = {member.value!r}"
    elif "__init__" in cls.__dict__ or dataclasses.is_dataclass(cls):
        yield f"    {signature_text(cls)}"
    for attribute, value in sorted(vars(cls).items()):
        if attribute.startswith("_"):
            continue
        if isinstance(value, property):
            getter = signature_text(value.fget).partition("->")[2].strip()
            yield f"    {attribute}: {getter or 'property'}"
        elif isinstance(value, classmethod | staticmethod):
            yield f"    {type(value).__name__} {attribute}{signature_text(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"    def {attribute}{signature_text(value)}"


def describe(module: ModuleType) -> str:
    """The text of a package's snapshot."""
    names = getattr(module, "__all__", None)
    if names is None:
        raise ValueError(f"{module.__name__} has no __all__: its public names are not stated")
    lines: list[str] = []
    for name in sorted(names):
        value = getattr(module, name)
        if inspect.isclass(value):
            lines += class_lines(name, value)
        elif get_origin(value) is Literal:
            lines.append(f"{name} = {', '.join(get_args(value))}")
        elif callable(value):
            lines.append(f"def {name}{signature_text(value)}")
        elif inspect.ismodule(value):
            lines.append(f"module {name}")
        else:
            lines.append(f"{name}: {type(value).__name__}")
        lines.append("")
    return "\n".join(lines)


def difference(folder: str, expected: str, actual: str) -> str:
    """A unified diff from the snapshot to what is there."""
    pair = (expected.splitlines(), actual.splitlines())
    return "\n".join(difflib.unified_diff(*pair, f"tools/api/{folder}.txt", f"packages/{folder}", lineterm=""))


def parts_of(folder: str) -> list[str]:
    """The names of a package's snapshots: its root's, then one for each module that is public by name."""
    return [folder, *(f"{folder}.{module}" for module in PUBLIC_MODULES.get(folder, ()))]


def main(arguments: list[str], snapshots: Path = SNAPSHOTS) -> int:
    """Compare or, with `--update`, write the snapshots."""
    update = "--update" in arguments
    folders = [argument for argument in arguments if not argument.startswith("-")] or list(PACKAGES)
    changed = 0
    parts = [
        part for folder in folders for part in (folder, *(f"{folder}.{m}" for m in PUBLIC_MODULES.get(folder, ())))
    ]
    for part in parts:
        folder, dot, module = part.partition(".")
        actual = describe(importlib.import_module(import_name(folder) + dot + module))
        path = snapshots / f"{part}.txt"
        if update:
            snapshots.mkdir(exist_ok=True)
            path.write_text(actual, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        if expected != actual:
            changed += 1
            print(difference(part, expected, actual))
    if changed:
        print("The public API changed. If that is meant, run `nox -s api -- --update` and say why in the changelog.")
    print(f"api: {len(folders)} packages and {len(parts) - len(folders)} modules compared, {changed} differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
