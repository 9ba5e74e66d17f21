"""Triton kernels of single nests: run in Triton's interpreter against the reference interpreter, and compiled."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    LowerOptions,
    compile_to_program,
    interpret_program,
    parse_program,
    print_program,
)
from aotkit_inductor_lower.ir import BufferKind, BufferRef, Compute, DType, Load, LoopNest, Program, Range, Stage, Store
from aotkit_inductor_lower.ir.nodes import Buffer
from aotkit_inductor_lower.ir.random_programs import RandomOptions, random_inputs, random_program
from aotkit_inductor_lower.kernel_ir.walk import perfect_nests
from aotkit_inductor_lower.kernel_passes.normal_form import kernel_of
from aotkit_inductor_lower.launch_plan.codec import compiled_from_json, compiled_to_json
from aotkit_inductor_lower.ops.dtypes import int_bounds, is_int, to_torch_dtype, torch_name
from aotkit_inductor_lower.ops.scalar import OP_TABLE, TypeRule, result_dtype
from aotkit_inductor_lower.symbolic import Symbol, SymbolKind, sym, to_expr
from aotkit_inductor_lower.targets.triton import (
    KernelSource,
    TileLimits,
    TritonError,
    TritonMissing,
    emit_kernel,
    interpret_kernel,
    jit_function,
    kernels_of,
    standalone_text,
)
from aotkit_inductor_lower.targets.triton.sectors import moved_bytes, narrowest
from aotkit_inductor_lower.targets.triton.target import TRITON_INTERPRETER

triton = pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")
from aotkit_inductor_lower.targets.triton.compile import compile_kernel, resource_facts, vector_bytes  # noqa: E402

RELATIVE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def sources(program: Program, limits: TileLimits | None = None, fast: bool = False) -> list[KernelSource]:
    """The kernels of a program that holds nests only."""
    buffers = {b.name: b for b in program.buffers}
    nests = [step for step in program.steps if isinstance(step, LoopNest)]
    kernels = [kernel_of(nest, buffers) for nest in nests]
    return [emit_kernel(kernel, limits or TileLimits(), fast=fast) for kernel in kernels]


def copy(value: torch.Tensor | int) -> torch.Tensor | int:
    """A copy with gaps and all."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def run(program: Program, inputs: list[torch.Tensor | int], limits: TileLimits | None = None) -> list[torch.Tensor]:
    """The program's kernels in Triton's interpreter."""
    env = {}
    for name, position, kind, dim in program.symbol_sources:
        given = inputs[position]
        env[name] = given if isinstance(given, int) else getattr(given, kind)(dim)
    known = {Symbol(name, SymbolKind.SIZE): int(value) for name, value in env.items()}
    tensors = {n: t for n, t in zip(program.inputs, inputs, strict=True) if isinstance(t, torch.Tensor)}
    for b in program.buffers:
        if b.name not in tensors and b.kind is not BufferKind.SCRATCH:
            sizes, strides = [s.evaluate(known) for s in b.sizes], [s.evaluate(known) for s in b.strides]
            tensors[b.name] = torch.empty_strided(sizes, strides, dtype=getattr(torch, b.dtype)).fill_(1)
    for source in sources(program, limits):
        interpret_kernel(source, tensors, {name: int(value) for name, value in env.items()})
    return [tensors[output.name] for output in program.outputs]  # type: ignore[union-attr]


def check(program: Program, inputs: list[torch.Tensor | int], limits: TileLimits | None = None) -> None:
    """Interpreted Triton equals the reference interpreter."""
    want = interpret_program(program, [copy(i) for i in inputs])
    for ours, reference in zip(run(program, [copy(i) for i in inputs], limits), want, strict=True):
        assert isinstance(reference, torch.Tensor)
        if reference.dtype.is_floating_point:
            tolerance = RELATIVE[reference.dtype]
            torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance / 2, equal_nan=True)
        else:
            assert torch.equal(ours, reference)


# -- random programs ---------------------------------------------------------------------------------------------

SMALL = RandomOptions(max_elements=1500)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.covers("F5e.1")
def test_a_random_program_gives_what_the_reference_gives(seed: int) -> None:
    program = random_program(seed, SMALL)
    check(program, random_inputs(program, seed))


@pytest.mark.parametrize("seed", range(20, 26))
@pytest.mark.covers("F5e.1")
def test_so_it_does_when_rows_are_walked_in_blocks_and_tiles_are_small(seed: int) -> None:
    program = random_program(seed, RandomOptions(max_elements=500))
    check(program, random_inputs(program, seed), TileLimits(row=0, pointwise=64, reduction=64))


# -- every op ----------------------------------------------------------------------------------------------------

FLOATS = [0.0, -0.0, 0.5, -1.5, 2.5, 3.0, -7.25, 0.1, 87.3, -100.0, 1e-6, 3e38, -1e10, float("inf"), float("-inf")]
FLOATS += [float("nan"), 127.5, -129.0, 2147483520.0, 2147483648.0, -2147483904.0, -9.3e18, 65520.0, 1 + 2**-8, 0.999]


def edges(dtype: DType) -> torch.Tensor:
    """Values worth trying."""
    if dtype is DType.BOOL:
        return torch.tensor([False, True])
    if is_int(dtype):
        low, high = int_bounds(dtype)
        values = {low, low + 1, high, high - 1, -1, 0, 1, 2, 3, -3, 7, -7, 8, 31, 32, 63, 64, 65, 100}
        return torch.tensor(sorted(v for v in values if low <= v <= high), dtype=to_torch_dtype(dtype))
    return torch.tensor(FLOATS, dtype=torch.float64).to(to_torch_dtype(dtype))


def op_program(operand: DType) -> tuple[Program, list[torch.Tensor | int], list[str]]:
    """One nest with every op that takes operands of this type, on all triples of edge values."""
    values = edges(operand)
    few = values[:: max(1, len(values) // 7)]
    columns = [values.repeat_interleave(len(values)), values.repeat(len(values))]
    columns.append(few.repeat(len(columns[0]) // len(few) + 1)[: len(columns[0])])
    columns.append((torch.arange(len(columns[0])) % 3 == 0) if operand is not DType.BOOL else columns[0])
    size = to_expr(len(columns[0]))
    one, at = (to_expr(1),), (sym("i0"),)
    types = [operand, operand, operand, DType.BOOL]
    buffers = [Buffer(f"x{k}", torch_name(d), (size,), one, BufferKind.INPUT) for k, d in enumerate(types)]
    body: list[Load | Compute | Store] = [Load(f"v{k}", f"x{k}", at, d) for k, d in enumerate(types)]
    names = []
    for row in OP_TABLE.values():
        if operand not in row.domain:
            continue
        operands = ["v0", "v1", "v2"][: row.arity]
        if row.traps and is_int(operand):
            continue  # zero divisors raise in the reference: tested below
        if row.rule is TypeRule.WHERE:
            results = [(("v3", "v0", "v1"), operand)]
        elif row.rule is TypeRule.CAST:
            results = [(("v0",), d) for d in DType]
        elif row.rule is TypeRule.BITCAST:
            width = to_torch_dtype(operand).itemsize
            results = [(("v0",), d) for d in DType if d is not DType.BOOL and to_torch_dtype(d).itemsize == width]
        else:
            results = [(tuple(operands), result_dtype(row.name, [operand] * row.arity))]
        for args, result in results:
            name = f"{row.name}_{result.value}"
            names.append(name)
            buffers.append(Buffer(name, torch_name(result), (size,), one, BufferKind.OUTPUT))
            body += [Compute(f"v_{name}", row.name, args, result), Store(name, at, f"v_{name}")]
    nest = LoopNest("every_op", (Range("i0", size),), (Stage((), tuple(body)),))
    outputs = tuple(BufferRef(name) for name in names)
    return Program("ops", ("x0", "x1", "x2", "x3"), tuple(buffers), (nest,), outputs), list(columns), names


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.covers("F5g.2", "F5g.3", "F5g.5")
def test_every_op_gives_what_its_row_says_on_edge_values(dtype: DType) -> None:
    program, inputs, names = op_program(dtype)
    want = interpret_program(program, [copy(i) for i in inputs])
    got = run(program, [copy(i) for i in inputs])
    for name, ours, reference in zip(names, got, want, strict=True):
        assert isinstance(reference, torch.Tensor)
        if not reference.dtype.is_floating_point or name.startswith(("cast", "bitcast")):
            view = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(reference.element_size())
            if reference.dtype.is_floating_point and not name.startswith("bitcast"):
                assert torch.equal(ours.isnan(), reference.isnan()), name
                ours, reference = ours.nan_to_num(0.0), reference.nan_to_num(0.0)
            assert torch.equal(ours.view(view), reference.view(view)) if view else torch.equal(ours, reference), name
            continue
        tolerance = RELATIVE[reference.dtype]
        torch.testing.assert_close(
            ours, reference, rtol=tolerance, atol=1e-38, equal_nan=True, msg=lambda text, op=name: f"{op}: {text}"
        )


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.I64, DType.U8, DType.BOOL])
def test_every_op_compiles_without_a_gpu(dtype: DType) -> None:
    (source,) = sources(op_program(dtype)[0])
    facts = resource_facts(compile_kernel(source, 90))
    assert facts.spills == 0


@pytest.mark.parametrize("dtype", [DType.I8, DType.U8, DType.I32, DType.I64])
@pytest.mark.covers("F5g.2")
def test_integer_division_has_eagers_signs_and_does_not_trap(dtype: DType) -> None:
    values = edges(dtype)
    a, b = values.repeat_interleave(len(values)), values.repeat(len(values))
    a, b = a[b != 0], b[b != 0]
    text = f"""\
aotkit-ir 2
program division
input a
input b
buffer a : {torch_name(dtype)}[{len(a)}] strides [1] input on cpu
buffer b : {torch_name(dtype)}[{len(a)}] strides [1] input on cpu
"""
    ops = ("floordiv", "truncdiv", "mod", "fmod")
    text += "".join(f"buffer {op} : {torch_name(dtype)}[{len(a)}] strides [1] output on cpu\n" for op in ops)
    text += f"loop k(i0 < {len(a)}):\n  stage():\n"
    text += f"    %v0 = load a[i0] : {dtype.value}\n    %v1 = load b[i0] : {dtype.value}\n"
    for k, op in enumerate(ops):
        text += f"    %v{k + 2} = {op} %v0, %v1 : {dtype.value}\n    store {op}[i0] = %v{k + 2}\n"
    check(parse_program(text + f"return {', '.join(ops)}\n"), [a, b])


# -- reductions --------------------------------------------------------------------------------------------------

SOFTMAX = """\
aotkit-ir 2
program softmax
input x
buffer x : {dtype}[{rows}, {n}] strides [{n}, 1] input on cpu
buffer y : {dtype}[{rows}, {n}] strides [{n}, 1] output on cpu
buffer e : float32[{n}] strides [1] scratch on cpu
loop softmax(i0 < {rows}):
  origin nodes ["softmax"] ops ["aten._softmax.default"] line "model.py:3: y = x.softmax(-1)"
  stage(r0 < {n}):
    %v0 = load x[i0, r0] : {d}
    %v1 = cast %v0 : f32
    %v2 = reduce max %v1 : f32
  stage(r1 < {n}):
    %v3 = load x[i0, r1] : {d}
    %v4 = cast %v3 : f32
    %v5 = sub %v4, %v2 : f32
    %v6 = exp %v5 : f32
    store e[r1] = %v6
    %v7 = reduce sum %v6 : f32
  stage(r2 < {n}):
    %v8 = load e[r2] : f32
    %v9 = div %v8, %v7 : f32
    %v10 = cast %v9 : {d}
    store y[i0, r2] = %v10
return y
"""


def softmax(rows: int, n: int, dtype: str = "float32", d: str = "f32") -> Program:
    """A softmax over rows, with its exponentials in a row of scratch memory."""
    return parse_program(SOFTMAX.format(rows=rows, n=n, dtype=dtype, d=d))


@pytest.mark.parametrize("limits", [TileLimits(), TileLimits(row=8, reduction=64)], ids=["whole", "blocks"])
@pytest.mark.covers("F5e.1", "F5g.10")
def test_softmax_rows_are_held_whole_or_walked_in_blocks(limits: TileLimits) -> None:
    program = softmax(3, 37)
    (source,) = sources(program, limits)
    assert source.persistent == (limits.row > 8)
    assert all(a.kind == "pointer" for a in source.arguments)  # no row needs memory
    assert source.text.count("tl.load") == (1 if source.persistent else 2)
    assert "# model.py:3: y = x.softmax(-1)" in source.text
    x = torch.randn(3, 37, generator=torch.Generator().manual_seed(0))
    check(program, [x], limits)


@pytest.mark.parametrize("kind", ["argmax", "argmin"])
@pytest.mark.parametrize("row", [64, 4])
@pytest.mark.covers("F5g.9")
def test_arg_extremes_take_the_first_of_equals_and_nans_win(kind: str, row: int) -> None:
    text = f"""\
aotkit-ir 2
program arg
input x
buffer x : float32[5, 11] strides [11, 1] input on cpu
buffer y : int64[5] strides [1] output on cpu
loop k(i0 < 5):
  stage(r0 < 11):
    %v0 = load x[i0, r0] : f32
    %v1 = reduce {kind} %v0 : i64
  stage():
    store y[i0] = %v1
return y
"""
    x = torch.randint(0, 3, (5, 11), generator=torch.Generator().manual_seed(3)).float()
    x[1, 4] = x[1, 7] = float("nan")
    x[2] = float("inf")
    x[3] = float("-inf")
    program = parse_program(text)
    check(program, [x], TileLimits(row=row, reduction=16))
    (source,) = sources(program, TileLimits(row=row, reduction=16))
    out = torch.empty(5, dtype=torch.int64)
    interpret_kernel(source, {"x": x, "y": out}, replace_functions=False)  # the device functions themselves
    assert torch.equal(out, getattr(torch, kind)(x, dim=1))


@pytest.mark.parametrize("kind", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("row", [64, 4])
@pytest.mark.covers("F5g.11")
def test_running_reductions_carry_over_blocks(kind: str, row: int) -> None:
    text = f"""\
aotkit-ir 2
program scan
input x
buffer x : float32[3, 21] strides [21, 1] input on cpu
buffer y : float32[3, 21] strides [21, 1] output on cpu
loop k(i0 < 3):
  stage(r0 < 21):
    %v0 = load x[i0, r0] : f32
    %v1 = scan {kind} %v0 : f32
    store y[i0, r0] = %v1
return y
"""
    x = torch.randn(3, 21, generator=torch.Generator().manual_seed(1))
    x[1, 5] = float("nan")
    check(parse_program(text), [x], TileLimits(row=row, reduction=8))


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16", "uint8"])
@pytest.mark.parametrize("mode", ["+=", "max="])
@pytest.mark.covers("F5g.13")
def test_stores_that_combine_are_atomic_or_in_order(dtype: str, mode: str) -> None:
    d = {"float32": "f32", "int64": "i64", "bfloat16": "bf16", "uint8": "u8"}[dtype]
    program = parse_program(f"""\
aotkit-ir 2
program scatter
input index
input x
input y
buffer index : int64[17] strides [1] input on cpu
buffer x : {dtype}[17, 3] strides [3, 1] input on cpu
buffer y : {dtype}[5, 3] strides [3, 1] input on cpu
loop k(i0 < 17, i1 < 3):
  stage():
    %v0 = load index[i0] : i64
    %v1 = check %v0 < 5
    %v2 = load x[i0, i1] : {d}
    store y[%v1, i1] {mode} %v2
return y
""")
    (source,) = sources(program)
    atomic = dtype == "int64" or (dtype == "float32" and mode == "+=")
    assert ("tl.atomic" in source.text) == atomic
    assert (source.grid == ()) == (not atomic)  # else one program instance does them in order
    g = torch.Generator().manual_seed(0)
    index = torch.randint(-5, 5, (17,), generator=g)
    x = torch.randint(0, 5, (17, 3), generator=g).to(getattr(torch, dtype))
    y = torch.ones(5, 3).to(getattr(torch, dtype))
    check(program, [index, x, y])


@pytest.mark.covers("F5g.13")
def test_an_index_out_of_range_stops_the_kernel() -> None:
    program = parse_program("""\
aotkit-ir 2
program gather
input index
input x
buffer index : int64[4] strides [1] input on cpu
buffer x : float32[5] strides [1] input on cpu
buffer y : float32[4] strides [1] output on cpu
loop k(i0 < 4):
  stage():
    %v0 = load index[i0] : i64
    %v1 = check %v0 < 5
    %v2 = load x[%v1] : f32
    store y[i0] = %v2
return y
""")
    x = torch.arange(5.0)
    assert torch.equal(run(program, [torch.tensor([0, -1, 4, -5]), x])[0], torch.tensor([0.0, 4, 4, 0]))
    with pytest.raises(Exception, match="index 5 is out of bounds for dimension with size 5"):
        run(program, [torch.tensor([0, 1, 5, 0]), x])
    assert sources(program)[0].checks
    assert (
        "trap" in compile_kernel(sources(program)[0], 90, keep_ptx=True).ptx
        or "__assertfail" in compile_kernel(sources(program)[0], 90, keep_ptx=True).ptx
    )


def copy_program(sizes: str, from_strides: str, to_strides: str, dtype: str = "float32", d: str = "f32") -> Program:
    """A copy between two layouts."""
    loops = ", ".join(f"i{k} < {n}" for k, n in enumerate(sizes.split(", ")))
    at = ", ".join(f"i{k}" for k in range(len(sizes.split(", "))))
    return parse_program(f"""\
aotkit-ir 2
program copy
input x
buffer x : {dtype}[{sizes}] strides [{from_strides}] input on cpu
buffer y : {dtype}[{sizes}] strides [{to_strides}] output on cpu
loop copy({loops}):
  stage():
    %v0 = load x[{at}] : {d}
    store y[{at}] = %v0
return y
""")


def test_a_transpose_has_a_square_tile_and_a_copy_one_axis() -> None:
    (transposed,) = sources(copy_program("64, 96", "1, 64", "96, 1"))
    assert dict(transposed.config.blocks) == {"XBLOCK": 32, "YBLOCK": 32}
    (plain,) = sources(copy_program("64, 96", "96, 1", "96, 1"))
    assert dict(plain.config.blocks) == {"XBLOCK": 1024}
    assert "in_i1 = " not in plain.text  # 6144 is a multiple of the block
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).t()
    check(copy_program("64, 96", "1, 64", "96, 1"), [x])


@pytest.mark.parametrize(
    ("sizes", "order", "axes"),
    [
        ("50, 6, 7", "1, 50, 300", 3),
        ("9, 33, 5", "165, 1, 33", 3),
        ("9, 33, 5", "0, 1, 0", 3),
        ("70, 5, 300", "1, 70, 350", 2),
    ],
)
@pytest.mark.covers("F5e.1")
def test_tiles_have_up_to_three_axes_whatever_the_order_of_reading(sizes: str, order: str, axes: int) -> None:
    shape, strides = ([int(n) for n in text.split(", ")] for text in (sizes, order))
    program = copy_program(sizes, order, f"{shape[1] * shape[2]}, {shape[2]}, 1")
    (source,) = sources(program)
    assert len(source.config.blocks) == axes and all(block > 1 for _, block in source.config.blocks)
    x = torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(0)).as_strided(shape, strides)
    (got,) = run(program, [x])
    assert torch.equal(got, x)


def test_large_buffers_are_indexed_with_64_bits() -> None:
    (small,) = sources(copy_program("1024, 1024", "1024, 1", "1024, 1"))
    (large,) = sources(copy_program("65536, 65536", "65536, 1", "65536, 1"))
    (gaps,) = sources(copy_program("2, 1024", "3000000000, 1", "1024, 1"))
    assert "int64" not in small.text
    assert "tl.program_id(0).to(tl.int64)" in large.text
    assert "tl.program_id(0).to(tl.int64)" in gaps.text


# -- compiled ----------------------------------------------------------------------------------------------------

GELU = """\
aotkit-ir 2
program gelu
input x
input bias
buffer x : bfloat16[512, 1024] strides [1024, 1] input on cpu
buffer bias : float32[1024] strides [1] input on cpu
buffer y : bfloat16[512, 1024] strides [1024, 1] output on cpu
loop gelu(i0 < 512, i1 < 1024):
  stage():
    %v0 = load x[i0, i1] : bf16
    %v1 = cast %v0 : f32
    %v2 = load bias[i1] : f32
    %v3 = add %v1, %v2 : f32
    %v4 = const 0.7071067811865476 : f32
    %v5 = mul %v3, %v4 : f32
    %v6 = erf %v5 : f32
    %v7 = const 1.0 : f32
    %v8 = add %v6, %v7 : f32
    %v9 = mul %v3, %v8 : f32
    %v10 = cast %v9 : bf16
    store y[i0, i1] = %v10
return y
"""


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.covers("F5e.1")
def test_kernels_compile_without_a_gpu_do_not_spill_and_load_16_bytes_at_once(arch: int) -> None:
    (gelu,) = sources(parse_program(GELU))
    cubin = compile_kernel(gelu, arch, keep_ptx=True)
    facts = resource_facts(cubin)
    assert (facts.spills, facts.stack) == (0, 0)
    assert facts.registers <= 64
    assert 16 in vector_bytes(cubin.ptx)
    assert set(vector_bytes(cubin.ptx, "st")) == {16}
    assert "cvt.rn.bf16" in cubin.ptx  # rounded to nearest even
    assert cubin.hidden >= 0 and cubin.code[:4] == b"\x7fELF"
    (copied,) = sources(copy_program("1024, 1024", "1024, 1", "1024, 1"))
    assert set(vector_bytes(compile_kernel(copied, arch, keep_ptx=True).ptx)) == {16}
    (rows,) = sources(softmax(512, 1024, "float16", "f16"))
    rows_cubin = compile_kernel(rows, arch, keep_ptx=True)
    assert resource_facts(rows_cubin).spills == 0
    assert 16 in vector_bytes(rows_cubin.ptx)
    assert "cvt.rn.f16" in rows_cubin.ptx


MULADD = """\
aotkit-ir 2
program muladd
input a
buffer a : float32[4096] strides [1] input on cpu
buffer y : float32[4096] strides [1] output on cpu
loop k(i0 < 4096):
  stage():
    %v0 = load a[i0] : f32
    %v1 = mul %v0, %v0 : f32
    %v2 = add %v1, %v0 : f32
    %v3 = div %v2, %v0 : f32
    %v4 = sqrt %v3 : f32
    store y[i0] = %v4
return y
"""


@pytest.mark.covers("F5e.1")
def test_nothing_is_contracted_or_flushed_to_zero() -> None:
    ptx = compile_kernel(sources(parse_program(MULADD))[0], 90, keep_ptx=True).ptx
    assert "fma" not in ptx and ".ftz" not in ptx
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx


def test_with_fast_numerics_products_and_sums_are_one_and_quotients_are_not_rounded_to_nearest() -> None:
    (source,) = sources(parse_program(MULADD), fast=True)
    ptx = compile_kernel(source, 90, keep_ptx=True).ptx
    assert "fma.rn.f32" in ptx and "div.rn" not in ptx and "sqrt.rn" not in ptx and ".ftz" not in ptx
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5
    y = torch.empty(4096)
    interpret_kernel(source, {"a": x, "y": y})
    torch.testing.assert_close(y, ((x * x + x) / x).sqrt())


def test_the_option_reaches_the_kernels_their_key_and_the_artifact() -> None:
    graph = make_fx(lambda x: (x * x / (x + 1),), tracing_mode="fake")(torch.ones(64))
    found = {}
    for numerics in ("eager", "fast"):
        options = LowerOptions(numerics=numerics, processor="triton-interpreter")
        program = compile_to_program(graph, options=options).program
        again = compiled_from_json(compiled_to_json(program))
        (kernel,) = kernels_of(again)
        found[numerics] = kernel.source.fast, "divide_fast" in kernel.source.text, TRITON_INTERPRETER.key(options)
    assert found["eager"][:2] == (False, False) and found["fast"][:2] == (True, True)
    assert found["eager"][2] != found["fast"][2]


def sums(rows: int, columns: int, strides: str, dtype: str, short: str, over: str) -> Program:
    """The sum over the first (``r0, i0``) or the last (``i0, r0``) dimension."""
    outer, inner = (columns, rows) if over == "r0, i0" else (rows, columns)
    return parse_program(f"""\
aotkit-ir 2
program sums
input x
buffer x : {dtype}[{rows}, {columns}] strides [{strides}] input on cpu
buffer y : float32[{outer}] strides [1] output on cpu
loop sums(i0 < {outer}):
  stage(r0 < {inner}):
    %v0 = load x[{over}] : {short}
    %v1 = cast %v0 : f32
    %v2 = reduce sum %v1 : f32
  stage():
    store y[i0] = %v2
return y
""")


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("dtype", "short"), [("bfloat16", "bf16"), ("float32", "f32"), ("float64", "f64")])
@pytest.mark.parametrize("rows", [512, 8192, 20000])
def test_columns_are_summed_128_bytes_of_a_row_at_once(dtype: str, short: str, rows: int) -> None:
    (source,) = sources(sums(rows, 30528, "30528, 1", dtype, short, "r0, i0"))
    width = {"bf16": 64, "f32": 32, "f64": 16}[short]
    assert source.config.block("XBLOCK") >= width and not source.persistent
    cubin = compile_kernel(source, 90, keep_ptx=True)
    assert set(vector_bytes(cubin.ptx)) == {16} and resource_facts(cubin).spills == 0


def test_rows_that_are_contiguous_are_held_as_before() -> None:
    (source,) = sources(sums(8192, 1024, "1024, 1", "bfloat16", "bf16", "i0, r0"))
    assert source.persistent and source.config.block("XBLOCK") == 1
    turned = sums(1024, 8192, "1, 1024", "bfloat16", "bf16", "r0, i0")  # the same memory, by its other name
    (source,) = sources(turned)
    assert source.persistent and source.config.block("XBLOCK") == 1


def test_a_value_of_each_row_does_not_make_columns_rows() -> None:
    """A factor that lies along the sum is as contiguous as can be, and hardly any bytes."""
    text = print_program(sums(8192, 3072, "3072, 1", "bfloat16", "bf16", "r0, i0"))
    text = text.replace("input x\n", "input x\ninput w\nbuffer w : float32[8192] strides [1] input on cpu\n", 1)
    text = text.replace("    %v1 = cast %v0 : f32\n", "    %v3 = cast %v0 : f32\n    %v4 = load w[r0] : f32\n")
    text = text.replace("    %v2 = ", "    %v1 = mul %v3, %v4 : f32\n    %v2 = ")
    (source,) = sources(parse_program(text))
    assert source.config.block("XBLOCK") == 64 and not source.persistent


def test_a_tile_of_one_column_moves_sixteen_times_what_it_needs() -> None:
    program = sums(8192, 30528, "30528, 1", "bfloat16", "bf16", "r0, i0")
    (nest,) = (step for step in program.steps if isinstance(step, LoopNest))
    kernel = kernel_of(nest, {b.name: b for b in program.buffers})
    looped = [nest for nest in perfect_nests(kernel) if nest.loops]
    grid = kernel.grid[0].symbol
    assert narrowest(kernel, looped, {grid: 1}) == 2
    assert moved_bytes(kernel, looped, {grid: 1}, 8192, True) == 32 + 16
    assert moved_bytes(kernel, looped, {grid: 64}, 64, False) == (128 + 16) / 64
    assert moved_bytes(kernel, looped, {grid: 8}, 512, True) == (32 + 16) / 8


@pytest.mark.parametrize("seed", [3, 5])
def test_kernels_of_random_programs_compile(seed: int) -> None:
    for source in sources(random_program(seed, RandomOptions(nests=1, ops=5))):
        assert compile_kernel(source, 90).code


# -- without Triton ----------------------------------------------------------------------------------------------


@pytest.mark.covers("F5e.6")
def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    (source,) = sources(softmax(3, 8))
    assert "@triton" not in source.text and "jit = triton.jit" in standalone_text(source)
    with pytest.raises(TritonMissing, match=r"pip install aotkit-inductor-lower\[cuda\]"):
        jit_function(source)


@pytest.mark.covers("F5e.6")
def test_compiling_for_the_cpu_imports_no_triton_and_the_subpackage_imports_none() -> None:
    code = """
import sys, torch
sys.modules["triton"] = None  # an import of it would raise
from torch.fx.experimental.proxy_tensor import make_fx
from aotkit_inductor_lower import compile_graph
import aotkit_inductor_lower.targets.triton
x = torch.randn(8, 16)
f = lambda x: torch.softmax(x * 2, -1)
compiled = compile_graph(make_fx(f, tracing_mode="fake")(x))
torch.testing.assert_close(compiled([x])[0], f(x))
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "fine", done.stderr


def test_a_kernel_may_be_called_what_a_device_function_is() -> None:
    for name in ("divide", "range", "while"):
        program = copy_program("5", "1", "1")
        nest = program.steps[0]
        assert isinstance(nest, LoopNest)
        buffers = {b.name: b for b in program.buffers}
        kernel = kernel_of(replace(nest, name=name), buffers)
        source = emit_kernel(kernel)
        assert source.name == f"{name}_kernel"
        x, y = torch.arange(5.0), torch.zeros(5)
        interpret_kernel(source, {"x": x, "y": y})
        assert torch.equal(x, y)


HANGING_ASSEMBLER = """#!/bin/sh
case "$1" in --version) exec {real} --version;; esac
echo $$ > {pid}
exec sleep 600
"""


@pytest.mark.covers("F7.25")
def test_an_assembler_killed_in_the_middle_of_a_compile_is_an_error_at_once(tmp_path, monkeypatch):
    tools = triton.knobs.nvidia
    variables = {"TRITON_PTXAS_PATH": tools.ptxas, "TRITON_PTXAS_BLACKWELL_PATH": tools.ptxas_blackwell}
    pid = tmp_path / "pid"
    os.mkfifo(pid)
    for name, tool in variables.items():  # Triton 3.9 takes the second for the devices before Blackwell, too
        assembler = tmp_path / name
        assembler.write_text(HANGING_ASSEMBLER.format(real=tool.path, pid=pid))
        assembler.chmod(0o755)
        monkeypatch.setenv(name, str(assembler))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    source = sources(copy_program("64, 8", "8, 1", "8, 1"))[0]
    failed = []

    def compile_it():
        try:
            compile_kernel(source, 90)
        except TritonError as error:
            failed.append(str(error))

    thread = threading.Thread(target=compile_it, daemon=True)
    thread.start()
    channel = os.open(pid, os.O_RDWR)
    assert select.select([channel], [], [], 60)[0], "the assembler was not started"
    os.kill(int(os.read(channel, 32)), 9)
    os.close(channel)
    thread.join(30)
    assert failed and "Triton does not compile the kernel" in failed[0]
    for name in variables:
        monkeypatch.delenv(name)
    assert compile_kernel(source, 90).name == source.name  # the next compile is none the worse for it


def test_the_interpreter_looks_for_no_overflow_that_it_would_tell_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_builder

    asked: list[bool] = []

    def ask(self: Any, *_: Any) -> None:
        asked.append(self.builder.options.sanitize_overflow)

    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", ask)
    program, options = copy_program("5", "1", "1"), interpreter_builder.options
    nest = program.steps[0]
    assert isinstance(nest, LoopNest)
    source = emit_kernel(kernel_of(nest, {b.name: b for b in program.buffers}))
    x, y = torch.arange(5.0), torch.zeros(5)
    interpret_kernel(source, {"x": x, "y": y})
    assert torch.equal(x, y) and asked and not any(asked)
    assert interpreter_builder.options is options
