"""The verifier: a good program passes, and every rule fires on a program that breaks just that rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aotkit_inductor_lower.errors import IRError, IRSyntaxError
from aotkit_inductor_lower.ir import LoopNest, Program
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.ir.verify import verify_nest, verify_program

HEADER = """\
aotkit-ir 2
program p
symbol $s0 = input 0 size 0
input x
input idx
input flag
buffer x : float32[$s0, 64] strides [64, 1] input on cpu
buffer idx : int64[8] strides [1] input on cpu
buffer flag : bool[8] strides [1] input on cpu
buffer h : float16[8] strides [1] temporary on cpu
buffer c : complex64[8] strides [1] temporary on cpu
buffer k : float32[64] strides [1] constant on cpu
buffer t : float32[8, 64] strides [64, 1] temporary on cpu
buffer u : float32[8, 64] strides [64, 1] temporary on cpu
buffer row : float32[64] strides [1] scratch on cpu
buffer y : float32[$s0, 64] strides [64, 1] output on cpu
"""
FILL_Y = """\
loop fill(i0 < $s0, i1 < 64):
  stage():
    %v0 = load x[i0, i1] : f32
    store y[i0, i1] = %v0
"""
FILL_T = """\
loop fill_t(i0 < 8, i1 < 64):
  stage():
    %z = const 0.0 : f32
    store t[i0, i1] = %z
"""


def program(steps: str, result: str = "y", *, header: str = HEADER) -> Program:
    return parse_program(f"{header}{FILL_Y}{steps}return {result}\n")


def body(*lines: str, ranges: str = "", outer: str = "i0 < 8, i1 < 64") -> str:
    """One nest over an 8x64 grid with the given instructions."""
    return f"loop n({outer}):\n  stage({ranges}):\n" + "".join(f"    {line}\n" for line in lines)


def test_good_programs_pass() -> None:
    verify_program(program(""))
    steps = """\
loop softmax(i0 < 8):
  stage():
    %j = load idx[i0] : i64
    %k = check %j < $s0
  stage(r0 < 64):
    %v0 = load x[%k, r0] : f32
    %v1 = reduce max %v0 : f32
    store row[r0] = %v0
  stage():
    %v2 = exp %v1 : f32
  stage(r1 < 64):
    %v3 = load row[63 - r1] : f32
    %v4 = div %v3, %v2 : f32
    store t[i0, r1] = %v4
  stage(r2 < 64):
    %v5 = load t[i0, 63 - r2] : f32
    store u[i0, r2] = %v5
extern mm0: _ = aten.mm.default(t, u)
alias a: h = t + 8
"""
    verify_program(program(steps))


def test_sizes_that_the_host_computes_are_read_printed_and_checked() -> None:
    text = HEADER.replace("input x\n", "size $c0 = trunc(1.7*float($s0))\nsize $c1 = max(-$c0 + 3, 0)\ninput x\n")
    known = program("", header=text + "buffer z : float32[$c0, $c1] strides [$c1, 1] input on cpu\ninput z\n")
    assert known.computed_sizes == (("c0", "trunc(1.7 * float($s0))"), ("c1", "max(-$c0 + 3, 0)"))
    assert parse_program(print_program(known)) == known and known.size_symbols == ("s0", "c0", "c1")
    verify_program(known)
    with pytest.raises(IRError, match=r"\$c1 is computed of \$c0, which has no source before it"):
        verify_program(replace(known, computed_sizes=known.computed_sizes[::-1]))
    with pytest.raises(IRError, match="size symbol 'c0' appears twice"):
        verify_program(replace(known, computed_sizes=(*known.computed_sizes, ("c0", "$s0"))))
    with pytest.raises(IRSyntaxError, match="expected a symbol"):
        program("", header=text.replace("1.7*float", "1.7*%%"))


def test_a_nest_is_checked_on_its_own() -> None:
    p = program(body("%a = load t[i0, i1] : f32", "store u[i0, i1] = %b"))
    nest = p.steps[1]
    assert isinstance(nest, LoopNest)
    with pytest.raises(
        IRError, match=r"nest n, stage 0, instruction 1 `store u\[i0, i1\] = %b`: value %b is not defined"
    ):
        verify_nest(nest, p)


LOAD = "%a = load x[i0, i1] : f32"


@pytest.mark.parametrize(
    ("nest", "problem"),
    [
        # scopes
        (body(LOAD, LOAD), "value %a is defined twice in this nest"),
        (body("%b = neg %a : f32", LOAD), "value %a is not defined before"),
        (
            body("%a = load t[i0, r0] : f32", "%s = reduce sum %a : f32", "%b = add %a, %s : f32", ranges="r0 < 64"),
            "%s lives in an earlier stage only, or is a reduction that is not finished",
        ),
        (
            body("%a = load t[i0, r0] : f32", ranges="r0 < 64", outer="i0 < 8") + "  stage():\n    %b = neg %a : f32\n",
            "value %a lives in an earlier stage only",
        ),
        (body(LOAD, "%s = reduce sum %a : f32"), "a reduction needs a stage with ranges"),
        (body("%a = load t[i0, r9] : f32"), "r9 is no loop variable here"),
        (body("%a = load t[i0, %q] : f32"), "value %q is not defined before"),
        (body("%a = load t[i0, i1] : f32", ranges="i1 < 4"), "loop variable i1 is used twice"),
        (body(outer="i0 < i1"), "the range of i0 may hold size symbols only, not i1"),
        (body(outer="i0 < -1"), "the range of i0 is negative: -1"),
        # types
        (body("%a = load x[i0, i1] : f64"), "x holds f32, not f64"),
        (body("%a = load c[i0] : f32"), "generated code cannot hold elements of complex64"),
        (body("%a = load h[i0] : f16", "%b = neg %a : f16"), "neg is not defined for f16"),
        (body("%a = const 1.5 : i32"), "1.5 is no i32"),
        (body("%a = const 300 : u8"), "300 is no u8"),
        (body("%a = index i0 : f32"), "an index value is i64 or i32, not f32"),
        (body("%a = index i0 : i32", "%b = check %a < 8"), "a checked index must be i64, not i32"),
        (body("%a = index i0 : i64", "%b = check %a < i1"), "the checked size may hold size symbols only"),
        (body(LOAD, "%b = load x[i0, i1] mask %a other 0.0 : f32"), "the mask %a must be bool, not f32"),
        (body("%a = load flag[i0] : bool", "%b = load idx[i0] mask %a other 0.5 : i64"), "0.5 is no i64"),
        (body(LOAD, "%b = load t[i0, %a] : f32"), "%a is an index, so it must be i64 or i32"),
        (body(LOAD, "store idx[i0] = %a"), "idx holds i64, %a is f32"),
        (
            body("%a = load t[i0, r0] : f32", "%s = reduce any %a : bool", ranges="r0 < 64", outer="i0 < 8"),
            "reduce any is not defined for f32",
        ),
        (
            body("%a = load t[i0, r0] : f32", "%s = reduce argmax %a : f32", ranges="r0 < 64", outer="i0 < 8"),
            "reduce argmax of f32 gives i64, not f32",
        ),
        # memory
        (body("%a = load nowhere[i0] : f32"), "no buffer named 'nowhere' is declared"),
        (body("%a = load t[i0] : f32"), "1 indices for t, which has 2 dimensions"),
        (body(LOAD, "store k[i1] = %a"), "k is a constant of the graph"),
        (body("%a = load row[i1] : f32"), "scratch buffer row is loaded before it is stored"),
        (body(LOAD, "store row[i1] = %a"), "scratch buffer row is indexed by an outer loop variable"),
        # bounds
        (body("%a = load t[i0, i1 + 1] : f32"), r"index 1 of t reaches [1, 64], outside [0, 64)"),
        (body("%a = load t[i0 - 1, i1] : f32"), r"index 0 of t reaches [-1, 6], outside [0, 8)"),
        (body("%a = load t[i0, 2*(i1 // 2) + 1 + (i1 // 63)] : f32"), "index 1 of t reaches [1, 64]"),
        (body("%a = load idx[i0] : i64", "%b = load t[%a, i1] : f32"), "depends on %a, which passed no check"),
        (
            body("%j = load idx[i0] : i64", "%k = check %j < 9", "%b = load t[%k, i1] : f32"),
            "index 0 of t reaches [0, 8]",
        ),
        (body("%j = index i0 + 1 : i64", "%b = load t[%j, i1] : f32"), "index 0 of t reaches [1, 8]"),
    ],
)
def test_a_broken_nest_is_refused_with_the_rule(nest: str, problem: str) -> None:
    with pytest.raises(IRError) as caught:
        verify_program(program(FILL_T + nest))
    assert problem in str(caught.value)
    assert "nest n" in str(caught.value)


@pytest.mark.parametrize(
    "index",
    [
        "63 - i1",
        "2*(i1 // 2) + (i1 % 2)",  # joins to i1
        "(i1 + 5) % 64",
        "(3*i1 + i0) // 4",  # correlated, needs the exact look
        "min(i1 + 40, 63)",
        "max(i1 - 3, 0)",
    ],
)
def test_indices_inside_are_accepted(index: str) -> None:
    verify_program(program(FILL_T + body(f"%a = load t[i0, {index}] : f32")))


def test_an_index_that_only_an_exact_look_proves_is_accepted_and_a_huge_one_is_not() -> None:
    # A square modulo 5 is 0, 1 or 4, so its square modulo 16 is 0 or 1; no interval shows that.
    square = "((i0*i0) % 5) * ((i0*i0) % 5) % 16"
    header = HEADER + "buffer small : float32[2] strides [1] temporary on cpu\n"
    fill = "loop f(i0 < 2):\n  stage():\n    %z = const 0.0 : f32\n    store small[i0] = %z\n"
    inside = body(f"%a = load small[{square}] : f32", outer="i0 < 8")
    verify_program(program(fill + inside, header=header))
    huge = body("%a = load small[((i0*i1) % 9) // 4] : f32", outer="i0 < 100000, i1 < 100000")
    with pytest.raises(IRError, match="could not be proven to stay in"):
        verify_program(program(fill + huge, header=header))


def test_bounds_over_symbolic_sizes_are_accepted_unproven() -> None:
    verify_program(program(body("%a = load x[i0, i1] : f32")))


def test_a_masked_load_may_point_outside() -> None:
    masked = body("%a = load flag[i0] : bool", "%b = load t[i0 + 3, i1] mask %a other 0.0 : f32")
    verify_program(program(FILL_T + masked))


def test_loops_that_never_run_are_not_checked_for_bounds() -> None:
    verify_program(program(FILL_T + body("%a = load t[i0 + 9, i1] : f32", outer="i0 < 0, i1 < 64")))


@pytest.mark.parametrize(
    ("load", "store", "independent"),
    [
        ("t[i0, r1]", "t[i0, r0]", True),
        ("t[i0, 63 - r1]", "t[i0, r0]", True),
        ("t[7 - i0, r1]", "t[i0, r0]", False),
        ("t[0, r1]", "t[i0, r0]", False),
        ("t[i0 // 2, r1]", "t[i0 // 2, r0]", False),
        ("t[7 - i0, r1]", "t[7 - i0, r0]", True),
        ("f[64*i0 + r1]", "f[64*i0 + r0]", True),
        ("f[32*i0 + r1]", "f[32*i0 + r0]", False),
        ("f[i0 + 8*r1]", "f[i0 + 8*r0]", True),
        ("f[i0 + 7*r1]", "f[i0 + 7*r0]", False),
    ],
)
def test_iterations_may_not_read_what_others_store(load: str, store: str, independent: bool) -> None:
    header = HEADER + "buffer f : float32[512] strides [1] temporary on cpu\n"
    fill = "loop fill_f(i0 < 512):\n  stage():\n    %z = const 0.0 : f32\n    store f[i0] = %z\n"
    nest = f"""\
loop n(i0 < 8):
  stage(r0 < 64):
    %a = const 1.0 : f32
    store {store} = %a
  stage(r1 < 64):
    %b = load {load} : f32
    store u[i0, r1] = %b
"""
    checked = program(FILL_T + fill + nest, header=header)
    if independent:
        verify_program(checked)
    else:
        with pytest.raises(IRError, match="which another iteration may have stored"):
            verify_program(checked)


@pytest.mark.parametrize(("load", "fine"), [("t[i0, r0]", True), ("t[i0, 63 - r0]", False)])
def test_inner_iterations_are_independent_too(load: str, fine: bool) -> None:
    nest = body(
        f"%a = load {load} : f32", "%b = neg %a : f32", "store t[i0, r0] = %b", ranges="r0 < 64", outer="i0 < 8"
    )
    if fine:
        verify_program(program(FILL_T + nest))
    else:
        with pytest.raises(IRError, match="another iteration may have stored"):
            verify_program(program(FILL_T + nest))


@pytest.mark.parametrize(
    ("steps", "result", "problem"),
    [
        ("", "t", "an output reads 't' before anything writes it"),
        ("", "nowhere", "an output names 'nowhere', which is not declared"),
        ("", "sym($q)", "an output holds $q, which has no source"),
        (body("%a = load t[i0, i1] : f32"), "y", "nest n reads 't' before anything writes it"),
        (
            body(LOAD, "store t[i0, i1] += %a", outer="i0 < $s0, i1 < 64"),
            "y",
            "nest n reads 't' before anything writes it",
        ),
        (FILL_T + FILL_T, "y", "step 'fill_t' appears twice"),
        ("extern e: t = aten.neg.default(u)\n", "y", "extern e reads 'u' before anything writes it"),
        ("extern e: t = aten.neg.default(nothing)\n", "y", "extern e names 'nothing', which is not declared"),
        ("extern e: nothing = aten.neg.default(y)\n", "y", "extern e makes 'nothing', which is not declared"),
        ("extern e: y = aten.neg.default(x)\n", "y", "extern e makes 'y', which is there already"),
        ("extern e: t = aten.neg.default(y, [sym(i0)])\n", "y", "extern e may hold size symbols only, not i0"),
        ("extern e: t = aten.neg.default(y) mutates u\n", "y", "extern e reads 'u' before anything writes it"),
        ("alias a: t = nothing + 0\n", "y", "alias a names 'nothing', which is not declared"),
        ("alias a: nothing = y + 0\n", "y", "alias a makes 'nothing', which is not declared"),
        (
            FILL_T + "alias a: u = t + 0\n" + body("%a = load u[i0, 63 - i1] : f32", "store t[i0, i1] = %a"),
            "y",
            "loads u and stores t, which share memory",
        ),
        (
            "".join(
                f"loop n{n}(i0 < 8):\n  stage(r0 < 64):\n    %a = const 0.0 : f32\n    store row[r0] = %a\n"
                for n in range(2)
            ),
            "y",
            "scratch buffer row is used by nests n0 and n1",
        ),
    ],
)
def test_a_broken_program_is_refused_with_the_rule(steps: str, result: str, problem: str) -> None:
    with pytest.raises(IRError) as caught:
        verify_program(program(steps, result))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("input flag\n", "input flag\ninput flag\n", "input 'flag' appears twice"),
        ("input flag\n", "", "input buffer 'flag' is not among the program's inputs"),
        ("input flag\n", "input flag\ninput k\n", "input 'k' is not declared as an input buffer"),
        ("input flag\n", "input flag\ninput $s9\n", "integer input $s9 has no symbol source"),
        ("size 0", "size 2", "$s0 comes from size 2 of x, which has fewer dimensions"),
        ("input 0 size", "input 7 size", "$s0 comes from input 7, but there are 3"),
        ("size 0", "colour 0", "$s0 comes from 'colour'; sources are int, above, below, size, stride"),
        ("size 0", "int 0", "$s0 comes from the int of input 0, which is x"),
        ("buffer h : float16[8]", "buffer h : float16[8, 8]", "buffer h has 2 sizes and 1 strides"),
        ("buffer h : float16[8]", "buffer h : float16[i0]", "the shape of h may hold size symbols only, not i0"),
        ("buffer h : float16[8]", "buffer h : float16[$s7]", "the shape of h holds $s7, which has no source"),
        ("buffer h : float16[8]", "buffer h : float16[-8]", "buffer h has a negative size or stride"),
        ("buffer h :", "buffer x :", "buffer 'x' appears twice"),
    ],
)
def test_broken_declarations_are_refused(old: str, new: str, problem: str) -> None:
    assert old in HEADER
    with pytest.raises(IRError) as caught:
        verify_program(program("", header=HEADER.replace(old, new, 1)))
    assert problem in str(caught.value)
