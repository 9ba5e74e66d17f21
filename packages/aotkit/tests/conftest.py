"""Every test of the assembled stack runs in pipeline test mode: each stage's product is serialized and reloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _pipeline_test_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("AOTKIT_VERIFY", "1")
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
