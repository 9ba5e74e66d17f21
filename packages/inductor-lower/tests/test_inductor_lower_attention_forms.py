"""Attention as kernels in the forms that ATen's call lacks: shared heads, bytes, dropout, gradients of scores."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.ir import ExternCall, Program
from aotkit_inductor_lower.ir.interpret import interpret_program
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.ir.walk import buffers_of
from aotkit_inductor_lower.lowering.attention import attention_of
from aotkit_inductor_lower.lowering.graph import lower_graph

_spec = importlib.util.spec_from_file_location("tile_kernels", Path(__file__).with_name("tile_kernels.py"))
tile_kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tile_kernels)
generated, needs_blocks, watched = tile_kernels.generated, tile_kernels.needs_blocks, tile_kernels.watched
ops = torch.ops.aotkit_lower
INFINITY = float("inf")
TYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """An attention: batch, heads, heads of keys, queries, keys, numbers of a head; along which dimensions the masks
    vary, if there are any; and whether the gradients of scores are asked for."""

    sizes: tuple[int, int, int, int, int, int]
    added: str = ""
    seen: str = ""
    kept: bool = False
    causal: bool = False
    hidden: float = -INFINITY
    replaces: bool = False
    zero_empty: bool = False
    scores: bool = False
    layout: str = "projection"
    scale: float = 0.3
    window: int = 0
    cap: float = 0.0

    def operands(self, dtype: torch.dtype) -> list[torch.Tensor]:
        _, heads, shared, queries, keys, _ = self.sizes
        found = [self.lines(heads, queries, dtype), self.lines(shared, keys, dtype), self.lines(shared, keys, dtype)]
        if self.added:
            found.append(self.mask(self.added, torch.randn).to(dtype))
        if self.seen:
            seen = self.mask(self.seen, torch.rand) < 0.7
            seen[..., 0] = True
            found.append(seen)
        if self.kept:
            found.append(self.mask("bhij", torch.rand) < 0.9)
        return found

    def mask(self, over: str, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        batch, heads, _, queries, keys, _ = self.sizes
        whole = dict(zip("bhij", (batch, heads, queries, keys), strict=True))
        return make(*(size if name in over else 1 for name, size in whole.items()))

    def lines(self, heads: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        batch, width = self.sizes[0], self.sizes[-1]
        if self.layout == "contiguous":
            return torch.randn(batch, heads, length, width, dtype=dtype)
        whole = torch.randn(batch, length, 2, heads, width, dtype=dtype)
        return whole[:, :, 1].transpose(1, 2)

    def split(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The masks in the order of the operator's arguments."""
        left = list(tensors)
        return tuple(left.pop(0) if there else None for there in (self.added, self.seen, self.kept))

    @property
    def settings(self) -> tuple[float, float, bool, float, bool]:
        return self.scale, self.hidden, self.replaces, 1 / 0.9, self.causal

    @property
    def rest(self) -> tuple[float, ...]:
        """What is behind all others."""
        return (self.window, self.cap) if self.window or self.cap else ()


def forward(case: Case) -> Callable[..., Any]:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> Any:
        return ops.attention(q, k, v, *case.split(masks), *case.settings, case.zero_empty, *case.rest)

    return program


def backward(case: Case) -> Callable[..., Any]:
    call = ops.attention_backward.with_scores if case.scores else ops.attention_backward.default

    def program(*tensors: torch.Tensor) -> Any:
        return call(*tensors[:7], *case.split(tensors[7:]), *case.settings, case.scale, *case.rest)

    return program


def written_out(case: Case, args: Sequence[torch.Tensor], gradient: torch.Tensor, dtype: torch.dtype) -> list[Any]:
    """Result and gradients as eager computes them in a type."""
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in args[:3])
    added, seen, kept = case.split(args[3:])
    times = case.sizes[1] // case.sizes[2]
    scores = q @ k.repeat_interleave(times, 1).mT * case.scale
    scores = case.cap * (scores / case.cap).tanh() if case.cap else scores
    bias = torch.zeros_like(scores) if added is None else added.to(dtype).expand_as(scores)
    bias = bias.detach().requires_grad_()
    products = None
    scores = scores + (bias if seen is None or case.replaces else torch.where(seen, bias, case.hidden))
    if seen is not None and case.replaces:
        scores = torch.where(seen, products := scores, case.hidden)
    if case.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -INFINITY)
    if case.window:
        far = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-case.window)
        scores = scores.masked_fill(far, -INFINITY)
    if case.zero_empty:
        empty = (scores == -INFINITY).all(-1, keepdim=True)
        weights = torch.where(empty, 0.0, torch.where(empty, 0.0, scores).softmax(-1))
    else:
        weights = scores.softmax(-1)
    if kept is not None:
        weights = weights * (kept.to(dtype) / 0.9)
    out = weights @ v.repeat_interleave(times, 1)
    wanted = [q, k, v, scores if products is None else products]
    grads = torch.autograd.grad(out, wanted, gradient.to(dtype))
    return [out.detach(), *grads][: 5 if case.scores else 4]


def computed(case: Case, args: list[torch.Tensor], gradient: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    ahead = watched(generated(forward(case), args, **options), args)
    whole = [gradient, *args[:3], *ahead, *args[3:]]
    return [ahead[0], *watched(generated(backward(case), whole, **options), whole)]


def off(got: torch.Tensor, true: torch.Tensor) -> float:
    return ((got.double() - true).norm() / true.norm().clamp(min=1e-300)).item()


def check(case: Case, dtype: torch.dtype, **options: Any) -> None:
    torch.manual_seed(1)
    args = case.operands(dtype)
    gradient = case.lines(case.sizes[1], case.sizes[3], dtype)
    got = computed(case, args, gradient, **options)
    eager, true = (written_out(case, args, gradient, kind) for kind in (dtype, torch.float64))
    assert [t.dtype for t in got] == [dtype] * 4 + [torch.float32] * case.scores
    for own, want, right in zip(got, eager, true, strict=True):
        assert own.shape == right.shape
        assert off(own, right) <= 3 * (off(want, right) + 2e-6)


CASES = [
    Case((2, 4, 2, 70, 70, 64), causal=True),
    Case((1, 6, 1, 40, 90, 32), layout="contiguous"),
    Case((1, 8, 2, 33, 50, 128), seen="bij", zero_empty=True),
    Case((2, 4, 2, 65, 65, 24), added="hij", kept=True, scores=True),
    Case((2, 3, 3, 70, 77, 64), seen="bj", hidden=torch.finfo(torch.float32).min),
    Case((1, 2, 2, 49, 49, 32), added="bhij", scores=True),
    Case((2, 2, 2, 64, 64, 64), kept=True),
    Case((1, 4, 2, 70, 60, 32), seen="ij", replaces=True, hidden=-1e9),
    Case((1, 2, 2, 70, 60, 32), seen="bij", added="hij", kept=True, replaces=True, scores=True),
    Case((1, 2, 2, 130, 530, 40), kept=True, causal=True, seen="ij"),
    Case((1, 3, 3, 150, 1100, 80), kept=True, added="bij", seen="bhij"),
    Case((1, 2, 1, 600, 600, 32), kept=True, causal=True),
    Case((1, 2, 2, 90, 70, 96), causal=True, scores=True),
    Case((1, 4, 2, 37, 41, 3), kept=True, seen="bij"),
    Case((1, 4, 4, 17, 35, 7), added="ij", scores=True, kept=True),
    Case((1, 2, 1, 50, 33, 256), kept=True, layout="contiguous"),
]


@pytest.mark.sample(ways=1)
@needs_blocks
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_as_exact_as_eager(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("processor", tile_kernels.LEVELS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", [CASES[3], CASES[8], CASES[11], CASES[12], CASES[14]], ids=str)
def test_on_vectors_without_tile_registers(case: Case, dtype: torch.dtype, processor: str) -> None:
    """Also where this processor has some, and of another length than its own."""
    check(case, dtype, processor=processor)


@needs_blocks
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("zero", [True, False], ids=["zero", "nan"])
def test_a_query_that_sees_nothing(zero: bool, dtype: torch.dtype) -> None:
    """Is nan, and so are the gradients of all keys of its head; or is 0, and has none."""
    case = Case((1, 2, 2, 40, 50, 32), seen="hij", kept=True, zero_empty=zero, scores=True)
    args = case.operands(dtype)
    args[3][:, 1, 5] = False
    gradient = case.lines(2, 40, dtype)
    got, true = computed(case, args, gradient), written_out(case, args, gradient, torch.float64)
    for own, right in zip(got, true, strict=True):
        assert torch.equal(own.isnan(), right.isnan())
        torch.testing.assert_close(
            own.double(), right, rtol=3e-2, atol=3e-2 if dtype is torch.bfloat16 else 1e-5, equal_nan=True
        )


@needs_blocks
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_hidden_by_the_smallest_number_is_not_hidden_from_who_sees_nothing_else(dtype: torch.dtype) -> None:
    """All weights of such a query are equal: their sum is not lost beside the large score, and keys that are no more
    than padding of a tile have none."""
    case = Case((1, 2, 2, 40, 50, 32), seen="ij", hidden=torch.finfo(dtype).min)
    args = case.operands(dtype)
    args[3][:, :, 5] = False
    gradient = case.lines(2, 40, dtype)
    got = computed(case, args, gradient)
    eager, true = (written_out(case, args, gradient, kind) for kind in (dtype, torch.float64))
    for own, want, right in zip(got, eager, true, strict=True):
        assert own.isfinite().all() and off(own, right) <= 3 * (off(want, right) + 2e-6)


@needs_blocks
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_scores_far_below_zero(dtype: torch.dtype) -> None:
    """Keys that fill up a tile have a score of 0, and no weight."""
    case = Case((1, 1, 1, 40, 41, 32), layout="contiguous", scale=8.0)
    args = case.operands(dtype)
    args[0], args[1] = args[0].abs() + 1, -args[1].abs() - 1
    gradient = case.lines(1, 40, dtype)
    got = computed(case, args, gradient)
    eager, true = (written_out(case, args, gradient, kind) for kind in (dtype, torch.float64))
    for own, want, right in zip(got, eager, true, strict=True):
        assert own.isfinite().all() and off(own, right) <= 3 * (off(want, right) + 2e-6)


@needs_blocks
def test_scores_far_below_zero_in_atens_call() -> None:
    """They were infinite weights of those keys, and nan in the gradients."""
    case = Case((1, 1, 1, 40, 41, 32), layout="contiguous")
    q, k, v = case.operands(torch.float32)
    q, k = q.abs() + 1, -k.abs() - 1
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, sums = flash(q, k, v, 0.0, False, scale=8.0)

    def program(*tensors: torch.Tensor) -> Any:
        return gradients(*tensors, 0.0, False, scale=8.0)

    args = [torch.randn_like(out), q, k, v, out, sums]
    got, want = watched(generated(program, args), args), program(*args)
    assert all(gradient.isfinite().all() for gradient in got)
    assert off(got[2], want[2].double()) <= 1e-4  # the others cancel


@needs_blocks
@pytest.mark.parametrize("value", [math.nan, INFINITY, -INFINITY, 1e38, 1e-41], ids=str)
def test_special_numbers(value: float) -> None:
    """Become what they are in float64, with gradients of scores written over nothing that is still read. (Gradients
    that cancel are rounding errors times 1e38: only the result is compared there.)"""
    case = Case((1, 4, 2, 40, 50, 32), added="bhij", kept=True, scores=True, layout="contiguous")
    plain = case.operands(torch.float32)
    gradient = case.lines(4, 40, torch.float32)
    ahead = generated(forward(case), plain)
    whole = [gradient, *plain[:3], *forward(case)(*plain), *plain[3:]]
    back = generated(backward(case), whole)
    for place in range(4):
        args = [tensor.clone() for tensor in plain]
        g = gradient.clone()
        [*args[:3], g][place][0, 1, 13, 5] = value
        first = watched(ahead, args)
        got = [first[0], *watched(back, [g, *args[:3], *first, *args[3:]])]
        eager, true = (written_out(case, args, g, kind) for kind in (torch.float32, torch.float64))
        for own, want, right in list(zip(got, eager, true, strict=True))[: 1 if value == 1e38 else None]:
            some = right.float().isfinite()
            assert torch.equal(own.isfinite(), some)
            assert off(own[some], right[some]) <= 3 * (off(want[some], right[some]) + 2e-6)


@needs_blocks
@pytest.mark.parametrize("value", [math.nan, INFINITY, -INFINITY], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_special_numbers_in_the_mask(value: float, dtype: torch.dtype) -> None:
    case = Case((1, 2, 2, 40, 50, 32), added="bhij", kept=True, scores=True)
    args = case.operands(dtype)
    args[3][0, 1, 7, 9] = value
    gradient = case.lines(2, 40, dtype)
    got, true = computed(case, args, gradient), written_out(case, args, gradient, torch.float64)
    for own, right in zip(got, true, strict=True):
        assert torch.equal(own.isfinite(), right.isfinite())


@needs_blocks
@pytest.mark.parametrize("layout", ["projection", "contiguous"])
def test_gradients_of_shared_heads_do_not_depend_on_how_they_lie(layout: str) -> None:
    """Queries of heads that share keys may lie so that two loops become one."""
    for case in (Case((1, 4, 1, 64, 64, 32), layout=layout), Case((2, 4, 2, 40, 40, 32), layout=layout, seen="bj")):
        check(case, torch.float32)


# -- what a nest means ------------------------------------------------------------------------------------

SMALL = [
    Case((1, 4, 2, 5, 7, 3), added="hij", seen="bij", kept=True, scores=True, hidden=-3.0),
    Case((2, 2, 2, 6, 6, 4), seen="ij", causal=True, zero_empty=True),
    Case((1, 2, 1, 5, 4, 3), kept=True, causal=True, scores=True),
    Case((1, 2, 1, 5, 4, 3), seen="ij", replaces=True, scores=True),
    Case((1, 2, 2, 5, 4, 3), seen="bij", replaces=True, added="ij"),
]


def nest_of(program: Callable[..., Any], args: list[torch.Tensor]) -> Program:
    """Its only step as a nest."""
    lowered = lower_graph(make_fx(program, tracing_mode="fake")(*args))
    (call,) = lowered.steps
    assert isinstance(call, ExternCall)
    attention = attention_of(call, buffers_of(lowered), "cpu")
    assert attention is not None
    nest, scratch = attention.nest("highest")
    made = Program(lowered.name, lowered.inputs, (*lowered.buffers, *scratch), (nest,), lowered.outputs)
    verify_program(made)
    assert parse_program(print_program(made)) == made
    return made


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_its_nest_means_what_the_operator_does(case: Case, dtype: torch.dtype) -> None:
    tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-6
    args = case.operands(dtype)
    ahead = forward(case)(*args)
    whole = [case.lines(case.sizes[1], case.sizes[3], dtype), *args[:3], *ahead, *args[3:]]
    for program, given in ((forward(case), args), (backward(case), whole)):
        got, want = interpret_program(nest_of(program, given), given), program(*given)
        for x, y in zip(got, want, strict=True):
            assert isinstance(x, torch.Tensor)
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_operator_alone_is_what_eager_computes(case: Case) -> None:
    """Where no kernel takes it, it runs as it is."""
    args = case.operands(torch.float32)
    gradient = case.lines(case.sizes[1], case.sizes[3], torch.float32)
    case = replace(case, zero_empty=False)
    graph = make_fx(forward(case), tracing_mode="fake")(*args)
    compiled = compile_graph(graph, options=LowerOptions(contractions="aten"))
    assert isinstance(compiled, CompiledGraph) and len(compiled.report().externs) == 1
    ahead = compiled(list(args))
    back = backward(case)(gradient, *args[:3], *ahead, *args[3:])
    for own, right in zip([ahead[0], *back], written_out(case, args, gradient, torch.float64), strict=True):
        torch.testing.assert_close(own.double(), right, rtol=1e-5, atol=1e-5)
