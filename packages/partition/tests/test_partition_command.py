"""The command as a user runs it: a report has a known suffix, and a reader who leaves costs no file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_partition import dump_graph
from aotkit_partition.command import main


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A saved joint graph."""

    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor]:
        value = (primals[0] @ primals[1]).tanh().square()
        return [value, *torch.autograd.grad([value], primals, tangents)]

    primals = [torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]
    captured = make_fx(joint, tracing_mode="fake")(primals, [torch.ones(4, 8)])
    for node, name in zip(
        captured.graph.find_nodes(op="placeholder"), ["primals_1", "primals_2", "tangents_1"], strict=True
    ):
        node.target = name
    (tmp_path / "graph.json").write_text(dump_graph(captured, flat=True))
    return tmp_path / "graph.json"


def test_a_report_that_nobody_can_write_is_refused(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(graph), "--report", str(graph.with_name("out.pdf"))])
    assert left.value.code == 2 and "written as .html, .json, .txt or .md, by its suffix" in capsys.readouterr().err
    assert not graph.with_name("out.pdf").exists()
    assert main([str(graph), "--report", str(graph.with_name("out.txt")), "--quiet"]) == 0
    assert graph.with_name("out.txt").read_text().startswith("partition by min-cut")
    assert capsys.readouterr().out.splitlines()[1].startswith("wrote ")


def test_a_reader_who_leaves_costs_no_file(graph: Path) -> None:
    line = f"({sys.executable} -m aotkit_partition graph.json --plots svg; echo status $? >&2) | true"
    done = subprocess.run(
        ["bash", "-c", line], cwd=graph.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == "status 0\n"
    assert sorted(path.name for path in (graph.parent / "svg").iterdir()) == ["cut.svg", "front.svg", "memory.svg"]
