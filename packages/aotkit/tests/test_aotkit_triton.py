"""``torch.compile(backend="aotkit")`` with Triton kernels: in Triton's interpreter, and on a device if there is one."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import aotkit
from aotkit.artifact import torch_state
from aotkit.artifact.package_file import read_package, write_package
from aotkit.artifact.tensors import bytes_of, tensor_of
from aotkit.driver import package
from aotkit_inductor_lower import driver
from aotkit_inductor_lower.targets.triton.target import TritonTarget

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")


def compiled(fn: Callable[..., Any], **settings: Any) -> tuple[Callable[..., Any], aotkit.Recorder]:
    """``fn`` with kernels in the interpreter, as a new process would have it."""
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = aotkit.Options(fallback="error", processor="triton-interpreter").patch(**settings.pop("options", {}))
    return torch.compile(fn, backend=aotkit.make_backend(options, recorder), **settings), recorder


def test_workers_start_before_a_graph_is_traced_and_only_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from aotkit.driver import lower

    asked: list[Any] = []
    monkeypatch.setattr(lower, "start_compile_workers", lambda *given: asked.append((given, recorder.stage_seconds())))
    run, recorder = compiled(torch.sin, options={"compile_workers": 3, "cache": False})
    run(torch.ones(3))
    (((devices, options), stages),) = asked
    assert devices == {torch.device("cpu")} and options.compile_workers == 3 and "trace" not in stages
    asked.clear()
    run, recorder = compiled(torch.cos, options={"lowering": "none", "cache": False})
    run(torch.ones(3))
    assert not asked


def test_a_graph_on_the_cpu_starts_no_workers(warm_python: Any) -> None:
    program = "import sys, torch, aotkit\nrun = torch.compile(torch.sin, backend='aotkit', options={'cache': False})\n"
    program += "run(torch.ones(3))\nprint([name for name in sys.modules if name.endswith('triton.workers')])"
    run = warm_python.run(["-c", program])
    assert run.stdout == "[]\n", run.stderr


class Model(torch.nn.Module):
    """A norm, a softmax, a product, a convolution, and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 6, 3)
        self.batch = torch.nn.BatchNorm1d(6)
        self.linear = torch.nn.Linear(8, 5)
        self.norm = torch.nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result has the batch in front."""
        y = F.gelu(self.linear(self.batch(self.conv(x))))
        return self.norm(y).softmax(-1) * x.mean()


def model_and_input() -> tuple[Model, torch.Tensor]:
    """In float64, so that sums in another order are equal."""
    torch.manual_seed(0)
    return Model().double(), torch.randn(3, 4, 10, dtype=torch.float64)


def trained(model: Model, run: Callable[..., Any], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Result, gradients and buffers after one step."""
    x = x.clone().requires_grad_()
    y = run(x)
    (y * torch.arange(5.0, device=x.device)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads, **dict(model.named_buffers())}  # type: ignore[dict-item]


def test_a_training_step_in_the_interpreter_is_eagers_and_is_loaded_the_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    model, x = model_and_input()
    expected = trained(model, model, x)
    for attempt in range(2):
        model, _ = model_and_input()
        run, recorder = compiled(model)
        got = trained(model, run, x)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}")
        assert sum(graph.report.kernel_count for graph in recorder.graphs) >= 4
        if attempt == 0:  # from now on everything must come from the cache

            def entered(*args: Any, **settings: Any) -> Any:
                pytest.fail("a graph was lowered again")

            monkeypatch.setattr(driver, "lower_for", entered)
            monkeypatch.setattr(TritonTarget, "generate", entered)


def test_the_gradient_of_a_generated_dropout_has_the_mask_of_its_forward() -> None:
    run, _ = compiled(lambda x: F.dropout(x.exp(), 0.5))
    x = torch.randn(30, 20, dtype=torch.float64, requires_grad=True)
    y = run(x)
    y.sum().backward()
    assert 0.3 < (y != 0).double().mean() < 0.7
    torch.testing.assert_close(x.grad, y.detach())


def test_dynamic_sizes_share_one_program_in_the_interpreter() -> None:
    run, recorder = compiled(lambda x: (x.softmax(-1).sum(0), x.t().contiguous() + 1), dynamic=True)
    for shape in ((7, 5), (33, 9), (4, 70)):
        x = torch.randn(shape, dtype=torch.float64)
        for got, want in zip(run(x), (x.softmax(-1).sum(0), x.t() + 1), strict=True):
            torch.testing.assert_close(got, want)
    assert len(recorder.graphs) == 1


def test_an_index_out_of_range_stops_a_kernel_or_reads_0_as_the_option_says() -> None:
    x, index = torch.arange(1.0, 6.0), torch.tensor([0, 5, -1])
    pick = lambda x, index: x[index] * 2
    unchecked, _ = compiled(pick, options={"index_asserts": False})
    assert torch.equal(unchecked(x, index), torch.tensor([2.0, 0.0, 10.0]))
    checked, _ = compiled(pick)  # another entry of the cache
    with pytest.raises(IndexError, match="index 5 is out of bounds for dimension with size 5"):
        checked(x, index)


def test_without_triton_a_graph_runs_eagerly_with_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    run, recorder = compiled(lambda x: x.sin() + 1, options={"fallback": "eager"})
    x = torch.randn(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(run(x), x.sin() + 1)
    assert [str(w.message) for w in caught if "pip install aotkit-inductor-lower[cuda]" in str(w.message)]
    assert len(recorder.fallbacks) == 1


def test_a_device_that_no_code_is_generated_for_is_named() -> None:
    run, _ = compiled(lambda x: x + 1)
    with pytest.raises(Exception, match="input 0 is on device meta; code is generated for the CPU and for CUDA only"):
        run(torch.empty(3, device="meta"))


def test_what_the_devices_can_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_state.cuda_capabilities(False) == () or torch.cuda.is_initialized()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8 + index, 0))
    assert torch_state.cuda_capabilities(False) == ((8, 0), (9, 0))


def test_a_stored_constant_comes_back_with_its_layout_and_device() -> None:
    value = torch.arange(24.0).as_strided((2, 3), (12, 2))
    again = tensor_of(bytes_of(value), "torch.float32", [2, 3], [12, 2], "cpu")
    assert torch.equal(again, value) and again.stride() == value.stride()
    moved = tensor_of(bytes_of(value), "torch.float32", [2, 3], [12, 2], "meta")
    assert moved.device.type == "meta" and moved.stride() == (12, 2)


# -- packages ----------------------------------------------------------------------------------------------------


def packed(path: Path, device: str = "cpu", **options: Any) -> tuple[Model, torch.Tensor, str]:
    """A package of the model."""
    model, x = model_and_input()
    model, x = model.to(device).eval(), x.to(device)
    return model, x, aotkit.aot_compile(model, (x,), path, options=aotkit.Options(**options))


def test_a_package_holds_the_kernels_of_a_device(tmp_path: Path) -> None:
    model, x, path = packed(tmp_path / "model.aotkit", processor="triton-interpreter")
    with torch.no_grad():
        torch.testing.assert_close(aotkit.load(path)(x), model(x))
    with zipfile.ZipFile(path) as archive:
        assert any(b"tl.load" in archive.read(name) for name in archive.namelist())


class OnDevice(torch.Tensor):
    """A tensor on a device that is not there: its memory can't be read from here, only copied."""

    def __new__(cls, value: torch.Tensor) -> OnDevice:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device="cuda")
        return made

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*(a.value if isinstance(a, OnDevice) else a for a in args), **(kwargs or {}))
        return result if func is torch.ops.aten._to_copy.default else OnDevice(result)


def test_weights_on_a_device_are_copied_into_the_package(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    write_package(tmp_path / "weights.aotkit", {}, {}, {"w": OnDevice(weight), "t": OnDevice(weight.t())}, None)
    _, _, weights = read_package(tmp_path / "weights.aotkit", None)
    assert torch.equal(weights["w"], weight) and torch.equal(weights["t"], weight.t())


def test_a_package_for_a_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    made = package.environment_of_package(device=torch.device("cuda:1"))
    assert made["device"] == "cuda:1 of architecture sm_90"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(aotkit.PackageError, match=r"for cuda:1 of architecture sm_90, and this process has no"):
        package.check_environment(made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    package.check_environment(made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(aotkit.PackageError, match=r"sm_90'; this process has 'cuda:1 of architecture sm_80'"):
        package.check_environment(made)
    argument = package._Argument("x", "torch.float32", [3], [1], "cuda:0", False, None)
    with pytest.raises(TypeError, match=r"on device cpu; the package was compiled for a dense one .* on device cuda:0"):
        argument.check(torch.empty(3), {})


# -- on a device -------------------------------------------------------------------------------------------------


def on_cuda(fn: Callable[..., Any], compile_workers: int | None = None, **settings: Any) -> Callable[..., Any]:
    """``fn`` compiled; a refusal is an error."""
    torch._dynamo.reset()
    options = aotkit.Options(fallback="error", compile_workers=compile_workers)
    return torch.compile(fn, backend=aotkit.make_backend(options), **settings)


@pytest.mark.gpu
def test_on_a_device_a_training_step_is_eagers_cold_and_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    model, x = model_and_input()
    expected = trained(model.cuda(), model, x.cuda())
    for attempt in range(2):
        model, _ = model_and_input()
        got = trained(model.cuda(), on_cuda(model, compile_workers=0), x.cuda())  # here Triton is hidden
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value)
        if attempt == 0:
            monkeypatch.setitem(sys.modules, "triton.compiler", None)


@pytest.mark.gpu
def test_on_a_device_recordings_are_made_of_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    options = aotkit.Options(fallback="error", cudagraphs=True)
    for attempt in range(2):
        torch._dynamo.reset()
        recorder = aotkit.Recorder()
        (ours, x), (theirs, _) = model_and_input(), model_and_input()
        ours.cuda(), theirs.cuda()
        run = torch.compile(ours, backend=aotkit.make_backend(options, recorder))
        for _ in range(4):
            ours.zero_grad(), theirs.zero_grad()
            got, expected = trained(ours, run, x.cuda()), trained(theirs, theirs, x.cuda())
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value)
        assert any(name == "cache.loaded" for name, _ in recorder.events) == bool(attempt)


@pytest.mark.gpu
def test_on_a_device_streams_misaligned_inputs_and_numbers_on_the_cpu_are_as_in_eager() -> None:
    def f(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.softmax(-1) * number

    run, memory = on_cuda(f), torch.randn(64 * 64 + 1, device="cuda")
    for offset in (0, 1):
        ours, theirs = memory.clone()[offset:][: 64 * 64].view(64, 64), memory.clone()[offset:][: 64 * 64].view(64, 64)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = run(ours, torch.tensor(3.0))
        stream.synchronize()
        torch.testing.assert_close(got, f(theirs, torch.tensor(3.0)))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
def test_on_a_device_a_package_runs_in_a_process_without_triton(tmp_path: Path) -> None:
    model, x, path = packed(tmp_path / "model.aotkit", "cuda")
    torch.save((x, model(x).detach()), tmp_path / "values.pt")
    code = f"""
import sys
sys.modules["triton"] = None
import aotkit, torch
x, want = torch.load({str(tmp_path / "values.pt")!r})
torch.testing.assert_close(aotkit.load({path!r})(x), want)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_a_second_device_kernels_run_there() -> None:
    x = torch.randn(33, 65, device="cuda:1")
    torch.testing.assert_close(on_cuda(lambda x: x.softmax(-1) + 1)(x), x.softmax(-1) + 1)


@pytest.mark.gpu
def test_on_a_device_the_first_call_of_a_thread_may_be_a_kernel() -> None:
    x = torch.randn(64, 64, device="cuda")
    run, found = on_cuda(lambda x: x.softmax(-1) + 1), list[torch.Tensor]()
    run(x)
    thread = threading.Thread(target=lambda: found.append(run(x)))
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0], x.softmax(-1) + 1)


@pytest.mark.gpu
def test_on_a_device_offsets_pass_two_to_the_31_and_indices_out_of_range_read_0() -> None:
    x = torch.empty(2_200_000_064, dtype=torch.int8, device="cuda").as_strided((3, 5), (1_100_000_000, 1))
    x.copy_(torch.arange(15).view(3, 5))
    torch.testing.assert_close(on_cuda(lambda x: (x * 2, x.sum(0), x.flip(0)))(x), (x * 2, x.sum(0), x.flip(0)))
    pick = lambda x, index: x[index] * 2
    torch._dynamo.reset()
    options = aotkit.Options(fallback="error", index_asserts=False)
    rows = torch.arange(1.0, 6.0, device="cuda")
    got = torch.compile(pick, backend=aotkit.make_backend(options))(rows, torch.tensor([0, 5, -1], device="cuda"))
    assert got.tolist() == [2.0, 0.0, 10.0]
