"""Parts of dumped texts: the loop IR, kernel IR or code of one kernel; and lines of the user's files."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Budget", "SourceLine", "llvm_of", "nest_of", "short_path", "source_at", "triton_of"]


@dataclass
class Budget:
    """How many characters a page may still take of one sort of text."""

    left: int

    def take(self, text: str) -> str:
        """The text, or where it would be too long, its beginning or nothing, and how to see it."""
        if len(text) <= self.left:
            self.left -= len(text)
            return text
        return f"({len(text)} characters are left out to keep this page small; AOTKIT_DUMP=folder writes them)"


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Lines of a file around one: (number, text, whether it is the one)."""

    place: str
    lines: tuple[tuple[int, str, bool], ...]


def source_at(place: str, around: int = 1) -> SourceLine:
    """``place`` is ``file:line`` with or without the code behind it. What can't be read has no lines."""
    found = re.match(r"(.*?):(\d+)(?:: (.*))?$", place)
    if found is None:
        return SourceLine(place, ())
    file, number, code = found.group(1), int(found.group(2)), found.group(3)
    lines = [
        (at, linecache.getline(file, at).rstrip("\n"), at == number)
        for at in range(max(1, number - around), number + around + 1)
        if linecache.getline(file, at)
    ]
    if not lines and code:
        lines = [(number, code, True)]
    return SourceLine(f"{short_path(file)}:{number}", _dedented(lines))


def _dedented(lines: list[tuple[int, str, bool]]) -> tuple[tuple[int, str, bool], ...]:
    margins = [len(text) - len(text.lstrip()) for _, text, _ in lines if text.strip()]
    margin = min(margins, default=0)
    return tuple((number, text[margin:], chosen) for number, text, chosen in lines)


def short_path(file: str) -> str:
    """The end of a path, which tells a file from others; a library's without the place where libraries are."""
    parts = Path(file).parts
    for marker in ("site-packages", "dist-packages"):
        if marker in parts:
            return "/".join(parts[parts.index(marker) + 1 :])
    return "/".join(parts[-2:])


def nest_of(text: str, name: str) -> str:
    """The block of loop IR or kernel IR that begins with the name: its line, and all that is indented under it."""
    head = re.compile(rf"^(?:loop|contraction|kernel) {re.escape(name)}[ (].*\n(?:[ ].*\n?)*", re.MULTILINE)
    found = head.search(text if text.endswith("\n") else f"{text}\n")
    return "" if found is None else re.sub(r"\n  origin [^\n]*", "", found.group().rstrip())


def llvm_of(text: str, function: str) -> str:
    """The definition of a function, and of its other versions."""
    head = re.compile(rf"^define [^\n]*@{re.escape(function)}\([^\n]*\n.*?^}}", re.MULTILINE | re.DOTALL)
    return "\n\n".join(found.group() for found in head.finditer(text))


def triton_of(text: str, name: str) -> str:
    """The function of a Triton kernel with its decorators, out of the scripts that time kernels."""
    head = re.compile(rf"(?:^@[^\n]*\n)*^def \w*{re.escape(name)}\(.*?(?=^[^\s)])", re.MULTILINE | re.DOTALL)
    found = head.search(text)
    return "" if found is None else found.group().rstrip()
