"""The name "aotkit" works with the entry point, and after a plain import where none is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

WITHOUT_ENTRY_POINTS = """
import importlib.metadata
found = importlib.metadata.entry_points
def without(**kw):  # all groups at once are asked for by triton
    every = found(**kw)
    return importlib.metadata.EntryPoints(p for p in every if p.name != "aotkit") if kw else every
importlib.metadata.entry_points = without
"""

COMPILE = """
import torch
compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="aotkit", options={"fallback": "error"})
x = torch.randn(5)
torch.testing.assert_close(compiled(x), torch.relu(x) + 1)
print("compiled")
"""


def run(code: str, *path: Path) -> str:
    search = [str(p) for p in path] + [p for p in sys.path if p]
    env = {**os.environ, "AOTKIT_CACHE_DIR": str(path[0] / "cache"), "PYTHONPATH": os.pathsep.join(search)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.covers("F8.1")
def test_plain_import_registers_the_backend_where_no_entry_point_is_installed(tmp_path: Path) -> None:
    assert "compiled" in run(WITHOUT_ENTRY_POINTS + "import aotkit" + COMPILE, tmp_path)


def test_import_beside_the_entry_point_registers_nothing_twice(tmp_path: Path) -> None:
    assert "compiled" in run("import aotkit, importlib; importlib.reload(aotkit)" + COMPILE, tmp_path)


@pytest.mark.covers("F8.1")
def test_without_an_import_the_entry_point_is_enough(tmp_path: Path) -> None:
    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    target = declared["project"]["entry-points"]["torch_dynamo_backends"]["aotkit"]
    installed = tmp_path / "aotkit_as_installed-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: aotkit-as-installed\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[torch_dynamo_backends]\naotkit = {target}\n")
    assert "compiled" in run(COMPILE, tmp_path)
