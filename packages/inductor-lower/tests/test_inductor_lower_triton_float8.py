"""Products of 8-bit floats: scaled ones, and of factors that are cast before they are multiplied."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_graph, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.targets.triton import compile_kernel, kernels_of, render_program, resource_facts
from aotkit_inductor_lower.targets.triton.map_loops import TileLimits
from aotkit_inductor_lower.targets.triton.records import Gpu
from aotkit_inductor_lower.targets.triton.target import TritonTarget
from aotkit_inductor_lower.targets.triton.tune import product_times

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

BF16, E4, E5 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
Graph = Callable[..., tuple[torch.Tensor, ...]]
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
rows_on_the_cpu = pytest.mark.skipif(
    RELEASE < (2, 12), reason="before torch 2.12 the CPU takes no scales of rows, see the last test"
)


def lower(f: Graph, args: Sequence[torch.Tensor], **settings: Any) -> Compiled:
    """``f`` with the kernels of a CUDA device."""
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    chosen = {"contractions": "generated"} | settings
    return compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter", **chosen))


def factors(rows: int, inner: int, columns: int, left: torch.dtype = E4, right: torch.dtype = E4) -> list[torch.Tensor]:
    """A matrix of rows along the sum, and one of columns along it."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, inner, generator=g) for n in (rows, columns))
    return [x.to(left), w.to(right).t()]


def scales(form: str, rows: int, columns: int) -> list[torch.Tensor]:
    """Of the tensors, or of each row and column."""
    g = torch.Generator().manual_seed(1)
    shapes: list[tuple[int, ...]] = (
        [(rows, 1), (1, columns)] if form == "rows" else [(), ()] if form == "" else [(1,), (1,)]
    )
    return [torch.rand(shape, generator=g) + 0.5 for shape in shapes]


def scaled(out: torch.dtype, bias: bool = False) -> Graph:
    """A scaled product, and relu of it."""

    def f(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.relu(torch._scaled_mm(*args[:4], bias=args[4] if bias else None, out_dtype=out)),)

    return f


def cast_to(to: torch.dtype) -> Graph:
    """A product of factors that are cast before."""
    return lambda x, w: (x.to(to) @ w.to(to),)


def exact_of(args: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float64."""
    x, w, a, b, *bias = (t.double() for t in args)
    return F.relu((x @ w) * a * b + (bias[0] if bias else 0.0))


def check(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """No further from the exact result than one and a half times eager."""
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    errors = [float((each.double() - exact).abs().max()) for each in (got, eager)]
    assert errors[0] <= 1.5 * errors[1] + 1e-6 * float(exact.abs().max())


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("form", ["", "one", pytest.param("rows", marks=rows_on_the_cpu)])
@pytest.mark.parametrize(
    ("out", "bias"),  # eager refuses a bias of a float32 result
    [(BF16, False), (BF16, True), (torch.float16, False), (torch.float16, True), (torch.float32, False)],
)
@pytest.mark.covers("F5g.16")
def test_a_scaled_product_takes_scales_bias_and_what_follows_along(form: str, out: torch.dtype, bias: bool) -> None:
    args = [*factors(50, 96, 40), *scales(form, 50, 40)]
    args += [torch.randn(40).to(out)] if bias else []
    f = scaled(out, bias)
    lowered = lower(f, args)
    (kernel,) = kernels_of(lowered.program)
    assert not lowered.report.externs
    assert ("dot_float8(" in kernel.source.text) == (out is not torch.float32)
    assert "dot_ieee(" not in kernel.source.text  # float16 has all bits of the factors
    check(bind_program(lowered.program)(list(args))[0], f(*args)[0], exact_of(args))


@pytest.mark.parametrize(("left", "right"), [*itertools.product([E4, E5], repeat=2)])
@pytest.mark.parametrize("to", [BF16, torch.float16, torch.float32])
def test_casts_before_a_product_are_part_of_it(left: torch.dtype, right: torch.dtype, to: torch.dtype) -> None:
    args = factors(50, 100, 40, left, right)
    f = cast_to(to)
    lowered = lower(f, args)
    (kernel,) = kernels_of(lowered.program)
    assert ("dot_float8(" in kernel.source.text) == (to is not torch.float32)
    why = [str(decision) for decision in lowered.records if decision.kind == "inline"]
    assert sum("the product takes 8-bit floats as they are" in reason for reason in why) == 2
    check(bind_program(lowered.program)(list(args))[0], f(*args)[0], args[0].double() @ args[1].double())


def test_every_byte_is_what_it_means() -> None:
    one = torch.zeros(256, 16)
    one[:, 0] = 1
    for format_ in (E4, E5):
        x = torch.zeros(256, 16, dtype=torch.uint8)
        x[:, 0] = torch.arange(256)
        args = [x.view(format_), torch.eye(16).to(format_)]
        numbers = args[0].float()[:, 0]
        finite = numbers.isfinite()
        for to in (BF16, torch.float32):  # as bytes, and as halves
            (got,) = bind_program(lower(cast_to(to), args).program)(list(args))
            assert torch.equal(got[finite, 0].float(), numbers[finite])
            assert got[numbers.isnan(), 0].isnan().all()


def test_atens_call_stays_where_nothing_is_measured() -> None:
    args = [*factors(50, 96, 40), *scales("rows", 50, 40)]
    lowered = lower(scaled(BF16), args, contractions="auto")
    assert [extern.target for extern in lowered.report.externs] == ["aten._scaled_mm.default"]
    reasons = [str(decision) for decision in lowered.records if decision.kind == "contraction"]
    assert reasons[0].endswith("ATen, nothing is measured without tune")


def test_the_faster_one_is_taken_where_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[torch.Tensor] = []

    def seconds(call: Callable[[], Any]) -> float:
        found = call()
        results.append(found[0] if isinstance(found, list | tuple) else found)
        return 1e-6 / len(results)

    monkeypatch.setattr(TritonTarget, "measure", lambda self, compiled: product_times("cpu", compiled, seconds))
    args = [*factors(50, 96, 40), *scales("one", 50, 40), torch.randn(40).to(BF16)]
    lowered = lower(scaled(BF16, bias=True), args, contractions="auto", tune=True)
    assert not lowered.report.externs and len(results) == 2
    torch.testing.assert_close(results[1], results[0], rtol=1.6e-2, atol=1.6e-2)


def test_other_scales_and_results_are_atens() -> None:
    x, w = factors(50, 96, 40)
    one = torch.ones(())
    lowered = lower(lambda x, w, a, b: (torch._scaled_mm(x, w, a, b, out_dtype=E4),), [x, w, one, one])
    assert [extern.target for extern in lowered.report.externs] == ["aten._scaled_mm.default"]


@pytest.mark.parametrize(
    ("left", "right", "instruction"),
    [(E4, E4, "f32.e4m3.e4m3"), (E5, E4, "f32.e5m2.e4m3"), (E5, E5, "f32.e5m2.e5m2")],
)
def test_bytes_are_multiplied_by_the_devices_units(left: torch.dtype, right: torch.dtype, instruction: str) -> None:
    x, w = torch.empty(8192, 768, dtype=left), torch.empty(3072, 768, dtype=right).t()
    lowered = lower(scaled(BF16), [x, w, torch.ones(()), torch.ones(())])
    (kernel,) = kernels_of(lowered.program)
    cubin = compile_kernel(kernel.source, 90, keep_ptx=True)
    facts = resource_facts(cubin)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*\], \[.*\], (0x[0-9a-f]+|\d+)", cubin.ptx)
    assert f"wgmma.mma_async.sync.aligned.m64n128k32.{instruction}" in cubin.ptx
    assert facts.spills == facts.stack == 0 and {int(width, 0) for width in copies} == {16}
    assert cubin.ptx.count("ld.global") <= 2  # the scales


def test_older_devices_multiply_halves() -> None:
    x, w = factors(256, 96, 256)
    lowered = lower(scaled(BF16), [x, w, torch.ones(()), torch.ones(())])
    (kernel,) = render_program(lowered.scheduled, limits=TileLimits(gpu=Gpu(80, 108))).kernels
    assert "dot_float8(" not in kernel.source.text and "tl.float16" in kernel.source.text
    assert "f32.f16.f16.f32" in compile_kernel(kernel.source, 80, keep_ptx=True).ptx


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["", "rows"])
def test_scaled_products_on_a_device(form: str) -> None:
    args = [t.cuda() for t in (*factors(512, 1024, 256), *scales(form, 512, 256))]
    args[1] = args[1].t().contiguous().t()  # columns along the sum, as ATen asks for
    f = scaled(BF16)
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    compiled = compile_graph(graph, options=LowerOptions(contractions="generated"))
    check(compiled(list(args))[0], f(*args)[0], exact_of(args))


@pytest.mark.gpu
@pytest.mark.parametrize("to", [BF16, torch.float32])
def test_casts_before_a_product_on_a_device(to: torch.dtype) -> None:
    args = [t.cuda() for t in factors(512, 1024, 256)]
    f = cast_to(to)
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    compiled = compile_graph(graph, options=LowerOptions(contractions="generated"))
    check(compiled(list(args))[0], f(*args)[0], args[0].double() @ args[1].double())


def test_scales_of_rows_are_refused_on_the_cpu_before_torch_2_12() -> None:
    args = [*factors(50, 96, 40), *scales("rows", 50, 40)]
    with pytest.raises(RuntimeError, match="per-tensor scaling") if RELEASE < (2, 12) else nullcontext():
        assert scaled(BF16)(*args)[0].shape == (50, 40)
