"""``options={"processor": "interpreter"}``: the whole stack with kernels that are interpreted."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import aotkit

Tensor = torch.Tensor


def compiled(fn: Callable[..., Any], **settings: Any) -> tuple[Callable[..., Any], aotkit.Recorder]:
    """``fn`` with interpreted kernels, as a new process would have it."""
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = aotkit.Options(fallback="error", processor="interpreter").patch(**settings.pop("options", {}))
    return torch.compile(fn, backend=aotkit.make_backend(options, recorder), **settings), recorder


class Model(torch.nn.Module):
    """Layers with kernels before, between and behind products, and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = torch.nn.BatchNorm1d(6)
        self.linear = torch.nn.Linear(6, 5)
        self.norm = torch.nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        """A row per example."""
        return self.norm(F.gelu(self.linear(self.batch(x)))).softmax(-1) * x.mean()


def model_and_input() -> tuple[Model, Tensor]:
    """In float64, so that sums in another order are equal."""
    torch.manual_seed(0)
    return Model().double(), torch.randn(7, 6, dtype=torch.float64)


def trained(model: Model, run: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """Result, gradients and buffers after one step."""
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def test_a_training_step_through_torch_compile_gives_eagers_results() -> None:
    model, x = model_and_input()
    want = trained(model, model, x)
    again, _ = model_and_input()
    run, recorder = compiled(again)
    for got, reference in zip(trained(again, run, x), want, strict=True):
        torch.testing.assert_close(got, reference)
    assert len(recorder.graphs) == 2 and all(graph.report.kernel_count for graph in recorder.graphs)


def test_the_option_is_one_of_torch_compile() -> None:
    torch._dynamo.reset()
    fn = lambda x: (x.softmax(-1) * 2).sum(0)
    run = torch.compile(fn, backend="aotkit", options={"processor": "interpreter", "fallback": "error"}, dynamic=True)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(run(x), fn(x))
    with pytest.raises(aotkit.UnknownOption, match="x86-64-amx, interpreter, triton-interpreter, not 'abacus'"):
        aotkit.Options(processor="abacus")  # type: ignore[arg-type]


def test_what_is_kept_for_the_interpreter_is_not_taken_for_the_processors_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path))
    fn = lambda x: (x * 3).cos().sum(1)
    x, hits = torch.randn(4, 5), []
    for processor in ("interpreter", "host", "interpreter", "host"):
        run, recorder = compiled(fn, options={"processor": processor})
        torch.testing.assert_close(run(x), fn(x))
        hits.append(sum(name == "cache.loaded" for name, _ in recorder.events))
    assert hits == [0, 0, 1, 1]


def test_memory_is_watched_and_every_stage_read_back() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y.add_(x.sum(0))
        return (x - x.mean(1, keepdim=True)).exp(), (x @ x.t()).relu() + y[: len(x)]

    x, y, theirs = torch.randn(5, 5), torch.randn(5), torch.randn(5)
    theirs.copy_(y)
    run, _ = compiled(fn, options={"redzones": True, "verify": True})
    for got, want in zip((*run(x, y), y), (*fn(x, theirs), theirs), strict=True):
        torch.testing.assert_close(got, want)


def test_an_index_out_of_range_is_an_index_error() -> None:
    run, _ = compiled(lambda x, index: x[index] * 2)
    x = torch.randn(4, 3)
    with pytest.raises(IndexError, match="an index is out of range"):
        run(x, torch.tensor([0, 4]))
    assert torch.equal(run(x, torch.tensor([0, -4])), x[[0, -4]] * 2)


def test_a_package_holds_the_text_of_the_kernels(tmp_path: Path) -> None:
    model, x = model_and_input()
    model = model.eval()
    options = aotkit.Options(processor="interpreter")
    path = aotkit.aot_compile(model, (x,), tmp_path / "model.aotkit", options=options)
    with torch.no_grad():
        torch.testing.assert_close(aotkit.load(path)(x), model(x))
    with zipfile.ZipFile(path) as archive:
        assert any(b'"target":"interpreter"' in archive.read(name) for name in archive.namelist())
