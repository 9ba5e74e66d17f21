"""The benchmark of generated products runs what it says, and ends where there is no device."""

from __future__ import annotations

import pytest
import torch

from aotkit_inductor_lower.targets.triton import Cubin
from aotkit_inductor_lower.targets.triton.drivers import InterpreterDriver
from aotkit_inductor_lower.targets.triton.records import Gpu
from tools.bench.triton_products import CASES, Bench, Case, Row, main, measure_all, ways

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")


def small(case: Case) -> Case:
    """The same with sizes that an interpreter computes."""
    short = {8192: 128, 768: 64, 1024: 72, 3072: 136, 2816: 144, 50257: 129, 50264: 136}
    shapes = tuple(tuple(short.get(n, n) for n in shape) for shape in case.shapes)
    return Case(case.name, case.graph, shapes, case.flops, case.parts)


def interpreted(case: Case) -> Row:
    """A case with three ways, which need no compiler."""
    row = Row(case, ways(case, Gpu(processors=2), 3))
    for way in row.ways:
        assert (len(way.sources) == 2) == (case.parts > 1)
        way.cubins.extend(Cubin(s.name, b"", 90, 0, 32, 0, s.config) for s in way.sources)
    return row


@pytest.mark.parametrize(
    "case", [c for c in CASES if "8192x768x3072" in c.name or "weight" in c.name or "257" in c.name]
)
def test_each_way_computes_its_case(case: Case) -> None:
    row = interpreted(small(case))
    assert measure_all([row], Bench(InterpreterDriver(), 1))
    assert len(row.times) == len(row.ways) > 0
    assert max(error for _, error, _ in row.times) < 1e-2 and row.error < 1e-2
    assert row.line(3).count(" | ") == 7 and row.ways[0].name in row.line(3)


def test_what_the_device_does_not_survive_ends_the_run_with_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = interpreted(small(CASES[0]))
    bench = Bench(InterpreterDriver(), 1)

    def wait(self: Bench) -> None:
        raise TimeoutError("a kernel takes more than 5 s")

    monkeypatch.setattr(Bench, "wait", wait)
    assert not measure_all([row], bench)
    assert "TimeoutError: a kernel takes" in capsys.readouterr().out and "nothing ran" in row.line(3)


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1
