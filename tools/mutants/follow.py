"""Verdicts follow the code: a mutant's key depends on file and text, so what is moved or renamed gets new keys.

    python -m tools.mutants follow COMMIT      # after sources were moved or renamed since that commit

A mutant of the commit and one of the present sources are the same where their file is the same, or was renamed, and
the sequence of mutants around them is the same but for identifiers. What went to another file is found by its text.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from difflib import SequenceMatcher

from tools.workspace import ROOT

from .groups import GROUPS
from .journal import EQUIVALENT, Journal
from .sample import Mutant, mutants_of_text

__all__ = ["follow", "same_mutants"]


def follow(commit: str, journals: Sequence[Journal]) -> str:
    """Rewrite the keys in the journals and in the list of equivalent mutants; returns what was found, for people."""
    keys = _present_keys(commit)
    lost = 0
    for journal in journals:
        verdicts = []
        for verdict in journal.verdicts.values():
            key = keys.get(verdict.key)
            lost += key is None
            verdicts.append(replace(verdict, key=key or verdict.key))
        journal.path.write_text("".join(json.dumps(asdict(verdict)) + "\n" for verdict in verdicts))
    text = EQUIVALENT.read_text()
    changed = re.sub(r'^key = "(\w+)"', lambda found: f'key = "{keys.get(found[1]) or found[1]}"', text, flags=re.M)
    EQUIVALENT.write_text(changed)
    return f"{sum(old != new for old, new in keys.items())} mutants have a new key, {lost} verdicts have no mutant"


def same_mutants(old: Sequence[Mutant], new: Sequence[Mutant]) -> dict[str, str]:
    """Keys of two states of one file: those whose neighbours are equal but for identifiers belong together."""
    found = {}
    shapes, others = [_shape(mutant) for mutant in old], [_shape(mutant) for mutant in new]
    for a, b, size in SequenceMatcher(a=shapes, b=others, autojunk=False).get_matching_blocks():
        found.update({old[a + i].key: new[b + i].key for i in range(size)})
    return found


def _shape(mutant: Mutant) -> tuple[str, str]:
    return mutant.site.operator, re.sub(r"[A-Za-z_]\w*", "x", f"{mutant.site.before}\n{mutant.site.after}")


def _present_keys(commit: str) -> dict[str, str]:
    """The present key of each mutant of a commit."""
    sources = [f"packages/{name}/src" for name in dict.fromkeys(group.package for group in GROUPS.values())]
    changes = [
        line.split("\t")
        for line in _git("diff", "--find-renames", "--name-status", commit, "--", *sources).splitlines()
    ]
    renamed = {change[2]: change[1] for change in changes if change[0].startswith("R")}
    before = {name: name for name in _git("ls-tree", "-r", "--name-only", commit, "--", *sources).splitlines()}
    keys: dict[str, str] = {}
    left: dict[tuple[str, ...], list[str]] = defaultdict(list)
    now = [path for source in sources for path in sorted((ROOT / source).rglob("*.py"))]
    for path in now:
        name = path.relative_to(ROOT).as_posix()
        mutants = mutants_of_text(name, path.read_text())
        old = before.pop(renamed.get(name, name), None)
        same = same_mutants(mutants_of_text(old, _git("show", f"{commit}:{old}")), mutants) if old else {}
        keys.update(same)
        for mutant in mutants:
            if mutant.key not in same.values():
                left[_text(mutant)].append(mutant.key)
    for old in _git("ls-tree", "-r", "--name-only", commit, "--", *sources).splitlines():
        for mutant in mutants_of_text(old, _git("show", f"{commit}:{old}")) if old.endswith(".py") else ():
            if mutant.key not in keys and len(left[_text(mutant)]) == 1:
                keys[mutant.key] = left[_text(mutant)][0]
    return keys


def _text(mutant: Mutant) -> tuple[str, ...]:
    return mutant.site.function, mutant.site.operator, mutant.site.before, mutant.site.after


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
