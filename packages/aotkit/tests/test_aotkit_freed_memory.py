"""A graph for training lets the C library keep what its steps free; one for inference leaves that as it is."""

from __future__ import annotations

import pytest
import torch

from aotkit.driver import bind


@pytest.mark.parametrize("trained", [True, False])
def test_only_training_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(bind, "keep_freed_memory", lambda: asked.append(True))
    x = torch.randn(4, 3, requires_grad=trained)
    torch.compile(lambda x: x.sin() * 2, backend="aotkit")(x)
    assert bool(asked) == trained
