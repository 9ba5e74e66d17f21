"""Storage classes, segments, lifetimes, and the plan that is built of them."""

from __future__ import annotations

import pytest
import torch

from aotkit_inductor_lower import interpret_program
from aotkit_inductor_lower.ir import Buffer, BufferKind
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.launch_plan import Allocate, ArenaBuffer, CallExtern, CallSegment, Free, View
from aotkit_inductor_lower.memory.build_plan import build_plan
from aotkit_inductor_lower.memory.segments import segments
from aotkit_inductor_lower.memory.storage import Workspace, assign_storage
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.symbolic import to_expr
from aotkit_inductor_lower.targets.cpu.generate import generate

PROGRAM = """aotkit-ir 2
program places
input x
input unused
buffer x : float32[8, 8] strides [8, 1] input on cpu
buffer unused : float32[8] strides [1] input on cpu
buffer c : float32[8] strides [1] constant on cpu
buffer a : float32[8, 8] strides [8, 1] temporary on cpu
buffer v : float32[64] strides [1] temporary on cpu
buffer m : float32[8, 8] strides [8, 1] temporary on cpu
buffer s : float32[8, 8] strides [8, 1] temporary on cpu
buffer i : int64[8, 8] strides [8, 1] temporary on cpu
buffer b : float32[8, 8] strides [8, 1] temporary on cpu
buffer held : float32[8] strides [1] scratch on cpu
buffer y : float32[8, 8] strides [8, 1] output on cpu
loop a(i0 < 8, i1 < 8):
  stage():
    %v0 = load x[i0, i1] : f32
    %v1 = load c[i1] : f32
    %v2 = add %v0, %v1 : f32
    store a[i0, i1] = %v2
alias v: v = a + 0
extern m: m = aten.mm.default(a, a)
extern s: s, i = aten.sort.default(m)
loop b(i0 < 8):
  stage(r0 < 8):
    %v0 = load s[i0, r0] : f32
    store held[r0] = %v0
  stage(r1 < 8):
    %v1 = load held[r1] : f32
    %v2 = load v[8*i0 + r1] : f32
    %v3 = add %v1, %v2 : f32
    store b[i0, r1] = %v3
loop y(i0 < 8, i1 < 8):
  stage():
    %v0 = load b[i0, i1] : f32
    %v1 = exp %v0 : f32
    store y[i0, i1] = %v1
return y
"""


def test_each_buffer_has_the_class_that_its_uses_allow() -> None:
    storage = assign_storage(parse_program(PROGRAM))
    assert storage.classes == {
        "x": "input", "unused": "input", "c": "constant", "a": "arena", "v": "view",
        "m": "arena", "s": "call result", "i": "call result", "b": "arena", "y": "allocated",
    }  # fmt: skip
    assert [storage.root(name) for name in ("v", "a", "x")] == ["a", "a", "x"]


def test_without_an_arena_torch_allocates_what_it_would_hold() -> None:
    with_arena = assign_storage(parse_program(PROGRAM)).classes
    without = assign_storage(parse_program(PROGRAM), arena=False).classes
    assert {name: kind for name, kind in without.items() if with_arena[name] != kind} == {
        "a": "allocated",
        "m": "call result",
        "b": "allocated",
    }


B = "buffer b : float32[8, 8] strides [8, 1] temporary on "
VIEWED = PROGRAM.replace("loop y", "alias w: w = b + 0\nloop y").replace(
    B, f"buffer w : float32[64] strides [1] output on cpu\n{B.replace(' b ', ' z ')}cpu\n{B}"
)


@pytest.mark.parametrize(
    "old, new",
    [
        ("return y", "return y, b"),
        ("return y", "return y, w"),
        ("return y", "extern z: z = aten.view_as.default(b, b)\nreturn y"),
        (f"{B}cpu", f"{B}cuda:0"),
    ],
    ids=["returned", "seen through what is returned", "handed back", "elsewhere"],
)
def test_what_may_outlive_the_call_is_not_in_the_arena(old: str, new: str) -> None:
    assert assign_storage(parse_program(VIEWED)).classes["b"] == "arena"
    assert assign_storage(parse_program(VIEWED.replace(old, new))).classes["b"] == "allocated"


def test_a_call_ends_a_segment_and_an_alias_does_not() -> None:
    program = parse_program(PROGRAM)
    runs = segments(program, assign_storage(program))
    assert [[(s.function, [nest.name for nest in s.nests]) for s in run] for run in runs] == [
        [("segment_0", ["a"])],
        [("segment_1", ["b", "y"])],
    ]


def sums_of_three(size: int, inputs: str = "xyz") -> str:
    """Each of three nests adds the next of ``inputs`` to what the one before made."""
    given = sorted(set(inputs))
    buffers = [(name, "input") for name in given] + [("a", "temporary"), ("b", "temporary"), ("c", "output")]
    lines = ["aotkit-ir 2", "program large", *(f"input {name}" for name in given)]
    lines += [f"buffer {name} : float32[{size}] strides [1] {kind} on cpu" for name, kind in buffers]
    for own, before, result in zip(inputs, (inputs[0], "a", "b"), "abc", strict=True):
        lines += [f"loop {result}(i0 < {size}):", "  stage():", f"    %v0 = load {own}[i0] : f32"]
        lines += [f"    %v1 = load {before}[i0] : f32", "    %v2 = add %v0, %v1 : f32", f"    store {result}[i0] = %v2"]
    return "\n".join([*lines, "return c", ""])


@pytest.mark.parametrize(("size", "parts"), [(1 << 20, 2), (1 << 17, 2), (1 << 10, 1)])
def test_a_segment_ends_where_a_large_tensor_can_be_given_back(size: int, parts: int) -> None:
    program = parse_program(sums_of_three(size))
    (run,) = segments(program, assign_storage(program))
    assert len(run) == parts
    steps = generate(program).plan.steps
    if parts == 2:
        others = [step for step in steps if not isinstance(step, CallSegment)]
        assert others[:3] == [Free(("x", "y")), Allocate("c"), Free(("z",))]
    args = [torch.randn(size) for _ in range(3)]
    (got,) = bind_program(generate(program))(list(args))
    torch.testing.assert_close(got, 2 * args[0] + args[1] + args[2])


def test_a_segment_goes_on_where_only_memory_of_the_arena_is_free() -> None:
    program = parse_program(sums_of_three(1 << 20, "xxx"))
    ((whole,),) = segments(program, assign_storage(program))
    assert [nest.name for nest in whole.nests] == ["a", "b", "c"]


def test_the_plan_allocates_frees_and_counts_program_points_kernel_by_kernel() -> None:
    program = parse_program(PROGRAM)
    plan = build_plan(program, assign_storage(program), ("x", "c", "a"))
    assert plan.slots == ("x", "c", "a")
    # points: a, mm, sort, allocation of y, b, y
    assert plan.arena == (ArenaBuffer("a", 0, 4), ArenaBuffer("m", 1, 2), ArenaBuffer("b", 4, 5))
    kinds = [step.target if isinstance(step, CallExtern) else step for step in plan.steps if not isinstance(step, View)]
    assert kinds[:-1] == [
        Free(("unused",)),
        CallSegment("segment_0", ("a",)),
        Free(("x",)),
        "aten.mm.default",
        "aten.sort.default",
        Free(("i",)),
        Allocate("y"),
        CallSegment("segment_1", ("b", "y")),
        Free(("s",)),
    ]


def test_a_workspace_lives_from_before_its_segment_to_its_end() -> None:
    program = parse_program(PROGRAM)
    buffer = Buffer("rows", "float32", (to_expr(64),), (to_expr(1),), BufferKind.TEMPORARY)
    plan = build_plan(program, assign_storage(program, arena=False), (), [Workspace("y", buffer)])
    place = plan.steps.index(Allocate("rows"))
    assert plan.steps[place - 1 : place + 2] == (
        Allocate("y"),
        Allocate("rows"),
        CallSegment("segment_1", ("b", "y")),
    )
    assert plan.buffer("rows").storage == "allocated" and not plan.arena
    assert next(s for s in plan.steps[place:] if isinstance(s, Free)).buffers[-1] == "rows"


COMPLEX = """aotkit-ir 2
program parts
input z
buffer z : complex64[9] strides [1] input on cpu
buffer tail : complex64[6] strides [1] temporary on cpu
buffer parts : float32[6, 2] strides [2, 1] temporary on cpu
buffer y : float32[6, 2] strides [2, 1] output on cpu
alias tail: tail = z + 3
alias parts: parts = tail + 0
loop y(i0 < 6, i1 < 2):
  stage():
    %v0 = load parts[i0, i1] : f32
    store y[i0, i1] = %v0
return y
"""


def test_an_offset_in_complex_elements_counts_their_bytes() -> None:
    program = parse_program(COMPLEX)
    z = torch.randn(9, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    want = torch.view_as_real(z[3:])
    assert torch.equal(interpret_program(program, [z])[0], want)
    assert torch.equal(bind_program(generate(program))([z])[0], want)
