"""Who computes a product: what the target says, once for equal ones, and ATen where there is no fuel."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    CompiledGraph,
    LowerOptions,
    compile_graph,
    interpret_program,
    lower_graph,
    parse_program,
)
from aotkit_inductor_lower.driver import schedule_graph
from aotkit_inductor_lower.ir import Buffer, ExternCall, LoopNest, Program
from aotkit_inductor_lower.ir.walk import contractions
from aotkit_inductor_lower.loop_passes.choose_contractions import choose_contractions
from aotkit_inductor_lower.passes import NO_FUEL, Decision, PassContext
from aotkit_inductor_lower.targets.select import named_target

aten = torch.ops.aten
DEVICE = named_target("triton-interpreter")
ARGS = torch.randn(6, 5), torch.randn(5, 5), torch.randn(5)


def products(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two equal ones, one that adds, one of another type."""
    y = aten.mm(x, w)
    return y, aten.mm(y, w), aten.addmm(b, y, w, alpha=2), aten.mm(x.double(), w.double())


def lowered() -> Program:
    return lower_graph(make_fx(products, tracing_mode="fake")(*ARGS))


def chosen(ctx: PassContext) -> list[str]:
    """What each product became."""
    program = lowered()
    names = [product.name for product in contractions(program)]
    after = choose_contractions(program, ctx)
    assert not contractions(after) and [s.name for s in after.steps] == [s.name for s in program.steps]
    for got, want in zip(interpret_program(after, list(ARGS)), products(*ARGS), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    return [type(step).__name__ for step in after.steps if step.name in names]


def made(ctx: PassContext) -> list[Decision]:
    return [decision for decision in ctx.decisions if decision.kind == "contraction"]


@pytest.mark.parametrize("target", ["cpu:znver4", "triton-interpreter"])
def test_nothing_is_asked_where_nothing_but_aten_may_be_chosen(target: str) -> None:
    ctx = PassContext.of(LowerOptions(contractions="aten"), target=named_target(target))
    assert chosen(ctx) == ["ExternCall"] * 4 and not ctx.decisions and ctx.fuel.used == 0


@pytest.mark.parametrize("target", ["cpu:znver4", "triton-interpreter"])
def test_what_is_left_to_aten_has_a_reason(target: str) -> None:
    ctx = PassContext.of(LowerOptions(), target=named_target(target))
    assert chosen(ctx) == ["ExternCall"] * 4 and ctx.fuel.used == 0
    assert len(made(ctx)) == 4 and not any(decision.fused for decision in made(ctx))


def test_generated_products_take_fuel_and_atens_calls_none() -> None:
    options = LowerOptions(contractions="generated")
    ctx = PassContext.of(options, target=DEVICE)
    assert chosen(ctx) == ["LoopNest", "LoopNest", "LoopNest", "ExternCall"] and ctx.fuel.used == 3
    assert [d.fused for d in made(ctx)] == [True, True, True, False]
    assert "kernels of products sum in f32, not in f64" in str(made(ctx)[3])
    for fuel in range(4):
        ctx = PassContext.of(LowerOptions(contractions="generated", fuel=fuel), target=DEVICE)
        assert chosen(ctx) == ["LoopNest"] * fuel + ["ExternCall"] * (4 - fuel)
        assert sum(NO_FUEL in d.reason for d in made(ctx)) == 3 - fuel


def test_equal_products_are_measured_once() -> None:
    asked: list[str] = []

    def measure(call: ExternCall, buffers: Mapping[str, Buffer]) -> tuple[float, float]:
        asked.append(call.name)
        return (10e-6, 20e-6) if call.target == "aten.addmm.default" else (10e-6, 9e-6)

    ctx = PassContext.of(LowerOptions(tune=True), target=DEVICE, measure=measure)
    assert chosen(ctx) == ["LoopNest", "LoopNest", "ExternCall", "ExternCall"]
    assert asked == ["mm", "addmm"]  # mm_1 is equal to mm, and float64 has no form
    assert "generated, ATen 10.0 us, generated 9.0 us" in str(made(ctx)[0])
    assert "ATen, ATen 10.0 us, generated 20.0 us" in str(made(ctx)[2])


def test_a_gain_too_small_to_pay_is_left_to_aten() -> None:
    for generated, name in ((9.6e-6, "LoopNest"), (9.8e-6, "ExternCall")):
        ctx = PassContext.of(LowerOptions(tune=True), target=DEVICE, measure=lambda *_, g=generated: (10e-6, g))
        assert chosen(ctx)[0] == name


def test_what_no_library_computes_is_a_nest_everywhere() -> None:
    text = """\
aotkit-ir 2
program p
input x
buffer x : float64[4, 4] strides [4, 1] input on cpu
buffer y : float64[4, 4] strides [4, 1] output on cpu
contraction y batch() rows(i < 4) columns(j < 4) reduced(k < 4) in f64 highest:
  left %l:
    %l = load x[i, k] : f64
  right %r:
    %r = load x[j, k] : f64
  sum %t:
    store y[i, j] = %t
return y
"""
    x = torch.randn(4, 4, dtype=torch.float64)
    for target in (named_target("cpu:znver4"), DEVICE):
        ctx = PassContext.of(LowerOptions(fuel=0), target=target)
        after = choose_contractions(parse_program(text), ctx)
        assert [type(step) for step in after.steps] == [LoopNest] and not ctx.decisions
        torch.testing.assert_close(interpret_program(after, [x])[0], x @ x.T)


def test_without_fma_products_are_atens() -> None:
    graph = make_fx(lambda a, b: a @ b, tracing_mode="fake")(torch.randn(64, 64), torch.randn(64, 64))
    compiled = compile_graph(graph, options=LowerOptions(contractions="generated", processor="x86-64"))
    assert isinstance(compiled, CompiledGraph)
    assert [call.target for call in compiled.report().externs] == ["aten.mm.default"]


@pytest.mark.parametrize("generated", [True, False])
def test_the_report_says_who_computes_products_and_why(generated: bool) -> None:
    x, w = torch.randn(96, 64), torch.randn(64, 80)
    graph = make_fx(lambda x, w: (aten.mm(x, w), aten.mm(x * 2, w), aten.mm(w.t(), x.t())), tracing_mode="fake")(x, w)
    options = LowerOptions(contractions="generated" if generated else "auto", processor="x86-64-v3")
    compiled = compile_graph(graph, [x, w], options=options)
    assert isinstance(compiled, CompiledGraph)
    report = compiled.report()
    assert sum(choice.count for choice in report.products) == 3
    # Equal ones are told of once.
    (twice, once) = report.products
    assert (twice.count, once.count) == (2, 1)
    assert twice.what.startswith("aten.mm.default float32 [96, 64]:[64, 1] x [64, 80]:[80, 1]: ")
    assert {twice.ours, once.ours} == {generated} and twice.what.rsplit(": ", 1)[1]
    assert f"{'our own' if generated else 'left to ATen'} 2x aten.mm.default float32" in str(report)


def test_a_copy_of_a_product_into_another_layout_stays_a_kernel_of_its_own() -> None:
    a, b = torch.randn(64, 96), torch.randn(96, 80)
    decided = {}
    for name, f in (("turned", lambda a, b: ((a @ b).t().contiguous(),)), ("same", lambda a, b: ((a @ b) + 1,))):
        graph = make_fx(f, tracing_mode="fake")(a, b)
        options = LowerOptions(contractions="generated")
        torch.testing.assert_close(compile_graph(graph, options=options)([a, b])[0], f(a, b)[0], rtol=1e-4, atol=1e-4)
        decisions = schedule_graph(graph, options).records
        decided[name] = [each for each in decisions if each.kind == "vertical"]
    if decided["same"]:  # the machine writes products in tiles
        assert decided["same"][-1].fused
        assert "stored apart" in decided["turned"][-1].reason and not decided["turned"][-1].fused
