"""The textual form of the loop IR: what is printed reads back equal, and what is wrong is said with its place."""

from __future__ import annotations

import math
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotkit_inductor_lower.errors import IRError, IRSyntaxError
from aotkit_inductor_lower.ir import (
    Alias,
    Buffer,
    BufferKind,
    BufferRef,
    CheckedIndex,
    Compute,
    Const,
    DType,
    ExternCall,
    Index,
    Literal,
    Load,
    LoopNest,
    Origin,
    Program,
    Range,
    Reduce,
    Stage,
    Store,
    SymInput,
)
from aotkit_inductor_lower.ir.parse import parse_nest, parse_program
from aotkit_inductor_lower.ir.print import print_instr, print_nest, print_program
from aotkit_inductor_lower.symbolic import Symbol, SymbolKind, smax, sym, to_expr

I0, R0 = sym("i0"), sym("r0")
S0 = sym("s0", SymbolKind.SIZE)
V9 = sym("v9", SymbolKind.VALUE)

SOFTMAX = """\
loop softmax(i0 < $s0):
  stage(r0 < 64):
    %v0 = load x[i0, r0] : f32
    %v1 = reduce max %v0 : f32
  stage(r1 < 64):
    %v2 = load x[i0, r1] : f32
    %v3 = sub %v2, %v1 : f32
    %v4 = exp %v3 : f32
    %v5 = reduce sum %v4 : f32
  stage(r2 < 64):
    %v6 = load x[i0, r2] : f32
    %v7 = sub %v6, %v1 : f32
    %v8 = exp %v7 : f32
    %v9 = div %v8, %v5 : f32
    store y[i0, r2] = %v9
"""


def _everything() -> Program:
    """A program that holds every kind of node and every odd literal."""
    body = (
        Load("v0", "x", (I0, R0 // 2), DType.F32),
        Load("v1", "x", (I0, R0 % 7), DType.F32, "m", -math.inf),
        Load("v1b", "x", (I0, R0), DType.F32, "m", math.nan),
        Const("c", float("nan"), DType.F32),
        Const("c1", 1e-45, DType.F32),
        Const("c2", True, DType.BOOL),
        Const("c3", -(2**63), DType.I64),
        Index("n", I0 * S0 - smax(R0, 3), DType.I64),
        Compute("m", "lt", ("n", "c3"), DType.BOOL),
        Compute("w", "where", ("m", "v0", "v1"), DType.F32),
        CheckedIndex("v9", "n", S0 * 4),
        Load("g", "table", (V9, R0), DType.BF16),
        Reduce("s", "sum", "w", DType.F32),
        Store("y", (I0, R0), "w"),
        Store("y", (I0, to_expr(0)), "w", "add", "m"),
    )
    nest = LoopNest(
        "all kinds",
        (Range("i0", S0),),
        (Stage((Range("r0", to_expr(64)),), body), Stage((), ())),
        Origin(("add", 'quo"te'), ("aten.add.Tensor",), "model.py:3, in f: return x  # y"),
    )
    args = (
        BufferRef("y"),
        (SymInput(4 * S0), Literal("int", -3), (), (Literal("none", None),)),
        Literal("float", -math.inf),
        Literal("float", math.nan),
        Literal("bool", True),
        Literal("str", 'a "b"\n'),
        Literal("dtype", "torch.float32"),
        Literal("complex", "(1+2j)"),
        BufferRef("none"),
    )
    call = ExternCall(
        "mm0",
        "aten.mm.default",
        args,
        (("out", BufferRef("z")), ("alpha", Literal("int", 1))),
        ("z", None),
        ("x", "y"),
        'no rule for "mm"',
        Origin(("mm",)),
    )
    buffers = (
        Buffer("x", "float32", (S0, to_expr(64)), (to_expr(64), to_expr(1)), BufferKind.INPUT),
        Buffer("odd name", "complex64", (), (), BufferKind.CONSTANT, "cuda:0"),
        Buffer("y", "float32", (S0,), (to_expr(1),), BufferKind.SCRATCH),
    )
    steps = (nest, call, ExternCall("nothing", "_c10d.barrier.default", (), (), ()), Alias("a", "v", "x", 2 * S0 + 1))
    return Program(
        "everything",
        ("x", "$s0", "odd name"),
        buffers,
        steps,
        (BufferRef("y"), SymInput(2 * S0), None),
        (("s0", 0, "size", 0), ("s1", 1, "int", 0)),
    )


def test_a_whole_program_survives_the_round_trip() -> None:
    program = _everything()
    text = print_program(program)
    again = parse_program(text)
    assert again == program
    assert print_program(again) == text, "origins too, which equality leaves out"


def test_a_program_without_origins_does_not_depend_on_node_names() -> None:
    program = _everything()
    text = print_program(program, origins=False)
    assert "aten.add" not in text
    assert parse_program(text) == program


def test_the_softmax_of_the_note_reads_and_prints_as_it_stands() -> None:
    nest = parse_nest(SOFTMAX)
    assert [len(s.body) for s in nest.stages] == [2, 4, 5]
    assert nest.reads == ("x",)
    assert nest.writes == ("y",)
    assert print_nest(nest) == SOFTMAX


def test_comments_blank_lines_and_indentation_do_not_matter() -> None:
    loose = "# a softmax\n\n" + textwrap.dedent(SOFTMAX.replace("    %", "\t%")).replace("\n", "\n\n")
    assert parse_nest(loose) == parse_nest(SOFTMAX)


def test_an_instruction_prints_on_its_own() -> None:
    assert print_instr(Store("y", (I0,), "v0", "add", "m")) == "store y[i0] += %v0 mask %m"
    assert print_instr(Load("v", "x", (), DType.I64)) == "%v = load x[] : i64"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        (SOFTMAX.replace(": f32", ": f33", 1), 3, 28, "'f33' is no element type; there are f64, f32"),
        (SOFTMAX.replace("sub %v2, %v1", "sub %v2, v1"), 7, 20, "expected a value like %v0"),
        (SOFTMAX.replace("x[i0, r1]", "x[i0 r1]"), 6, 21, "expected ','"),
        (SOFTMAX.replace("(r1 < 64)", "(r1 < )"), 5, 14, "expected a symbol, an integer or '('"),
        (SOFTMAX.replace("store y", "stor y"), 15, 5, "expected the end of the text, found 'stor y[i0, r2] = %v9'"),
        (SOFTMAX + "return\n", 16, 1, "expected the end of the text"),
        (SOFTMAX.replace("= exp %v3 : f32", "= exp %v3 : f32 fast"), 8, 25, "expected the end of the line"),
        (SOFTMAX.replace("[i0, r2] = ", "[i0//0, r2] = "), 15, 17, "division by zero"),
        ("", 1, 1, "expected a loop"),
    ],
)
def test_a_syntax_error_names_line_and_column(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(IRSyntaxError) as caught:
        parse_nest(text)
    assert message in str(caught.value)
    assert (caught.value.line, caught.value.column) == (line, column), str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("aotkit-ir 99\nprogram p\nreturn\n", "this package reads version 2"),
        (
            "aotkit-ir 2\nprogram p\nbuffer x : float32[2] strides [1] heap on cpu\nreturn",
            "'heap on cpu' is no buffer kind",
        ),
        (
            "aotkit-ir 2\nprogram p\nlop x\nreturn\n",
            "expected a buffer, loop, contraction, extern, alias or return, found 'lop x'",
        ),
        ("aotkit-ir 2\nprogram p\n", "expected a buffer, loop, contraction"),
        ("aotkit-ir 2\nprogram p\nreturn 3\n", "an output is a buffer, sym(...) or none"),
        ("aotkit-ir 2\nprogram p\nloop n(i < 2):\norigin nodes 3\nreturn", "expected a list of strings"),
        (
            'aotkit-ir 2\nprogram p\nloop n():\nstage():\n%a = const "x" : f32\nreturn',
            "expected a number, true or false",
        ),
    ],
)
def test_a_broken_program_is_refused_with_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(IRSyntaxError) as caught:
        parse_program(text)
    assert message in str(caught.value)


def test_a_store_of_unknown_mode_cannot_be_printed() -> None:
    with pytest.raises(IRError, match="must be one of set, add, mul, min, max, not 'xor'"):
        print_instr(Store("y", (), "v", "xor"))


@settings(max_examples=100, deadline=None)
@given(st.floats(), st.integers(), st.text(), st.text(min_size=1))
def test_any_literal_and_any_name_survives(number: float, whole: int, text: str, name: str) -> None:
    nest = LoopNest(name, (), (Stage((), (Const(name, number, DType.F64), Const("w", whole, DType.I64))),))
    call = ExternCall(
        name, name, (Literal("str", text), Literal("float", number)), ((name, Literal(name, text)),), (name,)
    )
    buffer = Buffer(name, name, (), (), BufferKind.OUTPUT, name)
    program = Program(name, (f"${name}",), (buffer,), (nest, call), (BufferRef(name),))
    again = parse_program(print_program(program))
    assert again == program
    (constant, _) = again.steps[0].stages[0].body  # type: ignore[union-attr]
    assert math.copysign(1, constant.value) == math.copysign(1, number) or math.isnan(number)  # type: ignore[union-attr]


def test_index_symbols_and_size_symbols_keep_their_kinds() -> None:
    nest = LoopNest("n", (Range("i0", S0),), (Stage((), (Index("v", I0 * S0 + V9, DType.I64),)),))
    (stage,) = parse_nest(print_nest(nest)).stages
    (instr,) = stage.body
    assert isinstance(instr, Index)
    assert {s.kind for s in instr.expr.symbols} == {SymbolKind.INDEX, SymbolKind.SIZE, SymbolKind.VALUE}
    assert Symbol("i0") in instr.expr.symbols
