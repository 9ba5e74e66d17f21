"""Convolutions and their gradients as contractions: what they mean, who computes them, and ATen's call as it was."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
    print_program,
)
from aotkit_inductor_lower.driver import schedule
from aotkit_inductor_lower.ir import Contraction, ExternCall, Literal, Program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.ir.walk import buffers_of, contractions, loads
from aotkit_inductor_lower.loop_passes.choose_contractions import choose_contractions
from aotkit_inductor_lower.lowering.convolutions import convolution_parts
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.targets.cpu.machine import generic_machine
from aotkit_inductor_lower.targets.cpu.target import target_of

aten = torch.ops.aten
V4, V3 = target_of(generic_machine(512), "znver4"), target_of(generic_machine(256), "znver3")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Case:
    """A convolution: sizes of image and weights, and how it slides."""

    image: tuple[int, ...]
    weights: tuple[int, ...]
    stride: Sequence[int]
    pad: Sequence[int]
    dilation: Sequence[int]
    transposed: bool = False
    output_pad: Sequence[int] = ()
    groups: int = 1
    bias: bool = True
    dtype: torch.dtype = torch.float32
    last: bool = False
    mask: Sequence[bool] = field(default=(True, True, True))

    @property
    def how(self) -> tuple[Any, ...]:
        """The arguments behind the tensors."""
        output_pad = list(self.output_pad or [0] * len(self.stride))
        return list(self.stride), list(self.pad), list(self.dilation), self.transposed, output_pad, self.groups

    @property
    def channels(self) -> int:
        """Of the result."""
        return self.weights[1] * self.groups if self.transposed else self.weights[0]

    def tensors(self) -> list[torch.Tensor]:
        """Image, weights and bias."""
        g = torch.Generator().manual_seed(sum(self.image))
        sizes = (self.image, self.weights, *([(self.channels,)] if self.bias else []))
        x, *others = [torch.randn(size, generator=g, dtype=torch.float64).to(self.dtype) for size in sizes]
        if self.last and x.dim() == 3:
            return [x.mT.contiguous().mT, *others]
        return [x.contiguous(memory_format=torch.channels_last) if self.last else x, *others]

    def forward(self, x: torch.Tensor, w: torch.Tensor, *bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The convolution."""
        return (aten.convolution(x, w, bias[0] if bias else None, *self.how),)

    def backward(self, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Its gradients, those of them that are wanted."""
        found = aten.convolution_backward(grad, x, w, [self.channels], *self.how, list(self.mask))
        return tuple(result for result, wanted in zip(found, self.mask, strict=True) if wanted)

    def graphs(self) -> list[tuple[Callable[..., tuple[torch.Tensor, ...]], list[torch.Tensor]]]:
        """Both, with arguments."""
        x, w, *bias = self.tensors()
        (result,) = self.forward(x, w, *bias)
        grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grad = torch.empty_like(result).copy_(grad)
        # tracing counts the parameters of methods wrong
        return [(lambda *a: self.forward(*a), [x, w, *bias]), (lambda *a: self.backward(*a), [grad, x, w])]


CASES = {
    "plain": Case((2, 3, 7, 6), (5, 3, 3, 2), (1, 1), (0, 0), (1, 1)),
    "padded": Case((1, 2, 5, 6), (3, 2, 3, 3), (1, 1), (1, 2), (1, 1), last=True),
    "strided": Case((2, 2, 8, 7), (3, 2, 3, 3), (2, 3), (1, 0), (1, 1)),
    "strided more than it has taps": Case((1, 2, 8, 9), (3, 2, 1, 2), (2, 3), (0, 1), (1, 1), last=True),
    "dilated": Case((1, 2, 9, 9), (2, 2, 3, 2), (1, 1), (2, 1), (2, 3), bias=False),
    "strided and dilated": Case((1, 2, 11, 9), (2, 2, 3, 3), (2, 4), (2, 3), (3, 2)),
    "in groups": Case((2, 6, 5, 5), (4, 3, 3, 3), (1, 2), (1, 1), (1, 1), groups=2),
    "depthwise": Case((2, 5, 6, 7), (5, 1, 3, 3), (1, 1), (1, 1), (1, 1), groups=5, last=True),
    "depthwise, strided": Case((2, 5, 6, 7), (5, 1, 3, 3), (2, 2), (1, 1), (1, 1), groups=5, last=True),
    "depthwise, twice as many": Case((2, 3, 6, 7), (6, 1, 3, 3), (1, 1), (1, 1), (1, 1), groups=3),
    "of points": Case((2, 4, 5, 6), (3, 4, 1, 1), (1, 1), (0, 0), (1, 1), last=True),
    "of one place": Case((2, 4, 3, 3), (3, 4, 3, 3), (1, 1), (0, 0), (1, 1)),
    "of no images": Case((0, 4, 3, 3), (3, 4, 3, 3), (1, 1), (1, 1), (1, 1)),
    "transposed": Case((2, 3, 4, 5), (3, 4, 3, 3), (1, 1), (1, 0), (1, 2), transposed=True),
    "transposed, strided": Case((1, 3, 4, 5), (3, 2, 3, 2), (2, 3), (1, 0), (1, 1), True, (1, 0)),
    "transposed, in groups": Case((1, 4, 4, 5), (4, 3, 3, 3), (2, 2), (1, 1), (1, 1), True, (1, 1), groups=2),
    "of a row": Case((2, 3, 9), (4, 3, 3), (2,), (1,), (2,)),
    "of a volume": Case((1, 2, 4, 5, 3), (3, 2, 2, 3, 1), (1, 2, 1), (0, 1, 0), (1, 1, 1)),
    "of bfloat16": Case((2, 3, 7, 6), (5, 3, 3, 2), (1, 1), (1, 0), (1, 1), dtype=torch.bfloat16),
    "of float16": Case((2, 3, 7, 6), (5, 3, 3, 2), (1, 1), (1, 0), (1, 1), dtype=torch.float16),
    "of float64": Case((2, 3, 7, 6), (5, 3, 3, 2), (1, 1), (1, 0), (1, 1), dtype=torch.float64, last=True),
}


def lowered(f: Callable[..., Any], args: list[Any], mode: str = "fake") -> Program:
    program = lower_graph(make_fx(f, tracing_mode=mode)(*args))
    verify_program(program)
    assert parse_program(print_program(program)) == program
    return program


def taken_apart(program: Program) -> Program | None:
    """The program with the parts that a convolution's results are for its call; ``None`` if there is no such part."""
    steps: list[Any] = []
    for step in program.steps:
        call = step.library if isinstance(step, Contraction) else step
        parts = convolution_parts(call, buffers_of(program)) if isinstance(call, ExternCall) else {}
        if isinstance(call, ExternCall) and len(parts) < sum(name is not None for name in call.results):
            return None
        steps += [part for number in parts for part in parts[number]] or [step]
    return replace(program, steps=tuple(steps))


def assert_results(case: Case, f: Callable[..., Any], args: list[torch.Tensor], results: Sequence[Any]) -> None:
    """That results are what float64 says, laid out as eager's."""
    true, eager = f(*(t.double() for t in args)), f(*args)
    assert len(results) == len(true)
    for got, want, laid_out in zip(results, true, eager, strict=True):
        assert isinstance(got, torch.Tensor) and got.dtype is case.dtype and got.shape == want.shape
        steps = zip(got.shape, got.stride(), laid_out.stride(), strict=True)
        assert all(a == b for size, a, b in steps if size != 1) or not got.numel()
        bound = TOLERANCE[case.dtype] * (float(want.abs().max()) if want.numel() else 1.0)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=max(bound, TOLERANCE[case.dtype]))


@pytest.mark.parametrize("name", CASES)
def test_parts_of_a_convolution_give_what_aten_gives(name: str) -> None:
    case = CASES[name]
    for f, args in case.graphs():
        program = taken_apart(lowered(f, args))
        assert program is not None and not any(isinstance(step, ExternCall) for step in program.steps)
        verify_program(program)
        assert parse_program(print_program(program)) == program
        assert_results(case, f, args, interpret_program(program, args))


def drawn(seed: int) -> Case:
    """A random convolution."""
    rng = random.Random(seed)
    dims, groups = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 2, 3))
    transposed = rng.random() < 0.3
    inside, outside = groups * rng.choice((1, 2)), groups * rng.choice((1, 3))

    def each(*of: int) -> tuple[int, ...]:
        return tuple(rng.choice(of) for _ in range(dims))

    taps, stride, dilation = each(1, 2, 3), each(1, 2, 3), each(1, 1, 2, 3)
    weights = (inside, outside // groups) if transposed else (outside, inside // groups)
    output_pad = tuple(rng.randrange(max(both)) if transposed else 0 for both in zip(stride, dilation, strict=True))
    dtype = rng.choice((torch.float32, torch.float64))
    mask = rng.choice([(True, True, True), (True, False, True), (False, True, True), (False, True, False)])
    bias, last = rng.random() < 0.5, dims == 2 and rng.random() < 0.5
    size = (rng.choice((1, 2)), inside, *each(5, 6, 7, 8))
    how = stride, each(0, 1, 2), dilation, transposed, output_pad, groups, bias, dtype, last, mask
    return Case(size, (*weights, *taps), *how)


def fits(case: Case) -> bool:
    """Whether eager takes it."""
    try:
        (result,) = case.forward(*(torch.empty_like(t, dtype=torch.float64) for t in case.tensors()))
    except RuntimeError:
        return False
    return result.numel() > 0


@pytest.mark.sample(9)
@pytest.mark.parametrize("seed", range(18))
def test_random_convolutions_are_what_their_parts_say(seed: int) -> None:
    case = drawn(seed)
    mode = "symbolic" if seed % 2 else "fake"
    for f, args in case.graphs() if fits(case) else []:
        whole = lowered(f, args, mode)
        program = taken_apart(whole)
        if program is not None:
            verify_program(program)
            assert_results(case, f, args, interpret_program(program, args))
        else:  # how many parts there are depends on a size that is not known
            assert mode == "symbolic" and max(case.stride) > 1
        if seed % 3 == 0:
            options = LowerOptions(contractions="generated", verify=True, redzones=seed % 2 == 0)
            graph = compile_graph(make_fx(f, tracing_mode=mode)(*args), options=options)
            assert isinstance(graph, CompiledGraph)
            assert (not graph.report().externs) == (program is not None)
            assert_results(case, f, args, graph(list(args)))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("name", ["padded", "depthwise", "depthwise, strided", "strided", "of points", "of bfloat16"])
@pytest.mark.parametrize("processor", ["host", "x86-64-v3"])
def test_generated_kernels_of_convolutions(name: str, processor: Any) -> None:
    case = CASES[name]
    for f, args in case.graphs():
        options = LowerOptions(contractions="generated", redzones=True, processor=processor)
        graph = compile_graph(make_fx(f, tracing_mode="fake")(*args), options=options)
        assert isinstance(graph, CompiledGraph) and not graph.report().externs
        assert_results(case, f, args, graph(list(args)))


def pointwise(channels: int, results: int, last: bool, size: tuple[int, int] = (9, 11)) -> Case:
    return Case((2, channels, *size), (results, channels, 1, 1), (1, 1), (0, 0), (1, 1), bias=False, last=last)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("channels", "results"), [(4, 8), (17, 10), (128, 31), (16, 64), (33, 130)])
def test_convolutions_of_one_tap_are_sums_in_onednns_order_and_right_gradients(
    channels: int, results: int, last: bool
) -> None:
    case = pointwise(channels, results, last)
    for backward, (f, args) in enumerate(case.graphs()):
        options = LowerOptions(contractions="generated", redzones=True)
        graph = compile_graph(make_fx(f)(*args), options=options)
        assert isinstance(graph, CompiledGraph) and not graph.report().externs
        got = graph(list(args))
        assert_results(case, f, args, got)
        if not backward and not graph.compiled.binary.facts.get("tiles"):  # which have an order of their own
            x, w = args
            total = torch.zeros(())
            for channel in range(channels):
                seen, weight = x[:, channel, None].double(), w[:, channel, 0, 0].double()[:, None, None]
                total = (seen * weight + total.double()).float()
            assert torch.equal(got[0], total)


# -- who computes what -----------------------------------------------------------------------------------


def summed_in_order(case: Case, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A depthwise convolution by fused multiplications and additions of float32, tap after tap, a row of taps after the
    other. Products of float32 are exact in float64, so one rounding is left in each step."""
    (rows, columns), (stride, _), (top, left) = case.weights[2:], case.stride, case.pad
    padded = torch.nn.functional.pad(x, (left, left, top, top))
    height, width = ((size - taps) // stride + 1 for size, taps in zip(padded.shape[2:], (rows, columns), strict=True))
    total = torch.zeros(())
    for row in range(rows):
        for column in range(columns):
            seen = padded[:, :, row:, column:][:, :, ::stride, ::stride][:, :, :height, :width]
            total = (seen.double() * w[:, 0, row, column].double()[:, None, None] + total.double()).float()
    return total


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("taps", "pad"), [((3, 3), (1, 1)), ((3, 3), (0, 0)), ((2, 4), (0, 1)), ((1, 9), (0, 4))])
def test_taps_of_a_depthwise_convolution_are_added_in_onednns_order(
    taps: tuple[int, int], pad: tuple[int, int], stride: int, last: bool
) -> None:
    case = Case((2, 24, 11, 19), (24, 1, *taps), (stride,) * 2, pad, (1, 1), groups=24, bias=False, last=last)
    (forward, args), _ = case.graphs()
    for processor in ("host", "x86-64-v3"):
        options = LowerOptions(contractions="generated", processor=processor)
        (got,) = compile_graph(make_fx(forward)(*args), options=options)(list(args))
        assert torch.equal(got, summed_in_order(case, *args))


def depthwise(taps: int = 3, channels: int = 32, last: bool = True) -> Case:
    sizes = (2, channels, 12, 12), (channels, 1, taps, taps)
    return Case(*sizes, (1, 1), (taps // 2,) * 2, (1, 1), groups=channels, last=last)


def chosen(case: Case, backward: bool, options: LowerOptions, target: Any = V4) -> tuple[Program, PassContext]:
    ctx = PassContext.of(options, target=target)
    f, args = case.graphs()[backward]
    return choose_contractions(lowered(f, args), ctx), ctx


def calls(program: Program) -> list[ExternCall]:
    return [step for step in program.steps if isinstance(step, ExternCall)]


def test_a_forward_convolution_is_a_contraction_with_atens_call_in_it() -> None:
    case = CASES["padded"]
    (f, args), backward = case.graphs()
    (product,) = contractions(lowered(f, args))
    assert product.library is not None and product.library.target == "aten.convolution.default"
    letters = "".join(loop.symbol[0] for loop in (*product.outer, *product.reduced))
    assert letters == "nyyokkc" and len(product.columns) == 1
    assert not contractions(lowered(*backward))


@pytest.mark.parametrize("contractions_", ["aten", "auto"])
@pytest.mark.parametrize("backward", [False, True])
def test_what_is_left_to_aten_is_its_call_as_it_was(contractions_: Any, backward: bool) -> None:
    f, args = CASES["strided"].graphs()[backward]

    def with_more(*args: torch.Tensor) -> list[torch.Tensor]:
        return [t + 1 for t in f(*(a * 2 for a in args))]

    program = lowered(with_more, args)
    (wanted,) = calls(program) or [c.library for c in contractions(program)]
    after = schedule(program, PassContext.of(LowerOptions(contractions=contractions_), target=V4))
    assert calls(after) == [wanted] and not contractions(after)
    before = replace(program, steps=tuple(wanted if isinstance(s, Contraction) else s for s in program.steps))
    assert after == schedule(before, PassContext.of(LowerOptions(), target=V4))


def test_depthwise_convolutions_are_kernels_where_they_are_faster() -> None:
    for last in (True, False):
        after, ctx = chosen(depthwise(last=last), False, LowerOptions())
        assert not calls(after)
        (decision,) = [d for d in ctx.decisions if d.kind == "contraction"]
        assert decision.fused and "depthwise" in decision.reason
    for case, target, options in (
        (depthwise(), V4, LowerOptions(contractions="aten")),
        (depthwise(), V4, LowerOptions(fuel=0)),
        (depthwise(channels=16), V3, LowerOptions()),
        (depthwise(taps=7), V4, LowerOptions()),
        (replace(depthwise(), dtype=torch.bfloat16), V4, LowerOptions()),
        (replace(depthwise(last=False), stride=(2, 2)), V4, LowerOptions()),
        (CASES["in groups"], V4, LowerOptions()),
    ):
        after, _ = chosen(case, False, options, target)
        assert [call.target for call in calls(after)] == ["aten.convolution.default"]


def test_depthwise_convolutions_of_bfloat16_are_kernels_on_amds_processors() -> None:
    pairs = replace(V4.machine, features=f"{V4.machine.features},+avx512bf16")
    amd = replace(V4, machine=pairs, processor="znver4")
    few, many = replace(depthwise(), dtype=torch.bfloat16), replace(depthwise(taps=7), dtype=torch.bfloat16)
    strided = replace(depthwise(last=False), dtype=torch.bfloat16, stride=(2, 2))
    for case, backward, target, left in (
        (few, False, amd, []),
        (few, True, amd, []),
        (few, False, replace(amd, processor="sapphirerapids"), [True]),
        (few, False, replace(V4, processor="znver4"), [True]),  # which converts by several instructions
        (replace(few, last=False, image=(2, 32, 24, 24), stride=(2, 2)), False, amd, []),
        (many, False, amd, [True]),
        (many, True, amd, [True, False, False]),
        (strided, True, amd, [False, True, True]),
        (replace(many, stride=(2, 2)), True, amd, []),
    ):
        after, _ = chosen(case, backward, LowerOptions(), target)
        assert [result is not None for call in calls(after) for result in call.results] == left
        if backward:
            f, args = case.graphs()[True]
            assert_results(case, f, args, interpret_program(after, args))


@pytest.mark.parametrize("last", [True, False])
def test_depthwise_convolutions_along_one_dimension_are_kernels_on_amds_processors(last: bool) -> None:
    amd = replace(V4, processor="znver4")
    four = Case((2, 24, 40), (24, 1, 4), (1,), (3,), (1,), groups=24, last=last)
    nine = replace(four, weights=(24, 1, 9))
    strided = replace(four, stride=(2,))
    for case, backward, target, left in (
        (four, False, amd, []),
        (four, True, amd, []),
        (strided, True, amd, []),
        (nine, False, amd, [True] * last),
        (nine, True, amd, []),
        (replace(nine, weights=(24, 1, 10)), True, amd, [True, True, True]),
        (four, False, replace(V4, processor="skylake-avx512"), [True]),
    ):
        after, _ = chosen(case, backward, LowerOptions(), target)
        assert [result is not None for call in calls(after) for result in call.results] == left
        if target is amd:
            f, args = case.graphs()[backward]
            assert_results(case, f, args, interpret_program(after, args))
            options = LowerOptions(contractions="generated", redzones=True)
            assert_results(case, f, args, compile_graph(make_fx(f)(*args), options=options)(list(args)))


def test_depthwise_convolutions_are_kernels_on_amds_processors_with_short_vectors() -> None:
    """Wide ones, or of long rows, of few taps, and of bfloat16, for which ATen has no vectors there, more."""
    wide, apart = depthwise(channels=32), depthwise(channels=64, last=False)
    rows = replace(apart, image=(2, 64, 12, 14))
    halved = replace(rows, image=(2, 64, 12, 28), stride=(2, 2))
    many, large = depthwise(taps=7), replace(depthwise(taps=7), image=(1, 32, 17, 16))
    line = Case((2, 24, 40), (24, 1, 4), (1,), (3,), (1,), groups=24)
    narrow = replace(depthwise(taps=7), dtype=torch.bfloat16)
    deep = replace(depthwise(channels=512), image=(1, 512, 3, 14))
    deeper = replace(depthwise(channels=1024), image=(1, 1024, 3, 14))
    large_deep = replace(depthwise(channels=768), image=(1, 768, 19, 14))
    for case, backward, target, left in (
        (deep, False, V3, []),
        (deep, True, V3, [True, True, True]),
        (deep, True, V4, []),
        (replace(deep, image=(1, 512, 3, 13)), True, V3, [False, True, True]),
        (replace(deep, image=(1, 512, 19, 14)), True, V3, [False, True, True]),
        (replace(deep, dtype=torch.bfloat16), True, V3, []),
        (deeper, False, V3, [True]),
        (deeper, False, V4, []),
        (replace(deeper, image=(1, 1024, 3, 13)), False, V3, []),
        (replace(deeper, image=(1, 1056, 3, 14), weights=(1056, 1, 3, 3), groups=1056), False, V3, []),
        (large_deep, False, V3, [True]),
        (large_deep, True, V3, [True, True, True]),
        (replace(large_deep, image=(1, 768, 18, 14)), False, V3, []),
        (wide, False, V3, []),
        (wide, True, V3, [False, True, True]),
        (depthwise(channels=16), False, V3, [True]),
        (apart, False, V3, [True]),
        (rows, False, V3, []),
        (rows, True, V3, [False, True, True]),
        (halved, True, V3, [False, True, True]),
        (replace(halved, image=(2, 64, 12, 26)), True, V3, [True, True, True]),
        (many, True, V3, [True, False, False]),
        (large, True, V3, [True, True, True]),
        (replace(large, last=False), True, V3, [True, False, False]),
        (line, True, V3, []),
        (narrow, False, V3, []),
        (narrow, True, V3, []),
        (replace(narrow, last=False), True, V3, [True, True, True]),
        (replace(narrow, weights=(32, 1, 3, 3), last=False), False, V3, []),
        (wide, False, replace(V3, processor="haswell"), [True]),
        (narrow, False, replace(V3, processor="znver4"), [True]),  # ATen's are those of AVX-512 there
        (line, False, replace(V3, processor="znver4"), [True]),
        (wide, False, target_of(generic_machine(128), "znver3"), [True]),
    ):
        after, _ = chosen(case, backward, LowerOptions(), target)
        assert [result is not None for call in calls(after) for result in call.results] == left


@pytest.mark.parametrize("last", [True, False])
def test_convolutions_of_bfloat16_of_one_tap_are_products_where_aten_has_no_vectors_for_it(last: bool) -> None:
    case = replace(pointwise(192, 96, last, (16, 16)), dtype=torch.bfloat16)
    forward, _ = chosen(case, False, LowerOptions(), V3)
    backward, _ = chosen(case, True, LowerOptions(), V3)
    assert not calls(forward) and contractions(forward)
    (call,) = calls(backward)  # by the weights
    assert call.results[0] is None and call.results[1] is not None and contractions(backward)
    for number, program in enumerate((forward, backward)):
        f, args = case.graphs()[number]
        assert_results(case, f, args, interpret_program(program, args))
    for other in (replace(V3, processor="znver4"), V4, target_of(generic_machine(128), "znver3")):
        after, _ = chosen(case, False, LowerOptions(), other)
        assert calls(after)


def test_convolutions_of_one_tap_are_products_of_ours_on_amds_processors() -> None:
    amd = replace(V4, processor="znver4")
    for last in (True, False):
        forward, _ = chosen(pointwise(48, 96, last, (40, 40)), False, LowerOptions(), amd)
        backward, _ = chosen(pointwise(48, 96, last, (40, 40)), True, LowerOptions(), amd)
        assert not calls(forward) and contractions(forward)
        (call,) = calls(backward)  # by the weights
        assert call.results[0] is None and call.results[1] is not None and contractions(backward)
    for case, target, options in (
        (pointwise(48, 96, True, (40, 40)), replace(V4, processor="sapphirerapids"), LowerOptions()),
        (pointwise(48, 96, True, (40, 40)), replace(V3, processor="znver3"), LowerOptions()),
        (pointwise(48, 96, True, (40, 40)), amd, LowerOptions(contractions="aten")),
        (pointwise(48, 96, True, (4, 4)), amd, LowerOptions()),  # small
        (pointwise(192, 96, True, (40, 40)), amd, LowerOptions()),  # eager's sums are one chain
        (replace(pointwise(48, 96, True, (80, 80)), stride=(2, 2)), amd, LowerOptions()),
    ):
        after, _ = chosen(case, False, options, target)
        assert [call.target for call in calls(after)] == ["aten.convolution.default"]
    for last in (True, False):
        strided, _ = chosen(replace(pointwise(48, 96, last, (80, 80)), stride=(2, 2)), True, LowerOptions(), amd)
        (call,) = calls(strided)
        assert call.results[0] is not None and not contractions(strided)


def test_one_call_computes_the_gradients_that_are_left_to_aten() -> None:
    few, _ = chosen(depthwise(last=False), True, LowerOptions())
    (call,) = calls(few)  # by the weights, and with these by the bias
    assert call.results[0] is None and None not in call.results[1:]
    assert call.args[-1] == tuple(Literal("bool", wanted) for wanted in (False, True, True))
    many, _ = chosen(depthwise(taps=7), True, LowerOptions())
    (call,) = calls(many)
    assert call.results[1:] == (None, None) and call.results[0] is not None
    for program, case in ((few, depthwise(last=False)), (many, depthwise(taps=7))):
        f, args = case.graphs()[True]
        assert_results(case, f, args, interpret_program(program, args))


def test_results_of_one_call_and_later_calls_are_numbered_apart() -> None:
    """The second result of ``convolution_backward`` and the call of ``convolution_backward_1`` had one name."""

    def f(g: torch.Tensor, y: torch.Tensor, v: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
        how = ([1, 1], [0, 0], [1, 1], False, [0, 0])
        gy, gv, _ = aten.convolution_backward(g, y, v, None, *how, y.shape[1], [True, True, False])
        _, gw, _ = aten.convolution_backward(gy, x, w, None, *how, 1, [False, True, False])
        return gv, gw

    args = [torch.randn(size).contiguous(memory_format=torch.channels_last) for size in ((2, 8, 7, 6), (2, 8, 9, 8))]
    args += [torch.randn(8, 1, 3, 3), torch.randn(2, 3, 9, 8), torch.randn(8, 3, 1, 1)]
    program = lowered(f, args)
    made = choose_contractions(program, PassContext.of(LowerOptions(), None, V4))
    verify_program(made)
    assert len({step.name for step in made.steps}) == len(made.steps)
    assert any(step.name == "convolution_backward_1_apart" for step in made.steps)
    for got, want in zip(interpret_program(made, args), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_weights_of_a_tap_are_put_side_by_side_where_channels_are() -> None:
    for last in (True, False):
        after, _ = chosen(depthwise(last=last), False, LowerOptions())
        read = {
            load.buffer for step in after.steps for stage in getattr(step, "stages", ()) for load in loads(stage.body)
        }
        assert any(name.endswith("_weights") for name in read) == last


@pytest.mark.parametrize("last", [True, False])
def test_an_infinite_weight_meets_no_padding(last: bool) -> None:
    (f, (x, w, b)), _ = depthwise(last=last).graphs()
    w[3, 0, 0, 0], w[4, 0, 2, 1] = math.inf, math.nan
    graph = compile_graph(make_fx(f, tracing_mode="fake")(x, w, b), options=LowerOptions(contractions="generated"))
    assert isinstance(graph, CompiledGraph) and not graph.report().externs
    (got,), (want,) = graph([x, w, b]), f(x, w, b)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)
    if not last:
        return  # eager's gradients by weights do multiply what is padded there, and with channels together do not
    _, (f, (grad, x, w)) = depthwise(taps=7).graphs()
    grad[0, 5, 0, 0] = math.inf
    graph = compile_graph(make_fx(f, tracing_mode="fake")(grad, x, w), options=LowerOptions(contractions="generated"))
    for got, want in zip(graph([grad, x, w]), f(grad, x, w), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("last", [True, False])
def test_a_pad_before_a_depthwise_convolution_is_a_mask_of_what_it_reads(last: bool, stride: int) -> None:
    case = replace(depthwise(last=last), pad=(0, 0), stride=(stride, stride))
    how = case.how

    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(torch.nn.functional.silu(x), (0, 1, 2, 1))
        return aten.convolution(padded, w, None, *how)

    def backward(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padded = torch.nn.functional.pad(x, (0, 1, 2, 1))
        by_x, by_w, _ = aten.convolution_backward(grad, padded, w, None, *how, [True, True, False])
        return torch.nn.functional.pad(by_x, (0, -1, -2, -1)), by_w

    x, w, _ = case.tensors()
    w[3, 0, 2, 2] = math.inf  # times a zero that is padded
    grad = torch.randn_like(forward(x, w))
    for f, args in ((lambda *a: (forward(*a),), [x, w]), (backward, [grad, x, w])):
        options = LowerOptions(contractions="generated", verify=True)
        graph = compile_graph(make_fx(f, tracing_mode="fake")(*args), options=options)
        assert isinstance(graph, CompiledGraph) and not graph.report().externs
        for got, want in zip(graph(list(args)), f(*args), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-4)
        names = [b.name for b in graph.program.buffers]
        assert "constant_pad_nd" not in names and ("silu" in names or len(args) == 3)


def test_what_is_no_pad_is_not_read_through() -> None:
    case = replace(depthwise(), pad=(0, 0))
    x, w, _ = case.tensors()
    for before in (
        lambda x: torch.nn.functional.pad(x, (0, 1, 2, 1), value=1.0).exp(),
        lambda x: torch.nn.functional.pad(x, (0, 1, 2, 1)) * 2,
        lambda x: torch.nn.functional.pad(x, (1, 1, 1, 1), mode="replicate"),
        lambda x: torch.nn.functional.pad(x, (0, 1, 2, 1), value=3.0),
    ):

        def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (aten.convolution(before(x), w, None, *case.how),)  # noqa: B023

        options = LowerOptions(contractions="generated", verify=True)
        graph = compile_graph(make_fx(f, tracing_mode="fake")(x, w), options=options)
        torch.testing.assert_close(graph([x, w])[0], f(x, w)[0], rtol=1e-5, atol=1e-4)
