"""Kernels that write over results of ATen calls."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, interpret_program
from aotkit_inductor_lower.errors import IRError
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.launch_plan import ReuseBuffer, compiled_from_json, compiled_to_json
from aotkit_inductor_lower.loop_passes.reuse_call_results import reuse_call_results
from aotkit_inductor_lower.passes import Fuel
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu.generate import generate

OVER = """aotkit-ir 2
program over
input x
input w
buffer x : float64[12, 16] strides [16, 1] input on cpu
buffer w : float64[16, 20] strides [20, 1] input on cpu
buffer h : float64[12, 20] strides [20, 1] temporary on cpu
buffer y : float64[12, 20] strides [20, 1] output on cpu
buffer z : float64[12, 20] strides [20, 1] output on cpu
extern mm0: h = aten.mm.default(x, w) reason "a matmul"
loop shift(i0 < 12, i1 < 20):
  stage():
    %a = load h[i0, i1] : f64
    %one = const 1.0 : f64
    %b = add %a, %one : f64
    store y[i0, i1] = %b
return y
"""

ROWS = """
  stage(r0 < 20):
    %a = load h[i0, r0] : f64
    %m = reduce max %a : f64
  stage(r1 < 20):
    %b = load h[i0, r1] : f64
    %c = sub %b, %m : f64
    store y[FIRST, r1] = %c
"""
BODY = OVER[OVER.index("loop shift") : OVER.index("return")]
SHAPED = OVER.replace("buffer y : float64[12, 20] strides [20, 1]", "buffer y : float64[3, 4, 20] strides [80, 20, 1]")


def rows(loops: str, load: str, store: str) -> str:
    return f"loop shift({loops}):" + ROWS.replace("h[i0,", f"h[{load},").replace("FIRST", store)


CASES = {
    "elementwise": (OVER, ("y", "h")),
    "rows": (OVER.replace(BODY, rows("i0 < 12", "i0", "i0")), ("y", "h")),
    "another shape": (
        SHAPED.replace("i0 < 12, i1 < 20", "i0 < 3, i1 < 4, i2 < 20")
        .replace("load h[i0, i1]", "load h[4*i0 + i1, i2]")
        .replace("store y[i0, i1]", "store y[i0, i1, i2]"),
        ("y", "h"),
    ),
    "rows of another shape": (SHAPED.replace(BODY, rows("i0 < 3, i1 < 4", "4*i0 + i1", "i0, i1")), ("y", "h")),
    "read in another order": (OVER.replace("load h[i0, i1]", "load h[11 - i0, i1]"), None),
    "another row of another shape": (
        SHAPED.replace(BODY, rows("i0 < 3, i1 < 4", "4*i0 - i1 + 3", "i0, i1")),
        None,
    ),
    "a row and its first": (
        OVER.replace(
            BODY,
            "loop shift(i0 < 12):\n  stage():\n    %f = load h[i0, 0] : f64"
            + rows("", "i0", "i0").partition(":")[2].replace("sub %b, %m", "sub %b, %f"),
        ),
        ("y", "h"),
    ),
    "with another operand": (OVER.replace("%one = const 1.0", "%one = load x[i0, 3]"), ("y", "h")),
    "only a part of it": (
        OVER.replace("y : float64[12, 20] strides [20, 1]", "y : float64[10] strides [1]")
        .replace("i0 < 12, i1 < 20", "i0 < 10")
        .replace("load h[i0, i1]", "load h[0, i0]")
        .replace("store y[i0, i1]", "store y[i0]"),
        None,
    ),
    "used later": (
        OVER.replace("return y", BODY.replace("shift", "again").replace("store y", "store z") + "return y, z"),
        ("z", "h"),
    ),
    "returned too": (
        OVER.replace(
            "h : float64[12, 20] strides [20, 1] temporary", "h : float64[12, 20] strides [20, 1] output"
        ).replace("return y", "return y, h"),
        None,
    ),
    "seen through a view": (
        OVER.replace("buffer y", "buffer v : float64[20, 12] strides [1, 20] output on cpu\nbuffer y")
        .replace("loop shift", "alias t: v = h + 0\nloop shift")
        .replace("return y", "return y, v"),
        None,
    ),
    "of another layout": (
        OVER.replace("y : float64[12, 20] strides [20, 1]", "y : float64[12, 20] strides [1, 12]"),
        None,
    ),
    "may be an argument": (
        OVER.replace("aten.mm.default(x, w)", "aten.view_as.default(u, u)")
        .replace("input w\n", "input w\ninput u\n")
        .replace("buffer h", "buffer u : float64[12, 20] strides [20, 1] input on cpu\nbuffer h"),
        None,
    ),
}


def test_a_kernel_writes_over_the_gradient_of_a_convolution_by_its_image() -> None:
    text = """aotkit-ir 2
program gradient
input g
input x
input w
buffer g : float32[2, 3, 8, 8] strides [192, 64, 8, 1] input on cpu
buffer x : float32[2, 4, 8, 8] strides [256, 64, 8, 1] input on cpu
buffer w : float32[3, 4, 1, 1] strides [4, 1, 1, 1] input on cpu
buffer dx : float32[2, 4, 8, 8] strides [256, 64, 8, 1] temporary on cpu
buffer dw : float32[3, 4, 1, 1] strides [4, 1, 1, 1] output on cpu
buffer y : float32[2, 4, 8, 8] strides [256, 64, 8, 1] output on cpu
extern c: dx, dw, _ = CALL
loop y(i0 < 2, i1 < 4, i2 < 8, i3 < 8):
  stage():
    %a = load dx[i0, i1, i2, i3] : f32
    %b = load x[i0, i1, i2, i3] : f32
    %c = mul %a, %b : f32
    store y[i0, i1, i2, i3] = %c
return y, dw
"""
    call = (
        "aten.convolution_backward.default(g, x, w, [0], [1, 1], [0, 0], [1, 1], false, [0, 0], 1, [true, true, false])"
    )
    after = reuse_call_results(parse_program(text.replace("CALL", call)), Fuel())
    compiled = generate(after)
    assert [(s.result, s.base) for s in compiled.plan.steps if isinstance(s, ReuseBuffer)] == [("y", "dx")]
    g, x, w = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 8, 8), torch.randn(3, 4, 1, 1)
    y, dw = bind_program(compiled)([g, x, w])
    image, weights = x.clone().requires_grad_(), w.clone().requires_grad_()
    wanted = torch.autograd.grad(torch.nn.functional.conv2d(image, weights), (image, weights), g)
    torch.testing.assert_close((y, dw), (wanted[0] * x, wanted[1]))


@pytest.mark.covers("F5h.8", "F5c.8")
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_writes_over_the_result_of_a_product_that_it_is_the_last_to_read(case: str) -> None:
    text, taken = CASES[case]
    program = parse_program(text)
    after = reuse_call_results(program, Fuel())
    verify_program(after)
    assert parse_program(print_program(after)) == after
    compiled = compiled_from_json(compiled_to_json(generate(after)))
    steps = [(s.result, s.base) for s in compiled.plan.steps if isinstance(s, ReuseBuffer)]
    assert steps == ([taken] if taken else [])
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 16), (16, 20), (12, 20)][: len(program.inputs)]
    args = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    before = [arg.clone() for arg in args]
    bound = bind_program(compiled, {})
    first, second = bound(list(args)), bound(list(args))
    for got, again, want in zip(first, second, interpret_program(program, before), strict=True):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(again, want)
        assert got.data_ptr() != again.data_ptr()
    assert not first[0]._is_view()
    torch.testing.assert_close(args, before)


def test_without_fuel_nothing_is_written_over() -> None:
    program = parse_program(OVER)
    assert reuse_call_results(program, Fuel(0)) == program


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("load h[i0, i1]", "load h[i0, 19 - i1]", "may not write y over h"),
        ("load h[i0, i1]", "load w[i0, i1]", "may not write y over h"),
        ("return y", "return y, h", "an output uses 'h', which y was written over"),
        ("return y", BODY.replace("shift", "again").replace("store y", "store z") + "return y", "uses 'h', which y"),
        ("reuses h + 0", "reuses h + 4", "begins where that does"),
        ("y reuses h", "x reuses h", "is new"),
        ("reuses h", "reuses z", "'z' before anything writes it"),
        ("return y", "alias v: v = h + 0\nextern n: z = aten.neg.default(v)\nreturn y", "uses 'v', which y"),
    ],
)
def test_the_verifier_refuses_what_is_written_over_too_early(old: str, new: str, problem: str) -> None:
    text = OVER.replace("loop shift", "alias over: y reuses h + 0\nloop shift")
    text = text.replace("buffer z", "buffer v : float64[240] strides [1] temporary on cpu\nbuffer z")
    verify_program(parse_program(text))
    assert old in text
    with pytest.raises(IRError, match=problem):
        verify_program(parse_program(text.replace(old, new)))


@pytest.mark.parametrize("f", [lambda x: x.t(), lambda x: x.flip(0), lambda x: x.t().flip(0) + x[:1]])
def test_an_input_is_overwritten_by_another_arrangement_of_its_own_elements(f) -> None:
    graph = make_fx(lambda x: [x.copy_(f(x))][:0], tracing_mode="fake")(torch.empty(70, 70))
    x = torch.randn(70, 70)
    want = f(x).clone()
    compile_graph(graph)([x])
    assert torch.equal(x, want)


@pytest.mark.covers("F5h.8", "F5c.8")
def test_a_network_of_convolutions_writes_its_activations_over_their_results() -> None:
    def network(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.ops.aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).relu()
        last = torch.ops.aten.convolution(hidden, v, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return last.sigmoid() + x, last

    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 6, 6), (4, 4, 3, 3), (4, 4, 3, 3)]
    args = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    compiled = compile_graph(make_fx(network, tracing_mode="fake")(*args))
    taken = [step for step in compiled.compiled.plan.steps if isinstance(step, ReuseBuffer)]
    assert [step.base for step in taken] == ["convolution"]  # the second one is returned
    torch.testing.assert_close(list(compiled(list(args))), list(network(*args)))
