"""Inline vector arithmetic: every function within two units in the last place, on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.generate import generate

WIDTHS = [bits for bits in (128, 256, 512) if bits <= host_machine().vector_bits]
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name)
    for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "erf", "tanh")
}


def evaluate(op: str, args: list[torch.Tensor], bits: int) -> tuple[torch.Tensor, str]:
    """``op`` by a kernel for processors with vectors of so many bits, and the kernel's text."""
    count = args[0].numel()
    names = [f"x{k}" for k in range(len(args))]
    lines = ["aotkit-ir 2", "program test", *(f"input {name}" for name in names)]
    lines += [f"buffer {name} : float32[{count}] strides [1] input on cpu" for name in names]
    lines += [f"buffer out : float32[{count}] strides [1] output on cpu", f"loop out(i0 < {count}):", "  stage():"]
    lines += [f"    %{name}v = load {name}[i0] : f32" for name in names]
    lines += [f"    %r = {op} {', '.join(f'%{name}v' for name in names)} : f32", "    store out[i0] = %r", "return out"]
    compiled = generate(parse_program("\n".join(lines) + "\n"), generic_machine(bits), keep_text=True)
    return bind_program(compiled)(list(args))[0], compiled.text


def every_kind_of_number(step: int) -> torch.Tensor:
    """Every ``step``-th bit pattern: normal and subnormal numbers of every size, infinities and nans."""
    return torch.arange(-(2**31), 2**31, step, dtype=torch.int64).to(torch.int32).view(torch.float32)


def assert_within_two_ulp(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Against f64: distances in units of the result's last place; nan, infinities and zeros must be the same."""
    rounded = exact.float()
    assert torch.equal(got.isnan(), rounded.isnan())
    assert torch.equal(got[rounded.isinf()], rounded[rounded.isinf()])
    zeros = (got == 0) & (rounded == 0)
    assert torch.equal(got[zeros].signbit(), rounded[zeros].signbit())
    size = rounded.abs()
    spacing = (torch.nextafter(size, torch.tensor(math.inf)) - size).double()
    finite = rounded.isfinite() & spacing.isfinite()
    assert float(((got.double() - exact).abs() / spacing)[finite].max()) <= 2.0


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.covers("F5d.3", "F5d.4")
def test_a_function_is_within_two_ulp_of_float64_over_all_of_float32(op: str, bits: int) -> None:
    for x in (every_kind_of_number(16381), torch.linspace(-4.0, 4.0, 200_003), torch.linspace(-105.0, 90.0, 200_003)):
        got, _ = evaluate(op, [x], bits)
        assert_within_two_ulp(got, FUNCTIONS[op](x.double()))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.covers("F5d.3", "F5d.4")
def test_powers_are_within_two_ulp_of_float64(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    count = 200_003
    kinds = every_kind_of_number(21467)
    bases = [kinds, torch.rand(count, generator=generator) * 4, 1 + torch.randn(count, generator=generator) * 0.01]
    powers = [
        kinds[torch.randperm(len(kinds), generator=generator)],
        torch.randn(count, generator=generator) * 40,
        torch.randn(count, generator=generator) * 3000,
    ]
    for base, power in zip(bases, powers, strict=True):
        got, _ = evaluate("pow", [base, power], bits)
        assert_within_two_ulp(got, torch.pow(base.double(), power.double()))


@pytest.mark.parametrize("bits", WIDTHS)
def test_what_rounds_to_one_is_one(bits: int) -> None:
    for op, least in (("erf", 4.0), ("tanh", 10.0)):
        x = torch.tensor([least, least + 0.5, 3e38, math.inf] * 8)
        for sign in (1, -1):
            assert torch.equal(evaluate(op, [sign * x], bits)[0], sign * torch.ones(32))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("op", ["erf", "exp", "tanh"])
def test_what_is_left_of_a_row_has_the_bits_of_whole_vectors(op: str, bits: int) -> None:
    x = torch.randn(67, generator=torch.Generator().manual_seed(0)) * 2
    whole, text = evaluate(op, [x[:64].contiguous()], bits)
    for count in (1, 3, 7, 9, 15):
        assert torch.equal(evaluate(op, [x[64 - count : 64].contiguous()], bits)[0], whole[64 - count :])
    if op == "erf" and bits > 128 and "x86_64" in text:
        assert ("permvar" if bits == 512 else "vpermilvar") in text


@pytest.mark.parametrize("bits", WIDTHS)
def test_gelu_by_erf_is_as_exact_as_by_one_that_is_rounded_once(bits: int) -> None:
    """Most of its error is that of the other steps."""
    x = torch.linspace(-6.0, 6.0, 500_003)
    exact, scaled = torch.nn.functional.gelu(x.double()), x * 0.5**0.5
    ours, best = (
        ((x * 0.5 * (1 + erf)).double() - exact).abs()
        for erf in (evaluate("erf", [scaled], bits)[0], scaled.double().erf().float())
    )
    assert ours.max() <= 1.1 * best.max() and ours.mean() <= 1.1 * best.mean()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.covers("F5d.3", "F5d.4")
def test_powers_of_e_that_round_to_subnormals_are_rounded_once(bits: int) -> None:
    x = torch.linspace(-105.0, -87.0, 20_001)
    assert_within_two_ulp(evaluate("exp", [x], bits)[0], torch.exp(x.double()))
    assert torch.equal(evaluate("exp", [x], bits)[0][x < -104.0], torch.zeros(int((x < -104.0).sum())))
    assert evaluate("exp2", [torch.full((9,), -149.0)], bits)[0].eq(2.0**-149).all()


@pytest.mark.parametrize("op", ["exp", "expm1", "log", "log1p", "log2", "log10", "exp2", "erf", "tanh"])
def test_a_function_calls_no_library(op: str) -> None:
    _, text = evaluate(op, [torch.ones(35)], 128)
    declared = [line for line in text.splitlines() if line.startswith("declare") and "@llvm." not in line]
    assert all(op not in line for line in declared)


def test_far_angles_take_the_library_and_near_ones_in_the_same_vector_stay_right() -> None:
    x = torch.tensor([0.5, 1e10, -3e38, 40000.0, -0.25, math.inf, 2.0] * 7)
    for op in ("sin", "cos"):
        got, _ = evaluate(op, [x], 128)
        assert_within_two_ulp(got, FUNCTIONS[op](x.double()))
