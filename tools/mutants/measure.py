"""Measures the coverage of a package's tests, file by file, each in a fork."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from tools.workspace import ROOT

from .coverage import Coverage, LineTracer, bits, digest
from .groups import package_files, test_files
from .session import Items, collected, trace_tests
from .supervise import Send, supervise

__all__ = ["BUILD", "coverage_of"]

BUILD = ROOT / "build" / "mutants"


def coverage_of(package: str, jobs: int = 1, new_only: bool = False) -> Coverage:
    """The coverage of a package, measured where it is not known yet (without ``jobs``: as it is known). ``new_only``:
    of test files that changed only the tests that they had not."""
    path = BUILD / f"{package}.json"
    coverage = Coverage.read(path)
    coverage.follow({_relative(file): file.read_text() for file in package_files(package)})
    common = [ROOT / "conftest.py", *sorted((ROOT / "packages" / package / "tests").glob("*.py"))]
    helpers = [file for file in common if not file.name.startswith("test_")]
    digests = {_relative(file): digest(file, *helpers) for file in test_files(package)}
    for file in set(coverage.digests) - set(digests):
        coverage.forget(file)
        del coverage.digests[file]
    stale = [file for file, wanted in digests.items() if coverage.digests.get(file) != wanted]
    if stale and jobs:
        print(f"{package}: measuring what {len(stale)} test files run", flush=True)
        _measure(package, stale, path, coverage, digests if not new_only else {}, jobs)
    coverage.write(path)
    return coverage


def _measure(
    package: str, stale: list[str], path: Path, coverage: Coverage, digests: dict[str, str], jobs: int
) -> None:
    """In a process of its own, because tests and package are imported there."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"{package}: coverage was not measured, see {BUILD / package}-measure.log")
        measured = Coverage.read(path)
        coverage.__dict__.update(measured.__dict__)
        return
    status = 1
    try:
        before = set(sys.modules)
        sources = package_files(package)
        tracer = LineTracer(sources)

        def loop(items: Items) -> None:
            nonlocal status
            for file, lines in tracer.stop().items():
                name = _relative(Path(file))
                coverage.at_import[name] = coverage.at_import.get(name, 0) | bits(lines)
            coverage.modules = sorted({*coverage.modules, *_third_party(set(sys.modules) - before)})
            _by_file(items, stale, sources, path, coverage, digests, jobs)
            status = 0

        tracer.start()
        collected(stale, BUILD / f"{package}-measure.log", loop)
    finally:
        os._exit(status)


def _by_file(
    items: Items,
    stale: list[str],
    sources: list[Path],
    path: Path,
    coverage: Coverage,
    digests: dict[str, str],
    jobs: int,
) -> None:
    files: dict[str, list[Any]] = defaultdict(list)
    for nodeid, item in items.items():
        if digests or nodeid not in coverage.lines:
            files[nodeid.partition("::")[0]].append(item)

    with tempfile.TemporaryDirectory() as folder:

        def work(file: str, send: Send) -> None:
            rows = trace_tests(files[file], sources, send)
            Path(folder, Path(file).name).write_text(json.dumps(rows, default=sorted))
            send(result="measured")

        def done(file: str, message: dict[str, Any]) -> None:
            if digests:
                coverage.forget(file)
            if message["result"] != "measured":
                print(f"{file}: {message['result']} in {message['test']}", flush=True)
                return
            for row in json.loads(Path(folder, Path(file).name).read_text()):
                coverage.seconds[row["test"]] = round(row["seconds"], 4)
                coverage.lines[row["test"]] = {_relative(Path(f)): bits(lines) for f, lines in row["lines"].items()}
            if digests:
                coverage.digests[file] = digests[file]
            coverage.write(path)

        supervise([file for file in stale if file in files], work, done, jobs)


def _third_party(names: set[str]) -> list[str]:
    """Modules that can be imported ahead of everything of ours."""
    ours = ("aotkit", "tools", "test_", "conftest", "packages")
    # pytest has to import them itself, and what imports them
    plugins = ("_pytest", "pytest", "_hypothesis", "hypothesis", "xdist", "anyio", "torch.testing._internal")
    return sorted(
        name for name in names
        if not name.startswith((*ours, *plugins)) and getattr(sys.modules.get(name), "__spec__", None)
    )  # fmt: skip


def _relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()
