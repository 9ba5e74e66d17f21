"""Scripts that show a wrong result are small, run by themselves, and say at which stage it becomes wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

from aotkit.reports.agreement import Comparison
from aotkit.reports.minify import minify
from aotkit.reports.repro import SeenGraph, count_operators, seeing

BAD = """
import torch
from aotkit_inductor_lower.driver import GRAPH_PASSES

(each,) = [p for p in GRAPH_PASSES if p.name == "simplify"]
def bad(graph, ctx, run=each.run):
    graph = run(graph, ctx)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        if ctx.fuel.take():
            node.target = torch.ops.aten.cos.default
    return graph
object.__setattr__(each, "run", bad)
"""

PROGRAM = """
import bad, torch, aotkit
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(48, 48)
    def forward(self, x):
        x = torch.nn.functional.gelu(self.layer(x)).view(32, 6, 8).transpose(0, 1).reshape(-1, 48).sin()
        return (x.softmax(-1) * x).sum()
print(aotkit.find_culprit(Net(), torch.randn(32, 48), repro="repro.py"))
"""


@pytest.fixture
def run(warm_python: Any) -> Callable[..., str]:
    """``run(folder, file, **variables)``: what a script prints."""

    def start(folder: Path, file: str, **variables: str) -> str:
        env = os.environ | {"AOTKIT_CACHE_DIR": str(folder / "cache"), "AOTKIT_VERIFY": "0"}
        done = warm_python.run([file], cwd=folder, env=env | variables)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr  # type: ignore[no-any-return]

    return start


def test_a_script_has_one_operator_and_one_number_and_names_the_stage(tmp_path: Path, run: Callable[..., str]) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "program.py").write_text(PROGRAM)
    said = run(tmp_path, "program.py")
    assert "the graph pass 'simplify'" in said and "repro.py shows it, with 1 of 9 operators" in said
    script = (tmp_path / "repro.py").read_text()
    assert ".sin()" in script and "softmax" not in script
    assert (tmp_path / "repro.tensors").stat().st_size < 2000
    (tmp_path / "with_the_bug.py").write_text('import bad, runpy\nrunpy.run_path("repro.py")\n')
    lines = [line for line in run(tmp_path, "with_the_bug.py").splitlines() if ": " in line]
    verdicts = {line.partition(": ")[0]: line.partition(": ")[2].split()[0].rstrip(":") for line in lines}
    assert verdicts == {
        "only Dynamo": "right",
        "captured, computed by ATen": "right",
        "lowered, no optional rewrite": "right",
        "all rewrites, kernels interpreted": "wrong",
        "as it was compiled": "wrong",
        "with what is to blame left out": "right",
    }
    fixed = run(tmp_path, "repro.py")
    assert "wrong" not in fixed.replace("what is to blame", "") and fixed.count("right") == 6


CRASH = BAD.replace("node.target = torch.ops.aten.cos.default", "raise KeyError(node.name)")


def test_a_script_of_a_compile_that_crashes_names_the_error_and_the_stage(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    (tmp_path / "bad.py").write_text(CRASH)
    (tmp_path / "program.py").write_text(PROGRAM)
    said = run(tmp_path, "program.py")
    assert "the graph pass 'simplify'" in said and "rewrite number 1 breaks it" in said
    assert "repro.py shows it, with 1 of 9 operators" in said
    script = (tmp_path / "repro.py").read_text()
    assert "KeyError is raised" in script and ".sin()" in script and "softmax" not in script
    assert (tmp_path / "repro.tensors").stat().st_size < 2000
    (tmp_path / "with_the_bug.py").write_text('import bad, runpy\nrunpy.run_path("repro.py")\n')
    verdicts = dict(re.findall(r"^(.+?): +(right|raises InternalError: .*)", run(tmp_path, "with_the_bug.py"), re.M))
    crashed = {what for what, said in verdicts.items() if "an internal error in the stage 'simplify'" in said}
    assert crashed == {"all rewrites, kernels interpreted", "as it was compiled"} and len(verdicts) == 6


def graph_of(fn: Any, *args: torch.Tensor) -> SeenGraph:
    seen: list[SeenGraph] = []
    torch._dynamo.reset()
    torch.compile(fn, backend=seeing(lambda gm, _: gm, seen))(*args)
    (found,) = seen
    return found


def test_sizes_are_made_smaller_where_the_graph_names_them_too() -> None:
    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).view(6, 4, 40).tanh().reshape(24, 40)
        return y.exp() + w.sum()

    found = graph_of(chain, torch.randn(24, 32), torch.randn(32, 40))

    def outcome(candidate: SeenGraph) -> str:
        """As if an exponential behind a view of three dimensions were what is wrong."""
        names = [str(node.target) for node in candidate.graph.graph.nodes if node.op.startswith("call")]
        return "wrong" if "exp" in names and "tanh" in names and "view" in names else "right"

    small = minify(found, outcome)
    names = [str(node.target) for node in small.graph.graph.nodes if node.op.startswith("call")]
    assert names == ["view", "tanh", "reshape", "exp"]
    (value,) = small.inputs or ()
    assert isinstance(value, torch.Tensor) and value.numel() <= 24
    assert count_operators(found) > 4 and outcome(small) == "wrong"
    small.graph(value)  # it runs


def test_what_fails_only_as_a_whole_stays_whole() -> None:
    found = graph_of(lambda x: (x.sin(), x.cos()), torch.randn(3))
    small = minify(found, lambda each: "wrong" if count_operators(each) == 2 else "right")
    assert count_operators(small) == 2 and small.inputs is not None and small.inputs[0].shape == (1,)


def test_gradients_of_a_cut_graph_are_compared() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    found = graph_of(net, torch.randn(3, 4))

    def outcome(candidate: SeenGraph) -> str:
        made = Comparison(candidate.graph, candidate.inputs or [], {})
        names = [name for name, _ in made.eager]
        return "wrong" if any(name.startswith("gradient") for name in names) else "right"

    small = minify(found, outcome)
    assert count_operators(small) == 1 and any(value.requires_grad for value in small.inputs or ())


def test_who_asks_dynamo_for_a_repro_is_told_what_writes_one(tmp_path: Path, run: Callable[..., str]) -> None:
    (tmp_path / "program.py").write_text(
        "import os, torch, aotkit\n"
        "torch._dynamo.config.repro_after = os.environ.get('ASKED')  # as from TORCHDYNAMO_REPRO_AFTER\n"
        "for f in (torch.sin, torch.cos):\n"
        "    torch.compile(f, backend='aotkit')(torch.randn(3))\n"
    )
    said = run(tmp_path, "program.py", ASKED="aot")
    assert said.count("aotkit.find_culprit(model, *inputs, repro='repro.py')") == 1
    assert "find_culprit" not in run(tmp_path, "program.py")
