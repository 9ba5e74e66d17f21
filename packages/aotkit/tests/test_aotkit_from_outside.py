"""Logs, dumps and messages as a user meets them: a program in a process of its own, set by environment variables."""

from __future__ import annotations

import html.parser
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def run(python: Any, folder: Path, program: str, **variables: str) -> str:
    """What a program says on standard error; the cache is in ``folder``, as is the program."""
    (folder / "program.py").write_text("import aotkit\n" + program)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AOTKIT_", "TORCH_LOGS"))}
    env |= {"AOTKIT_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1", **variables}
    done = python.run(["program.py"], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return str(done.stderr)


class _Links(html.parser.HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name == "href"]


@pytest.mark.covers("F2.49", "F8.12")
def test_logs_and_dumps_of_a_cold_and_of_a_warm_start_are_shown_to_a_user(tmp_path: Path, warm_python: Any) -> None:
    dumps = tmp_path / "dumps"
    cold = run(warm_python, tmp_path, PROGRAM, TORCH_LOGS="aot_graphs,aot_joint_graph", AOTKIT_DUMP=str(dumps))
    for artifact, graph in (
        ("aot_joint_graph", "graph0-joint"),
        ("aot_graphs", "graph0-forward"),
        ("aot_graphs", "graph0-backward"),
        ("aot_graphs", "graph1-inference"),
    ):
        assert f"[__{artifact}] {graph}" in cold
    assert cold.count("] class ") == 4, "each graph is shown once"

    _check_dumps(dumps)

    logs = {"TORCH_LOGS": "aotkit,aot_graphs", "AOTKIT_LOG": "kernels,passes", "AOTKIT_DUMP": str(dumps)}
    warm = run(warm_python, tmp_path, PROGRAM, **logs)
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
        ("seconds-per-stage-of-0-0", ".txt"),
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


MISTAKES = """
import warnings
import torch
import torch.nn as nn

def raised(call):
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)

import sys
from pathlib import Path
from typing import Any

x = torch.randn(32, 64)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))
torch.compile(torch.sin, backend="aotkit")(x)  # something to keep
print(aotkit.save_cache("text.cache", signing_key="sixteen characters"), file=sys.stderr)
print(aotkit.load_cache("text.cache", signing_key="sixteen characters"), file=sys.stderr)
raised(lambda: aotkit.save_cache("none.cache", signing_key=16))
raised(lambda: aotkit.explain(3, x))
raised(lambda: aotkit.Options(partitioner="min_cut"))

print(aotkit.compare(net, x), file=sys.stderr)
print(aotkit.find_culprit(net, x), file=sys.stderr)

from aotkit_inductor_lower.driver import GRAPH_PASSES

(each,) = [p for p in GRAPH_PASSES if p.name == "simplify"]
def bad(graph, ctx, run=each.run):
    graph = run(graph, ctx)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        if ctx.fuel.take():
            node.target = torch.ops.aten.cos.default
    return graph
run = each.run
object.__setattr__(each, "run", bad)
print("culprit:", aotkit.find_culprit(lambda x, w: x.sin() * w, x, x + 1, repro="repro.py"), file=sys.stderr)
object.__setattr__(each, "run", run)
exec(compile(Path("repro.py").read_text(), "repro.py", "exec"), {"__file__": "repro.py"})

def unsupported(x):
    return x * 2
torch.compile(unsupported, backend="aotkit")(torch.empty(3, device="meta"))  # the line of the notice
"""


def test_mistakes_and_wrong_results_are_told_in_plain_words(tmp_path: Path, warm_python: Any) -> None:
    said = run(warm_python, tmp_path, MISTAKES)
    assert said.count("entries") == 2 and "1 left out" not in said, said
    assert "CacheError: a signing key is bytes, or a text of 16 or more characters, not int" in said
    assert "TypeError: explain takes a function or a module, and its arguments; 3 can't be called" in said
    assert "takes one of min-cut, default, min-peak, not 'min_cut'" in said
    assert "right: largest error" in said and "measured by float64" in said
    assert "nothing: the result is right, after 1 check\n" in said
    assert "culprit: the graph pass 'simplify'" in said and "repro.py shows it" in said
    line = 2 + MISTAKES[: MISTAKES.index("  # the line of the notice")].count("\n")
    assert f"program.py:{line}: EagerFallback: aotkit runs one graph eagerly: input 0 is on device meta" in said


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("cache export all", 2, "'all' is no name of a file: it has neither a suffix nor a folder"),
        ("doctor", 0, "aotkit       "),
    ],
)
def test_the_command_says_what_it_means(arguments: str, status: int, said: str, tmp_path: Path) -> None:
    done = command(tmp_path, f"{sys.executable} -m aotkit {arguments}")
    assert done.returncode == status and said in done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) in ([], ["cache"])


def test_a_reader_who_leaves_ends_no_command_with_an_error(tmp_path: Path) -> None:
    done = command(tmp_path, f"({sys.executable} -m aotkit doctor; echo status $? >&2) | true")
    assert done.stderr == "status 0\n"


def command(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"AOTKIT_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
