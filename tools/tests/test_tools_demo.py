"""The demo's own parts; that it trains with the compiled model is shown by running it."""

from __future__ import annotations

import io

import torch
from rich.console import Console

from tools.demo import (
    IGNORED,
    MASK,
    Training,
    make_batch,
    make_model,
    make_optimizer,
    results_table,
    stages_table,
    times_table,
    train,
    verdict,
)


def make_training(label: str, losses: list[float]) -> Training:
    model = torch.nn.Linear(1, 1)
    training = Training(label, model, model, make_optimizer(model))
    training.losses = losses
    training.milliseconds = [1000.0] + [10.0] * (len(losses) - 1)
    return training


def test_a_batch_asks_for_the_masked_tokens_only() -> None:
    batch = make_batch(torch.Generator().manual_seed(0))
    masked = batch["input_ids"] == MASK
    assert masked.any(dim=1).all() and not masked.all()
    assert torch.equal(batch["labels"] != IGNORED, masked)


def test_eager_training_lowers_the_loss_and_shows_its_progress() -> None:
    model, other = make_model(1), make_model(1)
    one = Training("eager", model, model, make_optimizer(model))
    two = Training("aotkit", other, other, make_optimizer(other))
    text = io.StringIO()
    first = train(one, two, 10, Console(file=text, width=100))
    assert first > 0 and one.losses == two.losses
    assert one.losses[-1] < one.losses[0]
    assert "step 10/10" in text.getvalue()


def test_a_loss_that_differs_or_does_not_fall_fails_the_demo() -> None:
    good = [3.0, 2.0, 1.0]
    assert verdict(make_training("eager", good), make_training("aotkit", good)) is None
    assert "differs" in str(verdict(make_training("eager", good), make_training("aotkit", [3.0, 2.0, 1.1])))
    assert "nan" in str(verdict(make_training("eager", good), make_training("aotkit", [3.0, float("nan"), 1.0])))
    flat = [1.0, 1.0, 1.0]
    assert "fall" in str(verdict(make_training("eager", flat), make_training("aotkit", flat)))


def test_the_tables_show_losses_times_and_stages() -> None:
    eager, compiled = make_training("eager", [3.0, 2.0]), make_training("aotkit", [3.0, 2.5])
    text = io.StringIO()
    console = Console(file=text, width=100)
    console.print(results_table(eager, compiled))
    console.print(times_table(eager, compiled, 1.5))
    console.print(stages_table({"capture": 0.25, "lower": 0.5}, 1.5))
    shown = text.getvalue()
    for words in ("+5.0e-01", "10.00", "1.50", "capture", "0.250", "0.750"):
        assert words in shown
