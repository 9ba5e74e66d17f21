"""Of a test marked `sample` the first parameters run, all with `--whole`; other tests are whole."""

from __future__ import annotations

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
