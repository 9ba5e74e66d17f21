"""The packages with several versions of torch and Python: run a part of the tests, keep the result, write the page.

    python -m tools.compat run                # in an environment with the torch to test; docs/versions.toml keeps it
    python -m tools.compat run --all          # whole suites instead of a part of each
    python -m tools.compat run --all --resume # go on where such a run was cut off (tools/compat_files.py)
    python -m tools.compat page [--check]     # docs/versions.md

`nox -s compat -- 2.11` makes the environment and runs the first. A result is of one torch, one Python and one suite; a
later run of the same replaces it, and a failed one is kept as well: the page shows what is, not what was hoped for.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.compat_counts import count
from tools.compat_files import run_rest
from tools.workspace import ROOT

RESULTS, PAGE = ROOT / "docs" / "versions.toml", ROOT / "docs" / "versions.md"
KEPT = ROOT / "build" / "compat"  # what files of suites came to that are run in several goes

#: Per suite the files of the part that is run; none stands for the whole suite, where that takes a minute or two.
PARTS: Mapping[str, tuple[str, ...]] = {
    "functionalize": (),
    "aot-trace": (),
    "runtime-wrappers": (),
    "cache": (),
    "partition": ("flow", "graph_text", "interop", "donated_buffers", "small_graphs"),
    "cudagraphs": ("eligibility", "simulator", "split", "static_inputs"),
    "inductor-lower": ("cpu_ops", "cpu_random", "lowering_reductions", "lowering_scatter", "runtime_bind", "sweep"),
    "aotkit": ("backend", "compiled_autograd", "double_backward", "dynamic_sizes", "options", "registration", "views"),
    "models": (),
}


@dataclass(frozen=True)
class Result:
    """What came of a suite (:class:`tools.compat_counts.Counts`). ``part``: not all of it was run."""

    torch: str
    python: str
    suite: str
    passed: int
    failed: int
    refused: int
    elsewhere: int
    part: bool

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The order on the page."""
        return numbers(self.torch), numbers(self.python), list(PARTS).index(self.suite)

    def cell(self) -> str:
        """What the table says."""
        told = f"{self.passed}" if not self.failed else f"{self.passed}, **{self.failed} failed**"
        told += f", {self.refused} refused" if self.refused else ""
        told += f", {self.elsewhere} elsewhere" if self.elsewhere else ""
        return told + (" (part)" if self.part else "")


def numbers(version: str) -> tuple[int, ...]:
    """``2.11.0`` as numbers."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def paths_of(suite: str, everything: bool) -> list[str]:
    """The test files of a suite, or its folder."""
    if suite == "models":
        return ["tools/integration/test_architectures.py"]
    folder, prefix = f"packages/{suite}/tests", "aotkit" if suite == "aotkit" else suite.replace("-", "_")
    if everything or not PARTS[suite]:
        return [folder]
    return [f"{folder}/test_{prefix}_{name}.py" for name in PARTS[suite]]


def run_suite(suite: str, everything: bool, resume: bool = False) -> Result:
    """Run the suite with this interpreter and count."""
    import torch

    version, python = ".".join(map(str, numbers(torch.__version__))), ".".join(platform.python_version_tuple()[:2])
    part = bool(PARTS[suite]) and not everything
    if resume and everything and suite != "models":
        return Result(version, python, suite, *run_rest(suite, KEPT / f"{version}-{python}-{suite}.toml"), part)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={report}"]
        subprocess.run([*command, *paths_of(suite, everything)], cwd=ROOT, check=False)
        counts = count(report.read_text() if report.exists() else "")
    return Result(version, python, suite, *counts, part)


def read_results(path: Path = RESULTS) -> list[Result]:
    """What is kept, in the page's order."""
    rows = tomllib.loads(path.read_text()).get("result", []) if path.exists() else []
    return sorted((Result(**row) for row in rows), key=lambda result: result.key)


def keep(new: Sequence[Result], path: Path = RESULTS) -> None:
    """Write results; they replace those of the same torch, Python and suite."""
    kept = {result.key: result for result in (*read_results(path), *new)}
    lines = ["# Written by `python -m tools.compat run`; docs/versions.md is made of it.\n"]
    for key in sorted(kept):
        fields = asdict(kept[key]).items()
        lines.append("\n[[result]]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in fields))
    path.write_text("".join(lines))


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def page(results: Sequence[Result]) -> str:
    """The page's text."""
    pairs = sorted({(result.torch, result.python) for result in results}, key=lambda p: (numbers(p[0]), numbers(p[1])))
    head = "| suite | " + " | ".join(f"{torch} / {python}" for torch, python in pairs) + " |"
    found = {(result.suite, result.torch, result.python): result.cell() for result in results}
    rows = [
        f"| {suite} | " + " | ".join(found.get((suite, *pair), "not run") for pair in pairs) + " |" for suite in PARTS
    ]
    return INTRODUCTION + "\n".join([head, "|---" * (len(pairs) + 1) + "|", *rows]) + "\n"


INTRODUCTION = """# Versions of torch and Python

Tests passed on the CPU (Linux, x86-64), as `nox -s compat -- VERSION` counted them. A column is a torch / a Python.
*(part)*: some files of the suite; *refused*: tests of what this torch cannot do, which another test sees refused;
*elsewhere*: tests of processors and devices that were not there, as of kernels in tile registers without AMX.
`nox -s compat -- VERSION --all` runs whole suites (`--resume` goes on where that was cut off), and `nox -s test` runs
them with torch 2.13 and Python 3.11. What is not in the table has not been run. Of a suite that was counted lately
fewer parameters run than of one that was counted before a push ran samples of them: the whole of one may be less than a
part.
[Limits](limits.md#versions-and-platforms) says what the refused tests are.

<!-- made by `python -m tools.compat page` -->

"""


def make_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="python -m tools.compat", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the suites in this environment")
    run.add_argument("--all", action="store_true", help="whole suites")
    run.add_argument("--resume", action="store_true", help="with --all: run only files without a result on this code")
    run.add_argument("--suite", action="append", choices=list(PARTS), help="only this one (more than once)")
    written = commands.add_parser("page", help="write docs/versions.md")
    written.add_argument("--check", action="store_true", help="only say whether it is up to date")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run suites, or write the page."""
    options = make_parser().parse_args(arguments)
    if options.command == "page":
        return _write_page(options.check)
    failed = 0
    for suite in options.suite or PARTS:
        result = run_suite(suite, options.all, options.resume)
        keep([result])
        print(f"{suite}: {result.cell()}", flush=True)
        failed += result.failed
    return 1 if failed else 0


def _write_page(check: bool) -> int:
    text = page(read_results())
    if not check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        print("docs/versions.md is not what docs/versions.toml says: python -m tools.compat page")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
