"""Generated matrix products, and choices by measurement: block sizes, and ATen against generated."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program, decompositions, lower_graph
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.ir import Buffer, Contraction, ExternCall
from aotkit_inductor_lower.kernel_passes.linearize import extents_of
from aotkit_inductor_lower.launch_plan.codec import compiled_from_json, compiled_to_json
from aotkit_inductor_lower.targets.triton import (
    Cubin,
    KernelFacts,
    KernelSource,
    TritonError,
    assemble,
    compile_kernel,
    kernels_of,
    render_program,
    resource_facts,
    to_program,
)
from aotkit_inductor_lower.targets.triton.autotune import choose
from aotkit_inductor_lower.targets.triton.compile import compile_all
from aotkit_inductor_lower.targets.triton.errors import SharedMemoryExceeded
from aotkit_inductor_lower.targets.triton.target import TritonTarget
from aotkit_inductor_lower.targets.triton.tune import product_times

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")


def lower(f: Callable[..., Any], args: list[torch.Tensor], **settings: Any) -> Compiled:
    """``f`` with the kernels of a CUDA device."""
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    return compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter", **settings))


def choices(compiled: Compiled) -> list[str]:
    """Who computes each product, and why."""
    return [str(decision) for decision in compiled.records if decision.kind == "contraction"]


def products(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A linear map with something before and after it, and a batched product of a transposed view."""
    return F.gelu(torch.addmm(b, torch.relu(x), w)), torch.bmm(q, q.transpose(1, 2)) * 2, x @ w


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Odd sizes, so that every tile has a rest."""
    g = torch.Generator().manual_seed(0)
    shapes = ((50, 40), (40, 70), (70,), (3, 20, 33))
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


@pytest.mark.parametrize("sizes", [(0, 5, 7), (5, 0, 7), (5, 7, 0)], ids=str)
def test_a_generated_product_of_nothing(sizes: tuple[int, int, int]) -> None:
    """Without rows its tiles could not be chosen."""
    rows, inner, columns = sizes
    x, w = torch.randn(rows, inner), torch.randn(inner, columns)
    lowered = lower(lambda x, w: (x @ w, (x @ w).sum(0)), [x, w], contractions="generated")
    for ours, reference in zip(bind_program(lowered.program)([x, w]), (x @ w, (x @ w).sum(0)), strict=True):
        torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.covers("F5g.16", "F5e.4")
def test_generated_products_take_what_is_around_them_along(dtype: torch.dtype) -> None:
    args = inputs(dtype)
    lowered = lower(products, args, contractions="generated")
    assert len(lowered.program.kernels) == 3  # relu, bias and gelu are in the first, the factor in the second
    assert all("tl.dot" in k.source.text for k in kernels_of(lowered.program))
    got, want = bind_program(lowered.program)(list(args)), products(*args)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    for ours, reference in zip(got, want, strict=True):
        assert ours.stride() == reference.stride()
        torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


def followed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A linear map, gelu and a residual; what is between them is a result too, and so is a mask."""
    y = F.linear(x, w, b)
    return F.gelu(y) + r, y, y > 0


def with_relu(x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """And with something before it."""
    return followed(torch.relu(x) * 2, *rest)


@pytest.mark.parametrize(("program", "rows"), [(with_relu, (50,)), (followed, (5, 10))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.covers("F5h.9")
def test_a_linear_map_with_gelu_and_residual_is_one_kernel_of_several_results(
    dtype: torch.dtype, program: Callable[..., Any], rows: tuple[int, ...]
) -> None:
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=g).to(dtype) for shape in ((*rows, 40), (70, 40), (70,), (*rows, 70))]
    lowered = lower(program, args, contractions="generated")
    (kernel,) = kernels_of(lowered.program)
    assert "tl.dot" in kernel.source.text and len(lowered.program.kernels) == 1 and not lowered.report.externs
    assert sum(argument.written for argument in kernel.source.parameters) == 3
    got, want = bind_program(lowered.program)(list(args)), program(*args)
    exact = [a.double() for a in args]
    out, y, _ = program(*exact)
    terms = F.linear(exact[0].abs() * 2, exact[1].abs(), exact[2].abs())
    unit = torch.finfo(dtype).eps
    bound = terms * 48 * torch.finfo(torch.float32).eps + y.abs() * unit  # of a sum of 41 terms, and of its rounding
    assert [(a.dtype, a.shape, a.stride()) for a in got] == [(a.dtype, a.shape, a.stride()) for a in want]
    assert ((got[1].double() - y).abs() <= bound).all()
    assert ((got[0].double() - out).abs() <= 1.13 * bound + (out.abs() + exact[3].abs() + y.abs()) * 2 * unit).all()
    assert torch.equal(got[2], got[1] > 0)
    cubin = compile_kernel(kernel.source, 90, keep_ptx=True)
    assert resource_facts(cubin).spills == 0 and ("mma" in cubin.ptx) == (dtype is torch.bfloat16)


def test_products_compile_to_tensor_cores_and_f32_keeps_its_bits() -> None:
    half = lower(lambda x, w: (x @ w,), [torch.empty(512, 512, dtype=torch.bfloat16)] * 2, contractions="generated")
    cubin = compile_kernel(kernels_of(half.program)[0].source, 90, keep_ptx=True)
    assert "wgmma" in cubin.ptx and "cp.async" in cubin.ptx
    assert resource_facts(cubin).spills == 0
    assert "mma.sync" in compile_kernel(kernels_of(half.program)[0].source, 80, keep_ptx=True).ptx
    single = lower(lambda x, w: (x @ w,), [torch.empty(64, 64)] * 2, contractions="generated")
    assert "dot_ieee(" in kernels_of(single.program)[0].source.text
    for tf32 in (False, True):
        (kernel,) = render_program(single.scheduled, tf32=tf32).kernels
        assert ("dot_tf32(" in kernel.source.text) == tf32
        assert ("dot_ieee(" in kernel.source.text) == (not tf32)


def test_a_product_is_generated_only_where_it_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def timer(product: ExternCall, buffers: Mapping[str, Buffer]) -> tuple[float, float]:
        seen.append(product.target)
        return (20e-6, 10e-6) if product.target == "aten.bmm.default" else (10e-6, 9.9e-6)

    args = inputs(torch.float32)
    monkeypatch.setattr(TritonTarget, "measure", lambda self, compiled: timer)
    lowered = lower(products, args, tune=True)
    calls = [getattr(step, "target", "") for step in lowered.scheduled.steps]
    assert "aten.mm.default" in calls and "aten.addmm.default" in calls and "aten.bmm.default" not in calls
    assert len(seen) == 3
    reasons = choices(lowered)
    assert any("bmm" in reason and "generated, ATen 20.0 us, generated 10.0 us" in reason for reason in reasons)
    assert any("mm.default" in reason and ": ATen, ATen 10.0 us" in reason for reason in reasons)
    assert not any("mm.default" in str(refused) for refused in lowered.report.refused)
    got, want = bind_program(lowered.program)(list(args)), products(*args)
    torch.testing.assert_close(got, list(want))


# -- block sizes ---------------------------------------------------------------------------------------------------


def fake_cubin(source: KernelSource, arch: int) -> Cubin:
    """What the compiler would give."""
    return Cubin(source.name, b"code", arch, 0, source.config.num_warps * 32, 2, source.config)


@pytest.mark.parametrize("room", [1, 2, 0])
def test_a_kernel_has_as_many_stages_as_the_device_has_shared_memory_for(room: int) -> None:
    """Attention of heads of 128 with a bias asks for 104 KiB in three stages, and sm_86, sm_89 and sm_120 have 99."""
    lowered = lower(lambda x: (x * 2 + 1,), [torch.empty(64, 1024)])
    (kernel,) = render_program(lowered.scheduled).kernels
    source, tried = replace(kernel.source, config=replace(kernel.source.config, num_stages=3)), list[int]()

    def compiler(source: KernelSource, arch: int) -> Cubin:
        tried.append(source.config.num_stages)
        if source.config.num_stages > room:
            raise SharedMemoryExceeded("too much")
        return fake_cubin(source, arch)

    (made,) = compile_all([source], 86, compiler)
    assert tried == list(range(3, max(room, 1) - 1, -1))
    assert made.config.num_stages == room if room else isinstance(made, SharedMemoryExceeded)


@pytest.mark.covers("F5e.3")
def test_the_fastest_candidate_wins_and_spilling_and_failing_ones_are_left_out() -> None:
    lowered = lower(lambda x: (x * 2 + 1,), [torch.empty(64, 1024)])
    (kernel,) = render_program(lowered.scheduled, tune=True).kernels
    sources = (kernel.source, *kernel.alternatives)
    assert len(sources) >= 4
    assert len({s.config for s in sources}) == len(sources)
    broken, spilling, best = sources[0], sources[1], sources[3]

    def compiler(source: KernelSource, arch: int) -> Cubin:
        if source is broken:
            raise TritonError("too large")
        return fake_cubin(source, arch)

    def facts(cubin: Cubin) -> KernelFacts:
        return KernelFacts(255, 64 if cubin.config == spilling.config else 0, 0, 0)

    def timer(source: KernelSource, cubin: Cubin) -> float:
        return 1e-6 if source is best else 2e-6

    choice = choose(sources, 90, timer, compiler, facts)
    assert choice.source is best
    reasons = {c.config: c.reason for c in choice.tried}
    assert reasons[broken.config] == "too large" and reasons[spilling.config] == "spills 64 bytes"
    assert "1.0 us" in str(choice)
    assert choose(sources, 90, None, compiler, facts).source is sources[2]  # the first that compiles and does not spill
    with pytest.raises(TritonError, match="no candidate compiles: too large"):
        choose((broken,), 90, timer, compiler, facts)


def test_candidates_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = lower(lambda x: (x * 2 + 1,), [torch.empty(64, 1024)])
    (kernel,) = render_program(lowered.scheduled, tune=True).kernels
    sources = (kernel.source, *kernel.alternatives)[:4]
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    together = threading.Barrier(4)

    def compiler(source: KernelSource, arch: int) -> Cubin:
        together.wait(timeout=60)  # broken, and an error, if one waits for another
        return fake_cubin(source, arch)

    choice = choose(sources, 90, lambda source, cubin: 1e-6, compiler, lambda cubin: KernelFacts(32, 0, 0, 0))
    assert choice.source is sources[0] and len(choice.tried) == 4


def test_without_the_tool_that_tells_of_spills_the_timer_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = lower(lambda x: (x * 2 + 1,), [torch.empty(64, 1024)])
    (kernel,) = render_program(lowered.scheduled, tune=True).kernels
    sources = (kernel.source, *kernel.alternatives)

    def missing(*args: object, **options: object) -> None:
        raise FileNotFoundError("cuobjdump")

    monkeypatch.setattr("subprocess.run", missing)
    with pytest.raises(TritonError, match="cuobjdump does not run"):
        resource_facts(fake_cubin(sources[0], 90))
    choice = choose(sources, 90, lambda source, cubin: 1e-6 if source is sources[2] else 2e-6, fake_cubin)
    assert choice.source is sources[2]


@pytest.mark.covers("F5e.3", "F7.20")
def test_the_winner_is_part_of_the_artifact_and_is_not_tuned_again() -> None:
    x = torch.arange(64 * 1024.0).reshape(64, 1024)
    rendered = render_program(lower(lambda x: (x * 2 + 1,), [x]).scheduled, tune=True)
    asked: list[Any] = []

    def timer(source: KernelSource, cubin: Cubin) -> float:
        asked.append(source.config)
        return 1.0 / dict(source.config.blocks)["XBLOCK"]  # the largest block wins

    tuned = assemble(rendered, 90, timer)
    (kernel,) = tuned.kernels
    assert len(asked) >= 4 and dict(kernel.source.config.blocks)["XBLOCK"] == 4096 and not kernel.alternatives
    again = compiled_from_json(compiled_to_json(to_program(tuned)))
    assert again == to_program(tuned) and kernels_of(again) == (kernel,) and "4096" in kernel.choice
    asked.clear()
    (y,) = bind_program(again)([x])
    assert torch.equal(y, x * 2 + 1)  # also launched with the winner's number of program instances
    assert not asked


@pytest.mark.covers("F5e.3", "F5e.4")
def test_tuning_measures_each_product_once_with_its_own_layouts_and_keeps_the_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([3e-6, 1e-6, 1e-6, 3e-6, 2e-6, 1e-6])
    measured: list[Any] = []

    def seconds(call: Any) -> float:
        (result,) = call() if isinstance(found := call(), list) else (found,)
        measured.append(result)
        return next(clock)

    monkeypatch.setattr(TritonTarget, "measure", lambda self, compiled: product_times("cpu", compiled, seconds))
    args = inputs(torch.float32)
    lowered = lower(products, args, tune=True)
    assert len(measured) == 6 and all(torch.isfinite(m).all() for m in measured)
    for library, generated in zip(measured[::2], measured[1::2], strict=True):
        torch.testing.assert_close(generated, library, rtol=1e-4, atol=1e-4)
    assert sum(": generated, " in reason for reason in choices(lowered)) == 2
    torch.testing.assert_close(bind_program(lowered.program)(list(args)), list(products(*args)), rtol=1e-4, atol=1e-4)
    assert str(extents_of(lowered.scheduled.buffers)["x_1"]) == str(args[0].numel())


def test_a_product_of_sizes_known_at_run_time_only_is_atens() -> None:
    def compiled(op: Any, tensors: list[torch.Tensor]) -> Any:
        pytest.fail("nothing is compiled for it")

    args = torch.ones(3, 4), torch.ones(4, 5)
    graph = make_fx(lambda x, w: (x @ w,), decompositions(), tracing_mode="symbolic")(*args)
    program = lower_graph(graph)
    (product,) = program.steps
    assert isinstance(product, Contraction) and product.library is not None
    assert product_times("cpu", compiled)(product.library, {b.name: b for b in program.buffers}) == (0.0, math.inf)
