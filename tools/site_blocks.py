"""The blocks of code in the pages and READMEs, and what each has to prove.

A block that begins with ```` ```python ```` is a part of its page's program: all of them, one after the other, run
(`tools/integration/test_readme_examples.py`). One with a title, ```` ```python title="FILE" ````, quotes this file: its
lines stand there in this order, ``...`` is what was left out. Blocks between comments `<!-- .. begin -->` and
`<!-- .. end -->` are written by a tool, which has a test of its own. Commands name sessions, modules and subcommands
that there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT

__all__ = ["Block", "blocks_of", "pages", "program_of", "quotation_problem"]

_FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MADE = re.compile(r"<!-- [\w ]+: begin -->.*?<!-- [\w ]+: end -->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code. ``title``: the file that it quotes, or empty."""

    language: str
    title: str
    text: str


def pages() -> list[Path]:
    """Every page that somebody wrote: of docs, and the READMEs."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "packages").glob("*/README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page that no tool makes."""
    for language, title, text in _FENCE.findall(_MADE.sub("", page.read_text(encoding="utf-8"))):
        yield Block(language, title, text)


def program_of(page: Path) -> str:
    """The Python program of a page; empty if it has none."""
    return "\n".join(block.text for block in blocks_of(page) if block.language == "python" and not block.title)


def quotation_problem(block: Block, source: str) -> str:
    """The first line of a quotation that does not stand in ``source`` behind the lines before it, or ``""``."""
    lines = iter([line.strip() for line in source.splitlines()])
    for line in block.text.splitlines():
        wanted = re.sub(r"  # .*$", "", line).strip()
        if wanted and wanted != "..." and not any(re.sub(r"  # .*$", "", found) == wanted for found in lines):
            return line
    return ""
