"""Variances in Triton kernels: held rows, rows in one pass, two kernels; against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program, decompositions, interpret_program
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.targets.triton import (
    TileLimits,
    compile_kernel,
    interpret_kernel,
    kernels_of,
    render_program,
    resource_facts,
    to_program,
)

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")


def lower(f: Callable[..., Any], *args: Any, mode: str = "fake") -> Compiled:
    """``f`` traced on the CPU and lowered for a CUDA device."""
    graph = make_fx(f, decompositions(), tracing_mode=mode)(*args)
    return compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter"))


def in_blocks(lowered: Compiled) -> Compiled:
    """With small tiles, so that short rows are walked in blocks."""
    rendered = render_program(lowered.scheduled, limits=TileLimits(row=64, reduction=128))
    return replace(lowered, program=to_program(rendered))


def texts(lowered: Compiled) -> list[str]:
    """The kernels' sources."""
    return [kernel.source.text for kernel in kernels_of(lowered.program)]


def run(lowered: Compiled, *args: torch.Tensor) -> list[torch.Tensor]:
    """In Triton's interpreter."""
    return bind_program(lowered.program)(list(args))


def offset_rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers far from 0."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e4).to(dtype)


def assert_near(got: list[torch.Tensor], f: Callable[..., Any], *args: torch.Tensor, error: float) -> None:
    """``f`` of the float64 values, to an error relative to the largest result."""
    for ours, want in zip(got, f(*(a.double() for a in args)), strict=True):
        assert (ours.double() - want).abs().max() <= error * want.abs().max(), f(*args)


def variances(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Per row, and the sum."""
    return *torch.var_mean(x, 1), x.std(1, correction=0), x.sum(1)


@pytest.mark.parametrize("length", [37, 64, 65, 901, 768])
@pytest.mark.covers("F5e.1", "F5g.10")
def test_a_variance_far_from_zero_keeps_its_digits_and_reads_a_row_once(length: int) -> None:
    x = offset_rows(5, length)
    lowered = in_blocks(lower(variances, x))
    assert all(text.count("tl.load") == 1 for text in texts(lowered))
    assert any("reduce_squares" in text for text in texts(lowered)) == (length > 64)  # else the row is held
    assert_near(run(lowered, x), variances, x, error=1e-5)


def test_the_device_function_combines_lanes_of_which_some_saw_nothing() -> None:
    """The function itself, which the interpreter otherwise replaces by a faster one."""
    x = offset_rows(2, 70)
    (kernel,) = kernels_of(in_blocks(lower(lambda x: (x.var(1),), x)).program)
    got = torch.empty(2)
    names = [a.name for a in kernel.source.arguments]
    interpret_kernel(kernel.source, dict(zip(names, (x, got), strict=True)), replace_functions=False)
    assert_near([got], lambda x: (x.var(1),), x, error=1e-5)


@pytest.mark.covers("F5g.10")
def test_rows_with_nan_infinities_and_huge_values_have_the_variances_of_eager() -> None:
    x = offset_rows(4, 850, dtype=torch.float64)
    x[0, 840], x[1, 0], x[2, 77], x[3] = float("nan"), float("inf"), float("-inf"), 1e200
    want = list(variances(x))
    want[1] = x.mean(1)  # of a row with an infinity: of the sum
    for got, reference in zip(run(in_blocks(lower(variances, x)), x), want, strict=True):
        torch.testing.assert_close(got, reference, equal_nan=True)


@pytest.mark.covers("F5g.18")
def test_rows_of_a_layer_norm_are_read_twice_whatever_is_in_front() -> None:
    def f(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x * 2 + y
        return F.layer_norm(z, (901,), w, w), z.sum(1)

    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 901, generator=g, dtype=torch.float64) for _ in range(2))
    w = torch.rand(901, generator=g, dtype=torch.float64)
    lowered = in_blocks(lower(f, x, y, w))
    assert sum(text.count("in range(0, 901, RBLOCK)") for text in texts(lowered)) == 2
    assert any("reduce_squares" in text for text in texts(lowered))
    for got, want in zip(run(lowered, x, y, w), f(x, y, w), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("length", [4096, 5003])
@pytest.mark.covers("F5e.1", "F5g.10")
def test_variances_of_few_long_columns_are_two_kernels_that_combine_means_and_squares(length: int) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *torch.var_mean(x, 0), x.std(correction=0), (x * 2).var(0)

    x = offset_rows(length, 3)
    x[: length // 2] += 5  # chunks differ
    lowered = lower(f, x)
    launches = [launch.name for launch in lowered.program.kernels]
    assert sum(name.endswith("_partial") for name in launches) * 2 == len(launches)
    assert_near(run(lowered, x), f, x, error=1e-3)
    assert_near(interpret_program(lowered.scheduled, [x]), f, x, error=1e-3)  # as loop IR too
    x[0, 1] = float("nan")
    got = run(lowered, x)
    assert torch.equal(got[0].isnan(), torch.tensor([False, True, False])) and got[2].isnan()


def test_chunks_that_are_empty_or_short_do_not_count() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.var_mean(x)

    lowered = lower(f, torch.randn(700, dtype=torch.float64), mode="symbolic")
    assert any(launch.name.endswith("_partial") for launch in lowered.program.kernels)
    bound = bind_program(lowered.program)
    for size in (700, 129, 2):
        x = offset_rows(size, dtype=torch.float64) * 1e150  # so that a distance of nothing from the mean overflows
        args = [x] if len(lowered.program.plan.inputs) == 1 else [size, x]
        for got, want in zip(bound(args), f(x), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_variances_compile_without_spilling(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.var(1), F.layer_norm(x, (50257,)), y.std(0)

    lowered = lower(f, torch.empty(512, 50257, dtype=dtype), torch.empty(100352, 64, dtype=dtype))
    assert any("reduce_squares" in text for text in texts(lowered))
    for kernel in kernels_of(lowered.program):
        assert resource_facts(compile_kernel(kernel.source, 90)).spills == 0


# -- few long rows -----------------------------------------------------------------------------------------------


def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Forward with running statistics, and backward."""
    aten = torch.ops.aten
    running = torch.zeros_like(w), torch.ones_like(w)
    y, mean, rstd, *new = aten._native_batch_norm_legit_functional(x, w, b, *running, True, 0.1, 1e-5)
    gradients = aten.native_batch_norm_backward(y * y, x, w, None, None, mean, rstd, True, 1e-5, [True, True, True])
    return y.relu(), mean, rstd, *new, *gradients


def lower_batch_norm(dtype: torch.dtype) -> Compiled:
    """Traced on a fake CUDA device: 3 channels of 20,000 elements."""
    with FakeTensorMode():
        args = [torch.empty(shape, dtype=dtype, device="cuda") for shape in ((5, 3, 50, 80), (3,), (3,))]
        graph = make_fx(batch_norm, decompositions(), tracing_mode="fake")(*args)
    options = LowerOptions(verify=True, processor="triton-interpreter", disable=frozenset(["gather-launches"]))
    return compile_to_program(graph, options=options)


def batch_norm_inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Far from 0."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 50, 80, generator=g, dtype=torch.float64) + 100
    w, b = torch.rand(3, generator=g, dtype=torch.float64) + 0.5, torch.randn(3, generator=g, dtype=torch.float64)
    return [t.to(dtype) for t in (x, w, b)]


@pytest.mark.covers("F5e.1", "F5g.18")
def test_a_batch_norm_of_few_channels_is_a_kernel_per_pass_so_that_each_fills_a_device() -> None:
    lowered = lower_batch_norm(torch.float64)
    launches = [launch.name for launch in lowered.program.kernels]
    assert len(launches) == 6  # statistics of both directions in two kernels each, and the elements of both
    assert all(len(kernel.source.grid) > 1 for kernel in kernels_of(lowered.program)[::2])
    args = batch_norm_inputs(torch.float64)
    for got in (run(lowered, *args), interpret_program(lowered.scheduled, args)):
        for ours, want in zip(got, batch_norm(*args), strict=True):
            torch.testing.assert_close(ours, want)


@pytest.mark.covers("F5g.18")
def test_statistics_of_float32_on_a_device_are_float32_and_as_exact() -> None:
    lowered = lower_batch_norm(torch.float32)
    assert " : f64" not in print_program(lowered.scheduled)
    args = batch_norm_inputs(torch.float32)
    assert_near(run(lowered, *args), batch_norm, *args, error=5e-4)


def test_short_or_many_rows_and_passes_over_one_memory_stay_one_kernel() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.layer_norm(x, x.shape[1:]),)

    for shape, count in (((3, 1 << 14), 3), ((1025, 1 << 14), 1), ((3, 1000), 1)):
        assert len(lower(f, torch.empty(shape)).program.kernels) == count
    assert len(lower(lambda x: (x.softmax(1),), torch.empty(3, 1 << 14)).program.kernels) == 1  # a maximum is sought
