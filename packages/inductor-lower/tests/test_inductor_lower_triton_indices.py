"""Computed indices of kernels for CUDA, with and without asserts: source, results in the interpreter, compiled size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_graph, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.targets.triton import (
    compile_kernel,
    kernels_of,
    resource_facts,
)

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

Tensor = torch.Tensor


def lower(f: Callable[..., Any], args: list[Tensor], asserts: bool, **settings: Any) -> Compiled:
    """``f`` for a device."""
    graph = make_fx(torch.func.functionalize(f), decompositions(), tracing_mode="fake")(*args)
    options = LowerOptions(verify=True, index_asserts=asserts, processor="triton-interpreter", **settings)
    return compile_to_program(graph, options=options)


def run(f: Callable[..., Any], args: list[Tensor], asserts: bool) -> list[Any]:
    """``f`` in the interpreter."""
    lowered = lower(f, args, asserts)
    return bind_program(lowered.program, lowered.constants)([a.clone() for a in args])


def gather(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Rows by number, with arithmetic and a reduction behind."""
    return x[index] * 2 + 1, x[index].sum(1), x.index_select(0, index % 7)


def scatter(x: Tensor, index: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Stores, atomic ones, and ones in order (halves)."""
    whole = y.index_put((index,), x)
    added = torch.zeros(7, 5, dtype=torch.float64).index_put((index,), x, accumulate=True)
    halves = torch.zeros(7, 5, dtype=torch.bfloat16).index_put((index,), x.bfloat16(), accumulate=True)
    return whole, added, halves


def numbers(*shape: int) -> Tensor:
    """Whole ones, so that halves are exact."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@pytest.mark.parametrize("asserts", [True, False])
@pytest.mark.covers("F5g.13")
def test_indices_in_range_give_the_same_with_and_without_asserts(asserts: bool) -> None:
    args = [numbers(7, 5), torch.tensor([0, -1, 6, -7, 3])]
    for ours, want in zip(run(gather, args, asserts), gather(*args), strict=True):
        assert torch.equal(ours, want)
    args = [numbers(3, 5), torch.tensor([-2, 0, 5]), numbers(7, 5)]
    for ours, want in zip(run(scatter, args, asserts), scatter(*args), strict=True):
        assert torch.equal(ours, want)


def outside(index: Tensor, value: Tensor) -> Tensor:
    """``value`` where the index is in range, else 0."""
    inside = ((index >= -7) & (index < 7)).view(-1, *[1] * (value.dim() - 1))
    return torch.where(inside, value, torch.zeros((), dtype=value.dtype))


def test_without_asserts_what_is_out_of_range_reads_0() -> None:
    x, index = numbers(7, 5), torch.tensor([0, 7, -8, 2**62, -(2**62), -7, 6])
    inside = torch.where((index >= -7) & (index < 7), index, 0)
    row = outside(index, x[inside])
    for ours, want in zip(run(gather, [x, index], False), (row * 2 + 1, row.sum(1), x[index % 7]), strict=True):
        assert torch.equal(ours, want)
    with pytest.raises(IndexError, match="index 7 is out of bounds for dimension with size 7"):
        run(gather, [x, index], True)


def test_without_asserts_what_is_out_of_range_is_not_written() -> None:
    x, index, y = numbers(4, 5), torch.tensor([7, 1, -8, 2**62]), numbers(7, 5)
    kept, place = x[1:2], torch.tensor([1])
    for ours, want in zip(run(scatter, [x, index, y], False), scatter(kept, place, y), strict=True):
        assert torch.equal(ours, want)
    with pytest.raises(IndexError, match="index 7 is out of bounds for dimension with size 7"):
        run(scatter, [x, index, y], True)


def test_a_store_that_may_be_dropped_is_not_taken_for_what_is_in_memory() -> None:
    def f(y: Tensor, index: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        z = y.index_put((index,), x)
        return z, z[index] + 1

    args = [numbers(7), torch.tensor([9, 2]), numbers(2) * 100]
    whole = numbers(7)
    whole[2] = 200
    for ours, want in zip(run(f, args, False), (whole, torch.tensor([1.0, 201.0], dtype=torch.float64)), strict=True):
        assert torch.equal(ours, want)


def test_a_kernel_without_asserts_calls_nothing_and_is_smaller() -> None:
    args = [torch.randn(512, 64), torch.zeros(256, dtype=torch.int64)]
    pick = lambda x, index: (x[index] * 2,)
    facts = {}
    for asserts in (True, False):
        (kernel,) = kernels_of(lower(pick, args, asserts).program)
        assert ("device_assert" in kernel.source.text) == asserts == kernel.source.checks
        for arch in (80, 90):
            cubin = compile_kernel(kernel.source, arch, keep_ptx=True)
            assert ("__assertfail" in cubin.ptx) == asserts
            facts[asserts, arch] = resource_facts(cubin), len(cubin.code)
    for arch in (80, 90):
        (without, size), (checked, checked_size) = facts[False, arch], facts[True, arch]
        assert without.spills == without.stack == 0
        assert without.registers <= checked.registers and size < checked_size


def test_what_follows_a_product_may_be_scattered_or_looked_up_without_asserts() -> None:
    def f(x: Tensor, w: Tensor, table: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return (x @ w + table[index],)

    args = [torch.ones(16, 16), torch.ones(16, 16), torch.ones(4, 16), torch.full((16,), 4)]
    for asserts in (True, False):
        lowered = lower(f, args, asserts, contractions="generated")
        (kernel,) = kernels_of(lowered.program)
        assert "tl.dot" in kernel.source.text and kernel.source.checks == asserts
        bound = bind_program(lowered.program, lowered.constants)
        if asserts:
            with pytest.raises(IndexError):
                bound(list(args))
        else:
            assert torch.equal(bound(list(args))[0], torch.full((16, 16), 16.0))


def test_the_cpu_raises_either_way() -> None:
    args = [torch.randn(7, 5), torch.tensor([7])]
    graph = make_fx(gather, decompositions(), tracing_mode="fake")(*args)
    for asserts in (True, False):
        with pytest.raises(IndexError):
            compile_graph(graph, options=LowerOptions(index_asserts=asserts))(list(args))
