"""Attention as kernels: as exact as ATen's, both ways, for all sizes, layouts, masks, numbers and threads."""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.ir import Buffer, BufferKind, BufferRef, ExternCall, LoopNest, Program
from aotkit_inductor_lower.ir.interpret import interpret_program
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.ir.walk import buffers_of
from aotkit_inductor_lower.kernel_ir.attention_site import AttentionSite, Places, attention_site
from aotkit_inductor_lower.kernel_passes.normal_form import kernel_of
from aotkit_inductor_lower.lowering.attention import BACKWARD, FORWARD, attention_of
from aotkit_inductor_lower.lowering.graph import lower_graph
from aotkit_inductor_lower.target import Choice
from aotkit_inductor_lower.targets.cpu.choose_attention import choose_attention, computes_attention
from aotkit_inductor_lower.targets.cpu.machine import generic_machine

_spec = importlib.util.spec_from_file_location("tile_kernels", Path(__file__).with_name("tile_kernels.py"))
tile_kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tile_kernels)
generated, needs_blocks, watched = tile_kernels.generated, tile_kernels.needs_blocks, tile_kernels.watched
aten = torch.ops.aten
INFINITY, NAN = float("inf"), float("nan")
TYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """An attention: batch, heads, queries, keys, numbers of a head; how queries, keys and values lie; and its mask."""

    sizes: tuple[int, int, int, int, int]
    causal: bool = False
    mask: str = ""  # the dimensions along which the mask varies
    layout: str = "projection"
    scale: float | None = None
    mask_type: torch.dtype | None = None

    def operands(self, dtype: torch.dtype) -> list[torch.Tensor]:
        batch, heads, queries, keys, _width = self.sizes
        q, k, v = (self._lines(length, dtype) for length in (queries, keys, keys))
        if not self.mask:
            return [q, k, v]
        whole = dict(zip("bhij", (batch, heads, queries, keys), strict=True))
        mask = torch.randn(*(size if name in self.mask else 1 for name, size in whole.items()))
        mask[..., keys // 3] = -INFINITY
        return [q, k, v, mask.to(self.mask_type or dtype).expand(*whole.values())]

    def _lines(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        batch, heads, *_, width = self.sizes
        if self.layout == "projection":  # a third of what a linear layer gives
            return (
                torch.randn(batch, length, 3 * heads * width, dtype=dtype)[..., : heads * width]
                .unflatten(-1, (heads, width))
                .transpose(1, 2)
            )
        return torch.randn(batch, heads, length, width, dtype=dtype)

    @property
    def given(self) -> dict[str, Any]:
        return {} if self.scale is None else {"scale": self.scale}


def forward(case: Case) -> Callable[..., tuple[torch.Tensor, ...]]:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {"attn_mask": mask[0]} if mask else {}
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, case.causal, **given, **case.given)

    return program


def backward(case: Case) -> Callable[..., tuple[torch.Tensor, ...]]:
    def program(g: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {"attn_mask": tensors[5]} if len(tensors) > 5 else {}
        call = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return call(g, *tensors[:5], 0.0, case.causal, **given, **case.given)

    return program


def exact(case: Case, args: Sequence[torch.Tensor], gradient: torch.Tensor) -> tuple[list[torch.Tensor], ...]:
    """Result and logarithms, and gradients, in float64."""
    q, k, v = (tensor.double().requires_grad_() for tensor in args[:3])
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if case.scale is None else case.scale)
    if len(args) > 3:
        scores = scores + args[3].double()
    if case.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -INFINITY)
    out = scores.softmax(-1) @ v
    grads = torch.autograd.grad(out, (q, k, v), gradient.double())
    return [out.detach(), scores.logsumexp(-1).detach()], list(grads)


def off(got: Sequence[torch.Tensor], true: Sequence[torch.Tensor]) -> list[float]:
    return [((x.double() - y).norm() / y.norm().clamp(min=1e-300)).item() for x, y in zip(got, true, strict=True)]


def check(case: Case, dtype: torch.dtype, more: float = 1e-7, **options: Any) -> None:
    """Forward and backward as exact as ATen's, each with the result of its own forward."""
    args = case.operands(dtype)
    want, got = forward(case)(*args), watched(generated(forward(case), args, **options), args)
    gradient = torch.randn(want[0].shape, dtype=dtype)
    truth = exact(case, args, gradient)
    as_exact(got, want, truth[0], more)
    own, eager = ([gradient, *args[:3], *results, *args[3:]] for results in (got, want))
    as_exact(watched(generated(backward(case), own, **options), own), backward(case)(*eager), truth[1], more)


def as_exact(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], true: Sequence[torch.Tensor], more: float = 1e-7
) -> None:
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
    for own, eager in zip(off(got, true), off(want, true), strict=True):
        assert own <= 1.3 * eager + more


CASES = [
    Case((1, 2, 64, 64, 64)),
    Case((2, 3, 100, 100, 64), causal=True),
    Case((2, 2, 37, 70, 33), layout="contiguous"),
    pytest.param(Case((1, 2, 600, 600, 32), causal=True), id="several_blocks_causal"),
    pytest.param(Case((1, 2, 530, 1100, 40)), id="several_blocks"),
    Case((1, 2, 150, 77, 80), causal=True, mask="bij"),
    Case((1, 2, 40, 170, 128), causal=True, scale=0.3),
    Case((2, 3, 65, 90, 16), mask="bj"),
    Case((2, 3, 65, 90, 24), mask="hij", mask_type=torch.float32),
    Case((1, 1, 70, 70, 64)),
    Case((1, 2, 48, 48, 200)),
    Case((1, 2, 17, 33, 256), layout="contiguous"),
]


@pytest.mark.sample(ways=1)
@needs_blocks
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_as_exact_as_atens(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@needs_blocks
@pytest.mark.parametrize("seed", range(4))
def test_any_sizes(seed: int) -> None:
    """Of few numbers rounding errors are a matter of luck, so these may be somewhat larger."""
    made = random.Random(seed)
    sizes = (1, made.randint(1, 2), made.randint(2, 80), made.randint(2, 80), made.randint(2, 70))
    check(Case(sizes, bool(seed % 2), "ij" if seed > 1 else ""), TYPES[made.randint(0, 1)], 1e-6)


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("processor", tile_kernels.LEVELS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[5], Case((1, 2, 200, 650, 100), causal=True)], ids=str)
def test_on_vectors_without_tile_registers(case: Case, dtype: torch.dtype, processor: str) -> None:
    """Also where this processor has some, and of another length than its own."""
    check(case, dtype, processor=processor)


@needs_blocks
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_lengths_known_at_run_time(dtype: torch.dtype) -> None:
    case = Case((2, 2, 70, 70, 32), causal=True)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (2, 32)).transpose(1, 2)

    def ahead(*lines: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return forward(case)(*map(heads, lines))

    def back(sums: torch.Tensor, *lines: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return backward(case)(*map(heads, lines), sums)

    def operands(length: int) -> list[torch.Tensor]:
        return list(torch.randn(4, 2, length, 64, dtype=dtype))

    gradient, *lines = operands(70)
    out, sums = ahead(*lines)
    ours = generated(ahead, lines, tracing_mode="symbolic")
    saved = [sums, gradient, *lines, out.transpose(1, 2).flatten(2)]
    gradients = generated(back, saved, tracing_mode="symbolic")
    for length in (70, 33, 600 if dtype is torch.float32 else 333):  # more than a block of keys, or of queries
        gradient, *lines = operands(length)
        truth = exact(case, [*map(heads, lines)], heads(gradient))
        got, want = ours(list(lines)), ahead(*lines)
        as_exact(got, want, truth[0])
        saved, eager = ([r[1], gradient, *lines, r[0].transpose(1, 2).flatten(2)] for r in (got, want))
        as_exact(gradients(list(saved)), back(*eager), truth[1])


@tile_kernels.needs_tiles
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_precision_of_float32(precision: str) -> None:
    case = Case((1, 2, 100, 100, 64))
    args = case.operands(torch.float32)
    out, sums = forward(case)(*args)
    whole = [torch.randn_like(out), *args, out, sums]
    truth = exact(case, args, whole[0])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        both = [generated(forward(case), args), generated(backward(case), whole)]
    finally:
        torch.set_float32_matmul_precision(before)
    least, most = {"high": (1e-7, 2e-5), "medium": (1e-4, 6e-3)}[precision]
    for compiled, given_, true in zip(both, (args, whole), truth, strict=True):
        assert least <= off(compiled(list(given_)), true)[0] <= most


@needs_blocks
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_query_that_sees_nothing_has_no_result_and_no_gradient(dtype: torch.dtype) -> None:
    case = Case((1, 2, 40, 50, 32), mask="ij")
    args = case.operands(dtype)
    args[3] = args[3].clone()
    args[3][:, :, 5] = -INFINITY
    out, sums = forward(case)(*args)
    whole = [torch.randn_like(out), *args[:3], out, sums, args[3]]
    got = watched(generated(forward(case), args), args)
    assert not got[0][:, :, 5].any() and not got[1][:, :, 5].any()
    grads = watched(generated(backward(case), whole), whole)
    assert not grads[0][:, :, 5].any()
    for x, y in zip([*got, *grads], [out, sums, *backward(case)(*whole)], strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 2e-6)


@needs_blocks
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY, 1e38, 3e20], ids=str)
def test_special_numbers_of_float32_become_what_they_are_in_float64(value: float) -> None:
    """And those of the other head are none of their business. (ATen's kernel loses some nan, depending on sizes.)"""
    case = Case((1, 2, 40, 50, 32), layout="contiguous")
    plain = case.operands(torch.float32)
    out, sums = forward(case)(*plain)
    ahead = generated(forward(case), plain)
    back = generated(backward(case), [torch.randn_like(out), *plain, out, sums])
    for place in range(4):
        args = [tensor.clone() for tensor in plain]
        gradient = torch.randn_like(out)
        [*args, gradient][place][0, 1, 13, 5] = value
        got = watched(ahead, args)
        true = exact(case, args, gradient)
        assert torch.equal(got[0].isfinite(), true[0][0].isfinite())
        torch.testing.assert_close(got[0], true[0][0].float(), rtol=1e-4, atol=1e-5, equal_nan=True)
        for x, y in zip(watched(back, [gradient, *args, *got]), true[1], strict=True):
            torch.testing.assert_close(x[:, :1], y[:, :1].float(), rtol=1e-4, atol=1e-5)
            if not math.isfinite(value):
                assert torch.equal(x.isfinite(), y.isfinite())
                some = x.isfinite()
                torch.testing.assert_close(x[some], y[some].float(), rtol=1e-4, atol=1e-5)


@needs_blocks
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY], ids=str)
def test_special_numbers_of_bfloat16_become_what_they_are_in_float32(value: float) -> None:
    case = Case((1, 2, 40, 50, 32), layout="contiguous")
    plain = case.operands(torch.bfloat16)
    ahead = generated(forward(case), plain)
    for place in range(3):
        args = [tensor.clone() for tensor in plain]
        args[place][0, 1, 13, 5] = value
        got, want = watched(ahead, args)[0].float(), forward(case)(*(tensor.float() for tensor in args))[0]
        assert torch.equal(got.isfinite(), want.isfinite())
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, equal_nan=True)


@needs_blocks
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_large_scores_are_not_rounded_apart(dtype: torch.dtype) -> None:
    """The largest score of a row has the weight 1, whatever its size: 2**50 and more."""
    case = Case((1, 1, 40, 40, 48))
    args = case.operands(dtype)
    args[:2] = [tensor * 2.0**24 for tensor in args[:2]]
    got = watched(generated(forward(case), args), args)
    whole = [torch.randn_like(got[0]), *args, *got]
    truth = exact(case, args, whole[0])
    most = 1e-5 if dtype is torch.float32 else 5e-3
    assert off(got, truth[0])[0] <= most
    value = watched(generated(backward(case), whole), whole)[2]
    assert off([value], truth[1][2:])[0] <= most


@needs_blocks
def test_small_gradients_are_not_lost() -> None:
    case = Case((1, 2, 40, 50, 32))
    args = case.operands(torch.float32)
    out, sums = forward(case)(*args)
    whole = [torch.randn_like(out), *args, out, sums]
    compiled = generated(backward(case), whole)
    for size in (1e-20, 1e-30, 1e-38, 1e-41, 0.0):
        given_ = [torch.randn_like(out) * size, *whole[1:]]
        for x, y in zip(watched(compiled, given_), backward(case)(*given_), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=size * 1e-5 + 1e-43)


# -- what a nest means ------------------------------------------------------------------------------------

SMALL = [
    Case((1, 2, 5, 7, 3)),
    Case((2, 2, 6, 6, 4), causal=True),
    Case((1, 2, 5, 4, 3), mask="ij"),
    Case((2, 1, 4, 6, 3), causal=True, mask="bj", scale=0.7, layout="contiguous"),
]


def program_of(program: Callable[..., Any], args: list[torch.Tensor]) -> Program:
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


def both(case: Case, dtype: torch.dtype) -> list[tuple[Callable[..., Any], list[torch.Tensor]]]:
    args = case.operands(dtype)
    out, sums = forward(case)(*args)
    return [(forward(case), args), (backward(case), [torch.randn_like(out), *args[:3], out, sums, *args[3:]])]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_its_nest_means_what_aten_computes(case: Case, dtype: torch.dtype) -> None:
    tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-6
    for program, args in both(case, dtype):
        got, want = interpret_program(program_of(program, args), args), program(*args)
        for x, y in zip(got, want, strict=True):
            assert isinstance(x, torch.Tensor)
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def site_of(program: Program) -> AttentionSite | None:
    (nest,) = program.steps
    buffers = buffers_of(program)
    return attention_site(kernel_of(nest, buffers))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_its_kernel_is_known_by_its_shape(case: Case, dtype: torch.dtype) -> None:
    for (program, args), count in zip(both(case, dtype), (3, 5), strict=True):
        site = site_of(program_of(program, args))
        assert site is not None and (len(site.inputs), site.head) == (count, case.sizes[4])
        assert [size.constant for size in site.counts] == list(case.sizes[2:4])
        assert (site.causal, site.mask is not None) == (case.causal, bool(case.mask))
        assert math.isclose(site.scale, case.scale or case.sizes[4] ** -0.5, rel_tol=1e-6)


def test_a_kernel_that_computes_something_else_is_not_taken_for_one() -> None:
    """Any op of the nest, changed: no form is found, or a condition of places is one that is computed as it is."""
    for program, args in both(SMALL[1], torch.float32):
        made = program_of(program, args)
        text = print_program(made)
        for old, new in (
            ("= exp ", "= sin "),
            ("reduce max", "reduce min"),
            (" mul_contract ", " add "),
            ("= le ", "= lt "),
        ):
            if old in text:
                site = site_of(parse_program(text.replace(old, new, 1)))
                if "le" in old and site is not None:
                    assert site.mask is not None and isinstance(site.mask.seen, Places) and not site.causal
                else:
                    assert site is None


# -- who computes it --------------------------------------------------------------------------------------


def calls(program: Callable[..., Any], args: list[torch.Tensor], **options: Any) -> list[str]:
    compiled = compile_graph(make_fx(program, tracing_mode="fake")(*args), options=LowerOptions(**options))
    assert isinstance(compiled, CompiledGraph)
    got, want = compiled(list(args)), program(*args)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    return [extern.target for extern in compiled.report().externs]


@pytest.mark.parametrize(
    "options",
    [{"contractions": "aten"}, {"disable": ("generate-attention",)}, {"fuel": 0}, {"processor": "x86-64"}],
    ids=str,
)
def test_it_is_atens_where_that_is_asked_for(options: dict[str, Any]) -> None:
    for (program, args), target in zip(both(Case((1, 2, 64, 64, 32)), torch.float32), (FORWARD, BACKWARD), strict=True):
        assert calls(program, args, **options) == [target]


def test_what_has_no_form_is_atens() -> None:
    case = Case((1, 2, 64, 64, 32))
    (program, args), _ = both(case, torch.float32)
    assert calls(program, [tensor.double() for tensor in args]) == [FORWARD]
    assert calls(*both(Case((1, 2, 64, 64, 288)), torch.float32)[0]) == [FORWARD]
    assert calls(*both(Case((1, 2, 64, 64, 32), scale=-1.0), torch.float32)[1]) == [BACKWARD]


@needs_blocks
def test_a_scale_that_is_zero_in_float32_makes_no_nan() -> None:
    """The largest score before there is one, minus infinity, was multiplied by it."""
    case = Case((1, 2, 9, 10, 8), scale=1e-50)
    args = case.operands(torch.float32)
    graph = make_fx(forward(case), tracing_mode="fake")(*args)
    made = compile_graph(graph, options=LowerOptions(contractions="generated"))
    torch.testing.assert_close(made(list(args))[0], forward(case)(*args)[0])


@tile_kernels.needs_tiles
def test_the_choice_is_in_the_report_and_the_code_asks_for_tiles() -> None:
    (program, args), _ = both(Case((1, 2, 64, 64, 32)), torch.float32)
    compiled = compile_graph(make_fx(program, tracing_mode="fake")(*args))
    assert isinstance(compiled, CompiledGraph) and compiled.compiled.binary.facts.get("tiles")
    assert not compiled.report().externs
    for sizes in ((1, 2, 8, 64, 32), (1, 2, 33, 33, 32)):  # mostly padding
        assert calls(*both(Case(sizes), torch.float32)[0]) == [FORWARD]
    assert calls(*both(Case((1, 2, 33, 33, 32)), torch.bfloat16)[0]) == []


def test_on_vectors_it_is_chosen_where_that_was_measured_to_take_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD's processors with 512-bit vectors, and not for a few queries or keys, or where ATen's was not measured."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    nest, buffers = nest_of_forward(Case((1, 2, 64, 64, 32)))
    machine, options = generic_machine(512), LowerOptions()
    chosen = choose_attention(nest, buffers, options, machine, "znver4")
    assert chosen.form == "fma-attention" and "znver4" in chosen.reason
    for other, processor in ((machine, "skylake-avx512"), (generic_machine(256), "znver4")):
        assert choose_attention(nest, buffers, options, other, processor).form == "aten"
        asked = choose_attention(nest, buffers, LowerOptions(contractions="generated"), other, processor)
        assert asked.form == "fma-attention"
    few = nest_of_forward(Case((1, 2, 7, 64, 32)))
    assert choose_attention(*few, options, machine, "znver4") == Choice("aten", "the heads are small")
    for lengths, head, dtype in (((7, 64), 32, "float32"), ((64, 7), 32, "float32"), ((64, 64), 3, "float32")):
        assert not computes_attention(lengths, head, dtype, options, machine, "znver4")
    assert computes_attention((8, 8), 4, "float32", options, machine, "znver4")
    assert not computes_attention((64, 64), 64, "float64", options, machine, "znver4")
    pairs = replace(machine, features=f"{machine.features},+avx512bf16")  # of which ATen's products are made, too
    assert computes_attention((8, 8), 4, "bfloat16", options, pairs, "znver4")
    assert not computes_attention((8, 8), 4, "bfloat16", options, machine, "znver4")
    assert not computes_attention((64, 64), 64, "float32", LowerOptions(), generic_machine(128), "znver4")


def test_on_vectors_it_is_chosen_where_aten_has_no_more_than_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of bfloat16, and on the processors that were measured of float32."""
    for capability, taken in (("AVX2", True), ("AVX512", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        for dtype, processor, ours in (
            ("bfloat16", "haswell", taken),
            ("float32", "haswell", False),
            ("float32", "znver4", False),
            ("float32", "znver3", taken),
        ):
            machine = generic_machine(256)
            assert computes_attention((64, 64), 64, dtype, LowerOptions(), machine, processor) == ours
            assert not computes_attention((64, 7), 64, dtype, LowerOptions(), machine, processor)


def nest_of_forward(case: Case) -> tuple[LoopNest, dict[str, Buffer]]:
    program = program_of(forward(case), case.operands(torch.float32))
    (nest,) = program.steps
    assert isinstance(nest, LoopNest)
    return nest, dict(buffers_of(program))


def test_scratch_of_a_nest_is_its_own() -> None:
    """Rows of scratch in the forward, blocks in the backward; none of them outlives the nest."""
    for (program, args), count in zip(both(SMALL[0], torch.float32), (3, 8), strict=True):
        made = program_of(program, args)
        assert sum(buffer.kind is BufferKind.SCRATCH for buffer in made.buffers) == count
        assert all(isinstance(output, BufferRef) for output in made.outputs)
