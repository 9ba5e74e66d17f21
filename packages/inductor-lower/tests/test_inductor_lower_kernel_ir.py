"""The kernel IR: its text, its rules and its interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aotkit_inductor_lower.errors import IRError, IRSyntaxError
from aotkit_inductor_lower.kernel_ir.interpret import interpret_kernel
from aotkit_inductor_lower.kernel_ir.nodes import Loop, LoopMap, Param
from aotkit_inductor_lower.kernel_ir.parse import parse_kernel, parse_module
from aotkit_inductor_lower.kernel_ir.print import print_kernel, print_module
from aotkit_inductor_lower.kernel_ir.verify import verify_kernel, verify_module
from aotkit_inductor_lower.symbolic import to_expr

ROWS = """\
kernel rows(x: f32 aligned also i32, idx: i64, y: f32 written, $s0: size) index i64
  origin nodes ["amax", "sub"] ops ["aten.amax.default"] line "model.py:3, in f: return x - x.amax()"
  scratch kept: f32[64] stack
  grid i0 < 8 units
  %j = load idx[i0] : i64
  %k = check %j < 8
  loop r0 < 64:
    %v0 = load x[64*%k + r0] : f32
    %b = load x[64*%k + r0] : i32
    %v1 = reduce max %v0 : f32
    %at = reduce argmax %v0 at r0 : i64
    store kept[r0] = %v0
  %z = const 0 : i64
  %m = gt %at, %z : bool
  loop r1 < 2 unroll:
    %o = index 32*r1 : i64
    loop r2 < 32 lanes 16 x2:
      %v2 = load kept[32*r1 + r2] : f32
      %v3 = sub %v2, %v1 : f32
      store y[64*i0 + 32*r1 + r2] = %v3 mask %m
"""
BYTES = {"x": to_expr(2048), "idx": to_expr(64), "y": to_expr(2048)}
MODULE = f"""\
aotkit-kernel 1
module two_steps
{ROWS}kernel "an odd name"("x y": bf16 written, $length: length) index i32 ordered
  grid i0 < $length block of XBLOCK masked, i1 < 3 serial 4 scalar
  %c = const nan : bf16
  store "x y"[i0] += %c
call first = kernel 0(arg0_1, positions, add, $s3) line "model.py:3"
call second = kernel 1("a b", $s0)
"""


def test_what_is_printed_reads_back_equal() -> None:
    kernel = parse_kernel(ROWS)
    assert print_kernel(kernel) == ROWS
    assert kernel.origin.nodes == ("amax", "sub")
    assert kernel.params == (
        Param("x", "memory", kernel.params[0].dtype, aligned=True, also=kernel.params[0].also),
        Param("idx"),
        Param("y", "memory", kernel.params[0].dtype, written=True),
        Param("s0", "size"),
    )
    (outer,) = (s for s in kernel.body if isinstance(s, Loop) and s.symbol == "r1")
    assert isinstance(outer.body[1], Loop)
    assert outer.body[1].map == LoopMap("lanes", 16, 2)
    module = parse_module(MODULE)
    assert print_module(module) == MODULE
    assert [loop.map for loop in module.kernels[1].grid] == [
        LoopMap("block", 1, 1, "XBLOCK", "masked"),
        LoopMap("serial", 4, 1, "", "scalar"),
    ]


def test_without_origins_only_what_is_computed_is_left() -> None:
    module = parse_module(MODULE)
    text = print_module(module, origins=False)
    assert "model.py" not in text
    assert parse_module(text).kernels == module.kernels


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("aotkit-kernel 1", "aotkit-kernel 7", "line 1, column 16: text of version 7; this package reads version 1"),
        ("y: f32 written", "y: f32 writen", "line 3, column 55: expected ',', found 'writen, $s0: size) index i64'"),
        ("$s0: size", "$s0: extent", "'extent) index i64' is no kind of number; there are size, length"),
        ("lanes 16 x2", "wide 16", "'wide 16:' is no kind of loop; there are serial, units, lanes"),
        ("[64] stack", "[64] here", "'here' is no storage; there are registers, stack"),
        ("%v3 = sub", "v3 = sub", "expected an instruction or a loop, found 'v3 = sub %v2, %v1 : f32'"),
        ("loop r0 < 64:", "loop r0 < 64", "line 9, column 15: expected ':'"),
        ("call first = kernel 0", "call first = nest 0", "expected 'kernel', found 'nest 0"),
        ("module two_steps\n", "module two_steps\nloop x\n", "expected the end of the text, found 'loop x'"),
    ],
)
def test_a_syntax_error_names_its_place(old: str, new: str, message: str) -> None:
    assert old in MODULE
    with pytest.raises(IRSyntaxError) as caught:
        parse_module(MODULE.replace(old, new, 1))
    assert message in str(caught.value)


def test_indentation_tells_where_a_loop_ends() -> None:
    inside = parse_kernel("kernel k() index i64\n  loop i < 2:\n    %a = const 1 : i32\n    %b = neg %a : i32\n")
    after = parse_kernel("kernel k() index i64\n  loop i < 2:\n    %a = const 1 : i32\n  %b = neg %a : i32\n")
    assert [len(k.body) for k in (inside, after)] == [1, 2]
    with pytest.raises(IRError, match=r"value %a lives in an earlier loop only"):
        verify_kernel(after)


VERSIONS = """\
kernel k(x: f32, y: f32 written nontemporal, $s0: size) index i64
  config num_warps 4, num_stages 2
  grid i0 < 8 units, i1 < $s0 lanes 16 masked
  %a = load x[$s0*i0 + i1] : f32
  store y[$s0*i0 + i1] = %a
  version 8 - $s0
    kernel k(x: f32, y: f32 written nontemporal, $s0: size) index i64
      grid i0 < 8 lanes 8, i1 < $s0 units
      %a = load x[$s0*i0 + i1] : f32
      store y[$s0*i0 + i1] = %a
"""


def test_versions_read_back_and_take_what_their_kernel_takes() -> None:
    kernel = parse_kernel(VERSIONS)
    text = print_kernel(kernel)
    assert parse_kernel(text) == kernel
    assert [line.split() for line in text.splitlines()] == [
        line.replace("8 - $s0", str(8 - kernel.grid[1].extent)).split() for line in VERSIONS.splitlines()
    ]
    ((condition, short),) = kernel.versions
    assert condition == 8 - kernel.grid[1].extent
    assert (kernel.config, short.config) == ((("num_warps", 4), ("num_stages", 2)), ())
    assert [loop.map for loop in short.grid] == [LoopMap("lanes", 8), LoopMap("units")]
    verify_kernel(kernel)
    for old, new, problem in (
        ("8 lanes 8,", "8 lanes 3,", "8 may be no multiple of 3, so the loop needs a tail"),
        ("    kernel k(x: f32,", "    kernel k(x: f16,", "a version has the parameters and the scratch memory"),
        ("version 8 - $s0", "version 8 - $s1", "$s1 is no parameter"),
        ("= load x[$s0*i0 + i1]", "= load y[$s0*i0 + i1]", "stores to y go past the caches"),
    ):
        with pytest.raises(IRError) as caught:
            verify_kernel(parse_kernel(VERSIONS.replace(old, new, 1)))
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ("block 32 of RBLOCK", "block of RBLOCK", None),
        ("block 24 of RBLOCK", "block of RBLOCK", "64 may be no multiple of 24"),
        ("block 24 of RBLOCK masked", "block of RBLOCK", None),
        ("tile 64", "tile", None),
        ("tile 128", "tile", "64 may be no multiple of 128"),
        ("block 32 of RBLOCK", "block of XBLOCK", "16 may be no multiple of 32"),
    ],
)
def test_a_block_or_tile_is_of_all_loops_that_follow_it(first: str, second: str, problem: str | None) -> None:
    text = f"""\
kernel k(x: f32, y: f32 written) index i64
  loop r0 < 16 {first}:
    loop r1 < 4 {second}:
      %a = load x[4*r0 + r1] : f32
      store y[4*r0 + r1] = %a
"""
    if problem is None:
        verify_kernel(parse_kernel(text))
        return
    with pytest.raises(IRError, match=problem):
        verify_kernel(parse_kernel(text))


# -- rules -----------------------------------------------------------------------------------------------


def test_good_kernels_pass() -> None:
    verify_kernel(parse_kernel(ROWS), BYTES)
    module = parse_module(MODULE)
    (second,) = (replace(k, grid=k.grid[:1]) for k in module.kernels[1:])
    verify_module(replace(module, kernels=(module.kernels[0], second)), {"arg0_1": to_expr(2048)})


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        # names and scopes
        ("%v3 = sub %v2, %v1", "%v3 = sub %v2, %v0", "value %v0 lives in an earlier loop only"),
        ("%v3 = sub %v2, %v1", "%v3 = sub %v2, %v9", "value %v9 is not defined before"),
        ("%v2 = load kept", "%v0 = load kept", "value %v0 is defined twice in this kernel"),
        ("%m = gt %at, %z", "%at = gt %at, %z", "value %at is defined twice in this kernel"),
        ("store kept[r0] = %v0", "store kept[r0] = %v1", "a reduction that is not finished in this loop"),
        ("loop r2 < 32", "loop r1 < 32", "loop variable r1 is used twice"),
        ("loop r1 < 2", "loop r0 < 2", "loop variable r0 is used twice"),
        ("kept[32*r1 + r2]", "kept[32*r1 + r0]", "r0 is no loop variable here"),
        ("store y[64*i0", "store y[64*%v1", "%v1 is an index, so it must be i64 or i32"),
        # types
        ("%m = gt %at, %z : bool", "%m = gt %at, %z : i64", "gt of i64 gives bool, not i64"),
        ("mask %m", "mask %v3", "the mask %v3 must be bool, not f32"),
        ("%v2 = load kept[32*r1 + r2] : f32", "%v2 = load kept[32*r1 + r2] : i32", "kept holds f32, not i32"),
        ("x[64*%k + r0] : i32", "x[64*%k + r0] : i64", "x holds f32, not i64"),
        ("= %v3 mask", "= %z mask", "y holds f32, not i64"),
        ("index i64", "index f32", "offsets are computed in i64 or i32, not f32"),
        ("also i32", "also i32 f32", "parameter x names a type twice"),
        # declarations
        ("store kept[r0]", "store spare[r0]", "no memory named 'spare' is declared"),
        ("y: f32 written", "y: f32", "parameter y is not declared as written"),
        ("idx: i64", "idx: i64 written", "idx is declared as written, but nothing stores to it"),
        ("idx: i64,", "idx: i64, idx: f32,", "parameter idx appears twice"),
        ("$s0: size", "$s0: size, $s0: length", "parameter $s0 appears twice"),
        ("kept: f32[64] stack", "x: f32[64] stack", "memory x is declared twice"),
        ("kept: f32[64] stack", "kept: f32[-1] stack", "scratch kept has a negative extent"),
        ("%k = check %j < 8", "%k = check %j < $s1", "$s1 is no parameter"),
        ("grid i0 < 8", "grid i0 < $s1", "$s1 is no parameter"),
        ("32*r1 + r2] : f32", "$s1*r1 + r2] : f32", "$s1 is no parameter"),
        ("    store kept[r0] = %v0\n", "", "scratch kept is loaded before it is stored"),
        ("store kept[r0]", "store kept[i0]", "scratch kept is indexed by a loop of the grid"),
        # offsets
        ("x[64*%k + r0] : f32", "x[%k, r0] : f32", "2 indices; a kernel names an element by its offset in x"),
        ("store kept[r0]", "store kept[r0 + 1]", "the offset in kept reaches [1, 64], outside [0, 64)"),
        ("x[64*%k + r0] : f32", "x[64*%k + r0 + 1] : f32", "the offset in x reaches [1, 512], outside [0, 512)"),
        ("x[64*%k + r0] : f32", "x[64*%j + r0] : f32", "the offset in x depends on %j, which passed no check"),
        ("load idx[i0]", "load idx[i0 - 1]", "the offset in idx reaches [-1, 6], outside [0, 8)"),
        # loops, reductions, stores
        ("lanes 16 x2", "lanes 16 x4", "32 may be no multiple of 64, so the loop needs a tail"),
        ("unroll", "lanes", "a loop in lanes stands in another"),
        ("units", "units 0", "a loop takes at least one iteration at once"),
        ("argmax %v0 at r0", "argmax %v0", "argmin and argmax name the position that they give"),
        ("max %v0 :", "max %v0 at r0 :", "argmin and argmax name the position that they give, and no others do"),
        ("%m = gt %at, %z : bool", "%m = reduce any %m : bool", "value %m is not defined before"),
        ("%m = gt %at, %z : bool", "%m = reduce max %at : i64", "a reduction needs a loop around it"),
        ("= %v3 mask", "+= %v3 mask", "a store accumulates, so the kernel must be ordered"),
        ("scratch kept: f32[64] stack", "scratch kept: bf16[64] stack", "kept holds bf16, not f32"),
    ],
)
def test_each_planted_fault_is_caught(old: str, new: str, problem: str) -> None:
    assert old in ROWS
    with pytest.raises(IRError) as caught:
        verify_kernel(parse_kernel(ROWS.replace(old, new, 1)), BYTES)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("offset", "bad"),
    [("64*i0 + r0", False), ("64*i0 - r0 + 63", False), ("64*i0 + r0 - 64*i0", True), ("r0 - 64*i0 + 448", True)],
)
def test_grid_iterations_that_read_each_others_results_are_found(offset: str, bad: bool) -> None:
    kernel = parse_kernel(f"""\
kernel k(x: f32 written) index i64
  grid i0 < 8
  loop r0 < 64:
    %a = load x[{offset}] : f32
    %s = reduce sum %a : f32
  loop r1 < 64:
    store x[64*i0 + r1] = %s
""")
    if not bad:
        verify_kernel(kernel, {"x": to_expr(2048)})
        return
    with pytest.raises(IRError, match=r"an iteration loads x\[.*\], which another stores as \[64\*i0 \+ r1\]"):
        verify_kernel(kernel)


def test_grid_iterations_may_read_what_none_of_them_writes() -> None:
    kernel = parse_kernel("""\
kernel k(x: f32 written) index i64
  grid i0 < 8
  %a = load x[i0 + 8] : f32
  store x[i0] = %a
""")
    verify_kernel(kernel, BYTES)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("call second = kernel 1", "call second = kernel 2", "there is no kernel 2, but 2 of them"),
        ("call second", "call first", "call first: the step is called twice"),
        ("add, $s3)", "add)", "3 arguments for kernel rows, not 4"),
        ("add, $s3)", "add, s3)", "s3 is no size for s0"),
        ("add, $s3)", "arg0_1, $s3)", "a memory is passed twice"),
        ('call second = kernel 1("a b", $s0)\n', "", "nothing calls kernel an odd name"),
        ("kernel rows(", "kernel rows($s9: size, ", "5"),
    ],
)
def test_calls_must_fit_their_kernels(old: str, new: str, problem: str) -> None:
    with pytest.raises(IRError) as caught:
        verify_module(parse_module(MODULE.replace(old, new, 1)))
    assert problem in str(caught.value)


# -- what kernels compute ----------------------------------------------------------------------------------


def test_the_interpreter_runs_a_tree_of_loops() -> None:
    x, idx, y = torch.randn(8, 64), torch.tensor([3, -1, 0, 7, 7, 2, -8, 5]), torch.zeros(512)
    x[3, 0] = 9.0  # the largest of its row is its first: nothing is stored
    interpret_kernel(parse_kernel(ROWS), {"x": x.view(-1), "idx": idx, "y": y}, {"s0": 5})
    rows = x[idx]
    want = torch.where(rows.argmax(1, keepdim=True) > 0, rows - rows.amax(1, keepdim=True), torch.zeros(()))
    assert torch.equal(y.view(8, 64), want)


def test_maps_change_nothing() -> None:
    plain = ROWS.replace(" lanes 16 x2", "").replace(" unroll", "").replace(" units", "")
    results = []
    for text in (ROWS, plain):
        y = torch.zeros(512)
        x = torch.arange(512).sin()
        interpret_kernel(parse_kernel(text), {"x": x, "idx": torch.arange(8), "y": y})
        results.append(y)
    assert torch.equal(*results)


def run(text: str, **memory: Tensor) -> None:
    kernel = parse_kernel(text)
    verify_kernel(kernel, {name: to_expr(t.numel() * t.element_size()) for name, t in memory.items()})
    interpret_kernel(kernel, memory)


def test_the_first_of_equals_is_told_by_its_position_not_by_the_order_of_loops() -> None:
    x, at = torch.tensor([[0.0, 5.0, 1.0], [5.0, 2.0, 3.0]]), torch.zeros(1, dtype=torch.int64)
    run(
        """\
kernel first(x: f32, at: i64 written) index i64
  loop c < 3:
    loop r < 2:
      %v = load x[c + 3*r] : f32
      %p = reduce argmax %v at c + 3*r : i64
  store at[0] = %p
""",
        x=x.view(-1),
        at=at,
    )
    assert int(at) == int(x.argmax()) == 1


def test_scans_go_in_the_order_of_the_loops_and_masks_leave_memory_alone() -> None:
    x, y = torch.arange(6.0), torch.full((6,), -1.0)
    run(
        """\
kernel sums(x: f32, y: f32 written) index i64
  loop a < 2:
    %i = index a : i64
    loop b < 3:
      %v = load x[3*a + b] : f32
      %s = scan sum %v : f32
      %n = index b : i64
      %m = le %i, %n : bool
      store y[3*a + b] = %s mask %m
""",
        x=x,
        y=y,
    )
    assert y.tolist() == [0, 1, 3, -1, 10, 15]


def test_memory_is_read_as_other_types() -> None:
    x, y = torch.tensor([1.0, -2.0]), torch.zeros(8, dtype=torch.uint8)
    run(
        """\
kernel bytes(x: f32 also u8, y: u8 written) index i64
  grid i < 8
  %b = load x[i] : u8
  %f = load x[i // 4] : f32
  %z = const 0.0 : f32
  %m = lt %f, %z : bool
  store y[i] = %b mask %m
""",
        x=x,
        y=y,
    )
    assert y.tolist() == [0, 0, 0, 0, *x.view(torch.uint8)[4:].tolist()]


def test_what_cannot_run_is_said() -> None:
    kernel = parse_kernel("kernel k(x: f32, $s0: size) index i64\n  grid i < $s0\n  %a = load x[i] : f32\n")
    with pytest.raises(IRError, match=r"kernel k: index 0 of x reaches \[0, 8\], outside \[0, 3\)"):
        interpret_kernel(kernel, {"x": torch.zeros(3)}, {"s0": 9})
    with pytest.raises(IRError, match="kernel k: no memory given for parameter 'x'"):
        interpret_kernel(kernel, {}, {"s0": 9})
    with pytest.raises(IndexError, match="index 8 is out of bounds for dimension with size 8"):
        interpret_kernel(parse_kernel(ROWS), {"x": torch.zeros(512), "idx": torch.arange(1, 9), "y": torch.zeros(512)})
    division = "kernel k(x: i32) index i64\n  %a = load x[0] : i32\n  %b = floordiv %a, %a : i32\n"
    with pytest.raises(RuntimeError, match="kernel k, instruction 1: integer division or modulo by zero"):
        interpret_kernel(parse_kernel(division), {"x": torch.zeros(1, dtype=torch.int32)})
