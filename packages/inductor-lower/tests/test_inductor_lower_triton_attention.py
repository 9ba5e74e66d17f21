"""Attention as Triton kernels: in parts of the keys, in blocks, and its gradients."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.kernel_ir.attention_site import attention_site
from aotkit_inductor_lower.kernel_passes.linearize import linearize
from aotkit_inductor_lower.kernel_passes.normal_form import normalize
from aotkit_inductor_lower.symbolic import Symbol, SymbolKind, floordiv, sym, to_expr
from aotkit_inductor_lower.targets.triton import (
    KernelSource,
    compile_kernel,
    interpret_kernel,
    kernels_of,
    resource_facts,
    vector_bytes,
)
from aotkit_inductor_lower.targets.triton.attention import AttentionTile, attention_form, shared_loop
from aotkit_inductor_lower.targets.triton.records import Gpu
from aotkit_inductor_lower.targets.triton.render.attention_backward import gradient_sources
from aotkit_inductor_lower.targets.triton.render.attention_forward import attention_sources

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

_spec = importlib.util.spec_from_file_location(
    "attention_forms", Path(__file__).with_name("test_inductor_lower_attention_forms.py")
)
assert _spec is not None and _spec.loader is not None
forms = importlib.util.module_from_spec(_spec)
sys.modules["attention_forms"] = forms
_spec.loader.exec_module(forms)
Case, forward, backward, written_out, off = forms.Case, forms.forward, forms.backward, forms.written_out, forms.off

aten, ops = torch.ops.aten, torch.ops.aotkit_lower
INFINITY = float("inf")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
Tensors = list[torch.Tensor]


def lowered(program: Callable[..., Any], args: Tensors, **settings: Any) -> Compiled:
    graph = make_fx(program, decompositions(), tracing_mode="fake")(*args)
    options = LowerOptions(verify=True, processor="triton-interpreter", **settings)
    made = compile_to_program(graph, options=options)
    assert isinstance(made, Compiled)
    return made


def sources(made: Compiled) -> list[KernelSource]:
    return [kernel.source for kernel in kernels_of(made.program)]


def externs(made: Compiled) -> list[str]:
    return [step.target for step in made.scheduled.steps if type(step).__name__ == "ExternCall"]


def ran(program: Callable[..., Any], args: Tensors) -> Tensors:
    """The results of kernels of an attention, and of nothing else."""
    made = lowered(program, args)
    assert externs(made) == [] and all("fade" in s.text or "change" in s.text for s in sources(made))
    return bind_program(made.program)(list(args))


def computed(case: Any, args: Tensors, gradient: torch.Tensor) -> Tensors:
    ahead = ran(forward(case), args)
    whole = [gradient, *args[:3], *ahead, *args[3:]]
    return [ahead[0], *ran(backward(case), whole)]


CASES = [
    Case((2, 4, 2, 70, 70, 64), causal=True),
    Case((1, 6, 1, 40, 90, 32), layout="contiguous"),
    Case((1, 8, 2, 33, 50, 128), seen="bij", zero_empty=True),
    Case((2, 4, 2, 65, 65, 24), added="hij", kept=True, scores=True),
    Case((2, 3, 3, 70, 77, 64), seen="bj", hidden=torch.finfo(torch.float32).min),
    Case((1, 2, 2, 49, 49, 32), added="bhij", scores=True),
    Case((1, 4, 2, 70, 60, 32), seen="ij", replaces=True, hidden=-1e9),
    Case((1, 2, 2, 70, 60, 32), seen="bij", added="hij", kept=True, replaces=True, scores=True),
    Case((1, 2, 2, 130, 150, 40), kept=True, causal=True, seen="ij"),
    Case((1, 2, 2, 90, 70, 96), causal=True, scores=True),
    Case((1, 4, 2, 37, 41, 3), kept=True, seen="bij"),
    Case((1, 2, 1, 50, 33, 256), kept=True, layout="contiguous"),
    Case((2, 4, 2, 3, 100, 16), seen="bij", zero_empty=True),  # more heads than queries: loops in another order
    Case((1, 2, 2, 300, 300, 32), causal=True, window=7),
    Case((2, 4, 2, 200, 250, 16), causal=True, window=140, kept=True),
    Case((1, 4, 1, 270, 70, 24), causal=True, window=64, zero_empty=True),  # the last queries see nothing
    Case((1, 2, 1, 140, 140, 64), seen="bij", added="hij", replaces=True, causal=True, window=33, scores=True),
    Case((1, 4, 2, 70, 70, 32), causal=True, window=2),
    Case((1, 4, 2, 70, 70, 32), cap=2.0),
    Case((1, 2, 1, 90, 140, 64), seen="bij", added="hij", replaces=True, cap=1.5, scores=True, kept=True),
    Case((2, 2, 2, 150, 150, 16), causal=True, window=30, cap=5.0),
]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_directions_are_as_exact_as_eager(case: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    args = case.operands(dtype)
    gradient = case.lines(case.sizes[1], case.sizes[3], dtype)
    got = computed(case, args, gradient)
    eager, true = (written_out(case, args, gradient, kind) for kind in (dtype, torch.float64))
    assert [t.dtype for t in got] == [dtype] * 4 + [torch.float32] * case.scores
    for own, want, right in zip(got, eager, true, strict=True):
        assert own.shape == right.shape
        assert off(own, right) <= 3 * (off(want, right) + 2e-6)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
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
        tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(own.double(), right, rtol=3e-2, atol=tolerance, equal_nan=True)


def test_hidden_by_the_smallest_number_is_not_hidden_from_who_sees_nothing_else() -> None:
    case = Case((1, 2, 2, 40, 50, 32), seen="ij", hidden=torch.finfo(torch.float32).min)
    args = case.operands(torch.float32)
    args[3][:, :, 5] = False
    gradient = case.lines(2, 40, torch.float32)
    got = computed(case, args, gradient)
    eager, true = (written_out(case, args, gradient, kind) for kind in (torch.float32, torch.float64))
    for own, want, right in zip(got, eager, true, strict=True):
        assert own.isfinite().all() and off(own, right) <= 3 * (off(want, right) + 2e-6)


def test_keys_out_of_the_window_are_not_read() -> None:
    """By blocks that see none of them, in both directions: what lies there, nan here, changes nothing."""
    case = Case((1, 2, 1, 600, 600, 16), causal=True, window=20)
    args = case.operands(torch.bfloat16)
    gradient = case.lines(2, 600, torch.bfloat16)
    want = computed(case, args, gradient)
    for tensor in args[1:]:
        tensor[:, :, :100] = float("nan")
    got = computed(case, args, gradient)
    for own, right in zip(got, want, strict=True):
        assert torch.equal(own[:, :, 300:], right[:, :, 300:]) and own.isnan().any()
    for tensor in args[1:]:
        tensor[:, :, :100] = 0
    for tensor in (args[0], gradient):
        tensor[:, :, 500:] = float("nan")  # these queries see no key before 481
    got, want = computed(case, args, gradient), want
    for own, right in zip(got[2:4], want[2:4], strict=True):
        assert own[:, :, :350].isfinite().all() and torch.equal(own[:, :, 130:350], right[:, :, 130:350])


# -- keys in parts -------------------------------------------------------------------------------------------------

FEW = [
    Case((1, 14, 2, 1, 200, 64), seen="j", zero_empty=True),
    Case((2, 4, 4, 1, 300, 20), zero_empty=True, layout="contiguous"),
    Case((2, 4, 2, 3, 100, 16), added="bhij"),
    Case((2, 4, 2, 3, 100, 16), added="j", seen="bij", replaces=True, hidden=-1e9),
    Case((1, 4, 1, 5, 90, 64), causal=True),
    Case((1, 2, 2, 16, 130, 32), seen="bij", kept=True),
    Case((1, 32, 32, 2, 70, 128), seen="j", zero_empty=True),
    Case((1, 14, 2, 1, 200, 64), seen="j", zero_empty=True, cap=3.0),
]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_queries_have_their_keys_in_parts(case: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    args = case.operands(dtype)
    made = lowered(forward(case), args)
    assert len(sources(made)) == 2 and externs(made) == []
    got = bind_program(made.program)(list(args))[0]
    gradient = torch.zeros_like(got)
    eager, true = (written_out(case, args, gradient, kind)[0] for kind in (dtype, torch.float64))
    assert off(got, true) <= 3 * (off(eager, true) + 2e-6)


@pytest.mark.parametrize("keys", [256, 1024, 4096])
def test_there_is_work_for_every_multiprocessor(keys: int) -> None:
    """Where a part is not so short that it is not worth a program instance."""
    case = Case((1, 14, 2, 1, keys, 64), seen="j", zero_empty=True)
    with FakeTensorMode():
        q, k = (torch.empty(1, heads, length, 64, dtype=torch.bfloat16) for heads, length in ((14, 1), (2, keys)))
        args = [q, k, k.clone(), torch.empty(1, 1, 1, keys, dtype=torch.bool)]
    first = sources(lowered(forward(case), args))[0]
    assert first.config.block("YBLOCK") == 16  # heads that share keys are rows of one block: keys are read once
    count = 1
    for size, block in first.grid:
        count *= -(-(size.constant or 0) // (first.config.block(block) if block else 1))
    assert count >= min(Gpu().processors, 2 * keys // 64)


def test_keys_that_the_mask_hides_are_not_read() -> None:
    """How many are used shows only at run time: what lies behind them, nan here, changes nothing."""
    case = Case((1, 14, 2, 1, 256, 64), seen="j", zero_empty=True)
    args = case.operands(torch.bfloat16)
    args[3][:] = torch.arange(256) < 70
    want = ran(forward(case), args)[0]
    for tensor in args[1:3]:
        tensor[:, :, 128:] = float("nan")  # parts that are hidden whole
    assert torch.equal(ran(forward(case), args)[0], want)


def test_a_mask_that_hides_by_a_finite_number_hides_nothing_from_who_sees_nothing_else() -> None:
    case = Case((1, 2, 2, 1, 100, 16), seen="j", hidden=torch.finfo(torch.float32).min)
    args = case.operands(torch.float32)
    args[3][:] = False
    torch.testing.assert_close(ran(forward(case), args)[0], args[2].mean(2, keepdim=True))


# -- fused calls ---------------------------------------------------------------------------------------------------


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """As transformers repeats the heads of keys and values."""
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """A language model's attention, as torch has it on a device: a bool becomes numbers, padded to 16 bytes."""
    nothing, hidden = (torch.full((), x, dtype=q.dtype, device=q.device) for x in (0.0, -INFINITY))
    mask = torch.where(seen, nothing, hidden)
    times = q.shape[1] // k.shape[1]
    left = -k.shape[2] % 16
    mask = aten.slice.Tensor(aten.constant_pad_nd(mask, [0, left], 0.0), -1, 0, k.shape[2])
    mask = mask.expand(*q.shape[:3], k.shape[2])
    found = aten._scaled_dot_product_efficient_attention(q, repeated(k, times), repeated(v, times), mask, False)
    return found[0].transpose(1, 2).flatten(2)


def in_float(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
    times = q.shape[1] // k.shape[1]
    given = (q.double(), repeated(k, times).double(), repeated(v, times).double())
    return F.scaled_dot_product_attention(*given, attn_mask=seen).transpose(1, 2).flatten(2)


def cache(length: int = 100, queries: int = 1) -> Tensors:
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(1, h, n, 64, generator=g).bfloat16() for h, n in ((14, queries), (2, length), (2, length))]
    return [*made, (torch.arange(length) <= torch.arange(queries)[:, None] + 40)[None, None]]


@pytest.mark.parametrize("queries", [1, 3])
def test_a_token_reads_the_cache_once_and_the_bool_that_its_mask_is_made_of(queries: int) -> None:
    args = cache(queries=queries)
    made = lowered(token, args)
    assert externs(made) == [] and len(sources(made)) == 2, "no mask of numbers, no copies of heads"
    reads = {a.name: a.dtype.value for a in sources(made)[0].arguments if a.kind == "pointer"}
    assert sorted(reads.values()) == ["bf16", "bf16", "bf16", "bool"]
    got = bind_program(made.program)(list(args))[0]
    torch.testing.assert_close(got.double(), in_float(*args), rtol=2e-2, atol=2e-2)


def test_what_is_fused_well_stays_atens_unless_everything_is_generated() -> None:
    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return aten._scaled_dot_product_flash_attention(q, k, v)[0]

    args = [torch.randn(1, 2, 40, 64).bfloat16() for _ in range(3)]
    assert externs(lowered(plain, args)) == ["aten._scaled_dot_product_flash_attention.default"]
    made = lowered(plain, args, contractions="generated")
    assert externs(made) == []
    want = F.scaled_dot_product_attention(*(x.double() for x in args))
    torch.testing.assert_close(bind_program(made.program)(list(args))[0].double(), want, rtol=2e-2, atol=2e-2)
    assert len(externs(lowered(token, cache(queries=17)))) == 1, "that many queries are not few"
    assert len(externs(lowered(token, cache(), contractions="aten"))) == 1
    assert len(externs(lowered(token, cache(), disable=("attend-in-parts",)))) == 1


def test_a_call_whose_sums_are_kept_for_a_backward_stays() -> None:
    def kept(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
        return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True)[:2]

    args = [*(torch.randn(1, 2, 4, 16).bfloat16() for _ in range(3)), torch.randn(1, 2, 4, 4).bfloat16()]
    assert len(externs(lowered(kept, args))) == 1


def test_the_decision_says_why() -> None:
    (said,) = [str(d) for d in lowered(token, cache()).records if d.kind == "contraction"]
    assert "keys are cut in parts" in said


@pytest.mark.parametrize("queries", [1, 100])
def test_all_memory_is_on_the_device(queries: int) -> None:
    """That of scores, too, which no kernel has."""
    with FakeTensorMode():
        q, k = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16, device="cuda:0") for n in (queries, 200))
        graph = make_fx(lambda q, k: ops.attention(q, k, k, *[None] * 3, 0.1, 0.0, False, 1.0, False, True))(q, k)
    made = compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter"))
    assert isinstance(made, Compiled) and externs(made) == []
    assert {buffer.device for buffer in made.program.plan.buffers} == {"cuda:0"}


def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attention in operators, as in a model without fused attention."""
    return torch.softmax(q @ k.transpose(2, 3) * 0.125 + bias, -1) @ v


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tf32", [False, True])
def test_what_is_written_out_is_ours_where_that_is_faster(
    dtype: torch.dtype, tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotkit_inductor_lower.targets.triton.target.products_lose_bits", lambda: tf32)
    args = [*(torch.randn(2, 3, 40, 64).to(dtype) for _ in range(3)), torch.randn(1, 3, 40, 40).to(dtype)]
    made = lowered(written, args)
    whole = dtype is not torch.float32 or tf32
    assert len(externs(made)) == (0 if whole else 2)
    if whole:
        source, *_ = sources(made)  # and a copy, since it is returned
        assert ("dot_tf32(" in source.text) == (dtype is torch.float32)
        (got,) = bind_program(made.program)(list(args))
        true = written(*(x.double() for x in args))
        assert off(got, true) <= 3 * (off(written(*args), true) + 2e-6)


# -- compiled ------------------------------------------------------------------------------------------------------


def on_device(case: Any, dtype: torch.dtype, gradients: bool = False) -> list[KernelSource]:
    """The kernels of large operands."""
    with FakeTensorMode():
        args = case.operands(dtype)
        if gradients:
            args = [case.lines(case.sizes[1], case.sizes[3], dtype), *args[:3], *forward(case)(*args), *args[3:]]
    return sources(lowered(backward(case) if gradients else forward(case), args))


@pytest.mark.sample(ways=1)
@pytest.mark.slow
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("window", [0, 200])
def test_blocks_fit_a_hopper(head: int, gradients: bool, window: int) -> None:
    """Products are those of its tensor cores, nothing is spilled, and lines are loaded 16 bytes at once."""
    for source in on_device(Case((8, 12, 12, 1024, 1024, head), causal=True, window=window), torch.bfloat16, gradients):
        cubin = compile_kernel(source, 90, keep_ptx=True)
        facts = resource_facts(cubin)
        assert facts.spills == facts.stack == 0 and "wgmma" in cubin.ptx
        assert max(vector_bytes(cubin.ptx)) == 16


def test_parts_fit_a_hopper() -> None:
    first, second = on_device(Case((1, 14, 2, 1, 1024, 64), zero_empty=True), torch.bfloat16)
    for source in (first, second):
        cubin = compile_kernel(source, 90, keep_ptx=True)
        facts = resource_facts(cubin)
        assert facts.spills == facts.stack == 0 and facts.registers <= 64
        assert max(vector_bytes(cubin.ptx)) == 16


def sharing(count: int) -> tuple[Any, Tensors, Any, Any, Any]:
    """The program of an attention of eight heads, its operands, its kernel, and that as one of which ``count`` heads
    have the same keys and values, with their loop."""
    sizes = (2, 8, 3, 16), (2, 8, 40, 16), (2, 8, 40, 16)
    args = [torch.randn(*each, generator=torch.Generator().manual_seed(k)) for k, each in enumerate(sizes)]
    program = lowered(lambda *given: (F.scaled_dot_product_attention(*given),), args).scheduled
    (kernel,) = normalize(linearize(program)).kernels
    site = attention_site(kernel)
    assert site is not None
    heads = next(loop for loop in site.batch if loop.extent == 8)
    quotient = {Symbol(heads.symbol): floordiv(sym(heads.symbol), to_expr(count))}
    query, *read = site.inputs
    read = [replace(lines, start=lines.start.substitute(quotient)) for lines in read]
    return program, args, kernel, replace(site, inputs=(query, *read)), heads


def test_keys_of_several_heads_are_found_by_a_quotient_of_the_head() -> None:
    """Rows of a block are of four heads, and its keys those of the first of them."""
    program, (q, k, v), kernel, site, _ = sharing(4)
    (source,) = attention_sources(kernel, site, AttentionTile(16, 16, 4, 2))
    written = {site.outputs[0].buffer: torch.empty_like(q)}
    written |= {lines.buffer: torch.empty(2 * 8 * 3) for lines in site.saved}
    interpret_kernel(source, dict(zip(program.inputs, (q, k, v), strict=True)) | written)
    want = F.scaled_dot_product_attention(q, k[:, :2].repeat_interleave(4, 1), v[:, :2].repeat_interleave(4, 1))
    torch.testing.assert_close(written[site.outputs[0].buffer], want)


def test_heads_that_may_leave_a_rest_are_computed_one_by_one() -> None:
    *_, site, heads = sharing(4)
    unknown = sym("n", SymbolKind.SIZE)
    for extent, shared in ((unknown * 4, True), (unknown, False), (to_expr(6), False)):
        batch = tuple(replace(loop, extent=extent) if loop is heads else loop for loop in site.batch)
        assert (shared_loop(replace(site, batch=batch)) is not None) is shared


@pytest.mark.parametrize(("dtype", "arch", "blocks"), [
    (torch.float16, 75, [(64, 64), (32, 32), (32, 32)]), (torch.float16, 86, [(64, 64), (64, 32), (32, 64)]),
    (torch.float16, 90, [(64, 64), (64, 32), (32, 64)]), (torch.float32, 86, [(32, 16), (16, 16), (16, 16)]),
])  # fmt: skip
def test_blocks_are_as_large_as_shared_memory_allows(
    dtype: torch.dtype, arch: int, blocks: list[tuple[int, int]]
) -> None:
    """Compiled for sm_75, the backward asks for 80 KiB in the blocks of larger devices and for 48 in its own, of 64;
    for sm_86, that of float32 heads of 256 for 100 KiB, of 99."""
    head = 128 if dtype is torch.float16 else 256
    case = Case((1, 2, 2, 256, 256, head), layout="contiguous", added="bhij")
    args, gradient = case.operands(dtype), torch.randn(1, 2, 256, head).to(dtype)
    saved = [gradient, torch.randn(1, 2, 256), torch.rand(1, 2, 256)]
    found = []
    for program, given in ((forward(case), args), (backward(case), [gradient, *args[:3], *saved, *args[3:]])):
        kernels = normalize(linearize(lowered(program, given, contractions="generated").scheduled)).kernels
        (kernel,) = (each for each in kernels if attention_form(each) is not None)
        site = attention_form(kernel)
        assert site is not None
        written = gradient_sources if site.backward else attention_sources
        found += [(s.config.block("YBLOCK"), s.config.block("XBLOCK")) for s in written(kernel, site, gpu=Gpu(arch))]
    assert found == blocks
