"""`cudagraphs` of the options: compiled graphs are recorded and replayed; here on the simulated device."""

import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

from aotkit import Options, Recorder
from aotkit.driver.context import CompileContext
from aotkit.driver.run import compile_and_bind
from aotkit.driver.stages import own_stages
from aotkit_cudagraphs import CudagraphNotice, CudagraphTrees
from aotkit_cudagraphs.drivers import SimulatedDriver

# Operators as ATen runs them: the simulated device sees what goes through torch's dispatcher.
OPTIONS = Options(cudagraphs=True, lowering="none")


@pytest.fixture
def trees():
    return CudagraphTrees(SimulatedDriver(capacity=1 << 20))


def compiled(fn, examples, trees, num_static=0):
    fakes = _fakes(examples)
    ctx = CompileContext(OPTIONS, Recorder(), own_stages(), "model", num_static=num_static, trees=trees)
    return compile_and_bind(fn, fakes, examples, ctx)


def _fakes(examples):
    mode = FakeTensorMode()
    return [mode.from_tensor(x) for x in examples]


def replays(trees):
    return {info.name: info.replays for info in trees.report().functions}


@pytest.mark.covers("F6.20")
def test_an_inference_is_replayed_with_its_parameters_in_place(trees):
    weight = torch.randn(8, 8)

    def fn(w, x):
        return [torch.relu(x @ w) + 1]

    fast = compiled(fn, [weight, torch.randn(4, 8)], trees, num_static=1)
    kept = []
    for _ in range(5):
        x = torch.randn(4, 8)
        kept.append((fast(weight, x)[0], fn(weight, x)[0]))
    assert all(torch.equal(a, b) for a, b in kept) and replays(trees) == {"model-inference": 4}
    (recording,) = trees.report().recordings
    assert "float32[8, 8] static" in recording.inputs


@pytest.mark.covers("F6.21", "F6.26")
def test_a_training_step_is_a_path_of_two_recordings_and_accumulates_right(trees):
    weight = torch.randn(8, 8, requires_grad=True)
    twin = weight.detach().clone().requires_grad_()

    def fn(w, x):
        return [torch.tanh(torch.sin(x @ w) @ w).sum()]

    fast = compiled(fn, [weight, torch.randn(4, 8)], trees, num_static=1)
    for _ in range(3):
        for _ in range(4):
            x = torch.randn(4, 8)
            fast(weight, x)[0].backward()
            fn(twin, x)[0].backward()
            assert torch.allclose(weight.grad, twin.grad, rtol=1e-5, atol=1e-6)
        weight.grad = twin.grad = None
    assert replays(trees) == {"model-forward": 11, "model-backward": 11}
    paths = {recording.path: recording.inputs for recording in trees.report().recordings}
    assert paths.keys() == {("model-forward",), ("model-forward", "model-backward")}
    inputs = paths["model-forward", "model-backward"]
    assert "float32[8, 8] static" in inputs and "in path" in inputs


@pytest.mark.covers("F6.20")
def test_a_graph_is_recorded_around_what_cant_be(trees):
    with torch.library._scoped_library("aotkit_cudagraph_test", "FRAGMENT") as library:
        library.define("wait(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        library.impl("wait", lambda x: x * 3, "CompositeExplicitAutograd")

        def fn(x):
            return [torch.relu(torch.ops.aotkit_cudagraph_test.wait(torch.relu(x) + 1)) * 2]

        with pytest.warns(CudagraphNotice, match="tagged cudagraph_unsafe"):
            fast = compiled(fn, [torch.ones(4)], trees)
        for _ in range(4):
            x = torch.randn(4)
            assert torch.equal(fast(x)[0], fn(x)[0])
    assert replays(trees) == {"model-inference-0": 3, "model-inference-2": 3}


def test_parameters_and_buffers_of_a_compiled_module_are_used_in_place(trees, monkeypatch):
    monkeypatch.setattr("aotkit.driver.cudagraphs.CudagraphStages._trees_for", lambda self, graph, name: trees)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    twin = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    twin.load_state_dict(model.state_dict())
    fast = torch.compile(model, backend="aotkit", options={"cudagraphs": True, "lowering": "none"})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for _ in range(5):
        x = torch.randn(8, 4)
        for optimizer, run in zip(optimizers, (fast, twin), strict=True):
            optimizer.zero_grad()
            run(x).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
    forward = next(r for r in trees.report().recordings if r.path[-1].endswith("forward"))
    assert forward.inputs.count("static") >= 4 and forward.replays == 4
    model.eval(), twin.eval()
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(8, 4)
            torch.testing.assert_close(fast(x), twin(x))


@pytest.mark.covers("F6.18")
def test_reduce_overhead_on_the_cpu_says_once_that_nothing_is_recorded():
    def fn(x):
        return torch.relu(x) + 1

    fast = torch.compile(fn, backend="aotkit", options={"cudagraphs": True, "lowering": "none"})
    with pytest.warns(CudagraphNotice, match="runs on the CPU") as caught:
        assert torch.equal(fast(torch.ones(3)), fn(torch.ones(3)))
    assert len([w for w in caught if issubclass(w.category, CudagraphNotice)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(torch.zeros(3))
