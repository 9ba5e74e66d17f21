"""Of a test marked `sample` or thinned a part of the parameters runs, all with `--whole`; other tests are whole."""

from __future__ import annotations

import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import times_of_tests
from tools.workspace import ROOT

Cases = dict[bool, dict[str, list[tuple[int, ...]]]]

PROGRAM = """
import pytest

@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(5))
def test_drawn(seed): print("ran drawn", seed)

@pytest.mark.parametrize("seed", range(3))
def test_table(seed): print("ran table", seed)

@pytest.mark.nightly("the others show it")
def test_long(): print("ran long")

@pytest.mark.nightly("the others show it")
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(2))
def test_long_drawn(seed): print("ran long-drawn", seed)
"""

PRODUCT = """
import pytest

@pytest.mark.sample(ways={ways})
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize(("b", "with_b"), [(0, "x"), (1, "y"), (2, "z")], ids=str)
@pytest.mark.parametrize("c", [0, 1])
def test_product_{ways}(a, b, with_b, c):
    print("ran product-{ways}", a, b, c)
"""


@pytest.fixture(scope="module")
def ran(forked: Any) -> Cases:
    """For the tests that run at each push and for those of the session `sweeps`: their cases."""
    file = ROOT / "build" / f"test_samples_of_tests_{os.getpid()}.py"  # another worker has one, too
    file.parent.mkdir(exist_ok=True)
    file.write_text(PROGRAM + PRODUCT.format(ways=1) + PRODUCT.format(ways=2))
    found: Cases = {}
    try:
        for whole in (False, True):
            options = ["--whole", "-m", "sample or nightly"] * whole
            command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(file), *options]
            done = forked(command, cwd=ROOT)
            found[whole] = {}
            for name, case in re.findall(r"ran ([\w-]+)([ \d]*)", done.stdout):
                found[whole].setdefault(name, []).append(tuple(map(int, case.split())))
    finally:
        file.unlink()
    return found


def test_the_first_parameters_run_and_tests_without_a_mark_whole(ran: Cases) -> None:
    assert ran[False]["drawn"] == [(0,), (1,)] and ran[False]["table"] == [(0,), (1,), (2,)]


def test_sweeps_run_what_is_left_out_at_a_push(ran: Cases) -> None:
    assert {name: len(cases) for name, cases in ran[True].items()} == {
        "drawn": 5, "long": 1, "long-drawn": 2, "product-1": 24, "product-2": 24
    }  # fmt: skip
    assert "long" not in ran[False] and "long-drawn" not in ran[False]


def test_sweeps_are_run_with_these_options_and_in_all_folders_of_tests() -> None:
    (session,) = re.findall(r"^def sweeps\(.*?(?=^@)", (ROOT / "noxfile.py").read_text(), re.MULTILINE | re.DOTALL)
    assert "(sample or nightly) and not gpu and not system" in session and session.count('"--whole"') == 3
    assert all(each in session for each in ("packages/{name}/tests", '"tools/tests"', '"tools/integration"', "*whole"))


@pytest.mark.parametrize(("ways", "most"), [(1, 4), (2, 15)])
def test_of_a_product_each_value_or_each_pair_of_values_occurs_in_some_case(ways: int, most: int, ran: Cases) -> None:
    cases = ran[False][f"product-{ways}"]
    assert len(set(cases)) == len(cases) <= most
    for axes in itertools.combinations(range(3), ways):
        values = itertools.product(*(range((4, 3, 2)[axis]) for axis in axes))
        assert {tuple(case[axis] for axis in axes) for case in cases} == set(values)


def test_long_functions_keep_one_or_two_parameters() -> None:
    lines = [f"{seconds}\ta.py::test_{name}[{n}]" for name, seconds, count in TIMES for n in range(count)]
    found = {"a.py::test_few": 2, "a.py::test_long": 4, "a.py::test_longest": 8, "a.py::test_cpu_kinds": 4}
    assert times_of_tests.thinned([*lines, "9\ta.py::test_alone"]) == found


TIMES = [
    *(("long", 0.1, 9), ("longest", 1, 40), ("short", 0.02, 9), ("few", 7, 2)),
    *(("cpu_kinds", 7, 9), ("known_issues", 7, 9)),
]


def test_times_of_a_run_become_a_list_that_keeps_what_was_not_measured(tmp_path: Path, forked: Any) -> None:
    file, times, made = ROOT / "build" / "test_samples_of_times.py", tmp_path / "times", tmp_path / "list"
    file.parent.mkdir(exist_ok=True)
    file.write_text(WORK)
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.times_of_tests"]
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}  # part of the name
        forked([*command, "--times", str(times), str(file)], cwd=ROOT, env=env, check=True)
    finally:
        file.unlink()
    assert [line.split("[")[0].split("::")[1] for line in times.read_text().splitlines()] == ["test_work"] * 7
    name = "build/test_samples_of_times.py::test_work"
    for known, expected in (("", 7), (f"8 {name}\n", 8)):  # thinned already: what was measured is an eighth of it
        made.write_text(f"6 other.py::test_other\n{known}")
        assert times_of_tests.main([str(times), "--list", str(made)]) == 0
        assert made.read_text() == f"{expected} {name}\n6 other.py::test_other\n"


WORK = """
import subprocess, sys, time
import pytest

@pytest.mark.parametrize("seed", range(7))
def test_work(seed):
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    code = "import time\\nwhile time.process_time() < 0.1: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
"""


def test_every_function_of_the_list_is_there() -> None:
    text = dict[str, str]()
    for line in times_of_tests.THINNED.read_text(encoding="utf-8").splitlines():
        every, _, name = line.partition(" ")
        file, function = name.split("::")
        text.setdefault(file, (ROOT / file).read_text(encoding="utf-8"))
        assert 2 <= int(every) <= times_of_tests.MOST and f"def {function}(" in text[file], name


def test_of_a_function_of_the_list_every_so_many_th_parameter_is_collected(forked: Any) -> None:
    name = "packages/functionalize/tests/test_functionalize_collect.py::test_results_are_what_eager_mode_returns"
    assert name in times_of_tests.THINNED.read_text(encoding="utf-8")
    counts = []
    for options in ([], ["--whole"], ["--whole", "-m", "sample"]):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", name, *options]
        done = forked(command, cwd=ROOT, check=True)
        counts.append(done.stdout.count(f"{name}["))
    few, whole, marked = counts
    assert 0 < few < whole == marked
