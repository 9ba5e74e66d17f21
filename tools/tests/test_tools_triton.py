"""Tools around Triton kernels: conformance in the interpreter, the table of kernels, the benchmark without a device."""

from __future__ import annotations

import json

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

from tools.bench import triton_kernels
from tools.conformance import triton as conformance
from tools.conformance.pairs import Pair
from tools.triton_table import Graph, lower, measure, run_difference

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLE = [
    ("add", "int64", "forward"),
    ("nn.functional.gelu", "bfloat16", "gradient"),
    ("softmax", "float32", "gradient"),
    ("cumsum", "float32", "forward"),
    ("argmax", "bfloat16", "forward"),
    ("index_add", "float32", "forward"),
    ("nn.functional.layer_norm", "float32", "gradient"),
]


@pytest.mark.parametrize(("operator", "dtype", "direction"), SAMPLE)
def test_an_operator_of_the_table_is_as_in_eager(operator: str, dtype: str, direction: str) -> None:
    outcome = conformance.check_pair(Pair(operator, dtype, direction))
    assert outcome["kind"] in ("equal", "nearer"), outcome["reason"]
    assert outcome["kernels"]


def test_the_page_counts_the_committed_results_and_names_what_the_cpu_alone_gets_right() -> None:
    ours = json.loads((conformance.RESULTS / "triton.json").read_text())
    written = (conformance.ROOT / "docs" / "triton-coverage.md").read_text()
    for line in conformance.page(ours, ours).splitlines():
        if line.startswith(("| float32", "| bfloat16", "| int64")):
            assert "|".join(line.split("|")[:4]) in written  # kind, compiled, right
    cpu = {"outcomes": {"add": {"int64 forward": ["equal"]}, "sub": {"int64 forward": ["equal", "aten.sub"]}}}
    here = {"outcomes": {"add": {"int64 forward": ["different"]}, "sub": {"int64 forward": ["nearer"]}}}
    text = conformance.page({**here, "torch": "2", "reasons": {"add int64 forward": "by one"}, "not_run": {}}, cpu)
    assert "| int64 forward | 2 | 1 | 2 | 1 | 1 | 1 |" in text and text.endswith("- `add int64 forward`: by one\n")


def test_the_table_measures_kernels_and_notices_a_wrong_result() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    module = make_fx(lambda x: (torch.tanh(x) + 1,), tracing_mode="fake")(x)
    graph = Graph("small forward", module, [x])
    lowered = lower(graph)
    row = measure(graph, lowered)
    assert (row.launches, row.calls, row.spilling) == (1, 0, ()) and row.registers[0] > 0
    assert row.text().startswith("| small forward | 1 | 1 | 0 | ")
    assert run_difference(graph, lowered) is None
    wrong = make_fx(lambda x: (torch.tanh(x) + 2,), tracing_mode="fake")(x)
    assert "result 0 (8, 64) differs by up to 1" in str(run_difference(Graph("wrong", wrong, [x]), lowered))


def test_the_benchmark_says_that_there_is_no_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_kernels.main([]) == 0
    assert capsys.readouterr().out == triton_kernels.NO_DEVICE + "\n"
