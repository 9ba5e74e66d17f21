"""Which of ATen's kernels for a product is called, by processor, shape and layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import interpret_program, lower_graph, schedule_program
from aotkit_inductor_lower.ir import Alias, ExternCall
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.loop_passes.choose_library_calls import choose_library_calls
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.target import CpuTarget

F = torch.nn.functional
LINEAR = "mkldnn._linear_pointwise.default"


def program_of(f, *args, mode="fake"):
    graph = make_fx(lambda *given: f(*given), tracing_mode=mode)(*args)
    return schedule_program(lower_graph(graph))[0]


def cpu(processor):
    return CpuTarget(host_machine(), processor)


def targets(program):
    return [step.target for step in program.steps if isinstance(step, ExternCall)]


def random(*sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@pytest.mark.parametrize(
    ("f", "args", "views"),
    [
        (lambda x, w, b: F.linear(x, w, b), (random(256, 256), random(320, 256), random(320)), 0),
        (lambda x, w: F.linear(x, w).relu(), (random(256, 256), random(320, 256)), 0),  # the weight as it is
        (lambda x, w: x.relu() @ w, (random(256, 256), random(256, 320)), 1),
        (lambda x, w, b: torch.addmm(b, x, w), (random(256, 256), random(256, 320), random(320)), 1),
    ],
)
def test_large_products_of_rows_go_to_the_library_that_is_faster_on_the_processor(f, args, views):
    program = program_of(f, *args)
    chosen = choose_library_calls(program, PassContext.of(target=cpu("znver4")))
    verify_program(chosen)
    assert targets(chosen) == [LINEAR]
    assert sum(isinstance(s, Alias) for s in chosen.steps) == sum(isinstance(s, Alias) for s in program.steps) + views
    expected = f(*(x.double() for x in args))
    for results in (interpret_program(chosen, list(args)), bind_program(generate(chosen))(list(args))):
        torch.testing.assert_close(results[0].double(), expected, rtol=1e-4, atol=1e-3)
        assert results[0].stride() == expected.stride()
    for other in ("skylake-avx512", "znver3"):
        assert choose_library_calls(program, PassContext.of(target=cpu(other))) == program


def halves(*sizes):
    return random(*sizes).bfloat16()


WIDE = replace(generic_machine(512), features="+avx512f,+avx512bw,+fma")


def biased():
    f = lambda x, w, b: F.linear(x, w, b)
    args = (halves(512, 256), halves(1024, 256), halves(1024))
    program = program_of(f, *args)
    return f, args, program, choose_library_calls(program, PassContext.of(target=CpuTarget(WIDE, "sapphirerapids")))


def test_a_bias_of_bfloat16_is_added_by_the_linear_layer():
    _, _, program, chosen = biased()
    verify_program(chosen)
    assert targets(program) == ["aten.addmm.default"] and targets(chosen) == [LINEAR]


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")
def test_the_linear_layer_of_bfloat16_is_as_exact_as_eager():
    f, args, _, chosen = biased()
    expected = f(*(x.double() for x in args))
    eager = (f(*args) - expected).abs().max()
    for results in (interpret_program(chosen, list(args)), bind_program(generate(chosen))(list(args))):
        assert results[0].dtype is torch.bfloat16 and results[0].stride() == expected.stride()
        assert (results[0] - expected).abs().max() <= 1.01 * eager


@pytest.mark.parametrize(
    ("f", "args", "machine"),
    [
        (lambda x, w, b: F.linear(x, w, b), (halves(512, 256), halves(1024, 256), halves(1024)), "narrow"),
        (lambda x, w, b: F.linear(x, w, b), (halves(64, 64), halves(64, 64), halves(64)), "wide"),  # small
        (lambda x, w: F.linear(x, w), (halves(512, 256), halves(1024, 256)), "wide"),  # nothing is copied
        (lambda x, w, b: torch.addmm(b, x, w), (halves(512, 256), halves(256, 1024), halves(512, 1024)), "wide"),
    ],
)
def test_other_products_of_bfloat16_stay(f, args, machine):
    program = program_of(f, *args)
    used = WIDE if machine == "wide" else replace(WIDE, features="+avx2,+fma")
    assert choose_library_calls(program, PassContext.of(target=CpuTarget(used, "sapphirerapids"))) == program


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x, w: x @ w, (random(16, 16), random(16, 16))),  # small
        (lambda x, w: x.t() @ w, (random(256, 256), random(256, 320))),  # the first operand is transposed
        (lambda x, w: x @ w, (random(256, 256).double(), random(256, 320).double())),
        (lambda b, x, w: torch.addmm(b, x, w), (random(256, 320), random(256, 256), random(256, 320))),  # no bias
        (lambda b, x, w: torch.addmm(b, x, w, beta=2), (random(320), random(256, 256), random(256, 320))),
    ],
)
def test_products_that_gain_nothing_or_mean_something_else_stay(f, args):
    program = program_of(f, *args)
    assert choose_library_calls(program, PassContext.of(target=cpu("znver4"))) == program


DYNAMIC = """aotkit-ir 2
program dynamic
symbol $s0 = input 0 size 0
input x
input w
buffer x : float32[$s0, 512] strides [512, 1] input on cpu
buffer w : float32[512, 512] strides [512, 1] input on cpu
buffer y : float32[$s0, 512] strides [512, 1] output on cpu
extern mm: y = aten.mm.default(x, w) reason "a product"
return y
"""


def test_other_calls_of_two_matrices_stay():
    program = parse_program(DYNAMIC.replace("aten.mm.default", "aten._euclidean_dist.default"))
    assert choose_library_calls(program, PassContext.of(target=cpu("znver4"))) == program


def test_a_dynamic_number_of_rows_stays_where_the_other_library_writes_code_for_each():
    program = parse_program(DYNAMIC)
    assert choose_library_calls(program, PassContext.of(target=cpu("znver4"))) == program


def test_a_dynamic_number_of_rows_of_bfloat16_may_be_anything():
    """Both products are oneDNN's there."""
    text = DYNAMIC.replace("float32", "bfloat16").replace("512", "1024").replace("mm.default(", "addmm.default(b, ")
    text = text.replace("input w\n", "input w\ninput b\n")
    text = text.replace("buffer y", "buffer b : bfloat16[1024] strides [1] input on cpu\nbuffer y")
    program = parse_program(text)
    chosen = choose_library_calls(program, PassContext.of(target=CpuTarget(WIDE, "sapphirerapids")))
    verify_program(chosen)
    assert targets(chosen) == [LINEAR]
    bound, w, b = bind_program(generate(chosen)), halves(1024, 1024), halves(1024)
    for rows in (0, 1, 7, 65):
        x = halves(rows, 1024)
        torch.testing.assert_close(bound([x, w, b])[0], torch.addmm(b, x, w), rtol=2e-2, atol=1e-1)
