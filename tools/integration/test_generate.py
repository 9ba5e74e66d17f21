"""Language models that write one token after the other: the tokens that eager mode writes, in two graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

import aotkit  # noqa: F401  (registers the backend)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_model(**changed: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 500}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**{**sizes, **heads, **changed})
    return transformers.LlamaForCausalLM(config).eval()


def compiled(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="aotkit", options={"fallback": "error"})
    return model


HOW: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False, "cache_implementation": "static"}


def test_greedy_tokens_are_eagers_in_two_graphs() -> None:
    model, prompt = make_model(), torch.randint(0, 500, (1, 12))
    expected = model.generate(prompt, **HOW)
    compiled(model)
    assert torch.equal(model.generate(prompt, **HOW), expected)
    assert counters["stats"]["unique_graphs"] == 2
    assert torch.equal(model.generate(prompt, **HOW), expected)
    assert counters["stats"]["unique_graphs"] == 2, "a second call compiles nothing"


def test_a_third_graph_serves_prompts_of_all_other_lengths() -> None:
    model = make_model(num_hidden_layers=1)
    prompts = [torch.randint(0, 500, (1, length)) for length in (12, 7, 9, 5)]
    how = {**HOW, "max_new_tokens": 8}
    expected = [model.generate(prompt, **how) for prompt in prompts]
    model.compile(backend="aotkit", options={"fallback": "error"})
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert torch.equal(model.generate(prompt, **how), tokens)
    assert counters["stats"]["unique_graphs"] == 3


def test_two_hundred_tokens_of_a_batch_of_beams_are_eagers() -> None:
    model, prompt = make_model(num_hidden_layers=1), torch.randint(0, 500, (1, 5))
    how = {**HOW, "max_new_tokens": 200, "num_beams": 2}
    expected = model.generate(prompt, **how)
    assert torch.equal(compiled(model).generate(prompt, **how), expected)


def test_a_step_of_bfloat16_is_as_exact_as_eagers() -> None:
    """Logits of one token behind a prompt, against float64."""
    prompt, word, place = torch.randint(0, 500, (1, 9)), torch.tensor([[7]]), torch.tensor([9])

    def logits(model: Any, call: Any) -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        model(prompt, past_key_values=cache, cache_position=torch.arange(9))
        return call(word, past_key_values=cache, cache_position=place, position_ids=place[None]).logits.double()

    with torch.no_grad():
        model = make_model().bfloat16()
        exact = make_model().double()
        exact.load_state_dict(model.state_dict())
        want, true = logits(model, model), logits(exact, exact)
        got = logits(model, torch.compile(model, backend="aotkit", options={"fallback": "error"}))
    assert (got - true).abs().max() <= 1.5 * (want - true).abs().max()
