"""Which test runs which lines: measured once per package, in forks of one process, and kept under `build/mutants`.

When sources change, lines are followed through the text; when a test file changes, or `conftest.py`, its tests are
measured again.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Coverage", "LineTracer", "digest"]


class LineTracer:
    """Collects the lines that run in some files, in all threads."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.lines: dict[str, set[int]] = {str(file): set() for file in files}
        self.entered: Counter[int] = Counter()

    def start(self) -> None:
        """From now on."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def stop(self) -> dict[str, set[int]]:
        """The lines since the start, by file."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        found = {file: lines for file, lines in self.lines.items() if lines}
        self.lines = {file: set() for file in self.lines}
        self.entered.clear()
        return found

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        lines = self.lines.get(frame.f_code.co_filename)
        if lines is None:
            return None
        code = id(frame.f_code)
        self.entered[code] += 1
        if self.entered[code] > 40:  # its lines are known by now; tracing takes more time than the tests do
            return None

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line


@dataclass
class Coverage:
    """What was measured on one package. Lines of a file are bits of a number."""

    texts: dict[str, str] = field(default_factory=dict)  # source file -> its text when it was measured
    at_import: dict[str, int] = field(default_factory=dict)  # source file -> lines that run when tests are collected
    modules: list[str] = field(default_factory=list)  # third-party modules that the tests import
    digests: dict[str, str] = field(default_factory=dict)  # test file -> digest
    seconds: dict[str, float] = field(default_factory=dict)  # test -> processor time, those that passed
    lines: dict[str, dict[str, int]] = field(default_factory=dict)  # test -> source file -> lines

    @classmethod
    def read(cls, path: Path) -> Coverage:
        """What a file holds; nothing if there is none."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text())
        masks = [int(mask, 16) for mask in data.pop("masks")]
        files = data.pop("files")
        lines = {test: {files[f]: masks[m] for f, m in rows} for test, rows in data.pop("lines").items()}
        at_import = {file: int(mask, 16) for file, mask in data.pop("at_import").items()}
        return cls(lines=lines, at_import=at_import, **data)

    def write(self, path: Path) -> None:
        """Equal sets of lines are written once."""
        files = {file: at for at, file in enumerate(self.texts)}
        masks: dict[int, int] = {}
        rows = {
            test: [(files[file], masks.setdefault(mask, len(masks))) for file, mask in found.items()]
            for test, found in self.lines.items()
        }
        data = {
            "texts": self.texts, "modules": self.modules, "digests": self.digests, "seconds": self.seconds,
            "at_import": {file: f"{mask:x}" for file, mask in self.at_import.items()},
            "files": list(files), "masks": [f"{mask:x}" for mask in masks], "lines": rows,
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))

    def follow(self, texts: dict[str, str]) -> None:
        """Move all lines to where they are in the present texts; lines that are new are covered by nothing."""
        for file, old in list(self.texts.items()):
            new = texts.get(file)
            if new == old:
                continue
            place = _places(old, new) if new is not None else {}
            moved: dict[int, int] = {}
            for found in (*self.lines.values(), self.at_import):
                if new is None:
                    found.pop(file, None)
                elif file in found:
                    mask = found[file]
                    if mask not in moved:
                        moved[mask] = bits(place[line] for line in lines_of(mask) if line in place)
                    found[file] = moved[mask]
        self.texts = texts

    def forget(self, test_file: str) -> None:
        """Drop the tests of a file."""
        for test in [test for test in self.lines if test.partition("::")[0] == test_file]:
            del self.lines[test]
            self.seconds.pop(test, None)

    def tests(self, file: str, first: int, last: int) -> list[str]:
        """The tests that run one of these lines, the fastest first."""
        wanted = bits(range(first, last + 1))
        found = [test for test, rows in self.lines.items() if rows.get(file, 0) & wanted and test in self.seconds]
        return sorted(found, key=self.seconds.__getitem__)

    def runs_at_import(self, file: str, first: int, last: int) -> bool:
        """Whether one of these lines runs when the tests are collected."""
        return bool(self.at_import.get(file, 0) & bits(range(first, last + 1)))


def bits(lines: Iterable[int]) -> int:
    """Line numbers as one number."""
    mask = 0
    for line in lines:
        mask |= 1 << line
    return mask


def lines_of(mask: int) -> list[int]:
    """The line numbers of a number."""
    return [at for at, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]


def digest(*files: Path) -> str:
    """Of the contents."""
    joined = hashlib.sha256()
    for file in files:
        joined.update(file.read_bytes() if file.exists() else b"-")
    return joined.hexdigest()[:16]


def _places(old: str, new: str) -> dict[int, int]:
    """Line number in the old text -> that of the same line in the new one. A line that was exchanged for another is
    where its successor begins, so that its tests are still known."""
    before, after = old.splitlines(), new.splitlines()
    place: dict[int, int] = defaultdict(int)
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        for at in range(i1, i2):
            if tag == "equal":
                place[at + 1] = j1 + at - i1 + 1
            elif tag == "replace":
                place[at + 1] = min(j1 + at - i1, j2 - 1) + 1
    return dict(place)
