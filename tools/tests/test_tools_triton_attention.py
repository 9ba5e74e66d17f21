"""The benchmark of generated attention runs what it says, and ends where there is no device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aotkit_inductor_lower import bind_program
from aotkit_inductor_lower.targets.triton import to_program
from tools.bench.triton_attention import CASES, Case, error_of, main, ways

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

CPU = torch.device("cpu")


def small(case: Case) -> Case:
    """The same with sizes that an interpreter computes."""
    _, heads, shared, queries, keys, width = case.sizes
    sizes = 1, heads // shared, 1, min(queries, 70), min(keys, 96), width
    return replace(case, sizes=sizes, used=min(case.used, 50))


@pytest.mark.parametrize("case", [CASES[k] for k in (1, 7, 9, 11, 13)], ids=lambda case: case.name)
def test_each_way_computes_its_case(case: Case) -> None:
    given = small(case).operands(CPU)
    want = small(case).wanted(given)
    found = ways(small(case), given)
    assert found[0].name == "chosen" and len(found) > 2
    for way in found:
        assert len(way.sources) == (1 if case.kind == "forward" else 2)
        assert error_of(bind_program(to_program(way.rendered))(list(given)), want) < 2e-2


@pytest.mark.parametrize("case", [case for case in CASES if case.kind != "backward"][:2])
def test_the_library_computes_the_same(case: Case) -> None:
    given = small(case).operands(CPU)
    assert error_of(small(case).library(given)(), small(case).wanted(given)) < 2e-2


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1
