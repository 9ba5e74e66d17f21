"""The benchmark of language models: its formats, and what it compares with, where none of that is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from aotkit.reports.profile import ProfileRow
from tools.bench import decode, decode_llama_cpp, decode_rivals
from tools.bench.decode_kernels import launches_by_kind

Finder = Callable[..., object]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package of a rival can be found."""
    found: Finder = importlib.util.find_spec
    rivals = ("openvino", "llama_cpp", "gguf")

    def find_spec(name: str, *others: object) -> object:
        return None if name in rivals else found(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize(("flag", "what"), [("--openvino", "OpenVINO is not"), ("--llama-cpp", "gguf are not")])
def test_a_rival_that_is_not_installed_is_named(
    flag: str, what: str, nothing_installed: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["decode", flag])
    with pytest.raises(SystemExit) as raised:
        decode.main()
    assert raised.value.code == 2
    assert f"{what} installed" in capsys.readouterr().err


def test_steps_of_rivals_that_are_not_installed_say_what_they_need(nothing_installed: None) -> None:
    with pytest.raises(RuntimeError, match="needs the package openvino"):
        decode_rivals.OpenVinoStep(None, None, 1)
    with pytest.raises(RuntimeError, match="needs llama-cpp-python and gguf"):
        decode_llama_cpp.LlamaCppStep(None, "int8", [1], 64, 1)


def test_llama_cpp_has_no_weights_of_bytes_with_activations_of_float32() -> None:
    with pytest.raises(ValueError, match="like those of 'int8, float32'; it has float32, bfloat16"):
        decode_llama_cpp.LlamaCppStep(None, "int8, float32", [1], 64, 1)


@pytest.mark.parametrize(("layer", "apart"), [(decode.Int8Linear, 1 / 254), (decode.Int4Linear, 1 / 14)])
def test_rivals_get_the_numbers_that_a_layer_has(layer: Callable[[nn.Linear], nn.Module], apart: float) -> None:
    linear = nn.Linear(128, 32, bias=False).bfloat16()
    small = layer(linear)
    wide = decode_llama_cpp.widened(small)
    most = linear.weight.float().abs().amax()
    assert (wide - linear.weight).abs().max() <= (apart + 2**-8) * most  # scales are bfloat16
    x = torch.randn(3, 128).bfloat16()
    torch.testing.assert_close(small(x).float(), x.float() @ wide.t(), rtol=2e-2, atol=2e-2)


def test_rope_turns_neighbours_after_rows_are_turned() -> None:
    heads, width, x = 3, 8, torch.randn(16)
    weight, angle = torch.randn(heads * width, 16), torch.rand(width // 2)
    halves = (weight @ x).view(heads, 2, width // 2)
    low, high = halves[:, 0], halves[:, 1]
    expected = torch.stack([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], 1)
    pairs = (decode_llama_cpp.turned_rows(weight, heads) @ x).view(heads, width // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], 1)
    torch.testing.assert_close(turned, expected)


def test_launches_are_kept_by_kind() -> None:
    def row(name: str, ops: tuple[str, ...], ms: float, moved: int | None) -> ProfileRow:
        return ProfileRow("graph0", name, ops, "", 1, ms, 0.0, moved, None)

    rows = [
        row("mm_1", ("mm_1",), 1.0, 2_000_000),
        row("mm_7", ("mm_7",), 2.0, 2_000_000),
        row("mm", ("mm", "silu", "mul_3"), 0.5, 5_000_000),
        row("bmm_default", ("where_scalar", "bmm_default"), 0.25, 40_000),
        row("bmm_default_2", ("where_scalar", "bmm_default_2"), 0.25, 40_000),
        row("aten::topk", (), 0.1, None),
    ]
    found = [(each.kind, each.count, each.ms, each.bytes) for each in launches_by_kind(rows)]
    assert found == [
        ("product, 2.0 MB", 2, 3.0, 4_000_000),
        ("product, 5.0 MB", 1, 0.5, 5_000_000),
        ("where_scalar bmm", 2, 0.5, 80_000),
        ("aten::topk", 1, 0.1, 0),
    ]
