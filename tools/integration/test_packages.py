"""The five architectures for inference as packages: equal to eager in a process that never imports Dynamo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aotkit
from tools.bench.models import MODELS, make_batch, make_model

RUN = """
import sys, torch
inputs, wanted = torch.load("values")
import aotkit
results = aotkit.load("package")(**inputs)
for name, want in wanted.items():
    assert torch.allclose(results[name], want, rtol=1e-4, atol=1e-4), name
assert not [name for name in sys.modules if name.startswith("torch._dynamo.")]
print("same")
"""


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_package_is_small_and_gives_eagers_results_without_the_frontend(name: str, tmp_path: Path) -> None:
    model, inputs = make_model(name).eval(), make_batch(name, quick=True)
    inputs.pop("labels", None)
    model.config.use_cache = False
    path = aotkit.aot_compile(model, (), tmp_path / "package", kwargs=inputs)
    with torch.no_grad():
        wanted = {k: v for k, v in model(**inputs).items() if isinstance(v, torch.Tensor)}
    assert wanted
    torch.save([inputs, wanted], tmp_path / "values")
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
    assert Path(path).stat().st_size <= sum(tensors.values()) + 5_000_000
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr
