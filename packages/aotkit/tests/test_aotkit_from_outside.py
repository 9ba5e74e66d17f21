"""Logs, dumps and messages as a user meets them: a program in a process of its own, set by environment variables."""

from __future__ import annotations

import html.parser
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch

def block(x, w):
    return torch.nn.functional.gelu(x @ w + 1).softmax(-1)

def shift(x):
    return x.sin() + 1

x, w = torch.randn(8, 16), torch.randn(16, 32, requires_grad=True)
torch.compile(block, backend="aotkit")(x, w).sum().backward()
torch.compile(shift, backend="aotkit")(x)
"""


def run(folder: Path, program: str, **variables: str) -> str:
    """What a program says on standard error; the cache is in ``folder``, as is the program."""
    (folder / "program.py").write_text("import aotkit\n" + program)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AOTKIT_", "TORCH_LOGS"))}
    env |= {"AOTKIT_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


class _Links(html.parser.HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name == "href"]


@pytest.mark.covers("F2.49", "F8.12")
def test_logs_and_dumps_of_a_cold_and_of_a_warm_start_are_shown_to_a_user(tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    cold = run(tmp_path, PROGRAM, TORCH_LOGS="aot_graphs,aot_joint_graph", AOTKIT_DUMP=str(dumps))
    for artifact, graph in (
        ("aot_joint_graph", "graph0-joint"),
        ("aot_graphs", "graph0-forward"),
        ("aot_graphs", "graph0-backward"),
        ("aot_graphs", "graph1-inference"),
    ):
        assert f"[__{artifact}] {graph}" in cold
    assert cold.count("] class ") == 4, "each graph is shown once"

    _check_dumps(dumps)

    warm = run(tmp_path, PROGRAM, TORCH_LOGS="aotkit,aot_graphs", AOTKIT_LOG="kernels,passes", AOTKIT_DUMP=str(dumps))
    for name in ("graph0-forward", "graph0-backward", "graph1-inference"):
        assert f"{name} loaded from the cache: 1 kernel;" in warm
        assert f"{name} was loaded from the cache, which keeps no" in warm
    assert "set AOTKIT_CACHE_DIR to an empty folder" in warm
    assert "[__aot_graphs] graph0-backward" in warm and "define " in warm
    names = {path.name.partition("_")[2] for path in (dumps / "graph0.1").iterdir()}
    assert {"forward.py", "forward-graph.ll", "forward-report.txt", "backward-plan.json", "wrappers.bind.py"} <= names


def _check_dumps(dumps: Path) -> None:
    """One folder per graph, each file in its language, and pages from which each is reached."""
    assert sorted(path.name for path in dumps.iterdir()) == ["graph0", "graph1", "index.html"]
    names = [path.name for path in (dumps / "graph0").iterdir()]
    for kind, suffix in (
        ("captured", ".py"),
        ("forward-lowered", ".ir"),
        ("backward-scheduled", ".ir"),
        ("forward-graph", ".ll"),
        ("forward-plan", ".json"),
        ("forward-report", ".txt"),
        ("timing", ".txt"),
    ):
        assert [name[2:] for name in names if f"_{kind}." in name] == [f"_{kind}{suffix}"], names
    numbered = sorted(name for name in names if name[0].isdigit())
    assert [int(name.partition("_")[0]) for name in numbered] == list(range(len(numbered)))
    about = json.loads((dumps / "graph1" / "about.json").read_text())
    assert "return x.sin() + 1" in about["first line"] and about["compile id"] == "1/0"
    pages = _Links(dumps / "index.html").found
    assert pages == ["graph0/index.html", "graph1/index.html"]
    assert "return x.sin() + 1" in (dumps / "index.html").read_text()
    assert set(_Links(dumps / pages[0]).found) == set(names) - {"index.html"}
