"""The five architectures for inference as packages: equal to eager in a process that never imports Dynamo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import aotkit

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES, make_batch, make_model

RUN = """
import sys, torch
import aotkit
for name in sys.argv[1:]:
    inputs, wanted = torch.load(f"{name}/values")
    results = aotkit.load(f"{name}/package")(**inputs)
    for key, want in wanted.items():
        torch.testing.assert_close(results[key], want, rtol=1e-4, atol=1e-4)
    print(name)
assert not [name for name in sys.modules if name.startswith("torch._dynamo.")]
"""


def test_packages_are_small_and_give_eagers_results_without_dynamo(tmp_path: Path) -> None:
    for name in ARCHITECTURES:
        folder = tmp_path / name
        folder.mkdir()
        model, inputs = make_model(name).eval(), make_batch(name, 2)
        inputs = {key: value for key, value in inputs.items() if key not in ("labels", "attention_mask")}
        model.config.use_cache = False
        path = aotkit.aot_compile(model, (), folder / "package", kwargs=inputs)
        with torch.no_grad():
            wanted = {k: v for k, v in model(**inputs).items() if isinstance(v, torch.Tensor)}
        assert wanted
        torch.save([inputs, wanted], folder / "values")
        tensors = {t.data_ptr(): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
        assert Path(path).stat().st_size <= sum(tensors.values()) + 1_000_000
    command = [sys.executable, "-c", RUN, *ARCHITECTURES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.split()) == (0, list(ARCHITECTURES)), done.stderr
