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


@pytest.mark.nightly("`test_greedy_tokens_are_eagers_in_two_graphs` compares 64")
def test_two_hundred_greedy_tokens_of_float32_are_eagers() -> None:
    """Not one of them is chosen otherwise, by weights large enough that few tokens repeat."""
    model, prompt = make_model(initializer_range=0.2), torch.randint(0, 500, (1, 12))
    how = {**HOW, "max_new_tokens": 200}
    expected = model.generate(prompt, **how)
    assert expected.unique().numel() > 100
    assert torch.equal(compiled(model).generate(prompt, **how), expected)


def test_a_third_graph_serves_prompts_of_all_other_lengths() -> None:
    model = make_model(num_hidden_layers=1)
    prompts = [torch.randint(0, 500, (1, length)) for length in (12, 7, 9, 5)]
    how = {**HOW, "max_new_tokens": 8}
    expected = [model.generate(prompt, **how) for prompt in prompts]
    model.compile(backend="aotkit", options={"fallback": "error"})
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert torch.equal(model.generate(prompt, **how), tokens)
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.nightly("tokens of one beam and of a batch are compared at each push")
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


def test_sampled_tokens_are_eagers_with_the_same_seed() -> None:
    model, prompt = make_model(num_hidden_layers=1), torch.randint(0, 500, (2, 7))
    how = {**HOW, "max_new_tokens": 32, "do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.7}
    runs = []
    for call in (model, compiled(model)):
        torch.manual_seed(3)
        runs.append(call.generate(prompt, **how))
    assert torch.equal(*runs)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.nightly("prompts of several lengths are compared at each push, and words behind others")
def test_a_prompt_in_chunks_gives_eagers_tokens() -> None:
    model, prompt = make_model(num_hidden_layers=1), torch.randint(0, 500, (1, 50))
    how = {**HOW, "max_new_tokens": 12, "prefill_chunk_size": 16}
    expected = model.generate(prompt, **how)
    assert torch.equal(compiled(model).generate(prompt, **how), expected)


@pytest.mark.parametrize("kind", ["Mixtral", "Mistral"])
def test_experts_and_sliding_windows_give_eagers_tokens(kind: str) -> None:
    """Tokens go beyond the window."""
    own = {"num_local_experts": 8, "num_experts_per_tok": 2} if kind == "Mixtral" else {"sliding_window": 16}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 500}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=4, num_key_value_heads=2, **own)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    prompt, how = torch.randint(0, 500, (1, 9)), {**HOW, "max_new_tokens": 24}
    expected = model.generate(prompt, **how)
    assert torch.equal(compiled(model).generate(prompt, **how), expected)


def test_a_full_cache_is_an_error_and_keeps_what_is_in_it() -> None:
    """As in eager mode: also what lies behind the cache's memory is not written to."""
    model = make_model(num_hidden_layers=1)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    step = torch.compile(model, backend="aotkit", options={"fallback": "error"})

    def token(place: int) -> None:
        places = torch.tensor([place])
        step(torch.tensor([[1]]), past_key_values=cache, cache_position=places, position_ids=places[None])

    with torch.no_grad():
        model(torch.arange(15)[None], past_key_values=cache, cache_position=torch.arange(15))
        layer = cache.layers[0]
        whole = [torch.full((2, 2, 16, 32), 7.0) for _ in range(2)]  # a cache, and as much behind it
        for name, memory in zip(("keys", "values"), whole, strict=True):
            memory[0] = getattr(layer, name)[0]
            setattr(layer, name, memory[:1])
        token(15)
        before = [memory.clone() for memory in whole]
        assert all(memory[0, :, 15].ne(7).all() for memory in whole)
        for _ in range(2):
            with pytest.raises(IndexError, match="index is out of range"):
                token(16)
    assert all(torch.equal(memory, was) for memory, was in zip(whole, before, strict=True))


@pytest.mark.parametrize("first", [12, 16, 40])
def test_a_block_of_words_beyond_the_cache_writes_nothing_around_it(first: int) -> None:
    """Some of the words have a place in it, or none; as in eager mode it is an error."""
    model = make_model(num_hidden_layers=1)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    step = torch.compile(model, backend="aotkit", options={"fallback": "error"})

    def block(start: int) -> None:
        places = torch.arange(start, start + 8)
        step(places[None], past_key_values=cache, cache_position=places, position_ids=places[None])

    with torch.no_grad():
        block(0)
        layer = cache.layers[0]
        around = [torch.full((3, 2, 16, 32), 7.0) for _ in range(2)]
        for name, memory in zip(("keys", "values"), around, strict=True):
            memory[1] = getattr(layer, name)[0]
            setattr(layer, name, memory[1:2])
        layer.cumulative_length.fill_(first)
        for _ in range(2):
            with pytest.raises(IndexError, match=r"out of (range|bounds)"):
                block(first)
    assert all((memory[::2] == 7).all() for memory in around)
