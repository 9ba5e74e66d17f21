"""The program of the page on several machines runs with two processes, as `torchrun` starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.workspace import ROOT

PAGE = ROOT / "docs" / "howto" / "distributed.md"
PROGRAM = ROOT / "docs" / "howto" / "several_machines.py"


@pytest.mark.nightly("two processes on one machine are tested by the session `integration`")
def test_the_program_of_the_page_trains_with_two_processes_as_in_eager_mode(tmp_path: Path) -> None:
    assert "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint" in PAGE.read_text()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "AOTKIT_CACHE_DIR": str(tmp_path), "AOTKIT_VERIFY": "0"}
    done = subprocess.run([*launcher, str(PROGRAM)], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(re.findall(r"rank (\d) of 2: as in eager mode", done.stdout)) == ["0", "1"], done.stdout
