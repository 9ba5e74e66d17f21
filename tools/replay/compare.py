"""Two recordings of the corpus, name by name. Words that were renamed in between are given as a table."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Difference", "differences", "renamed"]

Recording = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A text that is not the same on both sides; ``before`` or ``after`` is empty where it is missing there."""

    case: str
    text: str
    before: str
    after: str

    def shown(self, lines: int = 12) -> str:
        """The first lines of a unified diff."""
        found = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), "before", "after", "", "", 1)
        return "\n".join([f"{self.case}: {self.text}", *(line.rstrip("\n") for line, _ in zip(found, range(lines)))])


def renamed(text: str, words: Mapping[str, str]) -> str:
    """The text with whole words replaced, each at most once: a new name may be another's old one."""
    if not words:
        return text
    alternatives = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.sub(rf"(?<!\w)(?:{alternatives})(?!\w)", lambda match: words[match[0]], text)


def differences(before: Recording, after: Recording, words: Mapping[str, str] | None = None) -> Iterator[Difference]:
    """What is not equal, after the words of ``before`` were renamed. A case that only one side has differs, too."""
    words = words or {}
    for case in sorted(set(before) | set(after)):
        old = {renamed(name, words): renamed(text, words) for name, text in before.get(case, {}).items()}
        new = after.get(case, {})
        if case not in before or case not in after:
            yield Difference(case, "the whole case", "recorded" * (case in before), "recorded" * (case in after))
            continue
        for name in sorted(set(old) | set(new)):
            if old.get(name) != new.get(name):
                yield Difference(case, name, old.get(name, ""), new.get(name, ""))
