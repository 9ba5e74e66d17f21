"""The reference interpreter against eager, one feature of the IR at a time."""

from __future__ import annotations

import pytest
import torch

from aotkit_inductor_lower.errors import IRError
from aotkit_inductor_lower.ir import (
    Buffer,
    BufferKind,
    BufferRef,
    DType,
    ExternCall,
    Literal,
    Program,
    SymInput,
)
from aotkit_inductor_lower.ir.builder import NestBuilder, loops
from aotkit_inductor_lower.ir.interpret import interpret_nest, interpret_program
from aotkit_inductor_lower.ir.parse import parse_nest, parse_program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.ops.dtypes import torch_name
from aotkit_inductor_lower.symbolic import SymbolKind, contiguous_strides, sym, to_expr

I0, I1, R0, R1 = sym("i0"), sym("i1"), sym("r0"), sym("r1")
S0 = sym("s0", SymbolKind.SIZE)


def buffer(name: str, dtype: DType, *sizes: int, kind: BufferKind = BufferKind.INPUT) -> Buffer:
    return Buffer(name, torch_name(dtype), tuple(map(to_expr, sizes)), contiguous_strides(sizes), kind)


def run(text: str, **buffers: torch.Tensor) -> None:
    interpret_nest(parse_nest(text), buffers)


@pytest.mark.covers("F5c.5")
def test_a_pointwise_nest_reads_strided_and_broadcast_tensors() -> None:
    x, b, y = torch.randn(6, 4).t(), torch.randn(6, 1), torch.empty(6, 4)
    run(
        """
loop n(i0 < 6, i1 < 4):
  stage():
    %x = load x[i1, i0] : f32
    %b = load b[i0, 0] : f32
    %s = add %x, %b : f32
    store y[i0, i1] = %s
""",
        x=x,
        b=b,
        y=y,
    )
    assert torch.equal(y, x.t() + b)


def test_two_passes_over_a_row_give_softmax() -> None:
    x, y = torch.randn(5, 7), torch.empty(5, 7)
    run(
        """
loop softmax(i0 < 5):
  stage(r0 < 7):
    %v0 = load x[i0, r0] : f32
    %v1 = reduce max %v0 : f32
  stage(r1 < 7):
    %v2 = load x[i0, r1] : f32
    %v3 = sub %v2, %v1 : f32
    %v4 = exp %v3 : f32
    %v5 = reduce sum %v4 : f32
  stage():
    %r = reciprocal %v5 : f32
  stage(r2 < 7):
    %v6 = load x[i0, r2] : f32
    %v7 = sub %v6, %v1 : f32
    %v8 = exp %v7 : f32
    %v9 = mul %v8, %r : f32
    store y[i0, r2] = %v9
""",
        x=x,
        y=y,
    )
    torch.testing.assert_close(y, x.softmax(-1))


def test_a_reduction_over_two_ranges_counts_positions_in_order() -> None:
    x = torch.randn(3, 4, 5)
    where, total = torch.empty(3, dtype=torch.int64), torch.empty(())
    run(
        """
loop n(i0 < 3):
  stage(r0 < 4, r1 < 5):
    %x = load x[i0, r0, r1] : f32
    %a = reduce argmax %x : i64
  stage():
    store where[i0] = %a
""",
        x=x,
        where=where,
    )
    assert torch.equal(where, x.reshape(3, 20).argmax(-1))
    run(
        "loop n():\n stage(r0 < 3):\n %x = load x[r0, 0, 0] : f32\n %s = reduce sum %x : f32\n"
        " stage():\n store t[] = %s\n",
        x=x,
        t=total,
    )
    torch.testing.assert_close(total, x[:, 0, 0].sum())


def test_a_reduction_over_nothing_is_the_identity() -> None:
    x, y = torch.empty(3, 0), torch.empty(3)
    run(
        "loop n(i0 < 3):\n stage(r0 < 0):\n %x = load x[i0, r0] : f32\n %s = reduce max %x : f32\n"
        " stage():\n store y[i0] = %s\n",
        x=x,
        y=y,
    )
    assert y.tolist() == [-float("inf")] * 3


def test_loops_that_never_run_write_nothing() -> None:
    x, y = torch.empty(0, 4), torch.ones(4)
    run("loop n(i0 < 0, i1 < 4):\n stage():\n %x = load x[i0, i1] : f32\n store y[i1] = %x\n", x=x, y=y)
    assert y.tolist() == [1, 1, 1, 1]


@pytest.mark.covers("F5g.13")
def test_indirect_addressing_wraps_negative_indices_and_reports_the_rest() -> None:
    table, idx, y = torch.randn(5, 3), torch.tensor([4, -5, 0, -1]), torch.empty(4, 3)
    text = """
loop n(i0 < 4, i1 < 3):
  stage():
    %i = load idx[i0] : i64
    %k = check %i < 5
    %v = load table[%k, i1] : f32
    store y[i0, i1] = %v
"""
    run(text, table=table, idx=idx, y=y)
    assert torch.equal(y, table[idx])
    with pytest.raises(IndexError, match="index 5 is out of bounds for dimension with size 5"):
        run(text, table=table, idx=torch.tensor([0, 5, 0, 0]), y=y)
    with pytest.raises(IndexError, match="index -6"):
        run(text, table=table, idx=torch.tensor([0, -6, 0, 0]), y=y)


@pytest.mark.covers("F5g.14")
def test_a_masked_load_reads_nothing_where_the_mask_is_false() -> None:
    x, y = torch.randn(3), torch.empty(5)
    text = """
loop pad(i0 < 5):
  stage():
    %i = index i0 - 1 : i64
    %z = const 0 : i64
    %n = const 3 : i64
    %a = ge %i, %z : bool
    %b = lt %i, %n : bool
    %m = logical_and %a, %b : bool
    %v = load x[i0 - 1] mask %m other -2.5 : f32
    store y[i0] = %v
"""
    run(text, x=x, y=y)
    assert torch.equal(y, torch.nn.functional.pad(x, (1, 1), value=-2.5))
    run(text.replace("const 3", "const 0"), x=torch.empty(0), y=y)
    assert y.tolist() == [-2.5] * 5, "a buffer without elements is not touched"


def test_a_masked_store_writes_where_the_mask_is_true_only() -> None:
    y = torch.zeros(4)
    run(
        "loop n(i0 < 4):\n stage():\n %i = index i0 : i64\n %t = const 2 : i64\n %m = ge %i, %t : bool\n"
        " %o = const 1.0 : f32\n store y[i0] = %o mask %m\n",
        y=y,
    )
    assert y.tolist() == [0, 0, 1, 1]


@pytest.mark.covers("F5d.7")
def test_an_adding_store_accumulates_collisions() -> None:
    src, idx, y = torch.randn(6, 2), torch.tensor([0, 2, 0, 1, 2, 2]), torch.zeros(3, 2)
    run(
        "loop n(i0 < 6, i1 < 2):\n stage():\n %i = load idx[i0] : i64\n %k = check %i < 3\n"
        " %v = load src[i0, i1] : f32\n store y[%k, i1] += %v\n",
        src=src,
        idx=idx,
        y=y,
    )
    torch.testing.assert_close(y, torch.zeros(3, 2).index_add(0, idx, src))
    count = torch.zeros(())
    run("loop n(i0 < 3):\n stage(r0 < 4):\n %o = const 1.0 : f32\n store c[] += %o\n", c=count)
    assert count == 12, "every iteration counts, though nothing depends on the loop variables"


def test_row_scratch_is_private_to_an_iteration() -> None:
    x, y = torch.randn(4, 8), torch.empty(4, 8)
    nest = parse_nest("""
loop n(i0 < 4):
  stage(r0 < 8):
    %v = load x[i0, r0] : f32
    %w = neg %v : f32
    store row[r0] = %w
  stage(r1 < 8):
    %u = load row[7 - r1] : f32
    store y[i0, r1] = %u
""")
    interpret_nest(nest, {"x": x, "y": y}, scratch={"row": buffer("row", DType.F32, 8, kind=BufferKind.SCRATCH)})
    assert torch.equal(y, -x.flip(1))


def test_division_by_zero_is_eagers_error() -> None:
    text = """
loop n(i0 < 2):
  stage():
    %a = load a[i0] : i64
    %b = load b[i0] : i64
    %c = floordiv %a, %b : i64
    store a[i0] = %c
"""
    with pytest.raises(RuntimeError, match="division or modulo by zero"):
        run(text, a=torch.tensor([1, 2]), b=torch.tensor([1, 0]))


def test_an_unchecked_access_outside_the_buffer_is_an_ir_error() -> None:
    with pytest.raises(IRError, match=r"index 0 of x reaches \[1, 4\], outside \[0, 4\)"):
        run("loop n(i0 < 4):\n stage():\n %x = load x[i0 + 1] : f32\n", x=torch.zeros(4))
    with pytest.raises(IRError, match="no tensor given for buffer 'x'"):
        run("loop n(i0 < 4):\n stage():\n %x = load x[i0] : f32\n")


def test_every_dtype_is_loaded_cast_and_stored() -> None:
    for dtype in DType:
        b = NestBuilder("n", loops({"i0": 4}))
        source = buffer("x", DType.F32, 4)
        target = buffer("y", dtype, 4, kind=BufferKind.OUTPUT)
        b.store_to(target, [b["i0"]], b.load_from(source, [b["i0"]]))
        x = torch.tensor([0.0, 1.25, 3.0, 100.5])
        y = torch.empty(4, dtype=getattr(torch, torch_name(dtype)))
        interpret_nest(b.finish(), {"x": x, "y": y})
        assert torch.equal(y, x.to(y.dtype))


# -- programs --------------------------------------------------------------------------------------------

PROGRAM = """\
aotkit-ir 2
program p
symbol $s0 = input 1 size 0
symbol $s1 = input 0 int 0
input $s1
input x
buffer x : float32[$s0, 4] strides [4, 1] input on cpu
buffer w : float32[4, 4] strides [4, 1] constant on cpu
buffer z : float32[$s0, 4] strides [4, 1] temporary on cpu
buffer v : float32[4*$s0] strides [1] temporary on cpu
buffer y : float32[$s0, 4] strides [4, 1] output on cpu
extern mm0: z = aten.mm.default(x, w)
alias view0: v = z + 0
loop n(i0 < 4*$s0):
  stage():
    %v = load v[i0] : f32
    %k = index $s1 : i64
    %f = cast %k : f32
    %s = mul %v, %f : f32
    store y[i0 // 4, i0 % 4] = %s
return y, sym($s0 + $s1), none, v
"""


@pytest.mark.covers("F5c.9")
@pytest.mark.parametrize("rows", [1, 6])
def test_a_program_with_externs_views_and_dynamic_sizes_runs(rows: int) -> None:
    program = parse_program(PROGRAM)
    verify_program(program)
    x, w = torch.randn(rows, 4), torch.randn(4, 4)
    y, number, nothing, v = interpret_program(program, [3, x], {"w": w})
    torch.testing.assert_close(y, (x @ w) * 3)
    assert (number, nothing) == (rows + 3, None)
    assert isinstance(v, torch.Tensor)
    torch.testing.assert_close(v, (x @ w).flatten())


def test_inputs_that_do_not_fit_their_declaration_are_refused() -> None:
    program = parse_program(PROGRAM)
    w = torch.randn(4, 4)
    with pytest.raises(IRError, match="takes 2 inputs, not 1"):
        interpret_program(program, [3], {"w": w})
    with pytest.raises(IRError, match="x is declared"):
        interpret_program(program, [3, torch.randn(6, 4).double()], {"w": w})
    with pytest.raises(IRError, match=r"with strides \[4, 1\]"):
        interpret_program(program, [3, torch.randn(4, 6).t()], {"w": w})
    with pytest.raises(IRError, match="needs the constant 'w'"):
        interpret_program(program, [3, torch.randn(6, 4)])


def test_an_alias_shares_memory_with_its_base() -> None:
    text = PROGRAM.replace("alias view0: v = z + 0\n", "").replace(
        "extern mm0: z", "alias view0: v = z + 0\nextern mm0: t"
    )
    text = text.replace("buffer z", "buffer t : float32[$s0, 4] strides [4, 1] temporary on cpu\nbuffer z")
    text = text.replace("load v[i0]", "load t[i0 // 4, i0 % 4]").replace("store y[", "store z[")
    text = text.replace("return y, sym($s0 + $s1), none, v", "return z, v")
    z, v = interpret_program(parse_program(text), [2, torch.eye(4)], {"w": torch.ones(4, 4)})
    assert isinstance(z, torch.Tensor) and isinstance(v, torch.Tensor)
    assert v.data_ptr() == z.data_ptr()
    assert v.tolist() == [2.0] * 16


def test_a_view_as_another_dtype_counts_in_its_own_elements() -> None:
    text = """\
aotkit-ir 2
program p
input x
buffer x : int32[4] strides [1] input on cpu
buffer v : int16[4] strides [2] temporary on cpu
alias a: v = x + 1
return v
"""
    x = torch.tensor([0, 1 << 16, 2 << 16, 3 << 16, 4 << 16], dtype=torch.int32)[1:]
    (v,) = interpret_program(parse_program(text), [x])
    assert isinstance(v, torch.Tensor)
    assert v.tolist() == [1, 2, 3, 4]


def test_extern_arguments_of_every_kind_arrive() -> None:
    y = buffer("y", DType.F64, 2, kind=BufferKind.OUTPUT)
    x = buffer("x", DType.F32, 2)
    a, b = buffer("a", DType.F32, 1, kind=BufferKind.OUTPUT), buffer("b", DType.F32, 1, kind=BufferKind.OUTPUT)
    full = ExternCall(
        "full",
        "aten.full.default",
        ((SymInput(to_expr(2)),), Literal("float", 0.5)),
        (
            ("dtype", Literal("dtype", "torch.float64")),
            ("layout", Literal("layout", "torch.strided")),
            ("device", Literal("device", "cpu")),
            ("pin_memory", Literal("bool", False)),
        ),
        ("y",),
    )
    split = ExternCall("split", "aten.split.Tensor", (BufferRef("x"), Literal("int", 1)), (), ("a", "b"))
    program = Program("p", ("x",), (x, y, a, b), (full, split), (BufferRef("y"), BufferRef("b")))
    verify_program(program)
    found, second = interpret_program(program, [torch.tensor([1.0, 2.0])])
    assert isinstance(found, torch.Tensor) and isinstance(second, torch.Tensor)
    assert found.dtype == torch.float64 and found.tolist() == [0.5, 0.5]
    assert second.tolist() == [2.0]


def test_a_mutating_extern_writes_its_argument() -> None:
    x = buffer("x", DType.F32, 2)
    call = ExternCall("add", "aten.add_.Scalar", (BufferRef("x"), Literal("int", 1)), (), (None,), ("x",))
    given = torch.zeros(2)
    interpret_program(Program("p", ("x",), (x,), (call,), ()), [given])
    assert given.tolist() == [1, 1]


def test_memory_that_nothing_wrote_shows_up_as_nan() -> None:
    text = """\
aotkit-ir 2
program p
buffer y : float32[2] strides [1] output on cpu
buffer n : int8[2] strides [1] output on cpu
return y, n
"""
    y, n = interpret_program(parse_program(text), [])
    assert isinstance(y, torch.Tensor) and isinstance(n, torch.Tensor)
    assert y.isnan().all()
    assert n.tolist() == [127, 127]


# -- builder ---------------------------------------------------------------------------------------------


def test_the_builder_refuses_what_does_not_fit() -> None:
    b = NestBuilder("n", loops({"i0": 4}))
    x = b.load_from(buffer("x", DType.F32, 4), [b["i0"]])
    with pytest.raises(IRError, match="different types: f32, i64"):
        b.op("add", x, b.const(1, DType.I64))
    with pytest.raises(KeyError, match="no loop variable 'r0' here"):
        b["r0"]
    with pytest.raises(IRError, match="cannot hold elements of complex64"):
        b.load_from(Buffer("c", "complex64", (), (), BufferKind.INPUT), [])
    b.begin_stage(loops({"r0": S0}))
    assert b["r0"] == R0
    total = b.reduce("sum", b.load_from(buffer("m", DType.F32, 4, 9), [I0, R0]))
    b.begin_stage()
    b.store_to(buffer("y", DType.F64, 4, kind=BufferKind.OUTPUT), [I0], total)
    nest = b.finish()
    assert [len(s.body) for s in nest.stages] == [2, 2, 2]
    assert nest.writes == ("y",)
