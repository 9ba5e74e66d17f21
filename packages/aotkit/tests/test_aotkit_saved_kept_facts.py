"""What a module of a saved function holds may change between two calls, also deep inside, and after quick ones."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotkit
from aotkit.artifact import kept_facts
from aotkit.artifact.kept_facts import KeptFacts


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.factor = nn.Linear(4, 4), nn.GELU(), 2.0
        self.settings = {"shift": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x)) * self.factor + self.settings["shift"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step"
    compiled = aotkit.saved.compile_to_save(step, (Net(), torch.ones(3, 4)))
    aotkit.saved.save_compiled_function(compiled, path)
    return path


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a submodule": lambda net: setattr(net.layers[1], "act", nn.GELU("tanh")),
    "a number in it": lambda net: setattr(net.layers[1], "factor", 3.0),
    "a setting of a module of torch": lambda net: setattr(net.layers[0].act, "approximate", "tanh"),
    "an item of a dictionary": lambda net: operator.setitem(net.layers[0].settings, "shift", 2.0),
    "a hook": lambda net: net.layers[1].linear.register_forward_hook(lambda *_: torch.zeros(3, 4)),
    "an order": lambda net: net.layers.__setitem__(0, Layer().requires_grad_(False)),
    "a layer": lambda net: operator.setitem(net.layers[0]._modules, "act", nn.ReLU()),
}


@pytest.mark.skipif(kept_facts.DictStates.of([]) is None, reason="this Python does not tell states of dictionaries")
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_calls_is_refused_or_seen(change: str, file: Path) -> None:
    saved, net, x = aotkit.saved.load_compiled_function(file), Net(), torch.ones(3, 4)
    for _ in range(4):
        assert torch.allclose(saved(net, x), net(x))
    net.layers[0].linear.weight.mul_(2)
    assert torch.allclose(saved(net, x), net(x))
    CHANGES[change](net)
    if change == "an order":  # other weights of the same shapes
        assert torch.allclose(saved(net, x), net(x))
        return
    for _ in range(2):
        with pytest.raises(aotkit.GuardError):
            saved(net, x)


@pytest.mark.parametrize("states", [True, False], ids=["states", "no states"])
def test_what_no_fact_is_about_may_change_and_calls_stay_quick(
    states: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not states:
        monkeypatch.setattr(kept_facts.DictStates, "of", staticmethod(lambda dicts: None))
    saved, net, x = aotkit.saved.load_compiled_function(file), Net(), torch.ones(3, 4)
    for _ in range(4):
        saved(net, x)
    monkeypatch.setattr(KeptFacts, "renew", lambda *_: 1 / 0)
    for count in range(3):
        net.layers[1].calls = count
        net.notes = {count: "new"}
        assert torch.allclose(saved(net, x), net(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = self.second = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@pytest.mark.skipif(kept_facts.DictStates.of([]) is None, reason="this Python does not tell states of dictionaries")
@pytest.mark.parametrize("name", ["first", "second"])
def test_one_module_under_two_names_may_not_become_two(name: str, tmp_path: Path) -> None:
    net, x = Twice(), torch.ones(3, 4)
    aotkit.saved.save_compiled_function(aotkit.saved.compile_to_save(step, (net, x)), tmp_path / "step")
    saved = aotkit.saved.load_compiled_function(tmp_path / "step")
    for _ in range(4):
        assert torch.allclose(saved(net, x), net(x))
    setattr(net, name, nn.Linear(4, 4).requires_grad_(False))
    with pytest.raises(aotkit.GuardError, match="are two objects, and were one"):
        saved(net, x)


@pytest.mark.parametrize("within", [False, True], ids=["itself", "in a function"])
def test_a_saved_function_may_be_called_by_a_compiled_one(within: bool, file: Path) -> None:
    loaded, net, x = aotkit.saved.load_compiled_function(file), Net(), torch.randn(3, 4)
    around = (lambda net, x: loaded(net, x * 2) / 2) if within else loaded
    for _ in range(3):
        found = torch.compile(around, backend="aotkit")(net, x)
        torch.testing.assert_close(found, net(x * 2) / 2 if within else net(x))
