"""With ``tune`` the CPU's contractions are measured: who wins computes, once for all graphs, and nothing else moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.ir import Buffer, BufferKind, Program
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.passes import Decision
from aotkit_inductor_lower.symbolic import to_expr
from aotkit_inductor_lower.targets.cpu import host_machine, measured
from aotkit_inductor_lower.targets.cpu.measured import MeasuredRace, time_in_turns

pytestmark = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")

aten = torch.ops.aten
LEVEL = "x86-64-v3"  # whose rules leave these products to ATen
Step = Callable[..., tuple[torch.Tensor, ...]]


@dataclass
class Judge:
    """Says who wins, in the place of a clock, and notes what it was asked."""

    ours: float
    asked: int = 0
    programs: list[tuple[Program, Program]] = field(default_factory=list)

    def times(self, library: Callable[[], Any], generated: Callable[[], Any]) -> tuple[float, float]:
        self.asked += 1
        for want, got in zip(library(), generated(), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
        return 10e-6, self.ours

    def race(self, *args: Any, **more: Any) -> MeasuredRace:
        judge = self

        class Noting(MeasuredRace):
            __slots__ = ()

            def compare(self, library: Program, generated: Program, behind: str) -> Any:
                judge.programs.append((library, generated))
                return MeasuredRace.compare(self, library, generated, behind)

        return Noting(*args, **{"times": self.times, **more})


class Store(dict[str, bytes]):
    """Of compiled programs and times."""

    def put(self, digest: str, data: bytes) -> None:
        self[digest] = data


def tuned(
    monkeypatch: pytest.MonkeyPatch, judge: Judge, f: Step, *args: torch.Tensor, mode: str = "fake", **more: Any
) -> CompiledGraph:
    options = {"tune": True, "processor": LEVEL, **more.pop("options", {})}
    store = more.pop("store", None)
    monkeypatch.setattr(measured, "MeasuredRace", partial(judge.race, **more))
    compiled = compile_graph(
        make_fx(f, tracing_mode=mode)(*args), options=LowerOptions(**options), object_store=store
    )
    assert isinstance(compiled, CompiledGraph)
    return compiled


def contractions(compiled: CompiledGraph) -> list[Decision]:
    return [decision for decision in compiled.records if decision.kind == "contraction"]


def assert_as_eager(compiled: CompiledGraph, f: Step, *args: torch.Tensor) -> None:
    for got, want in zip(compiled(list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (F.gelu(aten.addmm(b, x, w.t())),)


def training_step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A layer and its gradients."""
    x, w, b = (each.detach().requires_grad_() for each in (x, w, b))
    y = F.gelu(F.linear(x, w, b))
    return (y, *torch.autograd.grad(y.square().sum(), (x, w, b)))


def convolutions(x: torch.Tensor, deep: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, deep, w = (each.detach().requires_grad_() for each in (x, deep, w))
    y = F.relu(F.conv2d(F.conv2d(x, deep, padding=1, groups=x.shape[1]), w))
    return (y, *torch.autograd.grad(y.square().sum(), (x, deep, w)))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (y, *torch.autograd.grad(y.square().sum(), (q, k, v)))


LAYER = torch.randn(64, 48), torch.randn(80, 48) / 7, torch.randn(80)
IMAGES = torch.randn(2, 32, 12, 12), torch.randn(32, 1, 3, 3), torch.randn(48, 32, 1, 1) / 5
IMAGES = tuple(each.contiguous(memory_format=torch.channels_last) for each in IMAGES)
HEADS = tuple(torch.randn(1, 2, 40, 32) for _ in range(3))
CASES = [(training_step, LAYER, 3), (convolutions, IMAGES, 5), (attention, HEADS, 2)]


@pytest.mark.covers("F7.20")
@pytest.mark.parametrize("ours", [9e-6, 11e-6], ids=["ours", "atens"])
@pytest.mark.parametrize(("f", "args", "least"), CASES, ids=["layer", "convolutions", "attention"])
def test_whoever_is_faster_computes_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, f: Step, args: tuple[torch.Tensor, ...], least: int, ours: float
) -> None:
    judge = Judge(ours)
    compiled = tuned(monkeypatch, judge, f, *args)
    assert judge.asked >= least
    asked = [made for made in contractions(compiled) if "ATen 10.0 us" in made.reason]
    assert len(asked) >= least and all(made.fused == (ours < 9.7e-6) for made in asked)
    assert all(f"generated {ours * 1e6:.1f} us" in made.reason for made in asked)
    assert_as_eager(compiled, f, *args)


def test_ours_has_to_win_by_some_per_cent(monkeypatch: pytest.MonkeyPatch) -> None:
    (made,) = contractions(tuned(monkeypatch, Judge(9.8e-6), layer, *LAYER))
    assert not made.fused and "ATen, ATen 10.0 us, generated 9.8 us" in made.reason


@pytest.mark.covers("F7.20")
def test_what_was_measured_once_is_kept_for_all_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (y,) = layer(x, w, b)
        (other,) = layer(x * 2, w, b)
        return y + 1, other

    store, judge = Store(), Judge(9e-6)
    first = tuned(monkeypatch, judge, layer, *LAYER, store=store)
    assert judge.asked == 1
    again = tuned(monkeypatch, judge, layer, *LAYER, store=store)
    assert judge.asked == 1 and contractions(again) == contractions(first)
    other = tuned(monkeypatch, judge, two, *LAYER, store=store)
    assert judge.asked == 2 and len(contractions(other)) == 2  # with what follows it, one product is another one
    assert_as_eager(other, two, *LAYER)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        tuned(monkeypatch, judge, layer, *LAYER, store=store)
    finally:
        torch.set_num_threads(threads)
    assert judge.asked == 3


def test_what_is_around_a_product_is_measured_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = aten.mm(x, w.float() * s)
        return y.sum(), torch.relu(y + 1)

    args = torch.randn(32, 64), torch.randint(-9, 9, (64, 80), dtype=torch.int8), torch.rand(80) / 50
    judge = Judge(9e-6)
    compiled = tuned(monkeypatch, judge, scaled, *args)
    library, generated = (print_program(program) for program in judge.programs[0])
    assert "= aten.mm.default" in library and "contraction" not in library
    assert "contraction" in generated and generated.count("\nloop ") == library.count("\nloop ") - 2
    for text in (library, generated):
        assert "int8[64, 80]" in text and "where" in text and "= reduce" not in text
        assert text.count(" output on cpu") == 2  # what is summed, too
    assert_as_eager(compiled, scaled, *args)


@pytest.mark.parametrize(
    ("more", "limit", "why"),
    [
        ({"left": 0.0}, {}, "the time for measuring this graph is over"),
        ({"clock": iter(range(0, 10**6, 10)).__next__}, {}, "a call takes longer than there is time for measuring"),
        ({}, {"MOST_BYTES": 1000}, "its tensors take 0 MiB"),
    ],
    ids=["budget", "long", "memory"],
)
def test_rules_decide_what_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], limit: dict[str, int], why: str
) -> None:
    for name, value in limit.items():
        monkeypatch.setattr(measured, name, value)
    judge, store = Judge(9e-6), Store()
    (made,) = contractions(tuned(monkeypatch, judge, layer, *LAYER, store=store, **more))
    (rule,) = contractions(tuned(monkeypatch, judge, layer, *LAYER, options={"tune": False}))
    assert judge.asked == 0
    assert (made.fused, made.reason) == (rule.fused, f"{rule.reason} (not measured: {why})")


def test_sizes_that_are_known_at_run_time_are_left_to_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(9e-6)
    (made,) = contractions(tuned(monkeypatch, judge, layer, *LAYER, mode="symbolic"))
    assert judge.asked == 0 and "not measured: a size is known at run time only" in made.reason


def test_a_form_that_fails_is_atens_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(library: Any, generated: Any) -> tuple[float, float]:
        raise RuntimeError("no such instruction\nand more")

    compiled = tuned(monkeypatch, Judge(9e-6), layer, *LAYER, times=broken)
    (made,) = contractions(compiled)
    assert not made.fused and made.reason.endswith("ATen, the form of ours fails (RuntimeError: no such instruction)")
    assert_as_eager(compiled, layer, *LAYER)


def test_convolutions_whose_sums_are_no_chain_keep_the_bits_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.conv2d(x, w),)

    for channels, count in ((128, 1), (144, 0)):
        image = torch.randn(1, channels, 8, 8).contiguous(memory_format=torch.channels_last)
        judge = Judge(9e-6)
        compiled = tuned(monkeypatch, judge, points, image, torch.randn(32, channels, 1, 1))
        assert judge.asked == count and contractions(compiled)[0].fused == bool(count)


@pytest.mark.parametrize(
    "options", [{"tune": False}, {"contractions": "aten"}, {"contractions": "generated"}, {"processor": "interpreter"}]
)
def test_nothing_is_measured_where_nothing_is_to_choose(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    judge = Judge(9e-6)
    tuned(monkeypatch, judge, layer, *LAYER, options=options)
    assert judge.asked == 0 and not judge.programs


def test_what_takes_most_with_all_its_equals_is_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def growing(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(aten.mm(x, w) for w in weights)

    args = torch.randn(64, 64), *(torch.randn(64, columns) for columns in (64, 512, 256, 256, 256))
    judge = Judge(9e-6)
    tuned(monkeypatch, judge, growing, *args)
    columns = [program.buffer(program.outputs[0].name).sizes[1].constant for program, _ in judge.programs]  # type: ignore[union-attr]
    assert columns == [256, 256, 256, 512, 64] and judge.asked == 3


def test_measuring_leaves_the_generator_alone_and_works_within_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_fx(layer, tracing_mode="fake")(*LAYER)
    before = torch.get_rng_state()
    judge = Judge(9e-6)
    monkeypatch.setattr(measured, "MeasuredRace", judge.race)
    with FakeTensorMode(), torch.autocast("cpu"):
        compiled = compile_graph(graph, options=LowerOptions(tune=True, processor=LEVEL))
    assert judge.asked == 1 and torch.equal(torch.get_rng_state(), before)
    assert isinstance(compiled, CompiledGraph)
    assert_as_eager(compiled, layer, *LAYER)


def test_masks_of_made_up_operands_hide_nothing() -> None:
    """Of what is hidden nothing is computed, so kernels would seem fast."""
    size = (to_expr(3), to_expr(4)), (to_expr(5), to_expr(1))
    for dtype, sums in (("bool", 12), ("int64", 0)):
        made = measured._example(Buffer("b", dtype, *size, BufferKind.INPUT), torch.Generator())
        assert made.stride() == (5, 1) and made.sum() == sums


def test_calls_are_timed_in_turns() -> None:
    calls: list[str] = []
    times = time_in_turns(lambda: calls.append("library"), lambda: calls.append("generated"))
    assert all(0 <= seconds < 1 for seconds in times)
    changes = sum(one != other for one, other in pairwise(calls))
    assert calls[:2] == ["library", "generated"] and changes >= 5 and min(map(calls.count, set(calls))) > 5
