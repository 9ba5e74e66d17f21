"""What came of tests, by pytest's XML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.compat_counts import Counts, count, count_by_file

REPORT = """<testsuites><testsuite>
<testcase classname="packages.cache.tests.test_cache_a" name="one"/>
<testcase classname="packages.cache.tests.test_cache_a.Group" name="two"><failure/></testcase>
<testcase classname="packages.cache.tests.test_cache_a_b" name="three">
  <skipped type="pytest.skip" message="torch before 2.12 makes no fakes of these">a.py:1: the same</skipped></testcase>
<testcase classname="packages.cache.tests.test_cache_a_b" name="four"><skipped message="no AMX"/></testcase>
<testcase classname="" name="packages.cache.tests.test_cache_c"><error/></testcase>
</testsuite></testsuites>"""
PATHS = [f"packages/cache/tests/test_cache_{name}.py" for name in ("a", "a_b", "c", "d")]


def test_tests_are_counted_by_file_and_what_can_not_be_collected_has_failed() -> None:
    by_file = [Counts(1, 1, 0, 0), Counts(0, 0, 1, 1), Counts(0, 1, 0, 0), Counts(0, 0, 0, 0)]
    assert list(count_by_file(REPORT, PATHS).values()) == by_file
    with pytest.raises(ValueError, match="not enough values"):
        count_by_file(REPORT, PATHS[:2])


def test_a_run_is_counted_as_a_whole_and_one_without_a_test_is_a_failure() -> None:
    assert count(REPORT) == Counts(1, 2, 1, 1)
    assert count("<testsuites><testsuite tests='0'/></testsuites>") == count("") == Counts(0, 1, 0, 0)


PROGRAM = """
import pytest
old = pytest.mark.skipif(True, reason="refused before torch 2.13, see the next test")
no_device = pytest.mark.skipif(True, reason="no device")

@pytest.fixture
def late():
    yield
    raise RuntimeError

def test_passes(): pass
@old
def test_old(): pass
@pytest.mark.parametrize("n", [1, 2, 3])
@no_device
def test_device(n): pass
def test_fails(): raise AssertionError("torch before 2.12")
def test_fails_at_the_end(late): pass
"""


def test_what_pytest_writes_is_read(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    assert count((tmp_path / "report.xml").read_text()) == Counts(1, 2, 1, 3)
