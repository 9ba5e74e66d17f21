"""A whole suite in several runs: what each of its test files came to, kept until every file has run on the same code.

`python -m tools.compat run --all --resume` runs the files that have no result yet and writes the suite's result only
once none is left. A result counts for the code that it was had with: the sources of the package and of those that it
needs, what its tests share, and the file itself. After a change there, the files that it touches run again.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.compat_counts import Counts, count_by_file
from tools.workspace import ROOT, load_packages, with_siblings

__all__ = ["FileResult", "code_of", "read_kept", "run_rest", "test_files"]

#: Files that one pytest runs: as many as are lost when a run is cut off. Starting pytest takes about ten seconds.
AT_ONCE = 12


@dataclass(frozen=True)
class FileResult:
    """What came of a test file (:class:`tools.compat_counts.Counts`). ``code``: a digest of all that it ran on."""

    path: str
    code: str
    passed: int
    failed: int
    refused: int
    elsewhere: int


def test_files(suite: str) -> list[str]:
    """The test files of a package, as paths below the root."""
    return sorted(
        path.relative_to(ROOT).as_posix() for path in (ROOT / "packages" / suite / "tests").rglob("test_*.py")
    )


def code_of(suite: str) -> Mapping[str, str]:
    """Per test file the digest of what it runs on."""
    shared = hashlib.sha256((ROOT / "conftest.py").read_bytes())
    for name in with_siblings(suite, load_packages()):
        _add(shared, ROOT / "packages" / name / "src")
    files = test_files(suite)
    _add(shared, ROOT / "packages" / suite / "tests", frozenset(files))
    return {path: _with(shared, (ROOT / path).read_bytes()) for path in files}


def _with(shared: hashlib._Hash, text: bytes) -> str:
    digest = shared.copy()
    digest.update(text)
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, folder: Path, left_out: frozenset[str] = frozenset()) -> None:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and "__pycache__" not in path.parts and name not in left_out:
            digest.update(f"{name}\n".encode() + path.read_bytes())


def run_files(paths: Sequence[str]) -> dict[str, Counts]:
    """Run these files with this interpreter. A pytest that dies leaves no report, and so no result."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={report}"]
        done = subprocess.run([*command, *paths], cwd=ROOT, check=False)
        if done.returncode not in (0, 1, 5) or not report.exists():  # 5: none of these tests is for this machine
            raise RuntimeError(f"pytest ended with {done.returncode} in {', '.join(paths)}")
        return count_by_file(report.read_text(), paths)


def run_rest(suite: str, kept: Path) -> Counts:
    """Run what has no result on this code, or failed, and add up. ``kept`` is written after each few files."""
    code, results = code_of(suite), {result.path: result for result in read_kept(kept)}
    rest = [path for path in code if not _settled(results.get(path), code[path])]
    for start in range(0, len(rest), AT_ONCE):
        some = rest[start : start + AT_ONCE]
        for path, counts in run_files(some).items():
            results[path] = FileResult(path, code[path], *counts)
        if code_of(suite) != code:
            raise RuntimeError(f"{suite} was edited while its tests ran: these files have no result")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(_lines([results[path] for path in sorted(results) if path in code])))
    whole = [results[path] for path in code]
    return Counts(*(sum(getattr(each, name) for each in whole) for name in Counts._fields))


def _settled(result: FileResult | None, code: str) -> bool:
    return result is not None and result.code == code and not result.failed


def read_kept(path: Path) -> list[FileResult]:
    """The results of files in a file that :func:`run_rest` wrote."""
    return [FileResult(**row) for row in tomllib.loads(path.read_text()).get("file", [])] if path.exists() else []


def _lines(results: Sequence[FileResult]) -> Iterator[str]:
    for result in results:
        fields = (
            f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}"
            for name, value in asdict(result).items()
        )
        yield "\n".join(["[[file]]", *fields, ""])
