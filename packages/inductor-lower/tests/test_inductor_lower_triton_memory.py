"""What one program instance of a Triton kernel reads of memory that it writes, and that lies behind what it needs."""

from __future__ import annotations

import re

import pytest
import torch

from aotkit_inductor_lower import interpret_program, parse_program
from aotkit_inductor_lower.ir import LoopNest, Program
from aotkit_inductor_lower.kernel_passes.normal_form import kernel_of
from aotkit_inductor_lower.targets.triton import KernelSource, TileLimits, emit_kernel, interpret_kernel
from aotkit_inductor_lower.targets.triton.records import KnownMemory

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

WHOLE, IN_STEPS = TileLimits(), TileLimits(row=2, reduction=8)


def source(program: Program, limits: TileLimits = WHOLE, **known: int) -> KernelSource:
    """The only kernel of a program. ``known``: how many bytes buffers have."""
    (nest,) = (step for step in program.steps if isinstance(step, LoopNest))
    kernel = kernel_of(nest, {b.name: b for b in program.buffers})
    return emit_kernel(kernel, limits, memory=KnownMemory(bytes=known))


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes)))


@pytest.mark.parametrize("limits", [WHOLE, IN_STEPS], ids=["whole", "in steps"])
def test_a_row_of_which_a_part_was_stored_is_loaded_again(limits: TileLimits) -> None:
    """Both rows are held in eight lanes, of which five were stored."""
    program = parse_program("""\
aotkit-ir 2
program part
input x
buffer x : float32[3, 8] strides [8, 1] input on cpu
buffer y : float32[3] strides [1] output on cpu
loop k(i0 < 3):
  stage(r0 < 5):
    %v0 = load x[i0, r0] : f32
    %v1 = add %v0, %v0 : f32
    store x[i0, r0] = %v1
  stage(r1 < 8):
    %v2 = load x[i0, r1] : f32
    %v3 = reduce sum %v2 : f32
  stage():
    store y[i0] = %v3
return y
""")
    x, y = random(3, 8), torch.empty(3)
    (want,) = interpret_program(program, [x.clone()])
    interpret_kernel(source(program, limits), {"x": x, "y": y})
    assert isinstance(want, torch.Tensor)
    torch.testing.assert_close(y, want)


USED = """\
  stage(r1 < COUNT):
    %v3 = load x[i0, r1] : f32
    %v4 = mul %v3, %v2 : f32
    store y[i0, r1] = %v4
"""


def decayed(columns: int, above: str, below: str) -> Program:
    """Each row's number is replaced, and what is ``above`` or ``below`` reads it before or after that."""
    text = f"""\
aotkit-ir 2
program decay
input x
input rate
buffer x : float32[6, COUNT] strides [COUNT, 1] input on cpu
buffer rate : float32[6] strides [1] input on cpu
buffer y : float32[6, COUNT] strides [COUNT, 1] output on cpu
loop k(i0 < 6):
{above}  stage():
    %v0 = load rate[i0] : f32
    %v1 = const 0.5 : f32
    %v2 = mul %v0, %v1 : f32
    store rate[i0] = %v2
{below}return y
"""
    return parse_program(text.replace("COUNT", str(columns)))


ROWS = """\
  stage(r0 < COUNT):
    %a0 = load x[i0, r0] : f32
    %a1 = load rate[i0] : f32
    %a2 = mul %a0, %a1 : f32
    store y[i0, r0] = %a2
"""


@pytest.mark.parametrize("limits", [WHOLE, IN_STEPS], ids=["whole", "in steps"])
@pytest.mark.parametrize(("above", "below"), [("", USED), (ROWS, "")], ids=["used below", "used above"])
def test_threads_that_hold_the_same_element_wait_before_one_of_them_stores(
    limits: TileLimits, above: str, below: str
) -> None:
    """All threads of a row load its number, and one stores the new one: another one might load that."""
    text = source(decayed(700, above, below), limits).text
    *_, loaded = re.finditer(r"tl\.load\(p_rate", text)
    between = text[loaded.end() : text.index("tl.store(p_rate")]
    assert between.count("tl.debug_barrier()") == 1


def elementwise(count: int) -> Program:
    return parse_program(f"""\
aotkit-ir 2
program twice
input x
buffer x : float32[{count}] strides [1] input on cpu
loop k(i0 < {count}):
  stage():
    %v0 = load x[i0] : f32
    %v1 = add %v0, %v0 : f32
    store x[i0] = %v1
return x
""")


def test_threads_that_have_elements_of_their_own_do_not_wait() -> None:
    assert "barrier" not in source(elementwise(4096)).text
    assert "barrier" in source(elementwise(64)).text  # with four warps, threads hold the same


def test_masks_that_end_at_different_places_behind_a_row_have_names_of_their_own() -> None:
    """A half's mask ends at 1008 and a float's at 1004, behind which a float's memory may end."""
    program = parse_program("""\
aotkit-ir 2
program near
input x
input y
buffer x : float32[6, 1001] strides [1004, 1] input on cpu
buffer y : float16[6, 1001] strides [1008, 1] input on cpu
buffer z : float32[6] strides [1] output on cpu
loop k(i0 < 6):
  stage(r0 < 1001):
    %v0 = load x[i0, r0] : f32
    %v1 = load y[i0, r0] : f16
    %v2 = cast %v1 : f32
    %v3 = mul %v0, %v2 : f32
    %v4 = reduce sum %v3 : f32
  stage():
    store z[i0] = %v4
return z
""")
    text = source(program, x=6 * 1004 * 4, y=6 * 1008 * 2).text
    ends = re.findall(r"(near_\w+) = \w+ < (\d+)", text)
    assert sorted(end for _, end in ends) == ["1004", "1008"] and len(dict(ends)) == 2


@pytest.mark.parametrize(("reach", "count"), [(1111, 2), (1108, 1), (1105, 0)])
def test_masks_of_two_axes_that_end_later_stay_within_memory_together(reach: int, count: int) -> None:
    program = parse_program("""\
aotkit-ir 2
program windows
input x
buffer x : float32[1105] strides [1] input on cpu
buffer y : float32[1101] strides [1] output on cpu
loop k(i0 < 1101):
  stage(r0 < 5):
    %v0 = load x[i0 + r0] : f32
    %v1 = reduce sum %v0 : f32
  stage():
    store y[i0] = %v1
return y
""")
    text = source(program, TileLimits(reduction=64), x=4 * reach).text
    assert len(re.findall(r"near_\w+ = ", text)) == count
