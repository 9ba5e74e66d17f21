"""The benchmark of generated products runs what it says, and ends where there is no device."""

from __future__ import annotations

import pytest
import torch

from aotkit_inductor_lower.targets.triton import Cubin
from aotkit_inductor_lower.targets.triton.drivers import InterpreterDriver
from aotkit_inductor_lower.targets.triton.records import Gpu
from tools.bench.triton_products import CASES, Bench, Case, error_of, main, ways

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")


def small(case: Case) -> Case:
    """The same with sizes that an interpreter computes."""
    short = {8192: 128, 768: 64, 1024: 72, 3072: 136, 2816: 144, 50257: 129, 50264: 136}
    shapes = tuple(tuple(short.get(n, n) for n in shape) for shape in case.shapes)
    return Case(case.name, case.graph, shapes, case.flops, case.parts)


@pytest.mark.parametrize(
    "case", [c for c in CASES if "8192x768x3072" in c.name or "weight" in c.name or "257" in c.name]
)
def test_each_way_computes_its_case(case: Case) -> None:
    case = small(case)
    bench = Bench(InterpreterDriver(), 1)
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=g).to(torch.bfloat16) for shape in case.shapes]
    want = case.graph(*(a.float() for a in args))
    for way in ways(case, Gpu(processors=2), 3):
        assert (len(way.sources) == 2) == (case.parts > 1)
        way.cubins.extend(Cubin(s.name, b"", 90, 0, 32, 0, s.config) for s in way.sources)
        launch, result = bench.prepared(way, args)
        launch()
        assert error_of(result.view(want.shape), want) < 1e-2


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1
