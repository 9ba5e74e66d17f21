"""The benchmark of generated convolutions computes what it says, and ends where there is no device."""

from __future__ import annotations

import pytest
import torch

from aotkit_inductor_lower.targets.triton import Cubin
from aotkit_inductor_lower.targets.triton.drivers import InterpreterDriver
from aotkit_inductor_lower.targets.triton.records import Gpu
from tools.bench.triton_convolutions import CASES, Case, Row, Shape, cases_of, main, measure_all, ways
from tools.bench.triton_products import Bench

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

SMALL = [
    *cases_of(Shape(2, 24, 10, 32, 3, 1, 1)),
    *cases_of(Shape(2, 16, 8, 24, 3, 2, 1), "fiw"),
    *cases_of(Shape(2, 3, 16, 16, 7, 2, 3), "fw"),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_each_way_computes_its_case(case: Case) -> None:
    row = Row(case, ways(case, Gpu(processors=2), 2))
    for way in row.ways:
        way.cubins.extend(Cubin(s.name, b"", 90, 0, 32, 0, s.config) for s in way.sources)
    assert measure_all([row], Bench(InterpreterDriver(), 1))
    assert len(row.times) == len(row.ways) > 0
    assert max(error for _, error, _ in row.times) < 1e-2 and row.error < 1e-2
    assert row.line(3).count(" | ") == 7 and row.ways[0].name in row.line(3)


def test_every_case_has_kernels_for_all_of_it() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 40
    assert all(ways(case, Gpu(), 1)[0].sources for case in CASES[::9])


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1
