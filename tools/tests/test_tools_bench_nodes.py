"""The bench of large graphs."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench import nodes
from tools.bench.nodes import chain, main, measure


def test_a_chain_has_about_so_many_nodes() -> None:
    assert abs(len(chain(700).graph.nodes) - 700) < 10


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["training", "inference"])
def test_a_graph_is_compiled_and_equals_eager(way: str, fork_in: Any) -> None:
    fork_in(nodes)
    found = measure(100, way)
    assert found["us"] > 0 and found["off"] < 1e-4


def test_a_row_for_each_size(capsys: pytest.CaptureFixture[str], fork_in: Any) -> None:
    fork_in(nodes)
    assert main(["--sizes", "30", "--ways", "inference"]) == 0
    assert [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines()[2:]] == [[" 30 ", " inference "]]
