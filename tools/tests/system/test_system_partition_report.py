"""The HTML report of the partition package, written by its command, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_partition import dump_graph
from aotkit_partition.command import main

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of four layers, made by the command line from a saved graph."""
    return written(tmp_path_factory.mktemp("report"), 4)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of 120 layers, whose cut has more operators than can be named."""
    return written(tmp_path_factory.mktemp("deep"), 110, "min-cut").rename(tmp_path_factory.getbasetemp() / "deep.html")


def written(folder: Path, layers: int, strategy: str = "min-peak") -> Path:
    """The report of so many layers, by the command line."""

    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> list[torch.Tensor]:
        value, *weights = primals
        for weight in weights:
            value = torch.nn.functional.gelu(torch.tanh(value @ weight)) * 2
        return [value, *torch.autograd.grad([value], primals, tangents)]

    primals = [
        torch.randn(256, 64, requires_grad=True),
        *(torch.randn(64, 64, requires_grad=True) for _ in range(layers)),
    ]
    graph = make_fx(joint, tracing_mode="fake")(primals, [torch.ones(256, 64)])
    names = [f"primals_{place}" for place in range(1, layers + 2)] + ["tangents_1"]
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = name
    (folder / "graph.json").write_text(dump_graph(graph, flat=True))
    chosen = ["--strategy", strategy, "--budget", "0.7", "--report", str(folder / "out.html"), "--quiet"]
    assert main([str(folder / "graph.json"), *chosen]) == 0
    return folder / "out.html"


def test_the_report_opens_and_its_script_ran(report: Path, browse: Callable[..., str]) -> None:
    dom = browse(report.as_uri())
    assert "<title>Partition of graph.json</title>" in dom
    assert 'data-ready="yes"' in dom, "the script ran to its end"
    assert dom.count("<svg") == 6 and dom.count("<table") >= 3
    words = re.sub(r"<[^>]+>", " ", dom)
    for heading in ("Memory over one step", "Plans: peak memory", "The cut", "Saved values", "Not recomputed, and why"):
        assert heading in words


def test_a_table_sorts_and_filters_when_asked(report: Path, browse: Callable[..., str], tmp_path: Path) -> None:
    probe = """<script>
    const table = document.querySelectorAll('section table')[1], box = table.closest('section').querySelector('input');
    const all = table.tBodies[0].rows.length;
    table.tHead.rows[0].cells[2].click();
    const sizes = [...table.tBodies[0].rows].map(row => Number(row.cells[2].dataset.value));
    box.value = 'primals'; box.dispatchEvent(new Event('input'));
    const shown = [...table.tBodies[0].rows].filter(row => !row.classList.contains('hidden')).length;
    document.body.dataset.sorted = String(sizes.every((size, at) => at === 0 || sizes[at - 1] <= size));
    document.body.dataset.rows = `${shown} of ${all}`;
    </script></body>"""
    page = tmp_path / "probed.html"
    page.write_text(report.read_text().replace("</body>", probe))
    dom = browse(page.as_uri())
    assert 'data-sorted="true"' in dom
    shown, every = map(int, re.search(r'data-rows="(\d+) of (\d+)"', dom).groups())  # type: ignore[union-attr]
    assert 0 < shown < every


def test_no_words_overlap_or_are_cut_off(report: Path, deep: Path, boxes: Callable[..., dict[str, Any]]) -> None:
    for dark in (False, True):
        looked = boxes([report, deep], dark)
        assert not looked["found"], "\n".join(f"{f['page']} at {f['width']}: {f['what']}" for f in looked["found"])
        assert looked["looked"] == (2 if dark else 12) and looked["words"] > (300 if dark else 2000)


def test_the_report_draws(report: Path, browse: Callable[..., str], tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    browse(report.as_uri(), picture)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000
