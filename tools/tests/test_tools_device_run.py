"""The run on a device: its dry run is whole, it can be taken up again, and its report names what is to be fixed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import device_flex, device_items, device_run
from tools.workspace import ROOT


def dry_run(out: Path, *options: str) -> tuple[int, str, str]:
    """As a script, with nothing on the path: it is on its own on the machine with the device, too."""
    command = [sys.executable, str(ROOT / "tools" / "device_run.py"), str(out), "--dry-run", *options]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=out, env=env, capture_output=True, text=True, timeout=1200, check=False)
    text = (out / "report.md").read_text() if (out / "report.md").exists() else ""
    return done.returncode, text, text + done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.nightly("a few of its items run as it runs them, and all that leave figures in one process")
def test_the_dry_run_does_everything_and_finds_nothing_to_fix(tmp_path: Path) -> None:
    status, text, said = dry_run(tmp_path)
    assert status == 0, said
    assert "Nothing." in text and "failed" not in text and "| left |" not in text


def test_the_dry_run_runs_items_with_and_without_figures_in_processes_of_their_own(tmp_path: Path) -> None:
    status, text, said = dry_run(tmp_path, "--only", "^(versions|test_cudagraphs_gpu)$")
    assert status == 1 and "Nothing." in text and "failed" not in text, said  # others are left
    assert "| versions | ok |" in text and text.count("| test_cudagraphs_gpu | ok |") == 2, said


@pytest.mark.sample(2)  # `test_the_dry_run_runs_items` and the benches' own tests train models
@pytest.mark.parametrize(
    "name", sorted((item.name for item in device_run.items(dry_run=True) if item.figures), key=len)
)
def test_an_item_of_the_dry_run_gives_figures(name: str) -> None:
    figures = device_items.run_item(name, "cpu")
    assert json.loads(json.dumps(figures)) == figures
    if name.startswith("model"):
        assert figures["error"] < 1e-5 and figures["milliseconds"] > 0
    if name.startswith("flex"):
        assert figures["error"] < 1e-2 and figures["milliseconds"] > 0


def test_items_name_what_there_is() -> None:
    items = list(device_run.items(dry_run=False))
    assert {item.stage for item in items} >= {"machine", "tests", "kernels", "models"}
    assert len({item.file for item in items}) == len(items)
    paths = [item.name.split("/") for item in items if item.figures]
    assert {path[0] for path in paths} == set(device_items.ITEMS)
    assert {path[1] for path in paths if path[0] == "model"} == set(device_items.MODELS)
    assert {path[3] for path in paths if path[0] == "model"} == set(device_items.BACKENDS)
    assert [path[1] for path in paths if path[0] == "flex"][::2] == list(device_flex.CASES)
    assert list(dict.fromkeys(item.stage for item in items))[1] == "flex", "what has not run yet comes first"


FEW = (
    device_run.Item("machine", "good", (sys.executable, "-c", "print(1); print('{\"n\": 2.0}')"), True),
    device_run.Item("machine", "bad", (sys.executable, "-c", "raise SystemExit('broken')"), False),
    device_run.Item("machine", "slow", (sys.executable, "-c", "import time; time.sleep(60)"), False, seconds=1),
)


def test_a_run_is_taken_up_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_run, "items", lambda dry_run: iter(FEW))
    assert device_run.run_stages(tmp_path, ("machine",), -1, False, True) == list(FEW)  # no time for any
    assert device_run.run_stages(tmp_path, ("machine",), 60, False, True) == []
    outcomes = {item.name: json.loads((tmp_path / item.file).read_text()) for item in FEW}
    assert [outcomes[name]["status"] for name in ("good", "bad", "slow")] == [0, 1, 124]
    assert outcomes["good"]["figures"] == {"n": 2.0} and "broken" in outcomes["bad"]["output"]
    ran = []
    monkeypatch.setattr(device_run, "run", lambda item, _out: ran.append(item.name) or outcomes[item.name])
    device_run.run_stages(tmp_path, ("machine",), 60, False, True)
    assert ran == ["bad", "slow"]
    text, complete = device_run.report(tmp_path, ("machine",), True)
    assert not complete and "machine bad failed (1)" in text and "| good | ok |" in text and "n 2" in text


def test_both_sides_compile_in_as_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    ours = device_items.settings_of("aotkit graphs", "cuda")
    assert ours == {"backend": "aotkit", "options": {"fallback": "error", "cudagraphs": True, "compile_workers": 3}}
    assert device_items.settings_of("eager", "cuda") is None and device_items.settings_of("inductor", "cuda") == {}
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    assert device_items.settings_of("aotkit", "cuda") == device_items.BACKENDS["aotkit"]


def test_the_report_names_what_is_slow_or_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(milliseconds: float, first: float, difference: float = 0.0) -> dict[str, object]:
        rest = {"error": difference, "largest_kernels": [["gemm", 3, 12.0]]}
        return {"milliseconds": milliseconds, "first_call_seconds": first, **rest}

    found = {
        "kernel/gelu": {"share_of_copy": 0.9},
        "kernel/softmax": {"share_of_copy": 0.5},
        "model/bert/training/inductor": figures(2.0, 30.0),
        "model/bert/training/aotkit": figures(3.0, 5.0, float("nan")),
        "model/t5/training/inductor": figures(2.0, 30.0),
        "model/t5/training/aotkit": figures(1.0, 15.0),
    }
    items = [device_run.Item("models", name, (), True) for name in found]
    monkeypatch.setattr(device_run, "items", lambda dry_run: iter(items))
    for item in items:
        outcome = {"status": 0, "seconds": 1.0, "figures": found[item.name], "output": ""}
        (tmp_path / item.file).write_text(json.dumps(outcome))
    text, complete = device_run.report(tmp_path, ("models",), True)
    assert complete
    fix = text.partition("## To fix")[2].partition("\n## ")[0].strip().splitlines()
    assert [line.partition(" ")[2].partition(":")[0] for line in fix] == [
        "kernel/softmax has 50% of a copy's bandwidth, less than 85%",
        "model/bert/training/aotkit is nan from float32, eager 1.00e-02",
        "model/bert/training/aotkit",
        "model/t5/training/aotkit",
    ]
    assert "3.000 ms, the incumbent 2.000 ms" in fix[2] and "first call 15.0 s, the incumbent 30.0 s" in fix[3]
    assert "| gemm | 3 | 12.0 |" in text
