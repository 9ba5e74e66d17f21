"""What one program instance of a Triton kernel reads of memory that it writes, and that lies behind what it needs."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import pytest
import torch

from aotkit_inductor_lower import interpret_program, parse_program
from aotkit_inductor_lower.ir import LoopNest, Program
from aotkit_inductor_lower.kernel_passes.normal_form import kernel_of
from aotkit_inductor_lower.targets.triton import KernelSource, TileLimits, compile_kernel, emit_kernel, interpret_kernel
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


def body_of(*lines: str, count: int = 4096) -> KernelSource:
    """A kernel over ``x`` and ``y``, float32, ``h``, float16, and ``n``, int32."""
    names = {"x": "float32", "y": "float32", "h": "float16", "n": "int32"}
    head = [f"input {name}" for name in names]
    head += [f"buffer {name} : {dtype}[{2 * count}] strides [1] input on cpu" for name, dtype in names.items()]
    body = [f"loop k(i0 < {count}):", "  stage():", *(f"    {line}" for line in lines), "return"]
    return source(parse_program("\n".join(["aotkit-ir 2", "program p", *head, *body]) + "\n"))


X, H, ZERO = "%x = load x[i0] : f32", "%h = load h[i0] : f16", "%zero = const 0.0 : f32"
SUM = (X, H, "%w = cast %h : f32", "%s = add %x, %w : f32")
CHOSEN = ("%w = where %b, %x, %zero : f32", "store x[i0] = %w")
NOT_ITS_OWN = {
    "another type beside it": (*SUM, "%r = cast %s : f16", "store h[i0] = %r", ZERO, "store x[i0] = %zero"),
    "another step beside it": ("%v = load x[2*i0] : f32", "store y[i0] = %v", ZERO, "store x[2*i0] = %zero"),
    "what is computed by its name only": (
        "%n = load n[i0] : i32",
        "%c = cast %n : f32",
        "store y[i0] = %c",
        "%d = const 0 : i32",
        "%e = mul %n, %d : i32",
        "store n[i0] = %e",
    ),
    "two elements of a place": (
        "%n = load n[i0] : i32",
        "%l = cast %n : i64",
        "%c = check %l < 8192",
        "%v = load x[%c] : f32",
        "%w = neg %v : f32",
        "store x[%c] = %w",
    ),
    "one side alone": (X, ZERO, "%h = load h[i0] : f16", "%k = const 0.0 : f16", "%b = gt %h, %k : bool", *CHOSEN),
    "a comparison that is constant": (X, ZERO, "%k = const nan : f32", "%b = gt %x, %k : bool", *CHOSEN),
    "of two loads one": (X, "%y = load y[i0] : f32", "store y[i0] = %x", "store x[i0] = %y"),
}
ITS_OWN = {
    "floats": (X, "%y = load y[i0] : f32", "%s = mul %x, %y : f32", "store x[i0] = %s"),
    "both sides": (X, "%b = isnan %x : bool", "%m = neg %x : f32", "%w = where %b, %x, %m : f32", "store x[i0] = %w"),
    "one side, by itself": (X, ZERO, "%b = gt %x, %zero : bool", *CHOSEN),
    "integers": ("%n = load n[i0] : i32", "%d = const 1 : i32", "%e = add %n, %d : i32", "store n[i0] = %e"),
}


def memory_accesses(kernel: KernelSource) -> list[str]:
    """Loads, stores and barriers of a compiled kernel."""
    ptx: Any = compile_kernel(kernel, 90, keep_ptx=True).ptx
    return re.findall(r"^\s*(?:@%p\d+ )?(ld\.(?:global|shared)|st\.(?:global|shared)|bar\.sync)", ptx, re.MULTILINE)


@pytest.mark.parametrize("name", NOT_ITS_OWN)
def test_threads_wait_before_one_stores_what_another_may_be_about_to_load(name: str) -> None:
    """Triton gives the store other elements of a thread than the load, or may."""
    kernel = body_of(*NOT_ITS_OWN[name])
    assert kernel.text.count("tl.debug_barrier()") == 1
    accesses = memory_accesses(kernel)
    last = max((at for at, kind in enumerate(accesses) if kind == "ld.global"), default=0)
    assert accesses[-1] == "st.global" and "bar.sync" in accesses[last:]


@pytest.mark.parametrize("name", ITS_OWN)
def test_threads_that_store_what_they_loaded_do_not_wait(name: str) -> None:
    assert set(memory_accesses(body_of(*ITS_OWN[name]))) == {"ld.global", "st.global"}


def test_numbers_that_go_to_other_threads_before_they_are_stored_need_no_barrier_of_ours() -> None:
    kernel = body_of(*SUM, "store x[i0] = %s")
    assert "debug_barrier" not in kernel.text
    order = [kind for kind, _ in groupby(memory_accesses(kernel))]
    assert order == ["ld.global", "st.shared", "bar.sync", "ld.shared", "st.global"]


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
