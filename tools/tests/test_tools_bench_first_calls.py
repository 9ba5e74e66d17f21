"""The benchmark of first calls: what it runs, its table, and its end where there is no device."""

from __future__ import annotations

import pytest
import torch

from tools.bench.first_calls import NO_DEVICE, in_a_process, main, rows, table


def test_both_sides_of_each_task_are_measured() -> None:
    assert len(rows()) == 24 and rows("gpt2/one token") == [
        ("gpt2", "one token", "inductor"),
        ("gpt2", "one token", "aotkit"),
    ]


def test_a_share_needs_both_sides_and_the_mean_is_that_of_the_shares() -> None:
    text = table(
        {("bert", "training", "inductor"): 30.0, ("bert", "training", "aotkit"): 10.0}
        | {("gpt2", "training", "inductor"): 4.0, ("gpt2", "training", "aotkit"): 3.0}
        | {("t5", "training", "aotkit"): 3.0}
    )
    assert "| bert | training | 30.0 s | 10.0 s | 0.33 |" in text
    assert "t5" not in text and text.endswith("0.50")


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0 and capsys.readouterr().out.strip() == NO_DEVICE


@pytest.mark.nightly("compiles a model in a process of its own")
def test_a_process_tells_the_seconds_of_its_first_compiled_step() -> None:
    assert 0 < in_a_process(("gpt2", "one token", "aotkit")) < 600
    with pytest.raises(RuntimeError, match="gpt2/one token/none"):
        in_a_process(("gpt2", "one token", "none"))
