"""AOTKIT_LOG, AOTKIT_DUMP, AOTKIT_DISABLE, AOTKIT_FUEL and explain on a real compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import aotkit


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.softmax(F.gelu(x @ w + 1), dim=-1)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16), torch.randn(16, 32, requires_grad=True)


def train() -> tuple[torch.Tensor, torch.Tensor]:
    x, w = inputs()
    result = torch.compile(block, backend="aotkit", options={"fallback": "error", "cache": False})(x, w)
    result.square().sum().backward()
    torch.testing.assert_close(result, block(x, w))
    assert w.grad is not None
    return result, w.grad


@pytest.mark.covers("F8.12")
def test_dump_writes_a_numbered_file_per_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AOTKIT_DUMP", str(tmp_path / "dump"))
    train()
    (folder,) = (path for path in (tmp_path / "dump").iterdir() if path.is_dir())
    names = sorted(path.name for path in folder.iterdir() if path.name[0].isdigit())
    assert [int(name[:2]) for name in names] == list(range(len(names)))
    for stage in ("captured", "metadata", "partition", "lowered", "scheduled", "wrappers.bind"):
        assert any(stage in name for name in names), f"no dump of {stage} among {names}"
    lowered = next(path for path in folder.iterdir() if "lowered" in path.name)
    assert "loop " in lowered.read_text()


@pytest.mark.parametrize(
    "kind, expected", [("timing", "codegen"), ("graphs", "primals_1"), ("ir", "loop "), ("kernels", "define ")]
)
def test_log_prints_each_kind(
    kind: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AOTKIT_LOG", kind)
    train()
    printed = capsys.readouterr().err
    assert f"[aotkit {kind}]" in printed and expected in printed


def test_without_fuel_nothing_is_fused_and_results_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = inputs()
    fused = aotkit.explain(block, x, w.detach())
    plain = aotkit.explain(block, x, w.detach(), options=aotkit.Options(fuel=0, cache=False))
    assert plain.kernel_count > fused.kernel_count
    monkeypatch.setenv("AOTKIT_FUEL", "0")
    train()


def test_disabled_passes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_DISABLE", "remove-noops,common-subexpressions")
    train()


def test_a_pass_that_does_not_exist_cannot_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_DISABLE", "remove-everything")
    with pytest.raises(Exception, match=r"the passes are call-custom-writers, .*remove-noops, .*fuse-kernels"):
        train()


def test_explain_names_graphs_kernels_externs_and_stages() -> None:
    explanation = aotkit.explain(block, *inputs())
    text = str(explanation)
    assert [graph.name.split("-")[1] for graph in explanation.graphs] == ["forward", "backward"]
    for part in ("aten.mm.default", "kernel ", "codegen", "seconds per stage"):
        assert part in text
    assert not explanation.fallbacks


def test_explain_accumulates_no_gradient() -> None:
    x, w = inputs()
    aotkit.explain(block, x, w)
    assert w.grad is None


@pytest.mark.covers("F7.1")
def test_a_second_compile_finds_its_kernels_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "1")  # in this mode, which compiles each time, kernels alone are looked for
    events = []
    for _ in range(2):
        torch._dynamo.reset()
        recorder = aotkit.Recorder()
        compiled = torch.compile(block, backend="aotkit", options={"observer": recorder, "fallback": "error"})
        x, w = inputs()
        compiled(x, w).square().sum().backward()
        events.append([name for name, _ in recorder.events if name.startswith("cache.")])
    assert events == [["cache.miss", "cache.put"] * 2, ["cache.hit"] * 2]
