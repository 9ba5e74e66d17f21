"""Quantized integers: bit for bit eager's, in kernels where the operators are arithmetic, else by ATen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
import torch.nn.functional as F
from torch import Tensor

import aotkit
from aotkit_inductor_lower.targets.cpu.target import cpu_target

decomposed = torch.ops.quantized_decomposed
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
G = torch.Generator().manual_seed(0)
X = torch.randn(6, 40, generator=G) * 5
X[0, :6] = torch.tensor([0.05, 0.15, -0.05, math.inf, -math.inf, 1e30])
INT8, UINT8 = (-128, 127, torch.int8), (0, 255, torch.uint8)
SCALES, ZEROS = torch.rand(6, generator=G) + 0.05, torch.randint(-5, 5, (6,), generator=G)


def check(fn: Callable[..., Any], *args: Tensor) -> list[Any]:
    """Compiled, results and gradients are eager's to the last bit; the reports of the graphs."""
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "cache": False, "observer": recorder}
    run = torch.compile(fn, backend="aotkit", fullgraph=True, options=options)
    given = [[a.detach().clone().requires_grad_(a.requires_grad) for a in args] for _ in range(2)]
    want, got = fn(*given[0]), run(*given[1])
    torch.testing.assert_close(got, want, rtol=0, atol=0, check_stride=True, equal_nan=True)
    leaves = [[a for a in side if a.requires_grad] for side in given]
    if leaves[0]:
        gradients = [torch.autograd.grad(r, s, torch.ones_like(r)) for r, s in zip((want, got), leaves, strict=True)]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    return [record.report for record in recorder.graphs]


def there_and_back(x: Tensor) -> Tensor:
    q = decomposed.quantize_per_tensor(F.relu(x), 0.1, 3, *UINT8)
    return decomposed.dequantize_per_tensor(q, 0.1, 3, *UINT8) * 2


def by_channel(x: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    q = decomposed.quantize_per_channel(x * 2, scales, zeros, 0, *INT8)
    return decomposed.dequantize_per_channel(q, scales, zeros, 0, *INT8) + 1


def by_token(x: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return decomposed.quantize_per_token(x, scales[:, None].double(), zeros[:, None], *INT8)


IN_KERNELS: list[tuple[str, Callable[..., Any], tuple[Tensor, ...]]] = [
    ("there and back", there_and_back, (X,)),
    ("signed", lambda x: decomposed.quantize_per_tensor(x * 2, 0.1, -3, *INT8), (X,)),
    ("bfloat16", lambda x: decomposed.quantize_per_tensor(x, 0.25, 1, *UINT8), (X.bfloat16(),)),
    ("channels", by_channel, (X, SCALES, ZEROS)),
    ("tokens", by_token, (X, SCALES, ZEROS)),
]


@pytest.mark.covers("F5g.25")
@pytest.mark.parametrize("fn, args", [row[1:] for row in IN_KERNELS], ids=[row[0] for row in IN_KERNELS])
def test_operators_of_exported_models_are_one_kernel_with_eagers_integers(
    fn: Callable[..., Any], args: tuple[Tensor, ...]
) -> None:
    (report,) = check(fn, *args)
    assert report.kernel_count == 1 and not report.externs


LEAF = torch.randn(6, 40, generator=G).requires_grad_()
WEIGHTS = torch.randint(-128, 127, (8, 40), generator=G, dtype=torch.int8)
BY_ATEN: list[tuple[str, Callable[..., Any], tuple[Tensor, ...]]] = [
    ("fake", lambda x: torch.fake_quantize_per_tensor_affine(x * 2, 0.1, 3, -128, 127), (LEAF,)),
    (
        "fake, of tensors",
        lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s, z, 0, 255),
        (LEAF, torch.tensor(0.1), torch.tensor(3, dtype=torch.int32)),
    ),
    (
        "fake, by channel",
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z.int(), 0, -128, 127) * 2,
        (LEAF, SCALES, ZEROS),
    ),
    ("chosen", lambda x: decomposed.choose_qparams(x, -128, 127, 1e-5, torch.int8), (X,)),
    ("products of integers", lambda a, b: torch._int_mm(a, b.t()) * 0.5, (WEIGHTS.repeat(4, 1), WEIGHTS)),
]


@pytest.mark.covers("F5g.25")
@pytest.mark.parametrize("fn, args", [row[1:] for row in BY_ATEN], ids=[row[0] for row in BY_ATEN])
def test_operators_that_stay_whole_give_eagers_integers(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    reports = check(fn, *args)
    assert any(report.externs for report in reports)


def linear_of_channels(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    weight = decomposed.dequantize_per_channel(w, scales[:, 0].contiguous(), zeros[:, 0].contiguous(), 0, *INT8)
    return F.linear(x, weight.to(x.dtype))


def linear_of_groups(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return F.linear(x, decomposed.dequantize_per_channel_group(w, scales, zeros, *INT8, 64, x.dtype))


def linear_of_groups_without_zeros(x: Tensor, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return F.linear(x, decomposed.dequantize_per_channel_group(w, scales, None, *INT8, 64, x.dtype))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [linear_of_channels, linear_of_groups, linear_of_groups_without_zeros])
def test_weights_of_exported_models_are_dequantized_in_the_product(
    fn: Callable[..., Tensor], dtype: torch.dtype, rows: int
) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(rows, 256).to(dtype), torch.randint(-128, 128, (128, 256), dtype=torch.int8)
    scales, zeros = torch.rand(128, 4) / 50, torch.randint(-5, 5, (128, 4), dtype=torch.int32)
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "cache": False, "observer": recorder}
    got, want = torch.compile(fn, backend="aotkit", options=options)(x, w, scales, zeros), fn(x, w, scales, zeros)
    true = x.double() @ fn(torch.eye(256, dtype=dtype), w, scales, zeros).double()
    off, eager = ((y.double() - true).abs().max().item() for y in (got, want))
    assert got.dtype is dtype and off <= 1.5 * (eager + 2e-7 * true.abs().max().item())
    (graph,) = recorder.graphs
    machine = cpu_target().machine  # also an emulated one
    if machine.has("fma") and machine.vector_bits >= 256:
        assert graph.report.kernel_count == 1 and not graph.report.externs


@pytest.mark.covers("F5g.25")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize("view", [False, True], ids=["itself", "a view"])
def test_a_tensor_of_the_older_quantized_types_makes_the_graph_run_eagerly(view: bool) -> None:
    """Its fake value is one of an ordinary tensor: a kernel would read beyond its memory."""

    def fn(x: Tensor) -> Tensor:
        q = torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)
        return (q.view(-1) if view else q).dequantize() * 2

    torch._dynamo.reset()
    if RELEASE < (2, 12):  # Dynamo itself leaves them to eager
        result = torch.compile(fn, backend="aotkit", options={"fallback": "error"})(X[1:])
        torch.testing.assert_close(result, fn(X[1:]), rtol=0, atol=0)
        return
    with pytest.raises(RuntimeError, match="gives a quantized tensor"):
        torch.compile(fn, backend="aotkit", options={"fallback": "error"})(X[1:])
    torch._dynamo.reset()
    with pytest.warns(aotkit.EagerFallback, match="gives a quantized tensor"):
        result = torch.compile(fn, backend="aotkit")(X[1:])
    torch.testing.assert_close(result, fn(X[1:]), rtol=0, atol=0)
