"""Kernels in torch's traces by name, and the table of a profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

import aotkit


@pytest.fixture(autouse=True)
def _as_a_user_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")


class Net(nn.Module):
    """Two kernels in a row, and a product that ATen computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(torch.nn.functional.gelu(self.first(x)))
        return y, x.softmax(-1)


def ranges(step: Any) -> dict[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as trace:
        step()
    return {event.key: event.count for event in trace.key_averages() if event.key.startswith("graph")}


@pytest.mark.parametrize("options", [{}, {"separate_kernels": True}, {"processor": "interpreter"}])
def test_a_trace_names_the_kernels_and_calls_of_a_compiled_step(options: dict[str, Any]) -> None:
    net, x = Net(), torch.randn(8, 32)
    recorder = aotkit.Recorder()
    compiled = torch.compile(
        net, backend=aotkit.make_backend(aotkit.Options(contractions="aten", cache=False, **options), recorder)
    )
    expected = net(x)

    def step() -> None:
        for got, want in zip(compiled(x), expected, strict=True):
            torch.testing.assert_close(got, want)
        compiled(x)[0].sum().backward()

    step()
    found = ranges(step)
    step()  # without a profiler again
    kernels = {f"{g.name}: {kernel.kernel}" for g in recorder.graphs for kernel in g.report.groups}  # type: ignore[attr-defined]
    graphs = {key.partition(": ")[0] for key in found}
    assert {name.rpartition("-")[2] for name in graphs} == {"forward", "backward"}
    assert len(found) > len(kernels & found.keys()), "the product is a call of ATen"
    if options.get("separate_kernels"):
        assert kernels <= found.keys() and all(found[key] == 1 + ("forward" in key) for key in kernels)
    else:
        named = {f"{key.partition(': ')[0]}: {name}" for key in found for name in key.partition(": ")[2].split(", ")}
        assert kernels <= named


def test_a_profile_tells_time_bytes_and_arithmetic_of_each_kernel() -> None:
    net, x = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512)), torch.randn(512, 256)
    found = aotkit.profile(net, x, calls=5, options=aotkit.Options(contractions="aten"))
    assert found.calls == 5 and found.kernels_ms > 0 and found.step_ms > 0
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert {row.graph.rpartition("-")[2] for row in found.rows} == {"forward", "backward"}
    assert all(row.calls >= 1 for row in found.rows) and [row.ms for row in found.rows] == sorted(
        (row.ms for row in found.rows), reverse=True
    )
    (gelu,) = [row for row in found.rows if row.graph.endswith("-forward") and "gelu" in row.ops]
    size = 512 * 512 * 4
    assert gelu.bytes is not None and size <= gelu.bytes < 4 * size and gelu.flops is not None
    assert gelu.flops >= 10 * 512 * 512 and gelu.gb_per_s is not None and gelu.gflop_per_s is not None
    text = str(found)
    assert "GFLOP/s" in text and "one step takes" in text and "gelu native_layer_norm" in text
    assert [row for row in found.rows if not row.ops and row.bytes is None], "the product is a call of ATen"


def test_a_profile_accumulates_no_gradient_and_refuses_what_it_can_not_time() -> None:
    w = torch.randn(8, requires_grad=True)
    aotkit.profile(lambda x: (x * w).sin(), torch.randn(8), calls=1)
    assert w.grad is None
    with pytest.raises(TypeError, match="3 can't be called"):
        aotkit.profile(3, torch.randn(8))  # type: ignore[arg-type]
