"""Conversions from and to 8-bit floats, bit for bit as eager's: on the CPU, in Triton's interpreter, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    LowerOptions,
    bind_program,
    compile_graph,
    compile_to_program,
    decompositions,
    interpret_program,
)
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.targets.triton import (
    compile_kernel,
    kernels_of,
)

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool, *TYPES]


def graph(f: Callable[..., Any], *args: torch.Tensor) -> torch.fx.GraphModule:
    """``f`` of fake tensors."""
    return make_fx(f, decompositions(), tracing_mode="fake")(*args)


def lowered_for_cuda(f: Callable[..., Any], *args: torch.Tensor) -> Compiled:
    """With the IR verified."""
    return compile_to_program(graph(f, *args), options=LowerOptions(verify=True, processor="triton-interpreter"))


def on_the_cpu(f: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    """Compiled for the CPU; nothing is left to ATen."""
    compiled = compile_graph(graph(f, *args), options=LowerOptions(verify=True))
    assert not compiled.report().externs
    return compiled(list(args))


def in_triton(f: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    """The CUDA program in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")
    lowered = lowered_for_cuda(f, *args)
    assert not lowered.report.externs
    return bind_program(lowered.program)(list(args))


def in_the_ir(f: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    """The loop IR in its reference interpreter."""
    return interpret_program(lowered_for_cuda(f, *args).scheduled, list(args))  # type: ignore[return-value]


WAYS = [on_the_cpu, in_triton, in_the_ir]


def floats() -> torch.Tensor:
    """Each upper half of a float32 (all signs, exponents and 7 bits of mantissa: ties of both formats, subnormals,
    infinities, nan), with lower halves around where rounding changes."""
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x8000, 0xFFFF], dtype=torch.int32)
    return (upper[:, None] | lower).reshape(-1).view(torch.float32)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bits of 8-bit types, values of others, where one nan is as good as another (eager's sign of it depends on the
    processor)."""
    assert got.dtype == want.dtype
    if want.itemsize == 1:
        number = want.float() == want.float()
        assert torch.equal(got.float() == got.float(), number)
        assert torch.equal(got.view(torch.uint8)[number], want.view(torch.uint8)[number])
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.covers("F5g.5")
def test_floats_are_rounded_to_8_bits_as_in_eager(way: Callable[..., Any], to: torch.dtype) -> None:
    x = floats()
    assert_same(way(lambda x: (x.to(to),), x)[0], x.to(to))
    for half in (torch.bfloat16, torch.float16):
        y = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(half)
        assert_same(way(lambda y: (y.to(to),), y)[0], y.to(to))
    for z in (torch.arange(-600, 600), torch.tensor([1e300, -1e-300, 0.3], dtype=torch.float64)):
        assert_same(way(lambda z: (z.to(to),), z)[0], z.to(to))


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.covers("F5g.5")
def test_all_256_values_are_read_as_in_eager(way: Callable[..., Any], source: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(source).reshape(16, 16).t()
    types = [t for t in OTHERS if t is not torch.uint8]  # out of its range a cast to uint8 is not defined
    for got, to in zip(way(lambda x: tuple(x.to(t, copy=True) for t in types), x), types, strict=True):
        assert_same(got, x.to(to))
        assert got.stride() == x.to(to, copy=True).stride()


@pytest.mark.parametrize("way", [on_the_cpu, in_triton])
@pytest.mark.covers("F5g.5")
def test_a_scaled_value_is_quantized_and_read_again_in_one_kernel(way: Callable[..., Any]) -> None:
    def f(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        small = (x * scale).to(torch.float8_e4m3fn)
        return small, small.to(torch.bfloat16) / scale

    x = torch.randn(33, 7, generator=torch.Generator().manual_seed(0)) * 100
    scale = torch.tensor(3.0)
    for got, want in zip(way(f, x, scale), f(x, scale), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("arch", [80, 90])
def test_no_device_needs_an_instruction_for_them(arch: int) -> None:
    pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")
    lowered = lowered_for_cuda(lambda x: tuple(x.to(to).to(torch.float32) + 1 for to in TYPES), torch.empty(4096))
    (kernel,) = kernels_of(lowered.program)
    ptx = compile_kernel(kernel.source, arch, keep_ptx=True).ptx
    assert "e4m3" not in ptx and "e5m2" not in ptx


def test_other_8_bit_floats_and_arithmetic_are_left_to_aten_with_the_reason() -> None:
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    compiled = compile_graph(graph(lambda x: (x.to(torch.float8_e5m2fnuz),), x))
    assert "generated code has no torch.float8_e5m2fnuz" in str(compiled.report())
    assert_same(compiled([x])[0], x.to(torch.float8_e5m2fnuz))
    small = x.to(torch.float8_e5m2)
    compiled = compile_graph(graph(lambda a: (a.t().contiguous(), torch.cat([a, a]), a.view(torch.uint8)), small))
    for got, want in zip(compiled([small]), (small, torch.cat([small, small]), small.view(torch.uint8)), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("source", TYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_views_of_8_bit_floats_are_no_calls(way: Callable[..., Any], source: torch.dtype) -> None:
    """Read where they lie; and where they leave the graph, still views of the argument."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned = x.t().view(4, 8, 16).permute(1, 0, 2).unsqueeze(1).transpose(0, 3)
        return turned, turned.float() * 2, turned.squeeze(2).to(torch.bfloat16)

    x = torch.arange(256).repeat(2).to(torch.uint8).view(source).view(32, 16).t()
    for got, want in zip(way(f, x), f(x), strict=True):
        assert_same(got, want)
        assert got.stride() == want.stride()


def test_views_of_8_bit_floats_are_views_to_calls() -> None:
    """Also where one writes."""
    x = torch.randn(6, 8).to(torch.float8_e4m3fn)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        y.t().copy_(x.view(8, 6))
        return y, y.view(48).float(), torch.cat([x.t(), y.view(8, 6)])

    compiled = compile_graph(graph(f, x))
    for got, want in zip(compiled([x]), f(x), strict=True):
        assert_same(got, want)
