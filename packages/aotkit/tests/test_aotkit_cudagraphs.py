"""`cudagraphs` of the options: compiled graphs are recorded and replayed; here on the simulated device."""

import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

import aotkit
from aotkit import Options, Recorder
from aotkit.driver import bind as driver_bind
from aotkit.driver.context import CompileContext
from aotkit.driver.run import compile_and_bind
from aotkit.driver.stages import own_stages
from aotkit_cache import CacheWarning
from aotkit_cudagraphs import CudagraphNotice, CudagraphTrees
from aotkit_cudagraphs.drivers import SimulatedDriver
from aotkit_inductor_lower.errors import BindError

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
    monkeypatch.setattr("aotkit.driver.cudagraphs.recorded_device", lambda graph, ctx: torch.device("cpu"))
    monkeypatch.setattr("aotkit.driver.bound_recordings.trees_of", lambda device, outputs: trees)
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


# -- kept between processes: the plan and the compiled parts, not the recordings --


class Products(torch.nn.Module):
    """Only products, which the simulated device sees."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = torch.nn.Parameter(torch.randn(8, 8, generator=generator))
        self.v = torch.nn.Parameter(torch.randn(8, 8, generator=generator))

    def forward(self, x):
        return (x @ self.w) @ self.v


KEPT = {"cudagraphs": True, "contractions": "aten", "fallback": "error"}


@pytest.fixture
def process(monkeypatch):
    """What a new process has: trees of its own, on the simulated device, and nothing of Dynamo's."""
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    monkeypatch.setattr("aotkit.driver.cudagraphs.recorded_device", lambda graph, ctx: torch.device("cpu"))

    def begin():
        torch._dynamo.reset()
        trees = CudagraphTrees(SimulatedDriver(capacity=1 << 20))
        monkeypatch.setattr("aotkit.driver.bound_recordings.trees_of", lambda device, outputs: trees)
        return trees

    return begin


def compile_with(fn, recorder=None, **options):
    chosen = Options().patch(**KEPT, **options)
    return torch.compile(fn, backend=aotkit.make_backend(chosen, recorder or Recorder()))


def train(fast, model, steps=5):
    for _ in range(steps):
        x, weight = torch.randn(4, 8), torch.randn(4, 8)
        found = []
        for call in (fast, model):
            model.zero_grad()
            out = call(x)
            out.backward(weight)
            found.append([out.detach(), *(p.grad for p in model.parameters())])
            del out
        torch.testing.assert_close(*found)


@pytest.mark.covers("F6.20", "F7.1")
@pytest.mark.parametrize("verify", [False, True])
def test_a_training_graph_is_loaded_and_recorded_anew(process, no_compile, monkeypatch, verify):
    model, told = Products(), []
    for turn in range(2):
        trees, recorder = process(), Recorder()
        if verify:
            monkeypatch.setenv("AOTKIT_VERIFY", "1")
        fast = compile_with(model, recorder, verify=verify)
        train(fast, model)
        loaded = [fields for name, fields in recorder.events if name == "cache.loaded"]
        assert len(loaded) == (turn and not verify)
        assert sorted(kind.partition("-")[2] for kind in replays(trees)) == ["backward", "forward"]
        assert set(replays(trees).values()) == {4}
        told.append(sorted((r.path[-1].partition("-")[2], r.inputs) for r in trees.report().recordings))
        if not verify:
            no_compile()
    assert told[0] == told[1] and "float32[8, 8] static" in told[1][0][1]


@pytest.mark.covers("F6.20", "F7.1")
def test_the_parts_around_what_cant_be_recorded_are_loaded(process, no_compile):
    with torch.library._scoped_library("aotkit_cudagraph_kept", "FRAGMENT") as library:
        library.define("wait(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        library.impl("wait", lambda x: x * 3, "CompositeExplicitAutograd")
        wait, weight = torch.ops.aotkit_cudagraph_kept.wait, torch.randn(8, 8)

        def fn(x, y):
            return wait((x @ y) @ y) @ y @ y, x @ x

        for turn in range(2):
            trees, recorder = process(), Recorder()
            with pytest.warns(CudagraphNotice, match="tagged cudagraph_unsafe"):
                fast = compile_with(fn, recorder, cacheable={"aotkit_cudagraph_kept.wait@1"})
                for _ in range(4):
                    x = torch.randn(8, 8)
                    torch.testing.assert_close(fast(x, weight), fn(x, weight))
            assert any(name == "cache.loaded" for name, _ in recorder.events) == bool(turn)
            assert [name.partition("-")[2] for name in replays(trees)] == ["inference-0", "inference-2"]
            assert set(replays(trees).values()) == {3}
            no_compile()


def test_a_stored_backward_that_cant_be_used_is_compiled_and_recorded(process, monkeypatch):
    model = Products()
    process()
    train(compile_with(model), model, 2)
    whole = driver_bind.bind_graph
    refused = []

    def bind_graph(graph, *args, **kwargs):
        if not refused and args[3:] and args[3].endswith("-backward"):
            refused.append(args[3])
            raise BindError("it is damaged")
        return whole(graph, *args, **kwargs)

    monkeypatch.setattr(driver_bind, "bind_graph", bind_graph)
    trees = process()
    with pytest.warns(CacheWarning, match="a stored backward can't be used"):
        train(compile_with(model), model)
    assert len(refused) == 1 and sorted(replays(trees).values()) == [4, 4]


@pytest.mark.covers("F7.1")
def test_packages_and_saved_functions_record_where_they_run(process, no_compile, tmp_path):
    model, x = Products(), torch.randn(4, 8)
    options = Options().patch(**KEPT)
    process()
    aotkit.aot_compile(model, (x,), tmp_path / "package", options=options)
    saved = aotkit.saved.compile_to_save(model, (x,), options=options)
    aotkit.saved.save_compiled_function(saved, tmp_path / "function")
    no_compile()

    trees = process()
    package = aotkit.load(tmp_path / "package")
    for _ in range(4):
        x = torch.randn(4, 8)
        torch.testing.assert_close(package(x), model(x).detach())
    package.load_weights({name: 2 * value.detach() for name, value in model.named_parameters()})
    torch.testing.assert_close(package(x), 4 * model(x).detach())
    assert replays(trees) == {"package-inference": 4}

    trees = process()
    function = aotkit.saved.load_compiled_function(tmp_path / "function")
    train(lambda x: function(model, x), model)
    assert replays(trees) == {"saved-forward": 4, "saved-backward": 4}


def test_a_loaded_graph_on_the_cpu_says_once_that_nothing_is_recorded(monkeypatch):
    monkeypatch.setenv("AOTKIT_VERIFY", "0")

    def fn(x):
        return torch.relu(x) + 1

    for turn in range(2):
        torch._dynamo.reset()
        recorder = Recorder()
        with pytest.warns(CudagraphNotice, match="runs on the CPU") as caught:
            assert torch.equal(compile_with(fn, recorder)(torch.ones(3)), fn(torch.ones(3)))
        assert len([w for w in caught if issubclass(w.category, CudagraphNotice)]) == 1
        assert any(name == "cache.loaded" for name, _ in recorder.events) == bool(turn)
