"""The five architectures, training and inference, static and with sizes known at run time, against eager."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.fx.experimental._config
from torch._dynamo.utils import counters

import aotkit

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES, make_batch, make_model


@pytest.fixture(autouse=True)
def _test_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "1")
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()


SIZES = [(6, False), (2, False), (3, True), (17, True), (64, False), (64, True), (2, True)]
"""Batch sizes and which of the two lengths. The first is no size of a model, or the frontend would take it for that."""


def sizes(dynamic: bool) -> list[tuple[int, bool]]:
    return SIZES if dynamic else [(2, False)]


def graphs(name: str, dynamic: bool) -> int:
    """How often the frontend compiles: its convolutions make a difference between less than 16 images and more."""
    return 2 if name == "resnet" and dynamic else 1


def loss_and_gradients(
    model: torch.nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(**batch).loss
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.detach(), [torch.zeros(()) if g is None else g for g in gradients]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.covers("F5c.9")
def test_training_equals_eager_for_every_batch_size_and_length(name: str, dynamic: bool) -> None:
    model = make_model(name).train()
    reference = copy.deepcopy(model)
    recorder = aotkit.Recorder()
    options = {"observer": recorder, "fallback": "error", "redzones": dynamic}
    compiled = torch.compile(model, backend="aotkit", dynamic=dynamic, options=options)
    for batch, second_length in sizes(dynamic):
        inputs = make_batch(name, batch, second_length=second_length)
        loss, gradients = loss_and_gradients(compiled, inputs)
        expected_loss, expected = loss_and_gradients(reference, inputs)
        torch.testing.assert_close(loss, expected_loss)
        for got, want in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert not recorder.fallbacks
    assert counters["stats"]["unique_graphs"] == graphs(name, dynamic)
    assert sum("forward" in graph.name for graph in recorder.graphs) == graphs(name, dynamic)
    eligible = sum(graph.report.eligible_nodes for graph in recorder.graphs)
    generated = sum(graph.report.generated_nodes for graph in recorder.graphs)
    assert generated >= 0.9 * eligible, "too many calls are left to ATen: " + "\n".join(map(str, recorder.graphs))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.covers("F5c.9")
def test_inference_equals_eager_for_every_batch_size_and_length(name: str, dynamic: bool) -> None:
    model = make_model(name).eval()
    recorder = aotkit.Recorder()
    options = {"observer": recorder, "fallback": "error", "redzones": dynamic}
    compiled = torch.compile(model, backend="aotkit", dynamic=dynamic, options=options)
    with torch.no_grad():
        for batch, second_length in sizes(dynamic):
            inputs = make_batch(name, batch, second_length=second_length)
            torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, rtol=2e-4, atol=2e-5)
    assert not recorder.fallbacks
    assert counters["stats"]["unique_graphs"] == graphs(name, dynamic)


def serve_a_batch_of_one(name: str, mode: str) -> None:
    """Compiled for a batch of 6; then one of 1, and others. Where that asks for marks or settings, they are set."""
    training = mode == "training"
    model = make_model(name).train(training)
    reference = copy.deepcopy(model)
    options = {"fallback": "error", "redzones": True}
    compiled = torch.compile(model, backend="aotkit", dynamic=None if name == "resnet" else True, options=options)
    for batch, second_length in ((6, False), (1, False), (1, True), (17, True), (2, False)):
        inputs = make_batch(name, batch, second_length=second_length)
        if training:
            loss, gradients = loss_and_gradients(compiled, inputs)
            expected_loss, expected = loss_and_gradients(reference, inputs)
            torch.testing.assert_close([loss, *gradients], [expected_loss, *expected], rtol=2e-4, atol=2e-5)
            continue
        del inputs["labels"]
        if name == "resnet":
            torch._dynamo.decorators.mark_unbacked(inputs["pixel_values"], 0, min=1)
            torch._dynamo.mark_dynamic(inputs["pixel_values"], [2, 3])
        with torch.no_grad():
            got, want = compiled(**inputs).logits, reference(**inputs).logits
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("name", "mode"),
    [("bert", "training"), ("vit", "training"), ("gpt2", "inference"), ("llama", "inference"), ("resnet", "inference")],
)
@pytest.mark.covers("F5c.9")
def test_a_batch_of_one_is_served_by_the_same_graph_where_the_frontend_may_leave_its_size_open(
    name: str, mode: str
) -> None:
    """By default the frontend compiles once more for a size of one; `docs/limits.md` says how it does not."""
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        serve_a_batch_of_one(name, mode)
