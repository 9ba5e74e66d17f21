"""Draws mutants: a sample that stays what it is when code around it changes."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from tools.workspace import ROOT

from .groups import Group
from .operators import Site, mutate, sites

__all__ = ["Mutant", "draw", "mutants_of_text"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault in one file. ``key`` depends on the text of function and statement, not on line numbers."""

    key: str
    file: str
    site: Site
    text: str = field(repr=False)  # of the file when the mutant was drawn: sources may change during a run

    def tree(self) -> ast.Module:
        """The file's syntax tree with the fault."""
        return mutate(ast.parse(self.text), self.site)

    def diff(self) -> str:
        """What changes, for people."""
        head = f"{self.file}:{self.site.line} {self.site.function or 'module'} ({self.site.operator})"
        removed = "\n".join(f"- {line}" for line in self.site.before.splitlines())
        added = "\n".join(f"+ {line}" for line in self.site.after.splitlines())
        return f"{head}\n{removed}\n{added}"


def draw(group: Group, number: int | None = None, seed: int = 0, known: Container[str] = ()) -> list[Mutant]:
    """``number`` mutants of a group, or all it has; those whose keys are ``known`` first, so that a sample stays what
    it is when code is moved or renamed (:mod:`.follow`)."""
    found = [mutant for file in group.files() for mutant in mutants_of(file)]
    return sorted(found, key=lambda mutant: (mutant.key not in known, _hash(f"{seed} {mutant.key}")))[:number]


def mutants_of(file: Path) -> list[Mutant]:
    """Every mutant of a file."""
    return mutants_of_text(file.relative_to(ROOT).as_posix(), file.read_text())


def mutants_of_text(name: str, source: str) -> list[Mutant]:
    """Every mutant of a file's text."""
    times: Counter[str] = Counter()
    found = []
    for site in sites(ast.parse(source)):
        text = "\n".join((name, site.function, site.operator, site.before, site.after))
        times[text] += 1
        found.append(Mutant(_hash(f"{text}\n{times[text]}")[:12], name, site, source))
    return found


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
