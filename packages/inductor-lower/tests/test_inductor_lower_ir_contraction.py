"""Contractions: their text, what they mean, the rules they must keep, and a convolution as one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from aotkit_inductor_lower import LowerOptions, interpret_program
from aotkit_inductor_lower.analysis.dependencies import Dependencies
from aotkit_inductor_lower.driver import LOOP_LEVEL, LOOP_PASSES, schedule_program
from aotkit_inductor_lower.errors import CodegenError, IRError, IRSyntaxError
from aotkit_inductor_lower.ir import BufferKind, CheckedIndex, Compute, Contraction, Program
from aotkit_inductor_lower.ir.interpret import _LARGEST_GRID
from aotkit_inductor_lower.ir.parse import parse_nest, parse_program
from aotkit_inductor_lower.ir.print import print_nest, print_program
from aotkit_inductor_lower.ir.random_programs import RandomOptions, difference, random_inputs, random_program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.ir.walk import (
    contains,
    contractions,
    definitions,
    expressions,
    instructions,
    loads,
    map_contraction,
    ranges_within,
    rename_contraction,
    step_reads,
    step_writes,
    stores,
    substitute,
    used_values,
    with_buffers,
)
from aotkit_inductor_lower.kernel_passes.linearize import linearize
from aotkit_inductor_lower.passes import PassContext, run_passes
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.symbolic import Symbol, sym
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.select import named_target

ZEN = named_target("cpu:znver4")
HEADER = """\
aotkit-ir 2
program p
symbol $s0 = input 0 size 0
input x
input w
input bias
buffer x : bfloat16[$s0, 8] strides [8, 1] input on cpu
buffer w : bfloat16[8, 5] strides [5, 1] input on cpu
buffer bias : bfloat16[5] strides [1] input on cpu
buffer wide : float32[8, 5] strides [5, 1] constant on cpu
buffer y : bfloat16[$s0, 5] strides [5, 1] output on cpu
buffer z : bfloat16[$s0, 5] strides [5, 1] output on cpu
"""
LINEAR = """\
contraction y batch() rows(i < $s0) columns(j < 5) reduced(k < 8) in f32 high:
  origin nodes ["y"] ops ["aten.addmm.default"] line "model.py:3"
  left %l:
    %l = load x[i, k] : bf16
  right %product:
    %product = load w[k, j] : bf16
  sum %t:
    %b = load bias[j] : bf16
    %b_wide = cast %b : f32
    %sum = add %b_wide, %t : f32
    %r = cast %sum : bf16
    store y[i, j] = %r
  library y: y = aten.addmm.default(bias, x, w) reason "ATen's"
"""


def program(steps: str = LINEAR, result: str = "y") -> Program:
    return parse_program(f"{HEADER}{steps}return {result}\n")


def linear() -> Contraction:
    (found,) = contractions(program())
    return found


# -- text and meaning ------------------------------------------------------------------------------------


def test_what_is_printed_reads_back_equal() -> None:
    written = program()
    verify_program(written)
    text = print_program(written)
    assert text == f"{HEADER}{LINEAR}return y\n" and parse_program(text) == written
    bare = replace(linear(), library=None, precision="medium", rows=(), name="a b")
    text = print_program(replace(written, steps=(bare,)))
    assert "library" not in text and "rows() " in text and "f32 medium:" in text
    assert parse_program(text).steps == (bare,)
    assert "origin" not in print_program(written, origins=False)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows(", "lines(", "expected 'rows'"),
        ("f32 high", "f33 high", "is no element type"),
        ("f32 high", "f32 exact", "is no precision"),
        ("  right %product:", "  factor %product:", "expected 'right'"),
        ("  sum %t:", "  sum t:", "expected a value"),
        ("  library y: y =", "  library y: y", "expected '='"),
    ],
)
def test_broken_text_is_refused_with_what_was_expected(old: str, new: str, message: str) -> None:
    assert old in LINEAR
    with pytest.raises(IRSyntaxError, match=re.escape(message)):
        program(LINEAR.replace(old, new))


def test_the_nest_of_a_contraction_sums_and_then_stores() -> None:
    nest = linear().as_nest()
    assert parse_nest(print_nest(nest)) == nest and nest.origin.line == "model.py:3"
    assert (
        print_nest(nest, origins=False)
        == """\
loop y(i < $s0, j < 5):
  stage(k < 8):
    %l = load x[i, k] : bf16
    %left_wide = cast %l : f32
    %product = load w[k, j] : bf16
    %right_wide = cast %product : f32
    %product_ = mul_contract_high %left_wide, %right_wide : f32
    %t = reduce sum %product_ : f32
  stage():
    %b = load bias[j] : bf16
    %b_wide = cast %b : f32
    %sum = add %b_wide, %t : f32
    %r = cast %sum : bf16
    store y[i, j] = %r
"""
    )


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_it_is_interpreted_as_the_product_that_it_is(rows: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=g).bfloat16() for shape in ((rows, 8), (8, 5), (5,)))
    (y,) = interpret_program(program(), [x, w, b], {"wide": torch.zeros(8, 5)})
    torch.testing.assert_close(y, torch.addmm(b, x, w))


def test_a_large_one_is_interpreted_in_parts() -> None:
    rows, inner = 301, 128
    assert rows * inner * inner > _LARGEST_GRID
    text = f"""\
aotkit-ir 2
program p
input x
input w
buffer x : float32[{rows}, {inner}] strides [{inner}, 1] input on cpu
buffer w : float32[{inner}, {inner}] strides [{inner}, 1] input on cpu
buffer y : float32[{rows}, {inner}] strides [{inner}, 1] output on cpu
contraction y batch() rows(i < {rows}) columns(j < {inner}) reduced(k < {inner}) in f32 highest:
  left %l:
    %l = load x[i, k] : f32
  right %r:
    %r = load w[k, j] : f32
  sum %t:
    %n = index i*1000 + j : i64
    %m = cast %n : f32
    %v = add %t, %m : f32
    store y[i, j] = %v
return y
"""
    whole = parse_program(text)
    verify_program(whole)
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(rows, inner, generator=g), torch.randn(inner, inner, generator=g)
    (y,) = interpret_program(whole, [x, w])
    torch.testing.assert_close(y, x @ w + torch.arange(rows)[:, None] * 1000 + torch.arange(inner))


@pytest.mark.parametrize(("stride", "dilation", "pad"), [(1, 1, 0), (2, 1, 1), (1, 2, 2), (3, 2, 1)])
def test_a_convolution_is_a_contraction_with_a_mask(stride: int, dilation: int, pad: int) -> None:
    n, c, size, out, taps = 2, 3, 9, 4, 3
    places = (size + 2 * pad - dilation * (taps - 1) - 1) // stride + 1

    def inside(index: str, name: str) -> str:
        return f"""\
    %{name} = index {index} : i64
    %{name}_low = ge %{name}, %zero : bool
    %{name}_high = lt %{name}, %size : bool
    %{name}_in = logical_and %{name}_low, %{name}_high : bool
"""

    images = f"batch() rows(n < {n}, h < {places}, v < {places})"
    row, column = f"{stride}*h + {dilation}*p - {pad}", f"{stride}*v + {dilation}*q - {pad}"
    text = f"""\
aotkit-ir 2
program conv
input x
input w
buffer x : float32[{n}, {c}, {size}, {size}] strides [{c * size * size}, {size * size}, {size}, 1] input on cpu
buffer w : float32[{out}, {c}, {taps}, {taps}] strides [{c * taps * taps}, {taps * taps}, {taps}, 1] input on cpu
buffer y : float32[{n}, {out}, {places}, {places}] strides [{out * places**2}, {places**2}, {places}, 1] output on cpu
contraction y {images} columns(o < {out}) reduced(c < {c}, p < {taps}, q < {taps}) in f32 highest:
  left %l:
    %zero = const 0 : i64
    %size = const {size} : i64
{inside(row, "at_row")}{inside(column, "at_column")}\
    %in = logical_and %at_row_in, %at_column_in : bool
    %l = load x[n, c, {row}, {column}] mask %in other 0.0 : f32
  right %r:
    %r = load w[o, c, p, q] : f32
  sum %t:
    store y[n, o, h, v] = %t
return y
"""
    conv = parse_program(text)
    verify_program(conv)
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(n, c, size, size, generator=g), torch.randn(out, c, taps, taps, generator=g)
    want = F.conv2d(x, w, stride=stride, dilation=dilation, padding=pad)
    for each in (conv, schedule_program(conv, LowerOptions(verify=True))[0]):
        (y,) = interpret_program(each, [x, w])
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


# -- rules -----------------------------------------------------------------------------------------------

FAULTS = {
    "a loop on both sides": ("columns(j < 5)", "columns(i < 5)", "loop variable i is in two of batch, rows"),
    "nothing is summed": ("reduced(k < 8)", "reduced()", "there is nothing to sum over"),
    "left along the columns": ("load x[i, k]", "load x[j, k]", "the left operand varies along j in `%l = load x[j, k]"),
    "right along the rows": ("load w[k, j]", "load w[i, j]", "the right operand varies along i"),
    "no such loop": ("load x[i, k]", "load x[i, m]", "the left operand varies along m"),
    "not affine": ("load x[i, k]", "load x[i*i, k]", "an index that is not affine"),
    "not affine either": ("load x[i, k]", "load x[i//2, k]", "an index that is not affine"),
    "two loops multiplied": ("load x[i, k]", "load x[i*k, k]", "an index that is not affine"),
    "a computed index": ("%l = load x[i, k] : bf16", "%n = index i : i64\n%l = load x[%n, k] : bf16", "not affine"),
    "a checked index": ("%l = load", "%n = index i : i64\n%c = check %n < $s0\n%l = load", "varies along i, no loop"),
    "one of the sum": ("%l = load", "%n = index k : i64\n%c = check %n < $s0\n%l = load", "varies along k, no loop"),
    "an operand stores": ("  right", "    store x[i, k] = %l\n  right", "may not hold `store"),
    "an operand reduces": ("  right", "    %m = reduce max %l : bf16\n  right", "may not hold"),
    "an operand without its value": ("left %l:", "left %m:", "the left operand does not make its value %m"),
    "two types": ("load w[k, j] : bf16", "load wide[k, j] : f32", "its factors are bf16 and f32"),
    "a sum too narrow": ("in f32 high", "in bf16 high", "products of bf16 are not summed in bf16"),
    "a sum of integers": ("in f32 high", "in i64 high", "products of bf16 are not summed in i64"),
    "a wrong type": ("load x[i, k] : bf16", "load x[i, k] : f16", "its factors are f16 and bf16"),
    "out of the buffer": ("reduced(k < 8)", "reduced(k < 9)", "outside [0, 8)"),
    "the epilogue reduces": ("%b = load", "%m = reduce max %t : f32\n%b = load", "the epilogue may not hold"),
    "the epilogue checks": ("%b = load", "%n = index i : i64\n%m = check %n < 5\n%b = load", "epilogue may not hold"),
    "the epilogue sees a factor": ("cast %b : f32", "cast %l : f32", "uses %l, which is no value of the epilogue"),
    "the epilogue sees the summed loop": ("load bias[j]", "load bias[k]", "k is no loop variable here"),
    "the epilogue adds to memory": ("y[i, j] =", "y[i, j] +=", "combines with what is there"),
    "the epilogue stores nothing": ("    store y[i, j] = %r\n", "", "the epilogue stores nothing"),
    "the wrong type is stored": ("store y[i, j] = %r", "store y[i, j] = %sum", "y holds bf16, %sum is f32"),
    "iterations meet": ("store y[i, j] = %r", "store y[i, 0] = %r", "`store y[i, 0] = %r` does not vary along j"),
    "a value twice": ("%b_wide = cast %b : f32", "%l = cast %b : f32\n%b_wide = cast %b : f32", "%l is defined twice"),
    "the sum is a factor": ("sum %t:", "sum %l:", "no value of the epilogue"),
    "another result": ("y = aten.addmm", "z = aten.addmm", "ATen's call gives z, the contraction y"),
    "another name": ("library y:", "library z:", "ATen's call has the contraction's name"),
    "a call that writes": ('reason "ATen\'s"', "mutates x", "writes to none of its arguments"),
    "an argument too early": ("addmm.default(bias, x, w)", "addmm.default(z, x, w)", "reads 'z' before"),
    "an operand too early": ("load bias[j] : bf16", "load z[i, j] : bf16", "reads 'z' before anything writes it"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_verifier_finds_each_fault(fault: str) -> None:
    old, new, message = FAULTS[fault]
    assert LINEAR.count(old) == 1, old
    broken = program(LINEAR.replace(old, new))
    with pytest.raises(IRError) as caught:
        verify_program(broken)
    assert message in str(caught.value)


def test_faults_that_have_no_text_are_found_too() -> None:
    whole = program()
    with pytest.raises(IRError, match="the precision is one of highest, high, medium, not 'exact'"):
        verify_program(replace(whole, steps=(replace(linear(), precision="exact"),)))  # type: ignore[arg-type]
    with pytest.raises(IRError, match="makes 'y', which is there already"):
        verify_program(replace(whole, steps=(replace(linear(), name="first", library=None), linear())))
    with pytest.raises(IRError, match="no instruction of the operand makes its value %nothing"):
        replace(linear(), left=replace(linear().left, value="nothing")).as_nest()


# -- walks and analyses ----------------------------------------------------------------------------------


def test_walks_see_every_part() -> None:
    one = linear()
    body = instructions([one])
    assert [i.buffer for i in loads(body)] == ["x", "w", "bias"] and [i.buffer for i in stores(body)] == ["y"]
    assert set(definitions(body)) == {"l", "product", "b", "b_wide", "sum", "r"}
    assert used_values(body) == {"b", "b_wide", "t", "sum", "r"} and len(expressions(body)) == 7
    assert step_reads(one) == ("x", "w", "bias") and step_writes(one) == ("y",)
    assert [r.symbol for r in ranges_within(one)] == ["i", "j", "k"]
    bare = replace(one, epilogue=one.epilogue[-1:], reduced=())
    assert "bias" not in bare.reads and "bias" in step_reads(bare)  # ATen's call needs it all the same
    assert "bias" not in step_reads(replace(bare, library=None))


def test_changes_reach_every_part() -> None:
    one = linear()
    moved = map_contraction(one, lambda i: substitute(i, {Symbol("i"): sym("i") + 1}))
    assert str(loads(moved.left.body)[0].indices[0]) == "i + 1" and str(stores(moved.epilogue)[0].indices[0]) == "i + 1"
    assert moved.right == one.right and moved.library == one.library
    other = map_contraction(one, lambda i: with_buffers(i, {"y": "z", "x": "z"}))
    assert other.reads == ("z", "w", "bias") and other.writes == ("z",)
    renamed = rename_contraction(one, {"l": "a", "t": "total", "product": "b2"})
    assert (renamed.left.value, renamed.right.value, renamed.result) == ("a", "b2", "total")
    verify_program(replace(program(), steps=(renamed,)))
    assert rename_contraction(renamed, {"a": "l", "total": "t", "b2": "product"}) == one


def test_dependencies_see_what_it_reads_and_writes() -> None:
    double = """\
loop n(i < $s0, j < 5):
  stage():
    %a = load y[i, j] : bf16
    store z[i, j] = %a
"""
    facts = Dependencies.of(program(LINEAR + double, "z"))
    assert facts.before == [set(), {0}] and facts.writers["y"] == [0] and facts.readers["x"] == [0]
    assert {"x", "w", "bias"} <= facts.escapes and "y" not in facts.escapes
    into = map_contraction(linear(), lambda i: with_buffers(i, {"y": "z"}))
    *others, z = program().buffers
    whole = replace(program(), inputs=(*program().inputs, "z"), buffers=(*others, replace(z, kind=BufferKind.INPUT)))
    written = replace(whole, steps=(replace(into, library=None),), outputs=())
    verify_program(written)
    assert Dependencies.of(written).unstable == {"z"}


def test_a_contraction_is_no_kernel() -> None:
    with pytest.raises(CodegenError, match="contraction y is no kernel until choose-contractions has run"):
        linearize(program())


# -- random ones -----------------------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(40))
def test_random_contractions_print_and_keep_their_results_through_all_passes(seed: int) -> None:
    options = RandomOptions(nests=4, contractions=True)
    drawn = random_program(seed, options)
    assert random_program(seed, options) == drawn and len(contractions(drawn)) == 1
    assert parse_program(print_program(drawn)) == drawn
    scheduled, _ = schedule_program(drawn, LowerOptions(verify=True))
    assert not contractions(scheduled)
    inputs = random_inputs(drawn, seed, options)
    wanted, found = interpret_program(drawn, inputs), interpret_program(scheduled, inputs)
    compiled = bind_program(generate(scheduled))(list(inputs))
    for want, interpreted, generated in zip(wanted, found, compiled, strict=True):
        assert isinstance(want, torch.Tensor) and isinstance(interpreted, torch.Tensor)
        assert difference(want, interpreted, exact=True) is None
        assert difference(want, generated) is None


def test_random_contractions_are_of_all_kinds() -> None:
    options = RandomOptions(contractions=True)
    drawn = [found for seed in range(80) for found in contractions(random_program(seed, options))]
    assert {c.left.dtype.value for c in drawn} == {"f64", "f32", "f16", "bf16"}
    for kind in (
        lambda c: bool(c.batch),
        lambda c: not c.rows,
        lambda c: not c.columns,
        lambda c: len(c.reduced) == 2,
        lambda c: any(load.mask for load in loads(c.left.body)),
        lambda c: len(c.right.body) > 1,
        lambda c: contains(c.left.body, CheckedIndex),
        lambda c: contains(c.right.body, CheckedIndex),
        lambda c: sum(isinstance(i, Compute) and i.op == "logical_and" for i in c.body) > 2,
        lambda c: c.accumulate is not c.left.dtype,
        lambda c: len(c.writes) == 2,
    ):
        assert sum(map(kind, drawn)) > 4


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(12))
def test_every_pass_takes_a_program_with_a_contraction(seed: int) -> None:
    drawn = random_program(seed, RandomOptions(contractions=True, nests=4))
    inputs = random_inputs(drawn, seed)
    wanted = interpret_program(drawn, inputs)
    for each in LOOP_PASSES:
        after = run_passes((each,), drawn, PassContext.of(LowerOptions(verify=True), target=ZEN), LOOP_LEVEL)
        if after == drawn:
            continue  # the interpreter takes seconds for some programs
        for want, got in zip(wanted, interpret_program(after, inputs), strict=True):
            assert isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor)
            assert difference(want, got, exact=True) is None, each.name
