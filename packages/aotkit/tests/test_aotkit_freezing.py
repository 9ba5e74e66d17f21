"""The option "freezing": equal results, and a plain error where a frozen value is not what it was."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import aotkit
from aotkit.driver import freezing, lower
from aotkit_cache import open_cache
from aotkit_inductor_lower.targets.cpu import host_machine

OPTIONS = {"freezing": True, "fallback": "error"}


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    )
    model[1].running_mean.uniform_(-1, 1)
    model[1].running_var.uniform_(0.5, 2)
    return model.eval()


def freeze(model: nn.Module, **settings: object):
    torch._dynamo.reset()
    return torch.compile(model, backend="aotkit", options={**OPTIONS, **settings})


@pytest.mark.covers("F5a.23", "F5b.3")
@pytest.mark.parametrize("verify", [False, True])
def test_a_frozen_network_gives_eagers_results(verify: bool) -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    recorder = aotkit.Recorder()
    with torch.no_grad():
        run = freeze(model, verify=verify, observer=recorder)
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert "freeze" in recorder.stage_seconds()
    assert not any("batch_norm" in str(record.report) for record in recorder.graphs)


def test_with_gradients_nothing_is_frozen() -> None:
    model, x = network().train(), torch.randn(2, 3, 8, 8)
    run = freeze(model)
    run(x).sum().backward()
    with torch.no_grad():
        model[0].weight.add_(1)
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.covers("F5a.23")
def test_a_parameter_that_was_written_to_is_an_error_and_another_one_compiles_anew() -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        run = freeze(model)
        run(x)
        model[0].weight.mul_(2)
        with pytest.raises(aotkit.FrozenParameterError, match=r"shape \(8, 3, 3, 3\), has changed since"):
            run(x)
        torch.testing.assert_close(freeze(model)(x), model(x), rtol=1e-5, atol=1e-5)
        run = freeze(model)
        run(x)
        model[3].weight = nn.Parameter(torch.ones_like(model[3].weight))
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
        model[3].weight = nn.Parameter(torch.ones_like(model[3].weight).double())
        with pytest.raises(aotkit.FrozenParameterError, match="is now one of another shape, type or layout"):
            run(x)


def test_a_parameter_that_was_given_other_memory_is_an_error() -> None:
    """``p.data = ..`` moves no version counter."""
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    compiled, x = freeze(model), torch.randn(2, 4)
    with torch.no_grad():
        compiled(x)
        model[0].weight.data = model[0].weight.data * 2
        with pytest.raises(aotkit.FrozenParameterError, match="has changed"):
            compiled(x)
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.covers("F5a.23")
def test_discarded_parameters_are_an_error_to_whoever_uses_them_but_the_compiled_model() -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        want = model(x)
        run = freeze(model)
        run(x)
        names = aotkit.discard_parameters(model)
        assert {"0.weight", "1.running_mean", "5.bias"} <= set(names)
        torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-5)
        with pytest.raises(aotkit.FrozenParameterError, match=r"the parameter 0\.weight was discarded"):
            model(x)
        with pytest.raises(aotkit.FrozenParameterError, match=r"the buffer 1\.running_mean was discarded"):
            model[1].running_mean + 1
        assert "0.weight" in repr(model.state_dict(keep_vars=True)["0.weight"])
        assert aotkit.discard_parameters(network()) == []


def test_buffers_that_the_model_writes_to_are_not_frozen() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return x * self.weight + self.seen

    model, x = Counter().eval(), torch.ones(2)
    with torch.no_grad():
        run = freeze(model)
        assert [run(x).tolist() for _ in range(3)] == [[3.0, 4.0], [4.0, 5.0], [5.0, 6.0]]
        assert model.seen.item() == 3


def test_one_parameter_under_two_names_and_dynamic_sizes() -> None:
    model = network()
    model[3].weight = model[3].weight
    with torch.no_grad():
        torch._dynamo.reset()
        run = torch.compile(model, backend="aotkit", options=OPTIONS, dynamic=True)
        for batch in (2, 3, 7):
            x = torch.randn(batch, 3, 8, 8)
            torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)


def hits(recorder: aotkit.Recorder) -> int:
    return sum(name == "cache.loaded" for name, _ in recorder.events)


@pytest.mark.covers("F7.32")
def test_a_frozen_model_is_loaded_by_the_values_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    x = torch.linspace(-1, 1, 384).view(2, 3, 8, 8)

    def run(change: bool) -> int:
        model = network()
        recorder = aotkit.Recorder()
        with torch.no_grad():
            if change:
                model[3].bias[0] += 1
            call = freeze(model, observer=recorder)
            torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-5)
            if hits(recorder):  # what was loaded watches its parameters too
                assert "freeze" not in recorder.stage_seconds()
                assert {"0.weight", "1.running_mean"} <= set(aotkit.discard_parameters(model))
                call(x)
            else:
                model[0].weight.mul_(2)
                with pytest.raises(aotkit.FrozenParameterError, match="has changed since"):
                    call(x)
        return hits(recorder)

    assert [run(change=False), run(change=False), run(change=True), run(change=True), run(change=False)] == [
        0,
        1,
        0,
        1,
        1,
    ]


@pytest.mark.covers("F7.32")
def test_an_entry_of_a_frozen_model_does_not_hold_the_weights_that_are_used_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(600, 600), nn.ReLU()), torch.randn(3, 600)
    for loaded in (0, 1):
        recorder = aotkit.Recorder()
        with torch.no_grad():
            torch.testing.assert_close(freeze(model, observer=recorder)(x), model(x))
        assert hits(recorder) == loaded
    cache = open_cache()
    (size,) = [s.size for s in cache.entries() if cache.describe(s.key)[0].meta.get("kind") == "inference"]
    assert size < 600 * 600 * 4 // 2


def layers(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 130)).to(dtype).eval()


#: Products in tile registers read no packed weights; where the processor has them, kernels are for one without.
PLAIN = {"contractions": "generated", **({"processor": "x86-64-v3"} if host_machine().has("amx-bf16") else {})}


def packed(recorder: aotkit.Recorder) -> bool:
    """Whether weights were packed for the products."""
    return any("laid out once" in str(record.report) for record in recorder.graphs)


@pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")
def test_weights_of_linear_layers_are_packed_once_and_never_stale() -> None:
    model, x = layers(torch.float32), torch.randn(40, 96)
    recorder = aotkit.Recorder()
    with torch.no_grad():
        run = freeze(model, observer=recorder, **PLAIN)
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
        assert packed(recorder)
        model[0].weight.mul_(2)  # as an optimizer does
        with pytest.raises(aotkit.FrozenParameterError, match=r"shape \(200, 96\), has changed since"):
            run(x)
        run = freeze(model, **PLAIN)
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
        model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
        with pytest.raises(aotkit.FrozenParameterError, match="has changed since"):
            run(x)


@pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_in_memory_packed_or_as_they_were(dtype: torch.dtype) -> None:
    model, x = layers(dtype), torch.randn(40, 96, dtype=dtype)
    with torch.no_grad():
        run, want = freeze(model, **PLAIN), model(x)
        first = run(x)
        torch.testing.assert_close(first, want, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-2)
        left = weakref.ref(model[0].weight)
        assert aotkit.discard_parameters(model) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        gc.collect()
        assert left() is None, "nothing else holds the weight as it was"
        assert torch.equal(run(x), first)


@pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")
def test_packed_weights_come_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    x, results = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)), []
    for factor, loaded in ((1, 0), (1, 1), (2, 0)):
        model, recorder = layers(torch.float32), aotkit.Recorder()
        with torch.no_grad():
            model[0].weight.mul_(factor)
            results.append(freeze(model, observer=recorder, **PLAIN)(x))
            torch.testing.assert_close(results[-1], model(x), rtol=1e-5, atol=1e-5)
        assert (hits(recorder), packed(recorder)) == (loaded, True)
    assert torch.equal(results[0], results[1])


def test_of_more_weights_than_an_entry_may_hold_none_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "MOST_PACKED_BYTES", 4 * (96 * 200 + 200 * 130 + 330) - 1)
    model, x, recorder = layers(torch.float32), torch.randn(40, 96), aotkit.Recorder()
    with torch.no_grad():
        run = freeze(model, observer=recorder, **PLAIN, cache=False)
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert not packed(recorder)


class Layered(nn.Module):
    """Layers that are graphs of their own, as where something between them is printed."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.linear(x).relu())
            torch._dynamo.graph_break()
            return y + x

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layered.Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def both(models: list[nn.Module]) -> list[nn.Module]:
    """Compiled with equal options, so that Dynamo takes what it has for one for the other, too."""
    torch._dynamo.reset()
    return [torch.compile(model, backend="aotkit", options=OPTIONS) for model in models]


def test_modules_of_one_class_have_frozen_graphs_of_their_own() -> None:
    models, x = [network(), network()], torch.randn(2, 3, 8, 8)
    for parameter in models[1].parameters():
        nn.init.uniform_(parameter)
    with torch.no_grad():
        wanted = [model(x) for model in models]
        assert not torch.allclose(*wanted)
        runs = both(models)
        for run, want in [*zip(runs, wanted), *zip(runs, wanted)]:
            torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-5)
        aotkit.discard_parameters(models[1])
        for run, want in [*zip(runs, wanted), *zip(runs, wanted)]:
            torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-5)
        models[0][0].weight.mul_(2)
        with pytest.raises(aotkit.FrozenParameterError, match="has changed since"):
            runs[0](x)
        torch.testing.assert_close(runs[1](x), wanted[1], rtol=1e-5, atol=1e-5)


def test_layers_that_are_graphs_of_their_own_are_frozen_each() -> None:
    model, x = Layered(10).eval(), torch.randn(4, 8)  # more than Dynamo would compile anew for
    with torch.no_grad():
        want, run = model(x), freeze(model)
        for _ in range(2):
            torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-5)
        assert len(aotkit.discard_parameters(model)) == 40
        torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-5)


class Pair(nn.Module):
    def __init__(self, inner: int, tied: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(inner, inner, bias=False) for _ in range(2))
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = self.first.weight.shape[0]
        return self.second(self.first(x.sum(1, keepdim=True).expand(-1, width)).sin()).sum(1)


@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)], ids=str)
def test_weights_that_are_one_in_one_module_are_two_in_another(order: tuple[bool, ...]) -> None:
    models, x = [Pair(6, tied).eval() for tied in order], torch.randn(3, 5)
    with torch.no_grad():
        wanted, runs = [model(x) for model in models], both(models)
        for run, want in [*zip(runs, wanted), *zip(runs, wanted)]:
            torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-5)


def test_weights_with_two_names_are_discarded_as_one() -> None:
    model, x = Pair(6, True).eval(), torch.randn(3, 5)
    with torch.no_grad():
        want, run = model(x), freeze(model)
        run(x)
        assert aotkit.discard_parameters(model) == ["first.weight", "second.weight"]
        torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-5)


def test_a_module_of_other_sizes_is_refused() -> None:
    """Dynamo has no guard any more that tells it apart."""
    models, x = [Pair(6, False).eval(), Pair(7, False).eval()], torch.randn(3, 5)
    with torch.no_grad():
        runs = both(models)
        torch.testing.assert_close(runs[0](x), models[0](x), rtol=1e-5, atol=1e-5)
        with pytest.raises(aotkit.FrozenParameterError, match="is now one of another shape, type or layout"):
            runs[1](x)


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_modules_of_one_class_with_sizes_that_vary_are_right_or_refused(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    models = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval() for _ in range(2)]
    runs = [torch.compile(model, backend="aotkit", options=OPTIONS, dynamic=dynamic) for model in models]
    said = []
    with torch.no_grad():
        for rows in (3, 5, 7):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(runs[0](x), models[0](x))
            try:
                torch.testing.assert_close(runs[1](x), models[1](x))
            except aotkit.FrozenParameterError as refusal:
                said.append(str(refusal))
    assert len(said) == (3 if dynamic else 2)
    assert all("is another module's, and the graph is for sizes that vary" in text for text in said)


def test_graphs_of_other_modules_that_come_from_the_cache_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    models, x = [Pair(6, False).eval() for _ in range(3)], torch.randn(3, 5)
    with torch.no_grad():
        wanted = [model(x) for model in models]
        for _ in range(2):  # compiled, then loaded
            runs = both(models)
            for run, want in [*zip(runs, wanted), *zip(runs, wanted)]:
                torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-5)


def frozen_graphs() -> dict[int, object]:
    """Kept alive, so that no other has the same number."""
    return {id(each): each for each in gc.get_objects() if type(each) is freezing._Frozen}


@pytest.mark.parametrize("discarded", [False, True])
def test_graphs_of_modules_that_are_gone_are_forgotten(discarded: bool) -> None:
    x = torch.randn(2, 3, 8, 8)
    models = [network() for _ in range(3)]
    gone = [weakref.ref(model[5].weight) for model in models]
    known = frozen_graphs()
    with torch.no_grad():
        runs = both(models)
        for run in runs[:2]:
            run(x)
        if discarded:
            aotkit.discard_parameters(models[1])
        del run, runs[1], models[1]
        gc.collect()
        torch.testing.assert_close(runs[1](x), models[1](x), rtol=1e-5, atol=1e-5)  # the third
        gc.collect()
        assert [each() is None for each in gone] == [False, True, False]
        assert len(frozen_graphs().keys() - known.keys()) == 2
