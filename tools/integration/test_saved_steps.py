"""A saved step of a language model between two tokens: what changes is used or refused, never overlooked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import aotkit

PROMPT, LENGTH = 5, 16


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


def step(model: Any, cache: Any, word: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(word, past_key_values=cache, cache_position=place, position_ids=place[None]).logits
    return logits


def filled_cache(model: Any, length: int = LENGTH) -> Any:
    cache, places = transformers.StaticCache(config=model.config, max_cache_len=length), torch.arange(PROMPT)
    with torch.no_grad():
        model(places[None], past_key_values=cache, cache_position=places)
    return cache


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("saved") / "step"
    model = make_model()
    with torch.no_grad():
        arguments = model, filled_cache(model), torch.tensor([[1]]), torch.tensor([PROMPT])
        aotkit.saved.save_compiled_function(aotkit.saved.compile_to_save(step, arguments), path)
    return aotkit.saved.load_compiled_function(path)


class Talk:
    """A model and its cache, three tokens into a text: so that all checks have passed before. ``twin`` is the same in
    eager mode."""

    def __init__(self, saved: Any) -> None:
        self.saved, self.model = saved, make_model()
        self.cache = filled_cache(self.model)
        self.turn = 0
        for _ in range(3):
            assert self.agrees()

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([[self.turn * 7 % 100]]), torch.tensor([PROMPT + self.turn])

    def agrees(self) -> bool:
        """Whether the next token's logits, and the cache after it, are eager's."""
        word, place = self.arguments()
        model, cache = copy.deepcopy((self.model, self.cache))
        with torch.no_grad():
            want, got = step(model, cache, word, place), self.saved(self.model, self.cache, word, place)
        self.turn += 1
        torch.testing.assert_close(got, want)
        for mine, its in zip(self.cache.layers, cache.layers, strict=True):
            torch.testing.assert_close((mine.keys, mine.values), (its.keys, its.values))
            assert int(mine.cumulative_length) == int(its.cumulative_length)
        return True


def moved(weight: torch.Tensor) -> None:
    weight.data = weight.data.clone() * 2


def there_and_back(model: Any) -> None:
    model.bfloat16()
    model.float()


def other_cache(talk: Talk) -> None:
    talk.cache = copy.deepcopy(talk.cache)
    talk.model(torch.tensor([[9]]), past_key_values=talk.cache, cache_position=torch.tensor([PROMPT + talk.turn]))
    talk.turn += 1


USED: dict[str, Callable[[Talk], object]] = {
    "a weight that is replaced": lambda talk: setattr(
        talk.model.model.layers[2].mlp.up_proj, "weight", nn.Parameter(torch.randn(96, 64))
    ),
    "a weight in other memory": lambda talk: moved(talk.model.model.layers[1].self_attn.q_proj.weight),
    "a weight that is written to": lambda talk: talk.model.lm_head.weight.mul_(3),
    "a layer that is replaced": lambda talk: setattr(
        talk.model.model.layers[0].mlp, "down_proj", nn.Linear(96, 64, bias=False)
    ),
    "weights of a file": lambda talk: talk.model.load_state_dict(
        {name: value * 1.5 for name, value in make_model().state_dict().items()}, assign=True
    ),
    "another type and back": lambda talk: there_and_back(talk.model),
    "another cache": other_cache,
    "a cache in other memory": lambda talk: moved(talk.cache.layers[3].keys),
    "another cache layer's memory": lambda talk: setattr(
        talk.cache.layers[1], "values", talk.cache.layers[1].values.clone() * 2
    ),
}


@pytest.mark.parametrize("what", USED, ids=lambda name: name.replace(" ", "_"))
def test_what_is_changed_between_two_tokens_is_used(saved: Any, what: str) -> None:
    talk = Talk(saved)
    with torch.no_grad():
        USED[what](talk)
    for _ in range(3):
        assert talk.agrees()


def exchanged(weight: torch.Tensor, value: torch.Tensor) -> None:
    weight.data = value


REFUSED: dict[str, Callable[[Talk], object]] = {
    "a weight of another type": lambda talk: exchanged(
        talk.model.lm_head.weight, talk.model.lm_head.weight.data.half()
    ),
    "a weight in another order": lambda talk: exchanged(
        talk.model.model.layers[0].self_attn.q_proj.weight, torch.randn(64, 64).t()
    ),
    "a weight turned over in place": lambda talk: exchanged(
        talk.model.model.layers[0].self_attn.q_proj.weight, talk.model.model.layers[0].self_attn.q_proj.weight.data.t()
    ),
    "a weight of another size": lambda talk: setattr(
        talk.model.model.layers[3].mlp.gate_proj, "weight", nn.Parameter(torch.randn(95, 64))
    ),
    "a model of another type": lambda talk: talk.model.bfloat16(),
    "training": lambda talk: talk.model.train(),
    "a longer cache": lambda talk: setattr(talk, "cache", filled_cache(talk.model, 2 * LENGTH)),
    "a resized cache": lambda talk: talk.cache.layers[2].keys.resize_(1, 2, LENGTH // 2, 16),
    "a layer less in the cache": lambda talk: talk.cache.layers.pop(),
    "a hook on the model": lambda talk: talk.model.register_forward_hook(lambda *given: None),
    "caches that share memory": lambda talk: setattr(talk.cache.layers[2], "values", talk.cache.layers[1].values[:]),
    "keys that are values": lambda talk: setattr(talk.cache.layers[2], "values", talk.cache.layers[2].keys),
    "a number for a weight": lambda talk: talk.model.lm_head._parameters.__setitem__("weight", 3),
}


@pytest.mark.parametrize("what", REFUSED, ids=lambda name: name.replace(" ", "_"))
def test_what_was_not_compiled_is_refused_between_two_tokens(saved: Any, what: str) -> None:
    """Twice, and nothing is written; with the change taken back it goes on."""
    talk = Talk(saved)
    kept = copy.deepcopy((talk.model, talk.cache))
    with torch.no_grad():
        REFUSED[what](talk)
        before = copy.deepcopy(talk.cache)
        for _ in range(2):
            with pytest.raises(aotkit.GuardError):
                saved(talk.model, talk.cache, *talk.arguments())
    for mine, its in zip(talk.cache.layers, before.layers, strict=True):
        assert torch.equal(mine.keys, its.keys) and torch.equal(mine.cumulative_length, its.cumulative_length)
    talk.model, talk.cache = kept
    assert talk.agrees()


def test_modes_are_looked_at_in_every_call(saved: Any) -> None:
    talk = Talk(saved)
    with pytest.raises(aotkit.GuardError, match="gradients are on"):
        saved(talk.model, talk.cache, *talk.arguments())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(aotkit.GuardError):
        saved(talk.model, talk.cache, *talk.arguments())
    with torch.inference_mode(), pytest.raises(aotkit.GuardError):
        saved(talk.model, talk.cache, *talk.arguments())
    assert talk.agrees()


WORDS: dict[str, Callable[[Talk], tuple[Any, Any]]] = {
    "a word of another type": lambda talk: (torch.tensor([[1.0]]), talk.arguments()[1]),
    "two words": lambda talk: (torch.tensor([[1, 2]]), talk.arguments()[1]),
    "a number": lambda talk: (7, talk.arguments()[1]),
    "a place in the memory of the cache": lambda talk: (
        talk.arguments()[0],
        talk.cache.layers[1].cumulative_length.view(1),
    ),
}


@pytest.mark.parametrize("what", WORDS, ids=lambda name: name.replace(" ", "_"))
def test_other_words_and_places_are_refused(saved: Any, what: str) -> None:
    talk = Talk(saved)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(aotkit.GuardError):
            saved(talk.model, talk.cache, *WORDS[what](talk))
        assert talk.agrees()


@pytest.mark.parametrize("place", [-1, LENGTH, LENGTH + 1, 1 << 40])
def test_a_place_beyond_the_cache_is_an_error_and_nothing_is_written(saved: Any, place: int) -> None:
    """Of the layer that refuses it, and of what lies around the cache's memory."""
    talk = Talk(saved)
    memory = [torch.full((3, *layer.keys.shape[1:]), 7.0) for layer in talk.cache.layers]
    for around, layer in zip(memory, talk.cache.layers, strict=True):
        around[1:2] = layer.keys
        layer.keys = around[1:2]
        layer.cumulative_length.fill_(place)
    before = copy.deepcopy(talk.cache)
    with torch.no_grad(), pytest.raises(IndexError):
        saved(talk.model, talk.cache, torch.tensor([[1]]), torch.tensor([place]))
    for around, mine, its in zip(memory, talk.cache.layers, before.layers, strict=True):
        assert torch.equal(mine.keys, its.keys) and torch.equal(mine.values, its.values)
        assert (around[::2] == 7).all()
