"""The nox sessions, the CI entry and the workflows agree with each other and with the documentation."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import compat
from tools.workspace import PACKAGES, ROOT, load_packages

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    """The sessions that nox lists, by the name that `-s` takes."""
    command = [sys.executable, "-m", "nox", "--list", "--nocolor"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"^[*-] (\S+)(?: ->.*)?$", listed.stdout, re.MULTILINE))


def test_every_package_has_its_isolated_session(sessions: set[str]) -> None:
    assert {f"test_package({name})" for name in PACKAGES} <= sessions


def test_the_test_session_runs_every_session_that_needs_no_preparation(sessions: set[str]) -> None:
    text = (ROOT / "noxfile.py").read_text()
    (block,) = re.findall(r"^TEST_SESSIONS = \((.*?)^\)", text, re.MULTILINE | re.DOTALL)
    alone = set(re.findall(r'^\s+"(test_package\(.*?\))",', block, re.MULTILINE))
    names = set(re.findall(r'^\s+"(\w+)",', block, re.MULTILINE))
    assert {"lint", "types", "tools", "api", "docs", "wheels", "sdists", "integration", "library_paths"} == names
    assert names | alone <= sessions
    (others,) = re.findall(r'f"test_package\(\{name\}\)" for name in PACKAGES if name not in \((.*?)\)', block)
    assert {f"test_package({name})" for name in re.findall(r'"(.*?)"', others)} == alone


def test_the_system_session_runs_sessions_that_exist(sessions: set[str]) -> None:
    (block,) = re.findall(r"^SYSTEM_SESSIONS = (\(.*?\))$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    names = set(ast.literal_eval(block))
    assert names == {"system_tests", "emulated_kernels", "emulated_levels"} <= sessions


def test_the_numeric_tests_are_files_that_exist() -> None:
    text = (ROOT / "noxfile.py").read_text()
    (block,) = re.findall(r"^NUMERIC_TESTS = (\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    for package, names in ast.literal_eval(block).items():
        for name in names:
            path = ROOT / "packages" / package / "tests" / f"test_{package.replace('-', '_')}_{name}.py"
            assert path.is_file(), path


def test_documented_and_used_sessions_exist(sessions: set[str]) -> None:
    families = {name.partition("(")[0] for name in sessions}
    pages = (ROOT / "docs").rglob("*.md")
    files = [ROOT / "README.md", *pages, *WORKFLOWS]
    for path in files:
        for name in re.findall(r'nox -s "?(\w+)', path.read_text()):
            assert name in families, f"{path.name} names nox -s {name}"


def combinations(matrix: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The jobs of a matrix. A row of ``include`` that agrees with no job's own values is a job of its own."""
    own = {name: values for name, values in matrix.items() if name not in ("include", "exclude")}
    if isinstance(own.get("package"), str):  # told by another job: some of them
        own["package"] = PACKAGES
    jobs = [dict(zip(own, row, strict=True)) for row in itertools.product(*own.values())] if own else []
    for row in matrix.get("include", ()):
        fits = [job for job in jobs if all(job.get(name, value) == value for name, value in row.items() if name in own)]
        for job in fits:
            job.update(row)
        jobs += [] if fits else [dict(row)]
    yield from jobs or [{}]


def nox_calls(path: Path) -> Iterator[list[str]]:
    """The arguments of every call of nox in a workflow, for every job of its matrix."""
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        lines = [line.strip() for step in job.get("steps", ()) for line in str(step.get("run", "")).splitlines()]
        for values in combinations(job.get("strategy", {}).get("matrix", {})):
            for line in lines:
                text = re.sub(r"\$\{\{ *matrix\.(\w+) *\}\}", lambda found: str(values[found[1]]), line)  # noqa: B023
                call = re.search(r"(?:^|&& )nox (-s .*)", text)
                if call and "${" not in call[1]:
                    yield shlex.split(call[1])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_workflows_call_are_sessions_with_options_that_these_take(path: Path, sessions: set[str]) -> None:
    text = (ROOT / "packages" / "aotkit" / "pyproject.toml").read_text()
    ((low, high),) = re.findall(r"torch>=2\.(\d+),<2\.(\d+)", text)
    for _, *words in nox_calls(path):
        names, options = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
        assert set(names) <= sessions, names
        if names == ["compat"]:
            version, *rest = options
            assert version in {f"2.{minor}" for minor in range(int(low), int(high))}
            compat.make_parser().parse_args(["run", *rest])
        elif names in (["system_tests"], ["emulated_kernels"], ["emulated_levels"]):
            assert options == ["--whole"]  # of `conftest.py`; these sessions give pytest what they are given
        else:
            assert not options, f"nobody looks at whether {names} takes {options}"


def test_the_weekly_run_has_every_torch_and_python_that_packages_claim() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "compat.yml").read_text())["jobs"]
    weekly = {(job["torch"], job["python"]) for job in combinations(jobs["all"]["strategy"]["matrix"])}
    claimed = {
        python
        for package in load_packages().values()
        for python in re.findall(r"Python :: (3\.\d+)", (package.path / "pyproject.toml").read_text())
    }
    assert {python for _, python in weekly} == claimed
    assert {torch for torch, _ in weekly} >= {"2.11", "2.15"} == set(jobs["ends"]["strategy"]["matrix"]["torch"])


def test_rows_that_are_included_add_to_jobs_or_are_jobs() -> None:
    matrix = {"torch": ["a", "b"], "python": ["1"], "include": [{"torch": "b", "python": "2"}, {"torch": "a", "k": 1}]}
    assert list(combinations(matrix)) == [
        {"torch": "a", "python": "1", "k": 1},
        {"torch": "b", "python": "1"},
        {"torch": "b", "python": "2"},
    ]


def test_the_ci_entry_runs_the_readme_s_test_command_and_then_system() -> None:
    script = ROOT / ".ci" / "run"
    text = script.read_text()
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert re.search(r"for session in test system; do", text)
    assert "pip install nox && nox -s test" in (ROOT / "README.md").read_text()


def test_every_pinned_version_is_exact() -> None:
    lines = (ROOT / "tools" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", pin) for pin in pins)
    assert "torch==2.13.0" in pins
    names = [pin.partition("==")[0].lower().replace("_", "-") for pin in pins]
    assert len(names) == len(set(names))
