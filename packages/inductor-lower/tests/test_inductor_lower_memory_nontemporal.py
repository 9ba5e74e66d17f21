"""Results larger than the caches are written past them, and are right wherever they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.kernel_passes.mark_nontemporal import NONTEMPORAL_BYTES
from aotkit_inductor_lower.runtime import BoundProgram, bind_program
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.generate import generate

WIDTHS = [bits for bits in (128, 256, 512) if bits <= host_machine().vector_bits]
ROWS, COLUMNS = 1600, 4096


def outer_sum(columns: int, bits: int) -> tuple[BoundProgram, str]:
    """``out[i, j] = x[i] + y[j]`` and the kernel's text."""
    text = f"""aotkit-ir 2
program test
input x
input y
buffer x : float32[{ROWS}] strides [1] input on cpu
buffer y : float32[{columns}] strides [1] input on cpu
buffer out : float32[{ROWS}, {columns}] strides [{columns}, 1] output on cpu
loop out(i0 < {ROWS}, i1 < {columns}):
  stage():
    %a = load x[i0] : f32
    %b = load y[i1] : f32
    %c = add %a, %b : f32
    store out[i0, i1] = %c
return out
"""
    compiled = generate(parse_program(text), generic_machine(bits), keep_text=True)
    return bind_program(compiled), compiled.text


def inputs(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, generator=generator), torch.randn(columns, generator=generator)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_large_new_result_is_streamed(bits: int) -> None:
    assert ROWS * COLUMNS * 4 >= NONTEMPORAL_BYTES
    bound, text = outer_sum(COLUMNS, bits)
    assert "!nontemporal" in text and "call void @llvm.x86.sse.sfence()" in text
    x, y = inputs(COLUMNS)
    assert torch.equal(bound([x, y])[0], x[:, None] + y)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_streamed_result_that_is_not_aligned_is_stored_plainly(bits: int) -> None:
    bound, text = outer_sum(COLUMNS, bits)
    assert "!nontemporal" in text

    def shifted(sizes: Any, strides: Any, *_: Any) -> torch.Tensor:
        return torch.empty(ROWS * COLUMNS + 1)[1:].view(ROWS, COLUMNS)

    scope = bound._call.__globals__
    assert "empty_large" in scope
    scope["empty"] = scope["empty_large"] = shifted
    x, y = inputs(COLUMNS)
    (got,) = bound([x, y])
    assert got.data_ptr() % 16 == 4
    assert torch.equal(got, x[:, None] + y)


def test_rows_that_are_no_whole_vectors_are_stored_plainly() -> None:
    bound, text = outer_sum(COLUMNS + 3, 128)
    assert "!nontemporal" not in text and "sfence" not in text
    x, y = inputs(COLUMNS + 3)
    assert torch.equal(bound([x, y])[0], x[:, None] + y)


def test_a_result_that_the_caches_hold_is_stored_plainly() -> None:
    _, text = outer_sum(64, 128)
    assert "!nontemporal" not in text


def test_the_size_of_a_complex_result_is_counted_in_bytes() -> None:
    count = NONTEMPORAL_BYTES // 8
    text = f"""aotkit-ir 2
program test
input x
buffer x : float32[{count}, 2] strides [2, 1] input on cpu
buffer out : complex64[{count}] strides [1] output on cpu
buffer parts : float32[{count}, 2] strides [2, 1] temporary on cpu
alias parts: parts = out + 0
loop parts(i0 < {count}, i1 < 2):
  stage():
    %a = load x[i0, i1] : f32
    store parts[i0, i1] = %a
return out
"""
    assert "!nontemporal" in generate(parse_program(text), generic_machine(128), keep_text=True).text
    small = text.replace(str(count), str(count - 1))
    assert "!nontemporal" not in generate(parse_program(small), generic_machine(128), keep_text=True).text


@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_bytes_are_streamed_too(dtype: str) -> None:
    text = f"""aotkit-ir 2
program test
input x
buffer x : {dtype}[{NONTEMPORAL_BYTES}] strides [1] input on cpu
buffer out : {dtype}[{NONTEMPORAL_BYTES}] strides [1] output on cpu
loop out(i0 < {NONTEMPORAL_BYTES}):
  stage():
    %a = load x[i0] : {dtype if dtype == "bool" else "u8"}
    store out[i0] = %a
return out
"""
    assert "!nontemporal" in generate(parse_program(text), generic_machine(128), keep_text=True).text
