"""The table of versions, and that every difference between versions of torch is a function with a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools import compat
from tools.compat import Result, keep, page, read_results
from tools.compat_counts import REFUSED
from tools.workspace import ROOT, load_packages

MODULES = sorted((ROOT / "packages").glob("*/src/*/_torch_compat.py"))
_TELLS_VERSIONS = re.compile(r"(?:before|from) torch 2\.\d\d|from torch 2\.\d\d on", re.IGNORECASE)


def differences(source: str) -> set[str]:
    """The functions of a module whose docstring says from or before which torch they are needed."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if _TELLS_VERSIONS.search(ast.get_docstring(node) or "")}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.parts[-4])
def test_every_difference_has_a_test_that_says_which_versions_need_it(module: Path) -> None:
    tests = ROOT / "packages" / module.parts[-4] / "tests"
    (path,) = tests.glob("test_*_torch_compat.py")
    text = path.read_text()
    assert re.search(r"RELEASE (?:>=|<) \(2, \d\d\)", text)
    assert {
        name for name in differences(module.read_text()) if f'"{name}"' not in text and f".{name}(" not in text
    } == set()


def test_no_other_module_asks_for_the_version_of_torch() -> None:
    """But where an unsupported one is named."""
    asking = re.compile(r"torch\.__version__\.(?:split|startswith)|torch\.torch_version")
    found = {
        path.relative_to(ROOT / "packages").as_posix()
        for path in (ROOT / "packages").glob("*/src/**/*.py")
        if path.name != "_torch_compat.py" and asking.search(path.read_text())
    }
    assert found == {"aotkit/src/aotkit/reports/doctor.py"}


def skipped_for_torch(source: str, names: frozenset[str]) -> dict[int, str]:
    """By line: what each `skipif` says whose condition asks for a version of torch, or for one of the differences."""
    found = {}
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.skipif":
            asked = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)}
            reason = next((keyword.value for keyword in call.keywords if keyword.arg == "reason"), None)
            if asked & (names | {"RELEASE"}) or "torch.autograd.graph" in ast.unparse(call.args[0]):
                found[call.lineno] = ast.literal_eval(reason) if reason is not None else ""
    return found


def test_tests_that_are_left_out_for_the_version_of_torch_name_it() -> None:
    """By that the table tells what a torch refuses from what a machine lacks."""
    names = frozenset(name for module in MODULES for name in differences(module.read_text()))
    told = {
        f"{path.name}:{line}": reason
        for path in (ROOT / "packages").glob("*/tests/test_*.py")
        for line, reason in skipped_for_torch(path.read_text(), names).items()
    }
    assert len(told) >= 7
    assert {place: reason for place, reason in told.items() if not REFUSED.search(reason)} == {}


def test_a_function_that_tells_versions_is_found() -> None:
    found = differences(
        'def f():\n    "Before torch 2.12 not."\ndef g():\n    "From torch 2.13 on."\ndef h():\n    "No."\n'
    )
    assert found == {"f", "g"}


RESULT = Result("2.11", "3.11", "cache", 5, 0, 2, 3, False)


def test_a_later_result_replaces_the_one_of_the_same_versions_and_suite(tmp_path: Path) -> None:
    path = tmp_path / "versions.toml"
    keep([RESULT, Result("2.15", "3.12", "cache", 7, 1, 0, 0, True)], path)
    keep([Result("2.11", "3.11", "cache", 6, 0, 0, 0, False)], path)
    assert [(row.torch, row.passed) for row in read_results(path)] == [("2.11", 6), ("2.15", 7)]
    assert RESULT.cell() == "5, 2 refused, 3 elsewhere"
    text = page(read_results(path))
    assert "| cache | 6 | 7, **1 failed** (part) |" in text and "| models | not run | not run |" in text


def test_no_suite_in_the_table_has_failures() -> None:
    assert [(row.torch, row.python, row.suite) for row in read_results() if row.failed] == []


@pytest.mark.parametrize("name", load_packages())
def test_nothing_is_claimed_that_the_table_does_not_show(name: str) -> None:
    """Each torch and each Python that a package names has a column in which the package's suite passed; `nox -s test`
    runs everything with those that are pinned."""
    pinned = re.findall(r"^torch==(2\.\d+)", (ROOT / "tools" / "constraints.txt").read_text(), re.MULTILINE)
    shown = {(row.torch, row.python) for row in read_results() if row.suite == name and row.passed}
    shown |= {(torch, "3.11") for torch in pinned}
    text = (ROOT / "packages" / name / "pyproject.toml").read_text()
    ((low, high),) = re.findall(r"torch>=2\.(\d+),<2\.(\d+)", text)
    assert {f"2.{minor}" for minor in range(int(low), int(high))} <= {torch for torch, _ in shown}
    assert set(re.findall(r"Python :: (3\.\d+)", text)) == {python for _, python in shown}


def test_parts_name_files_that_there_are() -> None:
    for suite in compat.PARTS:
        assert all((ROOT / path).exists() for path in compat.paths_of(suite, everything=False)), suite
