"""From loop IR to kernels in their normal form: each pass by itself, and that what is computed stays the same.

Programs are run by their kernels, as they are made, in normal form, and mapped for each target, against the loop IR's
interpreter. Text and
rules are checked on every kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    LowerOptions,
    bind_program,
    decompositions,
    interpret_program,
    lower_graph,
    schedule_program,
)
from aotkit_inductor_lower.driver import make_kernels, pass_names
from aotkit_inductor_lower.errors import IRError
from aotkit_inductor_lower.ir import Program
from aotkit_inductor_lower.ir.random_programs import difference, random_inputs, random_program
from aotkit_inductor_lower.kernel_ir.interpret import interpret_module
from aotkit_inductor_lower.kernel_ir.nodes import Kernel, KernelModule
from aotkit_inductor_lower.kernel_ir.parse import parse_kernel, parse_module
from aotkit_inductor_lower.kernel_ir.print import print_kernel, print_module
from aotkit_inductor_lower.kernel_ir.verify import verify_kernel, verify_module
from aotkit_inductor_lower.kernel_passes.each_kernel import kernel_pass
from aotkit_inductor_lower.kernel_passes.expand_ops import expand_ops
from aotkit_inductor_lower.kernel_passes.linearize import declare_sizes, linearize, memory_extents
from aotkit_inductor_lower.kernel_passes.merge_loops import PASS as merge_loops_pass
from aotkit_inductor_lower.kernel_passes.merge_loops import merge_loops
from aotkit_inductor_lower.kernel_passes.normal_form import normalize
from aotkit_inductor_lower.kernel_passes.order_loops import order_loops
from aotkit_inductor_lower.kernel_passes.recompute_scratch import recompute_scratch
from aotkit_inductor_lower.kernel_passes.simplify_bounds import simplify_bounds
from aotkit_inductor_lower.kernel_passes.split_loops_by_divisors import split_loops_by_divisors
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.targets.cpu import generic_machine
from aotkit_inductor_lower.targets.cpu.map_loops import map_loops as map_lanes
from aotkit_inductor_lower.targets.cpu.map_loops import version_loops
from aotkit_inductor_lower.targets.select import named_target
from aotkit_inductor_lower.targets.triton.map_loops import TileLimits
from aotkit_inductor_lower.targets.triton.map_loops import map_loops as map_tiles

F = torch.nn.functional


def fresh(values: Any) -> list[Any]:
    """Copies of tensors, gaps and all."""
    return [
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v) if isinstance(v, Tensor) else v for v in values
    ]


def check(program: Program, inputs: Any) -> KernelModule:
    """The kernels in normal form, after they gave what the program gives."""
    given, extents = fresh(inputs), memory_extents(program)
    want = [*interpret_program(program, given), *given]
    module = linearize(program)
    normal = normalize(module)
    wide, narrow = generic_machine(512), generic_machine(128)
    mapped = [
        lambda kernel: version_loops(map_lanes(kernel, wide), wide),
        lambda kernel: map_lanes(kernel, narrow),
        map_tiles,
        lambda kernel: recompute_scratch(map_tiles(kernel, TileLimits(row=16, pointwise=64, reduction=64))),
    ]
    modules = [replace(normal, kernels=tuple(map(each, normal.kernels))) for each in mapped]
    for kernels in (module, normal, *modules):
        text = print_module(kernels)
        assert parse_module(text) == kernels
        assert print_module(parse_module(text)) == text
        verify_module(kernels, extents)
        given = fresh(inputs)
        got = [*interpret_module(program, kernels, given), *given]
        for ours, reference in zip(got, want, strict=True):
            if isinstance(reference, Tensor):
                assert isinstance(ours, Tensor)
                assert ours.stride() == reference.stride()
                assert difference(reference, ours) is None
            else:
                assert ours == reference
    return normal


@pytest.mark.parametrize("seed", range(30))
def test_the_kernels_of_a_random_program_compute_what_it_does(seed: int) -> None:
    program = random_program(seed)
    check(program, random_inputs(program, seed))


def training_step(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    y = F.layer_norm(F.gelu(leaves[0]), (x.shape[-1],), leaves[1], leaves[2])
    return (y, *torch.autograd.grad(y.sin().sum(), leaves))


def columns(x: Tensor) -> Tensor:
    """What a convolution reads for each of its outputs, with borders of zeros."""
    return F.unfold(F.pad(x, (1, 1, 1, 1)), (3, 3), stride=2) + 1


def in_place(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x[1:].mul_(2)
    x.t()[2].add_(y)
    return x[::2] + 1, x.view(-1)[3:7].exp()


def scattered(x: Tensor, at: Tensor) -> Tensor:
    return torch.zeros(5, 4).index_add(0, at, x) + x[at].amax(0)


def bits_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(torch.uint8) + 1, torch.view_as_complex(x.view(-1, 2)).real * 2


AT = torch.tensor([0, 3, 3, -1, 4])
GRAPHS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "softmax": (lambda x: x.softmax(-1), (torch.randn(5, 33),), "fake"),
    "layer norm and its gradients": (training_step, (torch.randn(6, 24), torch.randn(24), torch.randn(24)), "fake"),
    "the columns of a convolution": (columns, (torch.randn(2, 3, 7, 8),), "fake"),
    "sizes that are not known": (
        lambda x, y: ((x + y).softmax(-1), x.transpose(0, 1).reshape(-1) * 2, x.argmax(0)),
        (torch.randn(5, 9), torch.randn(9)),
        "symbolic",
    ),
    "in place, through views": (in_place, (torch.randn(6, 5), torch.randn(6)), "fake"),
    "indices that are computed": (scattered, (torch.randn(5, 4), AT.abs()), "fake"),
    "other types of the same memory": (bits_of, (torch.randn(3, 4),), "fake"),
    "scans and positions": (
        lambda x: (x.cumsum(0), x.argmin(), x.permute(2, 0, 1).argmax(-1), x.view(4, 30).amax(0)),
        (torch.randn(4, 5, 6),),
        "fake",
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_kernels_of_a_graph_compute_what_it_does(name: str) -> None:
    f, inputs, mode = GRAPHS[name]
    program, _ = schedule_program(lower_graph(make_fx(f, decompositions(), tracing_mode=mode)(*fresh(inputs))))
    module = check(program, inputs)
    assert module.kernels, "or nothing was checked"


# -- each pass -------------------------------------------------------------------------------------------


def changed(run: Callable[[Kernel], Kernel], text: str) -> str:
    """The kernel after a pass, without its first line and its margin."""
    kernel = run(declare_sizes(parse_kernel(f"kernel k(x: f32, y: f32 written) index i64\n{text}")))
    verify_kernel(kernel)
    lines = [line[2:] for line in print_kernel(kernel).splitlines()[1:]]
    return "\n".join(lines) + "\n"


def test_divisions_that_the_loops_answer_are_gone() -> None:
    text = """\
  grid i0 < 8, i1 < 1
  loop r0 < 64:
    %v = load x[64*((64*i0 + r0) // 512) + i1 + r0 % 64] : f32
    store y[64*i0 + r0 // 32] = %v
"""
    assert (
        changed(simplify_bounds, text)
        == """\
grid i0 < 8, i1 < 1
loop r0 < 64:
  %v = load x[r0] : f32
  store y[(r0 // 32) + 64*i0] = %v
"""
    )


def test_a_loop_is_split_where_that_removes_a_division() -> None:
    text = """\
  grid i0 < 24
  %v = load x[i0 // 8 + 3*(i0 % 8)] : f32
  store y[i0] = %v
"""
    assert (
        changed(split_loops_by_divisors, text)
        == """\
grid i0h8 < 3, i0 < 8
%v = load x[3*i0 + i0h8] : f32
store y[i0 + 8*i0h8] = %v
"""
    )
    inner = text.replace("  grid i0 < 24\n", "  loop i0 < 24:\n").replace("  %", "    %").replace("  st", "    st")
    assert changed(split_loops_by_divisors, inner).startswith("loop i0h8 < 3:\n  loop i0 < 8:\n    %v = load")
    kept = text.replace("24", "$s0")
    assert changed(split_loops_by_divisors, kept).startswith("grid i0 < $s0\n%v = load x[3*(i0 % 8) + (i0 // 8)]")


REPEATED = """\
  grid i0 < 4, i1 < 8
  loop r0 < 64:
    %v = load x[8*i0 + i1 + 32*r0] : f32
    %w = load x[i1] : f32
    %p = mul %v, %w : f32
    %s = reduce sum %p : f32
  store y[8*i0 + i1] = %s
"""


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [("", "", True), ("i1 < 8", "i1 < 64", False), ("r0 < 64", "r0 < 63", False)],
    ids=["short", "long enough for vectors", "little work"],
)
def test_a_short_loop_is_merged_with_one_for_which_something_is_repeated(old: str, new: str, merged: bool) -> None:
    found = changed(merge_loops, REPEATED.replace(old, new).replace("8*", f"{new[5:]}*" if "i1" in old else "8*"))
    assert found.startswith("grid i1 < 32\n") is merged
    assert ("%w = load x[i1 % 8]" in found) is merged


def test_the_widest_stride_goes_outside_unless_the_order_counts() -> None:
    text = """\
  grid i0 < 4, i1 < 8
  loop r0 < 3:
    loop r1 < 5:
      %v = load x[3*r1 + r0] : f32
      %s = reduce sum %v : f32
  store y[4*i1 + i0] = %s
"""
    found = changed(order_loops, text)
    assert found.startswith("grid i1 < 8, i0 < 4\nloop r1 < 5:\n  loop r0 < 3:\n")
    assert changed(
        order_loops,
        text.replace("reduce", "scan")
        .replace("= %s", "= %w")
        .replace("  store", "      %w = neg %s : f32\n      store"),
    ).startswith("grid i1 < 8, i0 < 4\nloop r0 < 3:\n  loop r1 < 5:\n")
    ordered = parse_kernel(
        "kernel k(y: f32 written) index i64 ordered\n  grid i0 < 4, i1 < 8\n  %c = const 1.0 : f32\n"
        "  store y[4*i1 + i0] += %c\n"
    )
    assert order_loops(ordered) == ordered


def test_neighbours_that_are_contiguous_everywhere_are_merged() -> None:
    text = """\
  grid i0 < 4, i1 < 1, i2 < $s0
  loop r0 < 1:
    loop r1 < 2:
      loop r2 < 5:
        %v = load x[10*$s0*i0 + 10*i2 + 5*r1 + r2] : f32
        %s = reduce sum %v : f32
  store y[$s0*i0 + i2] = %s
"""
    assert (
        changed(merge_loops, text)
        == """\
grid i2 < 4*$s0
loop r2 < 10:
  %v = load x[10*i2 + r2] : f32
  %s = reduce sum %v : f32
store y[i2] = %s
"""
    )
    apart = text.replace("$s0*i0 + i2] = %s", "$s0*i0 + 2*i2] = %s")
    assert changed(merge_loops, apart).startswith("grid i0 < 4, i2 < $s0\n")
    one = "  loop r0 < 1:\n    %v = load x[0] : f32\n    %s = reduce sum %v : f32\n  store y[0] = %s\n"
    assert changed(merge_loops, one).startswith("loop r0 < 1:\n"), "a reduction needs a loop"


def test_only_sizes_that_are_left_are_passed() -> None:
    kernel = parse_kernel("""\
kernel k(x: f32, y: f32 written, $s0: size, $s1: size) index i64
  grid i0 < $s1
  %v = load x[i0 // $s0 - i0 // $s0] : f32
  store y[i0] = %v
""")
    (normal,) = normalize(KernelModule("m", (kernel,), ())).kernels
    assert [param.name for param in normal.params] == ["x", "y", "s1"]


def test_ops_that_the_table_says_in_others_become_these_and_their_constants_vanish() -> None:
    kernel = parse_kernel("""\
kernel k(x: f32, y: f32 written) index i64
  %two = const 2.0 : f32
  loop r0 < 8:
    %half = const 0.5 : f32
    %v0 = load x[r0] : f32
    %v1 = pow %v0, %two : f32
    %v2 = pow %v1, %half : f32
    %v3 = rsqrt %v2 : f32
    %v4 = mul %v3, %half : f32
    store y[r0] = %v4
""")
    expanded = expand_ops(kernel)
    verify_kernel(expanded)
    assert (
        print_kernel(expanded)
        == """\
kernel k(x: f32, y: f32 written) index i64
  loop r0 < 8:
    %half = const 0.5 : f32
    %v0 = load x[r0] : f32
    %v1 = mul %v0, %v0 : f32
    %v2 = pow %v1, %half : f32
    %v3_0 = sqrt %v2 : f32
    %v3 = reciprocal %v3_0 : f32
    %v4 = mul %v3, %half : f32
    store y[r0] = %v4
"""
    )
    assert expand_ops(expanded) == expanded


SOFTMAX = """\
kernel _softmax(x_1: f32, _softmax: f32 written) index i64
  scratch _softmax_exp: f32[16] stack
  grid i1 < 32
  loop r0 < 16:
    %v0 = load x_1[16*i1 + r0] : f32
    %v1 = reduce max %v0 : f32
  loop r1 < 16:
    %v2 = load x_1[16*i1 + r1] : f32
    %v3 = sub %v2, %v1 : f32
    %v4 = exp %v3 : f32
    store _softmax_exp[r1] = %v4
    %v5 = reduce sum %v4 : f32
  loop r2 < 16:
    %v6 = load _softmax_exp[r2] : f32
    %v7 = div %v6, %v5 : f32
    store _softmax[16*i1 + r2] = %v7
"""


def test_a_softmax_in_normal_form_reads_like_this() -> None:
    program, _ = schedule_program(
        lower_graph(make_fx(lambda x: x.softmax(-1), tracing_mode="fake")(torch.ones(8, 4, 16)))
    )
    (kernel,) = normalize(linearize(program)).kernels
    assert print_kernel(kernel, origins=False) == SOFTMAX


@pytest.mark.parametrize("seed", range(8))
def test_a_program_is_right_without_the_kernel_passes_that_may_be_left_out(seed: int) -> None:
    program = random_program(seed)
    inputs = random_inputs(program, seed)
    want = interpret_program(program, fresh(inputs))
    target = named_target("cpu")
    for disable in (pass_names("kernel"), ("merge-loops",), ("order-loops", "split-loops-by-divisors")):
        options = LowerOptions(disable=disable, verify=True)
        kernels = make_kernels(program, PassContext.of(options, target=target))
        got = bind_program(target.generate(program, kernels, options))(fresh(inputs))
        for ours, reference in zip(got, want, strict=True):
            if isinstance(reference, Tensor):
                assert difference(reference, ours) is None, disable
            else:
                assert ours == reference


def test_each_kernel_that_a_pass_changes_takes_fuel_and_what_changes_nothing_takes_none() -> None:
    program = lower_graph(
        make_fx(lambda x, y: (x + 1, y * 2, y.sum()), tracing_mode="fake")(torch.rand(4, 6), torch.rand(5, 7))
    )
    module = linearize(program)
    for fuel in (0, 1, 2, None):
        ctx = PassContext.of(LowerOptions(fuel=fuel))
        merged = merge_loops_pass.run(module, ctx)
        changed = sum(new is not old for new, old in zip(merged.kernels, module.kernels, strict=True))
        assert ctx.fuel.used == changed == (len(module.kernels) if fuel is None else fuel)
        assert (merged is module) is (changed == 0)
        again = PassContext.of()
        assert merge_loops_pass.run(normalize(module), again) == normalize(module) and again.fuel.used == 0


def test_kernels_are_verified_among_a_callers_fake_tensors() -> None:
    """As under torch's ``aot_function``, which calls compilers so."""
    program = lower_graph(make_fx(lambda x: (x.softmax(-1),), decompositions(), tracing_mode="fake")(torch.rand(4, 6)))
    program, _ = schedule_program(program)
    grow = parse_kernel(
        "kernel k(x: f32 written) index i64\n  grid i0 < 4\n  %v = load x[i0] : f32\n  store x[i0] = %v\n"
    )
    shift = parse_kernel(print_kernel(grow).replace("store x[i0]", "store x[i0 + 1]"))
    with FakeTensorMode():
        make_kernels(program, PassContext.of(LowerOptions(verify=True)))
        verify_kernel(grow)
        with pytest.raises(IRError, match="which another stores"):
            verify_kernel(shift)


def test_kernels_that_break_a_rule_are_refused_after_the_pass_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    program = lower_graph(make_fx(lambda x: (x.sin(),), tracing_mode="fake")(torch.rand(4, 6)))
    damage = kernel_pass("damage", lambda k: replace(k, grid=()), why="a fault", required=True)
    monkeypatch.setattr("aotkit_inductor_lower.driver.KERNEL_PASSES", (damage,))
    make_kernels(program, PassContext.of(LowerOptions()))
    with pytest.raises(IRError, match="is no loop variable here"):
        make_kernels(program, PassContext.of(LowerOptions(verify=True)))
