"""No C or C++ compiler is started: the core of the stack runs where whatever is called like one writes that down."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cpp", "ld", "as", "make", "ninja", "cmake", "nvcc", "icpx")

CORE = """
import torch, aotkit

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(24), torch.nn.Linear(24, 48), torch.nn.Linear(48, 24)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))).softmax(-1)

torch.manual_seed(0)
model = Block()
compiled = torch.compile(model, backend="aotkit", dynamic=True, options={"fallback": "error"})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
step = torch.compile(optimizer.step, backend="aotkit", options={"fallback": "error"})
for rows in (5, 9):
    x = torch.randn(rows, 24)
    result = compiled(x)
    torch.testing.assert_close(result, model(x))
    result.square().mean().backward()
    step()
with torch.no_grad():
    torch.testing.assert_close(compiled(x), model(x))
print("ok")
"""


@pytest.mark.covers("F8.7")
def test_training_inference_and_an_optimizer_step_start_no_compiler(tmp_path: Path, warm_python: Any) -> None:
    called = tmp_path / "called"
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in COMPILERS:
        (tools / name).write_text(f'#!/bin/sh\necho "$0 $@" >> {called}\nexit 1\n')
        (tools / name).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "CUDA_HOME", "LD")}
    env |= {"PATH": str(tools), "AOTKIT_CACHE_DIR": str(tmp_path / "cache")}
    proof = subprocess.run(["gcc", "--version"], env=env, check=False, timeout=60)
    assert proof.returncode == 1 and called.read_text().startswith(str(tools / "gcc"))
    called.unlink()
    script = tmp_path / "core.py"
    script.write_text(CORE)
    done = warm_python.run([str(script)], env=env, only_torch=True)  # our imports start none, either
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stderr[-2000:]
    assert not called.exists(), called.read_text()
