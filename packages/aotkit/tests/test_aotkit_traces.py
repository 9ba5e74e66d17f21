"""Structured traces and the line of progress, as a user gets them: a program in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import re
from pathlib import Path
from typing import Any

import pytest

from aotkit import progress
from aotkit.environment import read_environment
from aotkit.errors import UnknownOption

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


def environment(folder: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AOTKIT_", "TORCH_LOGS"))}
    return {**kept, "AOTKIT_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1", **variables}


def entries(folder: Path) -> list[dict[str, Any]]:
    """The structured entries of a trace with their payloads."""
    found: list[dict[str, Any]] = []
    (log,) = folder.glob("*.log")
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            found[-1]["payload"] = found[-1].get("payload", "") + line.removeprefix("\t") + "\n"
        elif (start := line.find("] {")) > 0:
            found.append(json.loads(line[start + 2 :]))
    return found


def name_of(entry: dict[str, Any]) -> str:
    return next(
        (entry[kind].get("name", "") or kind for kind in ("artifact", "inductor_output_code") if kind in entry), ""
    )


SAVED = """
import os, sys, torch, aotkit
import saved as names

if sys.argv[1] == "save":
    torch._dynamo.config.enable_aot_compile = True  # off before torch 2.12
    compiled = torch.compile(names.f, fullgraph=True, backend="aotkit").aot_compile(((torch.ones(3),), {}))
    compiled.save_compiled_function("f.pt")
elif __name__ == "__main__":
    from torch._dynamo.guards import GuardManagerWrapper

    write, texts = GuardManagerWrapper.__str__, []
    GuardManagerWrapper.__str__ = lambda self: texts.append(1) or write(self)
    with open("f.pt", "rb") as file:
        loaded = torch.compiler.load_compiled_function(file, f_globals=vars(names))
    assert torch.equal(loaded(torch.ones(3)), torch.full((3,), 2.0))
    assert len(texts) == ("TORCH_TRACE" in os.environ), texts
"""


def test_a_load_of_what_torch_saved_is_told_and_costs_no_text_where_none_is_wanted(
    tmp_path: Path, warm_python: Any
) -> None:
    (tmp_path / "program.py").write_text(SAVED)
    (tmp_path / "saved.py").write_text("import torch\n\n\ndef f(x):\n    return x + 1\n")
    traced = {"TORCH_TRACE": str(tmp_path / "trace")}
    for what, variables in (("save", {}), ("load", {}), ("load", traced)):
        env = environment(tmp_path, **variables)
        done = warm_python.run(["program.py", what], cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
    (told,) = [e for e in entries(tmp_path / "trace") if name_of(e) == "aotkit_saved_function_loaded"]
    assert json.loads(told["payload"])["bytes"] > 0


def run(warm_python: Any, folder: Path, trace: str) -> list[dict[str, Any]]:
    (folder / "program.py").write_text(PROGRAM)
    env = environment(folder, TORCH_TRACE=str(folder / trace))
    done = warm_python.run(["program.py"], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return entries(folder / trace)


def test_a_trace_holds_what_a_compile_made_of_each_graph_cold_and_warm(tmp_path: Path, warm_python: Any) -> None:
    cold = run(warm_python, tmp_path, "cold")
    first = {
        name_of(entry): entry for entry in cold if (entry.get("frame_id"), entry.get("frame_compile_id")) == (0, 0)
    }
    for kind in ("forward", "backward"):
        for text in ("lowered", "scheduled", "kernels", "report", "plan"):
            assert f"aotkit_graph0-{kind}-{text}" in first
    assert "loop _softmax" in first["aotkit_graph0-forward-scheduled"]["payload"]
    code = [entry for entry in cold if "inductor_output_code" in entry and entry.get("frame_id") == 0]
    assert {entry["inductor_output_code"]["filename"] for entry in code} >= {
        "graph0-forward-graph.ll",
        "graph0-backward-graph.ll",
    }
    assert all("define " in entry["payload"] for entry in code)
    missed = json.loads(first["aotautograd_cache_miss"]["payload"])
    assert missed["graph"] == "graph0" and missed["reason"] == "no such entry" and len(missed["key"]) >= 32
    names = [name_of(entry) for entry in cold]
    assert "recompile_reasons" in names
    (page,) = [entry["payload"] for entry in cold if name_of(entry) == "aotkit_report.html"]
    assert "<title>sin, compiled by aotkit</title>" in page
    assert any(name.endswith("-inference-scheduled") for name in names), "what a report compiles, too"

    warm = run(warm_python, tmp_path, "warm")
    hits = [json.loads(entry["payload"]) for entry in warm if name_of(entry) == "aotautograd_cache_hit"]
    assert missed["key"] in [hit["key"] for hit in hits]
    names = [name_of(entry) for entry in warm if entry.get("frame_id") == 0]
    assert "aotkit_graph0-backward-plan" in names and "aotautograd_cache_miss" not in names


SLOW = """
import os, sys, time
os.dup2(os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY), 2)
import torch, aotkit
import aotkit.progress
import aotkit.driver.lower as lower

kept = lower.compile_to_program
def slow(*args, **kwargs):
    time.sleep(0.8)
    return kept(*args, **kwargs)
lower.compile_to_program = slow
aotkit.progress.AFTER = 0.3
torch.compile(lambda x: x.sin() + 1, backend="aotkit")(torch.randn(8))
print("done", file=sys.stderr)
"""


def on_a_terminal(warm_python: Any, folder: Path, **variables: str) -> str:
    """What the program writes to standard error where that is a terminal."""
    (folder / "slow.py").write_text(SLOW)
    mine, its = pty.openpty()
    done = warm_python.run(["slow.py", os.ttyname(its)], cwd=folder, env=environment(folder, **variables))
    os.close(its)
    said = b""
    while True:
        try:
            more = os.read(mine, 4096)
        except OSError:  # the other end of a terminal is closed
            break
        if not more:
            break
        said += more
    os.close(mine)
    assert done.returncode == 0, said
    return said.decode()


def test_a_long_compile_has_a_line_on_a_terminal_which_is_gone_at_the_end(tmp_path: Path, warm_python: Any) -> None:
    said = on_a_terminal(warm_python, tmp_path)
    assert re.search(r"\r\x1b\[Kaotkit compiles graph0: lower, \d s", said), said
    assert said.endswith("\r\x1b[Kdone\r\n")
    assert "\n" not in said[: said.index("done")], "it stays one line"
    for silent in ({"AOTKIT_PROGRESS": "0"}, {"AOTKIT_LOG": "timing"}):
        folder = tmp_path / str(len(silent) + len(next(iter(silent))))
        folder.mkdir()
        assert "aotkit compiles" not in on_a_terminal(warm_python, folder, **silent)


def test_a_short_compile_and_a_log_have_no_line(tmp_path: Path) -> None:
    class Terminal:
        def __init__(self, is_one: bool) -> None:
            self.said, self.isatty, self.flush = "", lambda: is_one, lambda: None

        def write(self, text: str) -> None:
            self.said += text

    import time

    for is_one, after, seconds in ((True, 5.0, 0.0), (False, 0.0, 0.3)):
        terminal: Any = Terminal(is_one)
        with progress.progress("graph0", lambda: "lower", terminal, after):
            time.sleep(seconds)
        assert terminal.said == ""
    with pytest.raises(UnknownOption, match="AOTKIT_PROGRESS takes 0 or 1"):
        read_environment({"AOTKIT_PROGRESS": "maybe"})
