"""A saved step with many weights and a cache, between whose calls somebody does something to them: each call gives what
eager mode gives, or is refused before anything is written."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import aotkit
from aotkit import GuardError
from aotkit_inductor_lower.runtime import argument_reader

pytestmark = pytest.mark.filterwarnings("ignore:.*resize")

WIDTH, LAYERS = 6, 18
QUICK = sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 11)


class Layer(nn.Module):
    """Two weights and a cache, which the step writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("cache", torch.zeros(4, WIDTH))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Writes to a row of the cache and reads all of it."""
        x = torch.tanh(x @ self.weight + self.bias)
        self.cache.index_copy_(0, place, x)
        return x + self.cache.sum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x, place)
        return x * 2 if self.layers[7].training else x


def inputs(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(turn)), torch.tensor([turn % 4])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "step.aotkit"
    with torch.no_grad():
        aotkit.saved.save_compiled_function(aotkit.saved.compile_to_save(Model(), inputs(0)), file)
    return file


def freed_and_made_again(layer: Layer) -> None:
    del layer._parameters["weight"]
    gc.collect()
    layer.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1), requires_grad=False)


def swapped(layer: Layer) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.full((WIDTH, WIDTH), 0.2), requires_grad=False))


def moved_into_a_larger_storage(layer: Layer) -> None:
    memory = torch.zeros(100)
    layer.cache.set_(memory.untyped_storage(), 40, (4, WIDTH), (WIDTH, 1))


def over_one_memory(layer: Layer) -> None:
    """The cache becomes a part of the weight's memory: the step would overwrite what it reads."""
    memory = torch.zeros(10, WIDTH)
    layer.cache = memory[:4]
    layer.weight.data = memory[2 : 2 + WIDTH]


ATTACKS: dict[str, Callable[[Layer], object]] = {
    "nothing": lambda layer: None,
    "written": lambda layer: layer.weight.mul_(0.5),
    "data": lambda layer: setattr(layer.weight, "data", torch.full((WIDTH, WIDTH), 0.3)),
    "set_": lambda layer: layer.weight.set_(torch.full((WIDTH, WIDTH), 0.3)),
    "storage resized": lambda layer: layer.cache.untyped_storage().resize_(1 << 14),
    "larger storage": moved_into_a_larger_storage,
    "cache of its own": lambda layer: setattr(layer, "cache", layer.cache.clone()),
    "weight of its own": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight * 2, requires_grad=False)),
    "freed and made again": freed_and_made_again,
    "swapped": swapped,
    "resized": lambda layer: layer.cache.resize_(5, WIDTH)[4:].zero_(),  # what is new may be anything, nan as well
    "smaller": lambda layer: layer.cache.resize_(3, WIDTH),
    "transposed": lambda layer: layer.weight.t_(),
    "another type": lambda layer: setattr(layer.weight, "data", torch.ones(WIDTH, WIDTH, dtype=torch.float64)),
    "a gradient": lambda layer: layer.weight.requires_grad_(),
    "negated": lambda layer: setattr(layer, "cache", torch._neg_view(layer.cache.clone())),
    "over one memory": over_one_memory,
    "one twice": lambda layer: setattr(layer, "cache", layer._other.cache),
    "lazily copied": lambda layer: setattr(layer, "cache", torch._lazy_clone(layer.cache)),
    "another dictionary": lambda layer: setattr(layer, "_parameters", {**layer._parameters, "more": None}),
    "another dictionary with another weight": lambda layer: setattr(
        layer, "_parameters", {**layer._parameters, "weight": nn.Parameter(layer.weight * 3, requires_grad=False)}
    ),
    "other attributes": lambda layer: setattr(layer, "__dict__", dict(layer.__dict__)),
    "weight in the dictionary": lambda layer: layer._parameters.update(weight=layer._other.bias * layer.weight),
}


def attack(model: Model, name: str, k: int) -> None:
    layer = model.layers[k]
    object.__setattr__(layer, "_other", model.layers[(k + 1) % LAYERS])
    ATTACKS[name](layer)


def contents(model: Model) -> list[torch.Tensor]:
    return [value.detach().clone() for value in (*model.parameters(), *model.buffers())]


@torch.no_grad()
def compare(call: Any, model: Model, twin: Model, turn: int) -> bool:
    """One call of both; whether ours was refused, in which case it wrote nothing."""
    before = contents(model)
    try:
        found = call(model, *inputs(turn))
    except GuardError:
        assert all(map(torch.equal, contents(model), before))
        return True
    torch.testing.assert_close(found, twin(*inputs(turn)), rtol=1e-4, atol=1e-5)
    for mine, eagers in zip(contents(model), contents(twin), strict=True):
        torch.testing.assert_close(mine, eagers, rtol=1e-4, atol=1e-5)
    return False


REFUSED = {"resized", "smaller", "transposed", "another type", "a gradient", "negated", "over one memory", "one twice"}


@pytest.mark.parametrize("name", ATTACKS, ids=lambda name: name.replace(" ", "_"))
def test_a_call_after_an_attack_is_eagers_or_refused(path: Path, name: str) -> None:
    call, model, twin = aotkit.saved.load_compiled_function(path), Model(), Model()
    for turn in range(3):
        assert not compare(call, model, twin, turn)
    assert (call._check_inputs._reader is None) is (argument_reader._compiled() is None)
    assert call._quick is not None or not QUICK
    with torch.no_grad():
        for one in (model, twin):
            attack(one, name, 7)
    for turn in range(3, 6):
        assert compare(call, model, twin, turn) is (name in REFUSED)


def test_a_call_after_a_refused_one_is_right_again(path: Path) -> None:
    call, model, twin = aotkit.saved.load_compiled_function(path), Model(), Model()
    random = Random(3)
    for turn in range(40):
        if turn % 3 == 2:
            other = Model()
            with torch.no_grad():
                attack(other, random.choice(sorted(REFUSED)), random.randrange(LAYERS))
                with pytest.raises(GuardError):
                    call(other, *inputs(turn))
        else:
            name, k = random.choice(sorted({*ATTACKS} - REFUSED)), random.randrange(LAYERS)
            with torch.no_grad():
                attack(model, name, k)
                attack(twin, name, k)
        assert not compare(call, model, twin, turn)


def test_versions_move_as_in_eager_mode(path: Path) -> None:
    call, model, twin = aotkit.saved.load_compiled_function(path), Model(), Model()
    for turn in range(3):
        compare(call, model, twin, turn)
    assert [b._version for b in model.buffers()] == [b._version for b in twin.buffers()]
    assert all(p._version == 0 for p in model.parameters())


def test_threads_with_models_of_their_own(path: Path) -> None:
    """One loaded step, four models at once, whose weights are replaced all the time."""
    call = aotkit.saved.load_compiled_function(path)
    failures: list[BaseException] = []
    pairs = [(Model(), Model()) for _ in range(4)]  # whose numbers come from one generator

    def run(seed: int) -> None:
        try:
            random, (model, twin) = Random(seed), pairs[seed]
            allowed = sorted({*ATTACKS} - REFUSED)
            for turn in range(10):
                name, k = random.choice(allowed), random.randrange(LAYERS)
                with torch.no_grad():
                    attack(model, name, k)
                    attack(twin, name, k)
                assert not compare(call, model, twin, turn)
        except (AssertionError, GuardError, RuntimeError) as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def other_part(model: Model) -> None:
    model.layers[7] = model._spare


FACTS: dict[str, Callable[[Model], object]] = {
    "training": lambda model: model.eval(),
    "training of a part": lambda model: model.layers[7].eval(),
    "another part": other_part,
    "another class": lambda model: setattr(model.layers[7], "__class__", type("Own", (Layer,), {})),
    "a list": lambda model: setattr(model, "_modules", {"layers": nn.ModuleList([*model.layers])}),
    "without a part": lambda model: model.layers._modules.pop("7"),
    "without a weight": lambda model: model.layers[7]._parameters.pop("weight"),
}


@pytest.mark.parametrize("name", FACTS, ids=lambda name: name.replace(" ", "_"))
@torch.no_grad()
def test_facts_about_a_module_are_seen_as_they_are_one_by_one(path: Path, name: str) -> None:
    """Of two loaded functions one never notes what its calls have found."""
    call, plain = (aotkit.saved.load_compiled_function(path) for _ in range(2))
    plain._noted = 1000
    outcomes, models = [], [Model() for _ in range(2)]
    for function, model in zip((call, plain), models, strict=True):
        torch.manual_seed(1)
        object.__setattr__(model, "_spare", Layer())
        for turn in range(3):
            function(model, *inputs(turn))
        FACTS[name](model)
        outcomes.append(outcome(function, model, inputs(4)))
    assert (call._quick is not None or not QUICK) and plain._quick is None
    assert type(outcomes[0]) is type(outcomes[1]) and str(outcomes[0]) == str(outcomes[1])
    for mine, others in zip(*map(contents, models), strict=True):
        torch.testing.assert_close(mine, others, rtol=0, atol=0)


def outcome(call: Any, model: Model, given: tuple[torch.Tensor, ...]) -> object:
    try:
        return call(model, *given)
    except (GuardError, AttributeError, KeyError) as error:
        return error


@torch.no_grad()
def test_states_of_torch_are_seen(path: Path) -> None:
    call, model, given = aotkit.saved.load_compiled_function(path), Model(), inputs(4)
    for turn in range(3):
        call(model, *inputs(turn))
    for change in (torch.enable_grad(), torch.inference_mode(), torch.autocast("cpu"), torch.device("meta")):
        with change, pytest.raises(GuardError, match="another state"):
            call(model, *given)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(GuardError, match="the default dtype"):
            call(model, *given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert call._quick is not None or not QUICK


@torch.no_grad()
def test_arguments_by_name(tmp_path: Path) -> None:
    x, place = inputs(0)
    compiled = aotkit.saved.compile_to_save(Model(), (), {"x": x, "place": place})
    aotkit.saved.save_compiled_function(compiled, tmp_path / "step.aotkit")
    call, model, twin = aotkit.saved.load_compiled_function(tmp_path / "step.aotkit"), Model(), Model()
    for turn in range(5):
        x, place = inputs(turn)
        torch.testing.assert_close(call(model, x=x, place=place), twin(x, place), rtol=1e-4, atol=1e-5)
    assert call._quick is not None or not QUICK
    with pytest.raises(GuardError, match="kwargs has the keys"):
        call(model, x=x, where=place)


@torch.no_grad()
def test_a_module_that_is_gone_is_not_another_one_in_its_place(path: Path) -> None:
    call = aotkit.saved.load_compiled_function(path)
    for turn in range(12):  # a module a call
        model, twin = Model(), Model()
        assert not compare(call, model, twin, turn)
        del model
        gc.collect()


@torch.no_grad()
def test_facts_that_are_looked_at_once_are_looked_at_for_each_module(path: Path) -> None:
    call, model = aotkit.saved.load_compiled_function(path), Model()
    for turn in range(3):
        call(model, *inputs(turn))
    other = Model()
    other.layers[3].register_forward_hook(lambda *given: None)
    before = contents(other)
    with pytest.raises(GuardError, match="_forward_hooks"):
        call(other, *inputs(4))
    assert all(map(torch.equal, contents(other), before))
