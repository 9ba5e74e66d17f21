"""tlparse, torch's own tool, makes pages of our structured traces, with everything that we put there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

PROGRAM = """
import torch, aotkit

def block(x, w):
    return torch.nn.functional.gelu(x @ w + 1).softmax(-1)

w = torch.randn(16, 32, requires_grad=True)
compiled = torch.compile(block, backend="aotkit")
for size in (8, 5):
    compiled(torch.randn(size, 16), w).sum().backward()
aotkit.report(torch.sin, torch.randn(8), path="page.html", calls=0)
"""


def test_what_a_compile_made_has_its_pages(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AOTKIT_", "TORCH"))}
    env |= {"AOTKIT_CACHE_DIR": str(tmp_path / "cache"), "TORCH_TRACE": str(tmp_path / "trace")}
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=env, check=True, timeout=300)
    (log,) = (tmp_path / "trace").glob("*.log")
    command = [str(Path(sys.executable).with_name("tlparse")), str(log), "-o", "pages", "--no-browser"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert made.returncode == 0, made.stderr
    pages = [path.relative_to(tmp_path / "pages") for path in (tmp_path / "pages").rglob("*_*.*")]
    names = {(page.parent.name, re.sub(r"_\d+$", "", page.stem)) for page in pages}
    for direction in ("forward", "backward"):
        for what in ("lowered", "scheduled", "kernels", "plan", "report"):
            assert ("-_0_0_0", f"aotkit_graph0-{direction}-{what}") in names
        assert ("-_0_0_0", f"inductor_output_code_graph0-{direction}-graph") in names
        assert ("-_0_0_0", f"aot_{direction}_graph") in names
    for compile_id, what in (
        ("-_0_0_0", "aot_joint_graph"),
        ("-_0_0_0", "aotautograd_cache_miss"),
        ("-_0_1_0", "recompile_reasons"),
        ("-_-_-_-", "aotkit_report.html"),
    ):
        assert (compile_id, what) in names
    index = (tmp_path / "pages" / "index.html").read_text()
    assert "aotkit_graph0-forward-scheduled" in index and "inductor_output_code_graph0-backward-graph" in index
