"""The networks that benchmarks train beside the five architectures of `tools/integration`: a step of each is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aotkit
from tools.bench.models import MORE, make_batch, make_model
from tools.bench.numerics import compare
from tools.bench.worker import make_step

pytest.importorskip("transformers")


@pytest.mark.filterwarnings("default::UserWarning")  # Dynamo warns of what it does itself
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["unet", *(name for name in MORE if name != "unet")])
def test_a_training_step_is_as_near_to_float64_as_eager_mode(name: str) -> None:
    batch = {key: value[:2] for key, value in make_batch(name, quick=True).items()}
    wide = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    recorder = aotkit.Recorder()
    backend = aotkit.make_backend(aotkit.Options(cache=False, fallback="error"), recorder)
    found = []
    for kind in ("double", "eager", "aotkit"):
        model = make_model(name).train()
        model = model.double() if kind == "double" else model
        torch._dynamo.reset()
        call: Any = torch.compile(model, backend=backend) if kind == "aotkit" else model
        values = make_step(model, call, wide if kind == "double" else batch, "train")()
        found.append({key: value.detach().numpy() for key, value in values.items()})
    reference, eager, ours = found
    report = compare(ours, eager, reference)
    assert report.ok and report.tensors > 10, report
    assert recorder.graphs and not recorder.fallbacks


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.nightly("products of each kind and a model's attention are tested on one thread and on two")
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_a_training_step_is_the_same_on_one_thread_and_on_two(name: str) -> None:
    """With products of ours: a library's sums may depend on the number of threads (in eager mode as well)."""
    batch = {key: value[:2] for key, value in make_batch(name, quick=True).items()}
    options = aotkit.Options(cache=False, fallback="error", contractions="generated")
    backend = aotkit.make_backend(options, aotkit.Recorder())
    model = make_model(name).train()
    torch._dynamo.reset()
    step = make_step(model, torch.compile(model, backend=backend), batch, "train")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            model.zero_grad()
            found.append({key: value.detach().clone() for key, value in step().items()})
    finally:
        torch.set_num_threads(before)
    one, two = found
    assert one.keys() == two.keys() and len(one) > 10
    assert [key for key in one if not torch.equal(one[key], two[key])] == []
