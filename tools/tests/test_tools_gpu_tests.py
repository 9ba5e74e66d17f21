"""The GPU tests start on a machine that has little installed, and one file's device is not another's."""

import subprocess
import sys

import pytest

from tools import gpu_tests
from tools.bench import cudagraphs
from tools.workspace import ROOT

#: What a GPU machine without a network may lack, on top of what the packages need.
MISSING = ("nox", "hatchling", "fakeredis", "redis", "fsspec", "expecttest")

RUN_WITHOUT = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MISSING!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_tests_for_a_device_are_collected_where_only_the_sources_and_their_needs_are():
    files = map(str, gpu_tests.files_with_gpu_tests())
    command = [sys.executable, "-c", RUN_WITHOUT, *files, "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    env = gpu_tests.environment()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0 and "error" not in done.stdout.lower(), done.stdout[-4000:] + done.stderr[-2000:]


def test_each_file_with_such_a_test_is_run_in_a_process_of_its_own(monkeypatch, capsys):
    names = {path.name for path in gpu_tests.files_with_gpu_tests()}
    assert {"test_cudagraphs_gpu.py", "test_aotkit_triton.py", "test_inductor_lower_triton_graphs.py"} <= names
    commands = []

    def run(command, **options):
        commands.append(command[-1])
        return subprocess.CompletedProcess(command, len(commands) == 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_tests.main([]) == 1
    assert len(set(commands)) == len(names)
    assert capsys.readouterr().out.count("passed") == len(names) - 1


def test_what_is_run_keeps_the_bytecode_of_the_sources_as_an_installed_package_does(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import sys; print(sys.dont_write_bytecode)"
    env = gpu_tests.environment()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env).stdout == "False\n"


def test_a_file_that_hangs_ends(tmp_path):
    (tmp_path / "test_hangs.py").write_text(
        "import time, pytest\n@pytest.mark.gpu\ndef test_it(): pass\ntime.sleep(60)\n"
    )
    assert gpu_tests.main([str(tmp_path / "test_hangs.py"), "--seconds", "5"]) == 1


@pytest.mark.nightly("all GPU tests, which are collected in such a process, import the packages from there as well")
def test_the_benchmark_of_recordings_runs_from_the_sources_alone():
    code = """
import torch
from tools.bench.cudagraphs import compiled
model = torch.nn.Linear(2, 2)
assert torch.equal(compiled(model, "aotkit")(torch.ones(2, 2)), model(torch.ones(2, 2)))
"""
    command, env = [sys.executable, "-W", "ignore", "-c", code], gpu_tests.environment()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_benchmark_of_recordings_has_our_kernels_in_it():
    ours = cudagraphs.BACKENDS["aotkit"]
    assert ours is not None and ours["options"].get("lowering") != "none"
