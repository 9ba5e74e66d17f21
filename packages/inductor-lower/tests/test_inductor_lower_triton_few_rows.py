"""Products of few rows with a matrix as kernels of a CUDA device: results, loads, and what they take in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.targets.triton import (
    compile_kernel,
    kernels_of,
    render_program,
    resource_facts,
    vector_bytes,
)
from aotkit_inductor_lower.targets.triton.binary import contents_of
from aotkit_inductor_lower.targets.triton.target import TritonTarget

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

Graph = Callable[..., tuple[torch.Tensor, ...]]


def lower(f: Graph, args: list[torch.Tensor], mode: str = "fake", **settings: Any) -> Compiled:
    """``f`` with the kernels of a CUDA device."""
    graph = make_fx(f, decompositions(), tracing_mode=mode)(*args)
    return compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter", **settings))


def some(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def check(lowered: Compiled, f: Graph, args: list[torch.Tensor]) -> None:
    """The results have eager's layout, and are at least as near to those in float64."""
    got, want, exact = bind_program(lowered.program)(list(args)), f(*args), f(*(a.double() for a in args))
    for ours, eager, true in zip(got, want, exact, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (eager.dtype, eager.shape, eager.stride())
        assert error(ours, true) <= 1.02 * error(eager, true)


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (F.linear(x, w, b),)


def addmm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.addmm(b, x, w, alpha=0.5, beta=2.0),)


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("f", [linear, addmm], ids=["along", "down"])
@pytest.mark.covers("F5e.4")
def test_products_of_few_rows_are_sums_of_odd_sizes(f: Graph, dtype: torch.dtype, rows: int) -> None:
    columns, inner = 97, 777
    shape = (columns, inner) if f is linear else (inner, columns)
    args = some(dtype, (rows, inner), shape, (columns,))
    lowered = lower(f, args, contractions="generated")
    (kernel,) = kernels_of(lowered.program)
    assert "tl.dot" not in kernel.source.text and not lowered.report.externs
    check(lowered, f, args)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("f", [linear, addmm], ids=["along", "down"])
def test_long_sums_go_in_steps(f: Graph, rows: int) -> None:
    columns, inner = 34, 9001
    args = some(torch.bfloat16, (rows, inner), (columns, inner) if f is linear else (inner, columns), (columns,))
    lowered = lower(f, args, contractions="generated")
    (kernel,) = kernels_of(lowered.program)  # they are not cut in parts for several kernels either
    assert "fold_sum" in kernel.source.text
    check(lowered, f, args)


def test_matrices_with_gaps_and_transposed_ones_are_read_where_they_lie() -> None:
    x, wide, tall = some(torch.bfloat16, (2, 600), (150, 640), (600, 170))

    def program(x: torch.Tensor, wide: torch.Tensor, tall: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ wide[:, :600].t(), x @ tall[:, 20:], (x.t() * 2).t() @ wide[:, 40:].t()

    args = [x, wide, tall]
    lowered = lower(program, args, contractions="generated")
    assert not lowered.report.externs
    check(lowered, program, args)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matrices_are_loaded_16_bytes_a_thread_and_all_at_once(dtype: torch.dtype, down: bool, rows: int) -> None:
    args = some(dtype, (rows, 768), (768, 2304) if down else (2304, 768))
    lowered = lower(lambda x, w: (x @ w if down else F.linear(x, w),), args, contractions="generated")
    (kernel,) = kernels_of(lowered.program)
    config = dict(kernel.source.config.blocks)
    assert 2304 // config["XBLOCK"] >= 132
    cubin = compile_kernel(kernel.source, 90, keep_ptx=True)
    each = config["XBLOCK"] * config.get("RBLOCK", 1024) * dtype.itemsize // (16 * cubin.threads)
    widths = vector_bytes(cubin.ptx)
    assert widths.count(16) >= each >= 2 and min(widths) >= 8
    assert resource_facts(cubin).spills == 0 and "mma" not in cubin.ptx and "atom" not in cubin.ptx


def test_float32_keeps_its_bits_where_other_products_may_lose_some() -> None:
    args = some(torch.float32, (4, 512), (256, 512), (256,))
    lowered = lower(linear, args)
    (exact,), (loose,) = (render_program(lowered.scheduled, tf32=tf32).kernels for tf32 in (False, True))
    assert exact.source.text == loose.source.text and "tf32" not in exact.source.text


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(
    ("rows", "columns", "inner", "ours"),
    [
        (1, 32000, 1024, True),
        (1, 32768, 4096, True),
        (1, 4096, 14336, False),  # too long a sum
        (1, 64, 64, False),  # too small a matrix
        (2, 4096, 4096, True),
        (2, 14336, 4096, False),
        (4, 1024, 2816, True),
        (4, 2816, 1024, False),
        (8, 1024, 1024, True),
        (8, 1024, 2816, False),
        (8, 50257, 768, True),  # results at no multiple of 16 bytes
        (9, 1024, 1024, False),
    ],
)
@pytest.mark.parametrize("down", [False, True])
def test_what_was_measured_slower_is_atens(rows: int, columns: int, inner: int, ours: bool, down: bool) -> None:
    shapes = (rows, inner), (inner, columns) if down else (columns, inner)
    with FakeTensorMode():
        args = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        lowered = lower(lambda x, w: (x @ w if down else F.linear(x, w),), args, "real")
    assert len(lowered.report.externs) == (0 if ours and (rows == 1 or not down) else 1)


def test_products_of_unknown_sizes_are_atens() -> None:
    args = some(torch.bfloat16, (2, 512), (512, 512), (512,))
    assert not lower(linear, args).report.externs
    assert len(lower(linear, args, "symbolic").report.externs) == 1


def test_products_of_float64_and_matrices_that_no_load_is_wide_for_are_atens() -> None:
    wide = some(torch.float64, (2, 512), (512, 512), (512,))
    assert len(lower(linear, wide).report.externs) == 1
    x, w = some(torch.bfloat16, (2, 512), (1024, 1024))
    assert len(lower(lambda x, w: (x @ w[::2, ::2],), [x, w]).report.externs) == 1


def test_with_tune_products_of_few_rows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(10e-6, 9e-6), (10e-6, 9.9e-6)])
    monkeypatch.setattr(TritonTarget, "measure", lambda self, compiled: lambda product, buffers: next(times))
    args = some(torch.float32, (1, 512), (256, 512), (512, 384))
    lowered = lower(lambda x, a, b: (F.linear(x, a), x @ b), args, tune=True)
    reasons = [str(each) for each in lowered.records if each.kind == "contraction"]
    assert len(lowered.report.externs) == 1 and "generated, ATen 10.0 us" in reasons[0]


# -- what products take in ---------------------------------------------------------------------------------------------


def feed_forward(
    x: torch.Tensor, scale: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """As in a Qwen2: a norm, two products with the same row, one more, and what came in is added."""
    wide = x.float() if x.dtype is torch.bfloat16 else x
    normal = scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return (x + F.linear(F.silu(F.linear(normal, gate)) * F.linear(normal, up), down),)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.covers("F5h.9")
def test_a_norm_two_products_and_an_activation_are_one_kernel(dtype: torch.dtype, rows: int) -> None:
    args = some(dtype, (rows, 1, 256), (256,), (600, 256), (600, 256), (256, 600))  # all few columns
    lowered = lower(feed_forward, args)
    assert len(lowered.program.kernels) == 2 and not lowered.report.externs
    first, _ = kernels_of(lowered.program)
    before, _ = first.source.text[first.source.text.index("program_id") :].split("reduce_sum", 1)
    assert "tl.load(p_gate" in before and "tl.load(p_up" in before  # before anything waits for the sum of squares
    check(lowered, feed_forward, args)
    cubin = compile_kernel(first.source, 90, keep_ptx=True)
    assert resource_facts(cubin).spills == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_a_layer_norm_gelu_and_a_matrix_of_columns_are_one_kernel(rows: int) -> None:
    def program(
        x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, up: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        normal = F.layer_norm(x, (256,), scale, shift).view(-1, 256)
        return (F.gelu(torch.addmm(bias, normal, up), approximate="tanh").view(*x.shape[:2], 768),)

    args = some(torch.float32, (rows, 1, 256), (256,), (256,), (256, 768), (768,))
    lowered = lower(program, args, contractions="generated")
    assert len(lowered.program.kernels) == 1 and not lowered.report.externs
    check(lowered, program, args)


def test_queries_keys_and_values_share_a_launch() -> None:
    def program(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return tuple(F.linear(normal, weight) for weight in weights)

    args = some(torch.float32, (1, 512), (512, 512), (128, 512), (128, 512))
    lowered = lower(program, args)
    (kernel,) = kernels_of(lowered.program)
    assert not lowered.report.externs and kernel.source.text.count("instance_of_") >= 4
    check(lowered, program, args)
    assert resource_facts(compile_kernel(kernel.source, 90)).spills == 0


def test_long_products_that_share_a_launch_keep_their_threads() -> None:
    args = some(torch.float32, (1, 3072), (3072, 200), (3072, 104))
    lowered = lower(lambda x, a, b: (x @ a, x @ b), args)
    (kernel,) = kernels_of(lowered.program)
    assert kernel.source.config.num_warps == 8 and "_and_more" in kernel.source.name
    assert resource_facts(compile_kernel(kernel.source, 90)).spills == 0


def decoder_layer(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """One token's, with two heads of queries that share one of keys and values."""
    first, q, k, v, out, second, gate, up, down = weights

    def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cosine + torch.cat([-x[..., 32:], x[..., :32]], -1) * sine

    normal = norm(x, first)
    heads = [F.linear(normal, weight).view(len(x), 1, -1, 64).transpose(1, 2) for weight in (q, k, v)]
    keys, values = (each.expand(len(x), 2, 1, 64) for each in (turned(heads[1]), heads[2]))
    found = F.scaled_dot_product_attention(turned(heads[0]), keys.contiguous(), values.contiguous())
    x = x + F.linear(found.transpose(1, 2).reshape(x.shape), out)
    normal = norm(x, second)
    return x + F.linear(F.silu(F.linear(normal, gate)) * F.linear(normal, up), down)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_token_takes_five_launches_a_layer_beside_attention(rows: int) -> None:
    shapes = (128,), (128, 128), (64, 128), (64, 128), (128, 128), (128,), (192, 128), (192, 128), (128, 192)
    args = some(torch.float32, (rows, 1, 128), (64,), (64,), *2 * shapes)

    def program(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *weights: torch.Tensor) -> Any:
        while weights:
            x, weights = decoder_layer(x, cosine, sine, *weights[:9]), weights[9:]
        return (x,)

    whole, once = both = [
        lower(program, given, contractions="generated", disable=("recognize-attention", "write-out-attention"))
        for given in (args, args[:12])
    ]
    counts = [sum(len(own) for _, own in contents_of(each.program.binary).segments) for each in both]
    assert counts[0] - counts[1] <= 6 and len(whole.report.externs) <= 2
    check(once, program, args[:12])


def repeated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Heads of keys, turned by their position."""
    x = x.view(4, 1, len(cosine))
    half = len(cosine) // 2
    turned = x * cosine + torch.cat([-x[..., half:], x[..., :half]], -1) * sine
    return (turned.expand(4, 3, len(cosine)).contiguous(),)


def test_few_elements_are_computed_where_they_are_repeated() -> None:
    args = some(torch.float32, (256,), (64,), (64,))
    lowered = lower(repeated, args)
    assert len(lowered.program.kernels) == 1
    assert "less than a launch" in " ".join(str(each) for each in lowered.records)
    check(lowered, repeated, args)
    large = some(torch.float32, (4 * 65536,), (65536,), (65536,))
    assert "less than a launch" not in " ".join(str(each) for each in lower(repeated, large).records)
