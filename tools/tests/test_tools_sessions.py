"""The nox sessions, the CI entry and the workflows agree with each other and with the documentation."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest

from tools.workspace import PACKAGES, ROOT

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
