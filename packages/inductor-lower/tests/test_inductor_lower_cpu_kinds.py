"""Kinds of kernels that other files' programs leave out, against the interpreter: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph
from aotkit_inductor_lower.ir.interpret import interpret_program
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.kernel_passes.linearize import linearize
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import host_machine
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.map_loops import map_loops

ROWS, COLUMNS = 5, 37
KINDS = [("bool", "any"), ("bool", "all"), ("int32", "xor"), ("int64", "xor"), ("uint8", "xor")]
SHORT = {"bool": "bool", "int32": "i32", "int64": "i64", "uint8": "u8", "float32": "f32", "float64": "f64"}


def same_as_the_interpreter(text: str, *inputs: torch.Tensor) -> None:
    program = parse_program(text)
    want = interpret_program(program, [x.clone() for x in inputs])
    got = bind_program(generate(program))([x.clone() for x in inputs])
    for ours, theirs in zip(got, want, strict=True):
        assert isinstance(theirs, torch.Tensor) and torch.equal(ours, theirs)


def values(dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if dtype == "bool":
        return torch.rand(ROWS, COLUMNS, generator=generator) < 0.9
    low = 0 if dtype == "uint8" else -4
    return torch.randint(low, 5, (ROWS, COLUMNS), generator=generator).to(getattr(torch, dtype))


@pytest.mark.parametrize("word", ["scan", "reduce"])
@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_scans_and_reductions_of_bits(dtype: str, kind: str, word: str) -> None:
    sizes = f"[{ROWS}, {COLUMNS}] strides [{COLUMNS}, 1]" if word == "scan" else f"[{ROWS}] strides [1]"
    store = "    store y[i0, r0] = %b" if word == "scan" else "  stage():\n    store y[i0] = %b"
    same_as_the_interpreter(
        f"""aotkit-ir 2
program bits
input x
buffer x : {dtype}[{ROWS}, {COLUMNS}] strides [{COLUMNS}, 1] input on cpu
buffer y : {dtype}{sizes} output on cpu
loop y(i0 < {ROWS}):
  stage(r0 < {COLUMNS}):
    %a = load x[i0, r0] : {SHORT[dtype]}
    %b = {word} {kind} %a : {SHORT[dtype]}
{store}
return y
""",
        values(dtype),
    )


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
@pytest.mark.parametrize(("written", "start"), [("+=", "0"), ("*=", "1"), ("min=", "2"), ("max=", "1")])
def test_stores_that_combine_with_what_is_there(dtype: str, written: str, start: str) -> None:
    first = f"{start}.0" if dtype.startswith("float") else start
    same_as_the_interpreter(
        f"""aotkit-ir 2
program combined
input x
buffer x : {dtype}[{ROWS}, {COLUMNS}] strides [{COLUMNS}, 1] input on cpu
buffer y : {dtype}[{COLUMNS}] strides [1] output on cpu
loop start(i0 < {COLUMNS}):
  stage():
    %c = const {first} : {SHORT[dtype]}
    store y[i0] = %c
loop y(i0 < {ROWS}, i1 < {COLUMNS}):
  stage():
    %a = load x[i0, i1] : {SHORT[dtype]}
    store y[i1] {written} %a
return y
""",
        values(dtype),
    )


@pytest.mark.parametrize(("source", "to"), [("float32", "int32"), ("int64", "float64"), ("int32", "float32")])
def test_bits_taken_for_another_type(source: str, to: str) -> None:
    x = torch.arange(-20, 17, dtype=torch.float32).to(getattr(torch, source))
    text = f"""aotkit-ir 2
program bits
input x
buffer x : {source}[37] strides [1] input on cpu
buffer y : {to}[37] strides [1] output on cpu
loop y(i0 < 37):
  stage():
    %a = load x[i0] : {SHORT[source]}
    %b = bitcast %a : {SHORT[to]}
    store y[i0] = %b
return y
"""
    (got,) = bind_program(generate(parse_program(text)))([x])
    assert torch.equal(got.view(getattr(torch, source)), x)


def test_many_small_kernels_of_one_shape_are_one_call() -> None:
    def update(*weights: torch.Tensor) -> list[torch.Tensor]:
        return [torch.addcmul(w, w, w) * 0.5 for w in weights]

    weights = [torch.arange(float(n)) for n in (1005, 1616, 2033, 6400)]
    compiled = compile_graph(make_fx(update, tracing_mode="fake")(*weights))
    assert any(record.combo for record in compiled.compiled.kernels)  # type: ignore[union-attr]
    for ours, want in zip(compiled([w.clone() for w in weights]), update(*weights), strict=True):
        assert torch.equal(ours, want)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_rows_whose_columns_are_computed_run_in_strips(dtype: str) -> None:
    rows, columns = 70, 50
    text = f"""aotkit-ir 2
program strips
input x
buffer x : {dtype}[{rows}, 20] strides [20, 1] input on cpu
buffer y : {dtype}[{rows}, {columns}] strides [{columns}, 1] output on cpu
loop y(i0 < {rows}, i1 < {columns}):
  stage():
    %a = index i1 : i64
    %b = const 19 : i64
    %c = const 2 : i64
    %d = sub %a, %c : i64
    %e = abs %d : i64
    %f = mul %e, %c : i64
    %g = sub %f, %e : i64
    %h = minimum %g, %b : i64
    %i = check %h < 20
    %j = load x[i0, %i] : {SHORT[dtype]}
    %k = add %j, %j : {SHORT[dtype]}
    store y[i0, i1] = %k
return y
"""
    kernel = map_loops(linearize(parse_program(text)).kernels[0], host_machine())
    assert [loop.map.kind for loop in kernel.grid] == ["strip", "lanes"]
    x = torch.arange(rows * 20).view(rows, 20).to(getattr(torch, dtype))
    same_as_the_interpreter(text, x)
