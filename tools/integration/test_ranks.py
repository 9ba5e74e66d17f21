"""Some cases of `python -m tools.ranks`, which has all; and a difference is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tools.ranks.__main__ import main

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed")


CASES = ["llama/simple-fsdp/static", "bert/ddp-in-graph/static", "resnet/simple-fsdp/checkpoint", "llama/sp/static"]


@pytest.mark.nightly("aotkit's tests have each collective in a graph, and two processes that train in both ways")
@pytest.mark.parametrize("case", [*CASES, "resnet/tp-ddp/restored"])
def test_training_on_ranks_with_collectives_in_the_graphs_is_as_in_eager_mode(case: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    failed = main(["--only", case, "--steps", "3", "--journal", str(journal)])
    (row,) = (json.loads(line) for line in journal.read_text().splitlines())
    assert not failed and row["verdict"] == "equal", row
    assert row["collectives"] > 0 and not row["eager"], row


def test_a_difference_and_an_error_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tools.ranks import train

    shifted = iter(range(1, 100))
    monkeypatch.setattr(
        train, "_train", lambda *_: [train.torch.tensor([1 + 1e-11 * next(shifted)], dtype=train.torch.float64)]
    )
    assert main(["--only", "resnet/tp/static", "--steps", "1", "--journal", str(tmp_path / "journal")])
    monkeypatch.setattr(train, "_train", lambda *_: 1 / 0)
    assert main(["--only", "resnet/tp/static", "--again", "--journal", str(tmp_path / "journal")])
    rows = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["differs", "raised"]
    assert rows[1]["error"].startswith("ZeroDivisionError")
