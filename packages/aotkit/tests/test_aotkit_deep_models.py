"""Models of transformers whose layers are compiled once, against eager: losses, logits, gradients, random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aotkit

transformers = pytest.importorskip("transformers", reason="transformers is not installed; nox installs it")

LAYERS, WORDS = 7, 64
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": 4, "decoder_start_token_id": 0}

MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, use_cache=False)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, num_attention_heads=4)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=WORDS, **T5, num_decoder_layers=LAYERS, use_cache=False)
    ),
}


@pytest.mark.nightly("test_aotkit_repeated_layers.py has attention, dropout, what layers share, and all else by itself")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_deep_model_is_what_eager_computes(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train(training)
    words = torch.randint(1, WORDS, (2, 12))
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "rng": "eager", "repeated_layers": "once", "observer": recorder, "cache": False}
    run = torch.compile(model, backend="aotkit", options=options)

    def step(call: Any) -> list[Any]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        with torch.set_grad_enabled(training):
            found = call(input_ids=words, labels=words)
        if training:
            found.loss.backward()
        return [found.loss.detach(), found.logits.detach(), *(p.grad for p in model.parameters()), torch.rand(2)]

    for ours, eagers in zip(step(run), step(model), strict=True):
        assert (ours is None) == (eagers is None)
        if ours is not None:
            torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=2e-5)
    ((*counts,),) = [what["layers"] for event, what in recorder.events if event == "layers.once"]
    assert counts == [LAYERS - 1] * (2 if name == "t5" else 1)
