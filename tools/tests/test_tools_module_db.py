"""Every module of torch's module_db through ``aot_module``: outputs, gradients, buffers and inputs equal eager's.

These are the first two samples of each module, each partitioned in another way; ``python -m
tools.conformance.module_db`` runs all samples in both ways.
"""

from __future__ import annotations

import pytest

from tools.conformance.module_db import check_module, entries, main

pytestmark = pytest.mark.filterwarnings("ignore")  # about deprecated arguments of modules, and kernels of the CPU

REFUSED = {
    "nn.CTCLoss": "its kernel reads the lengths of sequences from the memory of tensors",
    "nn.GaussianNLLLoss": "it branches on whether any variance is negative",
}


@pytest.mark.covers("F2.2", "F2.3", "F1.1")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("how, number", [("nop", 1), ("min_cut", 0)])
@pytest.mark.parametrize("name", [name for name in entries() if name not in REFUSED])
def test_a_module_of_the_table_equals_eager_in_training_and_evaluation(name: str, how: str, number: int) -> None:
    for training in (True, False):
        outcomes = list(check_module(entries()[name], training, how, 1, number))
        outcomes = outcomes or list(check_module(entries()[name], training, how, 1))  # a module with one sample
        assert outcomes and [o for o in outcomes if o.kind != "equal"] == []


def test_at_most_two_in_a_hundred_are_refused_each_by_a_typed_error_and_torch_fails_there_too() -> None:
    assert len(REFUSED) <= 0.02 * len(entries())
    for name in REFUSED:
        kinds = {o.kind for o in check_module(entries()[name], True, "nop", 3)}
        assert "refused" in kinds and kinds <= {"equal", "refused"}
        assert any(o.kind != "equal" for o in check_module(entries()[name], True, "torch", 3))


def test_a_difference_and_a_crash_are_told_from_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.conformance import module_db

    monkeypatch.setitem(module_db.HOW, "wrong", lambda m: lambda *a, **k: m(*a, **k) * 1.01)
    monkeypatch.setitem(module_db.HOW, "crashing", lambda m: 1 // 0)
    sigmoid = entries()["nn.Sigmoid"]
    assert [o.kind for o in check_module(sigmoid, True, "wrong", 1)] == ["different"]
    assert [o.kind for o in check_module(sigmoid, True, "crashing", 1)] == ["crash"]
    assert main(["--only", "nn.Sigmoid", "--how", "nop", "--samples", "1"]) == 0
    assert main(["--only", "nn.GaussianNLLLoss", "--how", "nop", "--samples", "1"]) == 1
