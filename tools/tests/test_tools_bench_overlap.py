"""The bench of overlap: what it simulates is what it measures, within what it asked for."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")


@pytest.mark.nightly("tests of aotkit and partition measure what peaks are; this is about the bench's own table")
def test_peaks_are_within_the_bound_and_as_simulated() -> None:
    small = ["--rows", "256", "--width", "512", "--layers", "4"]  # what is smaller is in an arena that stays
    command = [sys.executable, "-m", "tools.bench.overlap", *small]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    times = dict(re.findall(r"^  (\S.*?)  +([0-9.]+)$", shown, re.MULTILINE))
    assert float(times["eager"]) > float(times["computation"]) > 0, shown
    rows = [line.split() for line in shown.splitlines() if re.match(r"  (None|[0-9.]+) ", line)]
    assert [row[0] for row in rows] == ["None", "0.0", "0.1", "0.25", "10.0"], shown
    for _, asked, simulated, measured, _ in rows:
        assert float(measured) <= float(asked) + 0.01, shown
        assert float(simulated) == pytest.approx(float(measured), rel=0.05, abs=0.01), shown
