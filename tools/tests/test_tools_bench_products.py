"""The bench of products: what it compares, and who computed it."""

from __future__ import annotations

import sys
from typing import Literal

import pytest
import torch

from tools.bench import products


@pytest.mark.parametrize("contractions", ["auto", "generated"])
def test_the_choice_leaves_products_to_aten_and_says_so(
    contractions: Literal["auto", "generated"], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of these, which are small, on every processor."""
    monkeypatch.setattr(products, "LAYERS", ((32, 48, 64),))
    monkeypatch.setattr(sys, "argv", ["products", "--rounds", "1", "--contractions", contractions])
    before = torch.get_num_threads()
    try:
        assert products.main() == 0
    finally:
        torch.set_num_threads(before)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| (32, 48, 64)")]
    assert [row[2] for row in rows] == ["ATen" if contractions == "auto" else "us"] * 3
    assert all(float(row[6]) > 0 for row in rows)


def test_other_ways_to_choose_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["products", "--contractions", "aten"])
    with pytest.raises(SystemExit):
        products.main()


def test_factors_from_memory_and_products_of_vocabularies_are_measured_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products, "HEADS", ((32, 48, 64),))
    monkeypatch.setattr(products, "IN_NO_CACHE", 1 << 16)
    monkeypatch.setattr(sys, "argv", ["products", "--rounds", "1", "--wide", "--cold"])
    before = torch.get_num_threads()
    try:
        assert products.main() == 0
    finally:
        torch.set_num_threads(before)
    said = capsys.readouterr().out
    (row,) = [line.split(" | ") for line in said.splitlines() if line.startswith("| (32, 48, 64)")]
    assert row[1] == "`x @ w.t()`" and float(row[6]) > 0
    assert "factors from memory" in said
    monkeypatch.setattr(sys, "argv", ["products", "--cold", "--packed"])
    with pytest.raises(SystemExit):
        products.main()
