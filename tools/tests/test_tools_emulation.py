"""Which kinds of kernels there are and which ran, and the emulated demo's own decisions. That kernels of every kind run
is shown by `nox -s system`, that the demo does by `nox -s emulated_demo`."""

from __future__ import annotations

import ctypes
import typing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from aotkit_inductor_lower.ir import Instr
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.native import compile_for, load_object
from aotkit_inductor_lower.ops.reductions import REDUCTIONS
from aotkit_inductor_lower.ops.scalar import OP_TABLE
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import Machine, arm_machine, generic_machine, ways
from aotkit_inductor_lower.targets.cpu import generate as generating
from aotkit_inductor_lower.targets.cpu import load as loading
from aotkit_inductor_lower.targets.cpu.machine import target_machine
from tools.emulation import kinds, tiles, whole
from tools.emulation.kinds import all_kinds
from tools.emulation.plugin import Kinds, count_here

ADDING = """aotkit-ir 2
program adding
input x
buffer x : float32[8] strides [1] input on cpu
buffer y : float32[8] strides [1] output on cpu
loop y(i0 < 8):
  stage():
    %a = load x[i0] : f32
    %b = add %a, %a : f32
    store y[i0] = %b
return y
"""
FULL = replace(generic_machine(512), features="+fma,+avx512vnni,+avx512bf16,+avx512vbmi,+amx-tile,+amx-bf16,+amx-int8")


def test_every_way_to_write_a_kernel_is_a_kind_where_the_processor_has_it() -> None:
    on_vectors = {f"way {name} on vectors" for name in ("attention", "attention backward")} | {"way product of bytes"}
    every = {f"way {name}" for name in ways.WAYS}
    short = "few rows in short digits"  # where there is AVX2 and no AVX-512
    assert {kind for kind in all_kinds(FULL) if kind.startswith("way ")} == every - on_vectors - {f"way {short}"}
    assert f"way {short}" in all_kinds(generic_machine(256))
    without = replace(FULL, features=FULL.features.split(",+amx")[0])  # where there are no tile registers
    assert on_vectors < {kind for kind in all_kinds(without) if kind.startswith("way ")}
    arm = {kind.removeprefix("way ") for kind in all_kinds(arm_machine()) if kind.startswith("way ")}
    tiles = {"attention", "attention backward", "product in tile registers"}
    assert arm == set(ways.WAYS) - tiles - {
        short,
        "few rows of bytes",
        "few rows of bytes in digits",
        "few rows in digits",
        "few rows in pairs",
        "product in pairs",
        "product of bytes",
    }


def test_what_is_added_to_a_table_is_missing_until_a_test_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = all_kinds(arm_machine())
    new = {**ways.WAYS, "new": (lambda _: True, lambda *_: None)}
    monkeypatch.setattr(ways, "WAYS", new)
    monkeypatch.setattr(kinds, "OP_TABLE", {**OP_TABLE, "new": None})
    row = replace(next(iter(REDUCTIONS.values())), kind="new", scannable=True)
    monkeypatch.setattr(kinds, "REDUCTIONS", {**REDUCTIONS, "new": row})
    assert all_kinds(arm_machine()) - before == {"way new", "op new", "reduce new", "scan new"}
    assert {f"instruction {kind.__name__}" for kind in typing.get_args(Instr)} < before


def counted(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Kinds:
    """What plugins count; until the end of the test."""
    for module, name in ((generating, "generate"), (generating, "way_of"), (loading, "load")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    counting = Kinds("this processor", machine)
    count_here(counting)
    return counting


def test_a_kind_counts_when_its_kernel_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = generic_machine(128)
    found = counted(machine, monkeypatch)
    run = bind_program(generating.generate(parse_program(ADDING), machine))
    generating.generate(parse_program(ADDING.replace("add", "mul")), machine)  # made, and never called
    assert found.called == set()
    run([torch.ones(8)])
    assert {"way loops", "op add", "instruction Load", "reads f32", "writes f32", "store set"} <= found.called
    assert "op mul" not in found.called and found.calls == 1
    (problem,) = found.problems()
    assert problem.startswith("did not run: ") and "op mul" in problem


def test_kinds_that_run_elsewhere_need_not_run_here() -> None:
    here = Kinds("this processor", FULL, elsewhere=all_kinds(arm_machine()))
    (problem,) = here.problems()
    kinds_left = ["versions", "way attention", "way attention backward"]
    kinds_left += ["way few rows in digits", "way few rows in pairs", "way few rows of bytes"]
    kinds_left += ["way few rows of bytes in digits", "way product in pairs", "way product in tile registers"]
    assert problem == f"did not run: {', '.join(kinds_left)}"


def test_a_kernel_of_a_kind_that_no_table_has_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = generic_machine(128)
    found = counted(machine, monkeypatch)
    monkeypatch.setattr(ways, "way_of", lambda *asked, way_of=ways.way_of: ("another", way_of(*asked)[1]))
    bind_program(generating.generate(parse_program(ADDING), machine))([torch.ones(8)])
    assert "not in the tables: way another" in found.problems()


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ("qemu-aarch64 version 11.1.3 (Debian 1:11.1.3+ds-1)\n", ""),
        ("qemu-aarch64 version 7.2.19 (Debian 1:7.2+dfsg-7)\n", "qemu 7.2 dies while torch is imported"),
        ("something else", "does not tell its version"),
    ],
)
def test_an_emulator_that_torch_does_not_load_in_is_refused(told: str, problem: str) -> None:
    assert problem in whole.emulator_problem(told) and (problem == "") == (whole.emulator_problem(told) == "")


# -- tile registers --------------------------------------------------------------------------------------------------

TILES = """
define void @product(ptr %left, ptr %right, ptr %sums) {
entry:
  call void @llvm.x86.ldtilecfg(ptr %left)
  call void @llvm.x86.tileloadd64(i8 0, ptr %sums, i64 64)
  call void @llvm.x86.tileloaddt164(i8 4, ptr %left, i64 64)
  call void @llvm.x86.tileloadd64(i8 6, ptr %right, i64 128)
  call void @llvm.x86.tdpbf16ps(i8 0, i8 4, i8 6)
  call void @llvm.x86.tilestored64(i8 0, ptr %sums, i64 64)
  call void @llvm.x86.tilerelease()
  ret void
}
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tileloaddt164(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilerelease()
"""


@pytest.fixture(scope="module")
def product_of_tiles() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """``sums + left @ right`` by emulated tiles: 16 by 32, 32 by 16, 16 by 16."""
    text = tiles.with_emulated_tiles(TILES)
    assert "llvm.x86" not in text
    loaded = load_object(compile_for(target_machine(generic_machine(128)), text), [], ["product"])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(loaded.addresses()["product"])

    def product(left: torch.Tensor, right: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        result, lines = sums.float().clone(), left.bfloat16().contiguous()
        pairs = torch.zeros(16, 64, dtype=torch.bfloat16)  # rows of 128 bytes, of which half are read
        pairs[:, :32] = right.bfloat16().view(16, 2, 16).transpose(1, 2).reshape(16, 32)
        call(lines.data_ptr(), pairs.data_ptr(), result.data_ptr())
        assert loaded is not None
        return result

    return product


def test_products_of_emulated_tiles(product_of_tiles: Any) -> None:
    left, right = torch.randint(-9, 9, (16, 32)), torch.randint(-9, 9, (32, 16))
    sums = torch.randint(-99, 99, (16, 16))
    assert torch.equal(product_of_tiles(left, right, sums), (sums + left @ right).float())


def test_emulated_tiles_sum_the_numbers_of_pairs_apart(product_of_tiles: Any) -> None:
    left, right = torch.ones(16, 32), torch.ones(32, 16)
    left[:, 0] = 2.0**24  # in which a 1 is lost that is added to it, unlike a sum of them
    assert torch.equal(product_of_tiles(left, right, torch.zeros(16, 16)), torch.full((16, 16), 2.0**24 + 16))
    left[:, 0] = 1.0
    assert torch.equal(product_of_tiles(left, right, torch.full((16, 16), 2.0**24)), torch.full((16, 16), 2.0**24 + 32))


def test_emulated_tiles_have_no_subnormal_numbers(product_of_tiles: Any) -> None:
    ones, tiny, zeros = torch.ones(16, 32), torch.full((32, 16), 2.0**-130), torch.zeros(16, 16)
    assert (product_of_tiles(ones, tiny, zeros) == 0).all()
    assert (product_of_tiles(torch.full((16, 32), 2.0**-70), torch.full((32, 16), 2.0**-60), zeros) == 0).all()
    assert (product_of_tiles(ones * 0, tiny, zeros + 2.0**-130) == 0).all()
    odd = torch.full((32, 16), float("inf"))
    assert (product_of_tiles(ones, odd, zeros) == odd[0, 0]).all()
    assert product_of_tiles(ones * 0, odd, zeros).isnan().all()


def test_products_of_bytes_in_emulated_tiles() -> None:
    text = tiles.with_emulated_tiles(TILES.replace("tdpbf16ps", "tdpbssd"))
    loaded = load_object(compile_for(target_machine(generic_machine(128)), text), [], ["product"])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(loaded.addresses()["product"])
    left, right = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((16, 64), (64, 16)))
    sums = torch.randint(-(2**31), 2**31 - 1, (16, 16)).int()
    want = (sums.long() + left.long() @ right.long()).int()  # what does not fit is cut off
    fours = torch.zeros(16, 128, dtype=torch.int8)
    fours[:, :64] = right.view(16, 4, 16).transpose(1, 2).reshape(16, 64)
    call(left.data_ptr(), fours.data_ptr(), sums.data_ptr())
    assert torch.equal(sums, want)


def test_functions_without_tiles_stay_as_they_are() -> None:
    text = "define i32 @one() {\nentry:\n  ret i32 1\n}\n"
    assert tiles.with_emulated_tiles(text) == text


CALLS = "define i32 @kernel(ptr %p) {{\nentry:\n{}  call void @product(ptr %p, ptr %p, ptr %p)\n{}  ret i32 0\n}}\n"
SET, RELEASED = "  call void @llvm.x86.ldtilecfg(ptr %p)\n", "  call void @llvm.x86.tilerelease()\n"


def test_tiles_without_shapes_are_an_error_as_they_are_on_a_processor() -> None:
    assert not tiles.unset_shapes(TILES)
    kept = (line for line in TILES.splitlines(keepends=True) if "ldtilecfg" not in line and "release" not in line)
    bare = "".join(kept)
    assert tiles.unset_shapes(bare) == ["product"]
    assert not tiles.unset_shapes(bare + CALLS.format(SET, RELEASED))
    for before, behind in (("", ""), (SET, ""), ("", RELEASED), (RELEASED, SET), (SET + RELEASED, "")):
        assert tiles.unset_shapes(bare + CALLS.format(before, behind)) == ["kernel"]
    with pytest.raises(AssertionError, match="before their shapes are set, or stay set: kernel"):
        tiles.with_emulated_tiles(bare + CALLS.format(SET, ""))
