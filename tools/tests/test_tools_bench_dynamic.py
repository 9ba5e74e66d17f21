"""The comparison of a compile with sizes known at run time with a static one, on a small model."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tools.bench import dynamic, models


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 12), nn.Linear(12, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.head(self.table(input_ids).tanh())
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def batch(size: int, length: int, generator: torch.Generator) -> models.Batch:
    ids = torch.randint(0, 16, (size, length), generator=generator)
    return {"input_ids": ids, "labels": ids.flip(1)}


def test_both_modes_compile_once_and_agree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(models.MODELS, "bert", models.Case(Small, batch, 4, 9, 5))
    threads = torch.get_num_threads()
    try:
        assert dynamic.main(["--models", "bert", "--steps", "2"]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["bert", "infer"], ["bert", "train"]]
    assert all(line.endswith("1 graphs") for line in lines)


@pytest.mark.parametrize("backend", ["eager", "aotkit"])
def test_texts_of_new_lengths_need_one_graph(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "bert", models.Case(Small, batch, 4, 30, 5))
    torch._dynamo.reset()
    counters.clear()
    found = dynamic.serve_new_lengths("bert", "train", quick=False, count=6, backend=backend)
    assert found.first > 0 and found.again > 0
    assert counters["stats"]["unique_graphs"] == 1
