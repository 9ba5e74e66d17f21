"""Of a test marked `sample` a part of the parameters runs, all with `--whole`; other tests are whole."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import pytest

from tools.workspace import ROOT

PROGRAM = """
import pytest

@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(5))
def test_drawn(seed): pass

@pytest.mark.parametrize("seed", range(3))
def test_table(seed): pass
"""


@pytest.mark.parametrize(("options", "passed"), [([], 5), (["--whole"], 8), (["--whole", "-m", "sample"], 5)], ids=str)
def test_the_first_parameters_run(options: list[str], passed: int) -> None:
    file = ROOT / "build" / f"test_drawn_{passed}_{len(options)}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(PROGRAM)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), *options]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    finally:
        file.unlink()
    assert f"{passed} passed" in done.stdout, done.stdout


PRODUCT = """
import pytest

@pytest.mark.sample(ways={ways})
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize(("b", "with_b"), [(0, "x"), (1, "y"), (2, "z")], ids=str)
@pytest.mark.parametrize("c", [0, 1])
def test_product(a, b, with_b, c):
    print("ran", a, b, c)
"""


@pytest.mark.parametrize(("ways", "most"), [(1, 4), (2, 15)])
def test_of_a_product_each_value_or_each_pair_of_values_occurs_in_some_case(ways: int, most: int) -> None:
    file = ROOT / "build" / f"test_product_{ways}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(PRODUCT.format(ways=ways))
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(file)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    finally:
        file.unlink()
    ran = [tuple(map(int, case)) for case in re.findall(r"ran (\d) (\d) (\d)", done.stdout)]
    assert len(set(ran)) == len(ran) <= most, done.stdout
    for axes in itertools.combinations(range(3), ways):
        values = itertools.product(*(range((4, 3, 2)[axis]) for axis in axes))
        assert {tuple(case[axis] for axis in axes) for case in ran} == set(values)
