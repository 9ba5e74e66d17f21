"""Whole suites in several runs: what counts, and for which code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import compat_files
from tools.compat_counts import Counts
from tools.compat_files import read_kept, run_rest

PATHS = [f"packages/cache/tests/test_cache_{name}.py" for name in ("a", "a_b", "c", "d")]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of the packages that the suite of cache needs, each with a source file and four files of tests."""
    for name in ("cache", "functionalize"):
        (tmp_path / "packages" / name / "src").mkdir(parents=True)
        (tmp_path / "packages" / name / "src" / "module.py").write_text("value = 1\n")
        (tmp_path / "packages" / name / "tests").mkdir()
    for path in PATHS:
        (tmp_path / path).write_text("")
    (tmp_path / "conftest.py").write_text("")
    monkeypatch.setattr(compat_files, "ROOT", tmp_path)
    monkeypatch.setattr(compat_files, "with_siblings", lambda *_: ("cache",))
    monkeypatch.setattr(compat_files, "AT_ONCE", 2)
    return tmp_path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The files of each run of pytest; the test of `c` fails at first."""
    runs: list[list[str]] = []

    def run_files(paths: Sequence[str]) -> dict[str, Counts]:
        runs.append(list(paths))
        first = sum(PATHS[2] in run for run in runs) == 1
        return {path: Counts(2, int(path == PATHS[2] and first), 1, 3) for path in paths}

    monkeypatch.setattr(compat_files, "run_files", run_files)
    return runs


def test_a_run_that_was_cut_off_goes_on_with_the_files_that_are_left(
    root: Path, ran: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, run_files = root / "kept.toml", compat_files.run_files

    def cut_off(paths: Sequence[str]) -> dict[str, Counts]:
        if ran:
            raise KeyboardInterrupt
        return run_files(paths)

    monkeypatch.setattr(compat_files, "run_files", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run_rest("cache", kept)
    assert [result.path for result in read_kept(kept)] == PATHS[:2]
    monkeypatch.setattr(compat_files, "run_files", run_files)
    assert run_rest("cache", kept) == (8, 1, 4, 12)
    assert ran == [PATHS[:2], PATHS[2:]]
    assert run_rest("cache", kept) == (8, 0, 4, 12)  # what failed runs again, and nothing else
    assert run_rest("cache", kept) == (8, 0, 4, 12)
    assert ran[2:] == [PATHS[2:3]]


def test_a_result_counts_for_the_code_that_it_was_had_with(root: Path, ran: list[list[str]]) -> None:
    kept = root / "kept.toml"
    run_rest("cache", kept)
    run_rest("cache", kept)
    ran.clear()
    (root / PATHS[1]).write_text("# another test\n")
    run_rest("cache", kept)
    assert ran == [PATHS[1:2]]
    (root / "packages" / "functionalize" / "src" / "module.py").write_text("value = 2\n")  # which cache does not need
    run_rest("cache", kept)
    assert ran == [PATHS[1:2]]
    for changed in ("packages/cache/src/module.py", "packages/cache/tests/helper.py", "conftest.py"):
        ran.clear()
        (root / changed).write_text("value = 3\n")
        run_rest("cache", kept)
        assert [path for run in ran for path in run] == PATHS, changed


def test_code_that_is_edited_while_its_tests_run_has_no_result(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def edit(paths: Sequence[str]) -> dict[str, Counts]:
        (root / "packages" / "cache" / "src" / "module.py").write_text("value = 4\n")
        return dict.fromkeys(paths, Counts(1, 0, 0, 0))

    monkeypatch.setattr(compat_files, "run_files", edit)
    with pytest.raises(RuntimeError, match="cache was edited while its tests ran"):
        run_rest("cache", root / "kept.toml")
    assert read_kept(root / "kept.toml") == []
