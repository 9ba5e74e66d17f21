"""Temporaries that are too large for an arena that is kept, see Note [Large temporaries of a training step]."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aotkit_inductor_lower import interpret_program
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.launch_plan import (
    Allocate,
    CallExtern,
    CallSegment,
    Free,
    ReuseBuffer,
    compiled_from_json,
    compiled_to_json,
)
from aotkit_inductor_lower.launch_plan.facts import memory_of
from aotkit_inductor_lower.memory.storage import assign_storage
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.runtime.arena import ArenaPool
from aotkit_inductor_lower.targets.cpu.generate import generate

PROGRAM = """aotkit-ir 2
program large
input x
buffer x : float64[64, 64] strides [64, 1] input on cpu
buffer m : float64[64, 64] strides [64, 1] temporary on cpu
buffer a : float64[64, 64] strides [64, 1] temporary on cpu
buffer n : float64[64, 64] strides [64, 1] temporary on cpu
buffer s : float64[64] strides [1] temporary on cpu
buffer y : float64[64, 64] strides [64, 1] output on cpu
extern m: m = aten.mm.default(x, x)
loop a(i0 < 64, i1 < 64):
  stage():
    %v0 = load m[i0, i1] : f64
    %v1 = sin %v0 : f64
    store a[i0, i1] = %v1
extern n: n = aten.mm.default(a, a)
loop s(i0 < 64):
  stage(r0 < 64):
    %v0 = load n[i0, r0] : f64
    %v1 = reduce sum %v0 : f64
  stage():
    store s[i0] = %v1
loop y(i0 < 64, i1 < 64):
  stage():
    %v0 = load n[i0, i1] : f64
    %v1 = load s[i0] : f64
    %v2 = add %v0, %v1 : f64
    store y[i0, i1] = %v2
return y
"""
BYTES = 64 * 64 * 8


def test_only_temporaries_larger_than_asked_for_leave_the_arena() -> None:
    storage = assign_storage(parse_program(PROGRAM), arena_bytes=BYTES - 1)
    assert storage.classes == {
        "x": "input", "m": "allocated", "a": "allocated", "n": "allocated", "s": "arena", "y": "allocated",
    }  # fmt: skip
    assert storage.large == {"m", "a", "n"}
    for most in (BYTES, None):
        assert assign_storage(parse_program(PROGRAM), arena_bytes=most).large == frozenset()


def test_a_large_temporary_is_written_over_or_freed_behind_its_last_reader() -> None:
    plan = generate(parse_program(PROGRAM), arena_bytes=BYTES - 1).plan
    steps = [step.out if isinstance(step, CallExtern) else step for step in plan.steps]
    assert steps[:-1] == [
        Allocate("m"),
        "aten.mm.out",
        Free(("x",)),
        ReuseBuffer("a", "m"),
        CallSegment("segment_0", ("a",)),
        Free(("m",)),
        Allocate("n"),
        "aten.mm.out",
        Free(("a",)),
        ReuseBuffer("y", "n"),
        CallSegment("segment_1", ("s", "y")),
        Free(("n",)),
    ]
    assert [each.buffer for each in plan.arena] == ["s"]


@pytest.mark.parametrize("redzones", [False, True])
def test_results_are_the_same_and_the_arena_stays_small(redzones: bool) -> None:
    program = parse_program(PROGRAM)
    compiled = generate(program, arena_bytes=BYTES - 1)
    again = compiled_from_json(compiled_to_json(compiled))
    assert replace(again, text="") == replace(compiled, text="")
    pool = ArenaPool()
    bound = bind_program(again, arenas=pool, redzones=redzones)
    given = torch.randn(64, 64, dtype=torch.float64)
    before = given.clone()
    (wanted,) = interpret_program(program, [given.clone()])
    results = [bound([given])[0] for _ in range(2)]
    for result in results:
        torch.testing.assert_close(result, wanted)
        assert redzones or result.untyped_storage().nbytes() == BYTES
    assert results[0].data_ptr() != results[1].data_ptr()
    torch.testing.assert_close(given, before)
    assert pool.kept_bytes < BYTES
    # the result of each product, written over by the kernel behind it; both at once while the second product runs
    assert memory_of(again).peak.total < 2 * BYTES + 1024


MANY = """aotkit-ir 2
program many
input x
buffer x : float32[512] strides [1] input on cpu
buffer m : float32[512] strides [1] temporary on cpu
"""
SINES = """loop NAME(i0 < 512):
  stage():
    %v0 = load FROM[i0] : f32
    %v1 = sin %v0 : f32
    store NAME[i0] = %v1
"""


@pytest.mark.parametrize("members", [4, 40])
def test_kernels_of_one_shape_run_in_order_where_one_writes_over_what_the_others_read(members: int) -> None:
    names = [f"y{k}" for k in range(members)]
    text = MANY + "".join(f"buffer {y} : float32[512] strides [1] output on cpu\n" for y in names)
    text += SINES.replace("NAME", "m").replace("FROM", "x")
    text += "".join(SINES.replace("NAME", y).replace("FROM", "m") for y in names) + f"return {', '.join(names)}\n"
    compiled = generate(parse_program(text), arena_bytes=1024)
    over = [(step.result, step.base) for step in compiled.plan.steps if isinstance(step, ReuseBuffer)]
    assert over == [(names[-1], "m")]
    given = torch.randn(512)
    for result in bind_program(compiled)([given]):
        torch.testing.assert_close(result, given.sin().sin())
