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
"""


# Each program in a process of its own, of one that has imported what a compile imports of torch, and nothing of ours.
OF_TORCH = (
    *("torch._dynamo.backends.inductor", "torch._functorch._aot_autograd.graph_compile", "torch._inductor.sizevars"),
    *("torch._dynamo.precompile_context", "torch._dynamo.repro.after_dynamo", "torch.export._trace"),
    *("torch._subclasses.schema_check_mode", "torch._dynamo.dce_extra_outputs"),
)
EACH_BY_ITSELF = """
import contextlib, importlib, os, sys, traceback
import torch, torch._dynamo, llvmlite.binding

for name in sys.argv.pop(1).split(","):
    with contextlib.suppress(ImportError):  # another torch does not have it
        importlib.import_module(name)
assert not [name for name in sys.modules if name.startswith("aotkit")]
for folder in sys.argv[1:]:
    process = os.fork()
    if process == 0:
        os.environ["AOTKIT_CACHE_DIR"] = f"{folder}/cache"
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            exec(open(f"{folder}/program").read(), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=open(f"{folder}/failure", "w"))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(process, 0)
"""

PROGRAMS = {
    "no entry point": WITHOUT_ENTRY_POINTS + "import aotkit" + COMPILE,
    "both": "import aotkit, importlib; importlib.reload(aotkit)" + COMPILE,
    "no import": COMPILE,
    "lazy": WITHOUT_ENTRY_POINTS
    + """
import sys, torch, aotkit
assert not [name for name in sys.modules if name.startswith("aotkit_") or name == "aotkit.backend"]
assert "aotkit" in torch._dynamo.list_backends()
""",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each program did: "compiled", or how it failed."""
    folders = {}
    for name, program in PROGRAMS.items():
        folders[name] = tmp_path_factory.mktemp("program")
        (folders[name] / "program").write_text(program + f'open("{folders[name]}/done", "w").write("compiled")')
    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    target = declared["project"]["entry-points"]["torch_dynamo_backends"]["aotkit"]
    installed = folders["no import"] / "aotkit_as_installed-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: aotkit-as-installed\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[torch_dynamo_backends]\naotkit = {target}\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", EACH_BY_ITSELF, ",".join(OF_TORCH), *map(str, folders.values())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    results = {name: [folder / "failure", folder / "done"] for name, folder in folders.items()}
    return {name: "".join(f.read_text() for f in files if f.exists()) for name, files in results.items()}


@pytest.mark.covers("F8.1")
def test_plain_import_registers_the_backend_where_no_entry_point_is_installed(outcomes: dict[str, str]) -> None:
    assert outcomes["no entry point"] == "compiled"


def test_import_beside_the_entry_point_registers_nothing_twice(outcomes: dict[str, str]) -> None:
    assert outcomes["both"] == "compiled"


@pytest.mark.covers("F8.1")
def test_without_an_import_the_entry_point_is_enough(outcomes: dict[str, str]) -> None:
    assert outcomes["no import"] == "compiled"


def test_an_import_beside_dynamo_imports_no_backend_yet(outcomes: dict[str, str]) -> None:
    assert outcomes["lazy"] == "compiled"
