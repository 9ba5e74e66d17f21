"""The five architectures, training and inference, static and dynamic batch, against eager."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

import aotkit

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES, make_batch, make_model


@pytest.fixture(autouse=True)
def _test_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "1")
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


def loss_and_gradients(
    model: torch.nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(**batch).loss
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.detach(), [torch.zeros(()) if g is None else g for g in gradients]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_equals_eager_for_every_batch_size(name: str, dynamic: bool) -> None:
    model = make_model(name).train()
    reference = copy.deepcopy(model)
    recorder = aotkit.Recorder()
    options = {"observer": recorder, "fallback": "error"}
    compiled = torch.compile(model, backend="aotkit", dynamic=dynamic, options=options)
    for batch in (6, 7, 5) if dynamic else (2,):
        inputs = make_batch(name, batch)
        loss, gradients = loss_and_gradients(compiled, inputs)
        expected_loss, expected = loss_and_gradients(reference, inputs)
        torch.testing.assert_close(loss, expected_loss)
        for got, want in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert not recorder.fallbacks
    assert sum("forward" in graph.name for graph in recorder.graphs) == 1
    eligible = sum(graph.report.eligible_nodes for graph in recorder.graphs)
    generated = sum(graph.report.generated_nodes for graph in recorder.graphs)
    assert generated >= 0.9 * eligible, "too many calls are left to ATen: " + "\n".join(map(str, recorder.graphs))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_inference_equals_eager_for_every_batch_size(name: str, dynamic: bool) -> None:
    model = make_model(name).eval()
    recorder = aotkit.Recorder()
    options = {"observer": recorder, "fallback": "error"}
    compiled = torch.compile(model, backend="aotkit", dynamic=dynamic, options=options)
    with torch.no_grad():
        for batch in (6, 7, 5) if dynamic else (2,):
            inputs = make_batch(name, batch)
            torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, rtol=2e-4, atol=2e-5)
    assert not recorder.fallbacks
