"""Weights that are moved into huge pages are the same tensors, and compiled functions go on with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import aotkit  # noqa: F401  (registers the backend)
from aotkit import huge_pages
from aotkit_inductor_lower.memory.huge_pages import HUGE_PAGE


def test_a_compiled_model_goes_on_with_the_same_tensors() -> None:
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 512))
    model.register_buffer("twice", model[0].weight.detach()[:4])
    compiled, x = torch.compile(model, backend="aotkit"), torch.randn(1, 1024)
    with torch.no_grad():
        before = compiled(x)
        places = [p.data_ptr() for p in model.parameters()]
        moved = huge_pages.move_weights(model)
        assert [p.data_ptr() for p in model.parameters()] == places
        assert torch.equal(compiled(x), before)
    weights = sum(p.nbytes for p in model.parameters())
    assert moved % HUGE_PAGE == 0 and moved <= weights + 2 * HUGE_PAGE * len(places)


def test_each_storage_is_asked_for_once_and_only_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(huge_pages, "move_to_huge_pages", lambda ranges: len(asked.extend(ranges) or asked))
    model = nn.Linear(8, 8)
    model.register_buffer("view", model.weight.detach()[:, :2])
    other = nn.Linear(4, 4, device="meta")
    assert huge_pages.move_weights(model, other, model) == 2
    assert sorted(asked) == sorted((p.data_ptr(), p.untyped_storage().nbytes()) for p in model.parameters())


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system tells nothing of its pages")
def test_what_it_says_is_moved_lies_in_huge_pages() -> None:
    model = nn.Linear(4096, 4096, bias=False)  # 64 MiB, which the C library takes from the system by itself
    moved = huge_pages.move_weights(model)
    place, found = model.weight.data_ptr(), 0
    for region in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(end, 16) for end in region.split(" ", 1)[0].split("-"))
        if first < place + model.weight.nbytes and place < last:
            found += int(re.search(r"AnonHugePages:\s+(\d+) kB", region)[1]) * 1024  # type: ignore[index]
    assert found >= moved
