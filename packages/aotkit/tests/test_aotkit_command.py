"""The command, and the cache as a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import aotkit
from aotkit.cli.main import main
from aotkit.reports import doctor
from aotkit_cache import open_cache


@pytest.fixture(autouse=True)
def _products_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")


def f(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def run(*shape: int) -> aotkit.Recorder:
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    call = torch.compile(f, backend=aotkit.make_backend(aotkit.Options(fallback="error"), recorder), dynamic=False)
    x = torch.linspace(0, 1, shape[0] * shape[1]).reshape(shape).clone()
    torch.testing.assert_close(call(x), f(x))
    return recorder


def command(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(arguments) == status
    said = capsys.readouterr()
    return said.out + said.err


@pytest.mark.covers("F7.30", "F7.18")
def test_the_cache_is_listed_explained_shipped_and_pruned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "begins with ''" in command(capsys, "cache", "why", status=1)
    run(4, 8)
    assert "is the only graph" in command(capsys, "cache", "why")
    recorder = run(4, 6)
    listed = command(capsys, "cache", "ls")
    assert listed.count(" inference    1 kernel\n") == 2 and " kernels\n" in listed
    assert "2 inference" in command(capsys, "cache", "stats")
    said = command(capsys, "cache", "why")
    assert "inputs[0]['shape'][1]: 8 -> 6" in said and "inputs[0]['stride'][0]: 8 -> 6" in said
    assert len(said.splitlines()) == 4  # nothing else differs
    newest = said[:12]
    assert said == command(capsys, "cache", "why", newest)

    secret = tmp_path / "secret"
    secret.write_text("a secret that both machines have\n")
    assert "wrote 4 entries" in command(capsys, "cache", "export", str(tmp_path / "all.bin"), "--key-file", str(secret))
    some = aotkit.save_cache(tmp_path / "some", recorder=recorder, signing_key=b"sixteen secret bytes")
    assert len(some.keys) == 2 and newest in {key[:12] for key in some.keys}

    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path / "other machine"))
    refused = command(capsys, "cache", "import", str(tmp_path / "all.bin"), status=1)
    assert "read 0 entries; 4 left out: the entry was signed with another signing key" in refused
    assert "cache.loaded" not in [name for name, _ in run(3, 3).events]
    assert "read 4 entries" in command(capsys, "cache", "import", str(tmp_path / "all.bin"), "--key-file", str(secret))
    assert "cache.loaded" in [name for name, _ in run(4, 6).events]
    assert len(aotkit.load_cache(tmp_path / "some", signing_key=b"sixteen secret bytes").keys) == 2

    assert "deleted 0 entries" in command(capsys, "cache", "prune", "--unused-days", "1")
    assert "deleted 6 entries" in command(capsys, "cache", "prune")
    assert open_cache().entries() == []


@pytest.mark.covers("F8.13")
def test_the_doctor_names_versions_processor_libraries_and_problems(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = doctor.diagnose()
    facts = dict(found.facts)
    assert torch.__version__ in facts["torch"] and "bit vectors" in facts["processor"]
    assert "inductor-lower" in facts["its parts"] and "missing" not in facts["its parts"]
    assert facts["cache"] == str(tmp_path / "cache") and facts["entries"].startswith("0,")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path / "file"))
    said = command(capsys, "doctor", status=1)
    assert "problem: nothing is kept between processes" in said and "is not a directory" in said


def test_the_doctor_says_why_kernels_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(doctor.diagnose().facts)["threads"] == "those of torch's OpenMP runtime"
    monkeypatch.setattr(torch.__config__, "parallel_info", lambda: "ATen parallel backend: native thread pool\n")
    found = doctor.diagnose()
    assert dict(found.facts)["threads"] == "one, see below"
    assert any("use one thread: this torch runs its operators on another pool" in told for told in found.problems)


def test_a_function_and_a_package_are_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "example_target.py").write_text(
        "import torch\ndef make():\n    return (lambda x: x.sin() + 1), [torch.ones(3, 4)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    said = command(capsys, "explain", "example_target:make")
    assert "1 compiled graph, 1 kernel\n" in said
    path = aotkit.aot_compile(torch.nn.Linear(3, 2), (torch.ones(4, 3),), tmp_path / "linear")
    said = command(capsys, "explain", path)
    assert "argument input: torch.float32 [4, 3]" in said and "2 weights" in said and "device: cpu" in said
    said = command(capsys, "bench", "example_target:make", "--seconds", "0.1")
    assert "first call" in said and "1.00 x" in said
    said = command(capsys, "profile", "example_target:make", "--calls", "2")
    assert "GFLOP/s" in said and "# sin add" in said
    assert "neither a file nor" in command(capsys, "explain", "nothing", status=1)


def test_a_wrong_call_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ([], ["cache"], ["cache", "burn"]):
        with pytest.raises(SystemExit) as left:
            main(wrong)
        assert left.value.code == 2
        assert "usage: aotkit" in capsys.readouterr().err


def test_the_runner_is_built_where_it_can_run_and_says_what_the_compiler_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built and used in the system tests."""
    from aotkit.cli import runner

    with pytest.raises(RuntimeError, match="there is no compiler 'no-such-compiler'; name one of C"):
        runner.build_runner(tmp_path, "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"^false -std=c\+\+20 .* failed:"):
        runner.build_runner(tmp_path, "false")
    monkeypatch.setattr("platform.machine", lambda: "mips")
    with pytest.raises(RuntimeError, match="on Linux on x86-64 processors only"):
        runner.build_runner(tmp_path)
