"""Kernels read and write memory in few sectors: what is counted on whole graphs, without a device."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

from aotkit_inductor_lower import (
    LowerOptions,
    bind_program,
    compile_graph,
    compile_to_program,
    decompositions,
    driver,
    interpret_program,
)
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.graph_passes import pad_products
from aotkit_inductor_lower.ir.random_programs import difference, random_inputs, random_program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.loop_passes.gather_launches import gather_launches
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.targets.triton import (
    InterpreterDriver,
    KernelSource,
    compile_kernel,
    contents_of,
    kernels_of,
    load_on,
    resource_facts,
    vector_bytes,
)
from aotkit_inductor_lower.targets.triton import map_loops as map_loops_module
from aotkit_inductor_lower.targets.triton.target import TRITON_INTERPRETER

pytestmark = pytest.mark.filterwarnings("ignore")
aten = torch.ops.aten
INTERPRETED = LowerOptions(processor="triton-interpreter")


def lower(f: Callable[..., Any], *args: torch.Tensor) -> Compiled:
    graph = make_fx(lambda *given: f(*given), decompositions(), tracing_mode="fake")(*args)
    lowered = compile_to_program(graph, options=LowerOptions(processor="triton-interpreter", verify=True))
    assert isinstance(lowered, Compiled)
    return lowered


def sources(lowered: Compiled) -> list[KernelSource]:
    return [kernel.source for kernel in kernels_of(lowered.program)]


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def test_columns_are_summed_in_chunks_though_each_row_has_a_mean_of_its_own() -> None:
    """What lies along the sum, and is the same for all columns, does not make one column a unit of work."""

    def f(x: torch.Tensor, mean: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (grad * (x - mean)).sum((0, 1)), grad.sum((0, 1))

    args = random(4, 512, 768), random(4, 512, 1, seed=1), random(4, 512, 768, seed=2)
    lowered = lower(f, *args)
    assert any(launch.name.endswith("_partial") for launch in lowered.program.kernels)
    for got, want in zip(bind_program(lowered.program)(list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_sums_of_columns_lie_side_by_side_as_the_columns_do(dtype: torch.dtype) -> None:
    """So the innermost axis of the tile is along the columns: at least 128 bytes of each row at once."""
    x = random(2048, 768).to(dtype)
    lowered = lower(lambda x: (x.sum(0, dtype=torch.float32),), x)
    partial = next(b for b in lowered.program.plan.buffers if "_partial" in b.name)
    assert [size.constant for size in partial.sizes][1] == 768
    (first,) = (s for s in sources(lowered) if s.name.endswith("_partial"))
    assert str(first.grid[-1][0]) == "768" and first.grid[-1][1] == "XBLOCK"
    assert first.config.block("XBLOCK") * dtype.itemsize >= 128
    (got,) = bind_program(lowered.program)([x])
    torch.testing.assert_close(got, x.sum(0, dtype=torch.float32), rtol=1e-4, atol=1e-3)


def test_the_gradient_of_a_log_softmax_keeps_no_row_in_memory() -> None:
    """What is computed of a few values a row is computed again, not written and read back."""

    def f(x: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaf = x.detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(leaf.float(), labels)
        return torch.autograd.grad(loss, leaf, scale)

    x, labels = random(6, 20000).bfloat16(), torch.tensor([3, 19999, -100, 7, 0, 12345])
    scale = torch.tensor(3.0)
    lowered = lower(f, x, labels, scale)
    assert not [a.name for source in sources(lowered) for a in source.arguments if a.kind == "scratch"]
    (got,) = bind_program(lowered.program)([x, labels, scale])
    torch.testing.assert_close(got, f(x, labels, scale)[0], rtol=1e-2, atol=1e-6)


def launches(lowered: Compiled) -> list[str]:
    contents = contents_of(lowered.program.binary)
    return [contents.kernels[launch.kernel].source.name for _, own in contents.segments for launch in own]


def casts_and_products(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Products in bfloat16 with weights of float32, and their gradients in float32."""
    with torch.enable_grad():
        leaves = [w.detach().requires_grad_() for w in weights]
        y = x.bfloat16()
        for leaf in leaves:
            y = y @ leaf.bfloat16()
    return (y.detach(), *torch.autograd.grad(y.float().sum(), leaves))


def test_casts_of_weights_are_one_launch_and_so_are_those_of_their_gradients() -> None:
    args = [
        random(64, 32),
        random(32, 48, seed=1),
        random(48, 32, seed=2),
        random(32, 48, seed=3),
        random(48, 8, seed=4),
    ]
    lowered = lower(casts_and_products, *args)
    names = launches(lowered)
    assert sum(name.endswith("_and_more") for name in names) == 2 and len(names) <= 5
    assert len(lowered.program.kernels) >= 9  # each has its record
    driver = InterpreterDriver()
    bound = bind_program(lowered.program, lowered.constants, load=lambda program: load_on(program, driver))
    for got, want in zip(bound(list(args)), casts_and_products(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert driver.launched == names
    for kernel in kernels_of(lowered.program):
        cubin = compile_kernel(kernel.source, 90, keep_ptx=True)
        assert resource_facts(cubin).spills == 0
        if kernel.source.name.endswith("_and_more"):
            assert max(vector_bytes(cubin.ptx)) == 16  # pointers that are chosen are known to be aligned, too


def test_a_residual_sum_reads_what_the_norm_before_it_keeps_for_its_gradient() -> None:
    """Blocks that normalize their residual sums, and products of these: what a norm gives is nowhere stored in f32."""

    def f(x: torch.Tensor, m: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = []
        for _ in range(3):
            y, mean, rstd = aten.native_layer_norm(x, [x.shape[-1]], w, b, 1e-5)
            half = y.to(torch.bfloat16)
            kept += [x, mean, rstd, half]
            x = y + (half @ m).float()
        return (*kept, x)

    args = [random(64, 64), random(64, 64, seed=1).bfloat16() / 8, random(64, seed=2), random(64, seed=3)]
    lowered = lower(f, *args)
    written = [name for step in lowered.scheduled.steps if hasattr(step, "writes") for name in step.writes]
    assert not any(name.startswith("native_layer_norm") and name.endswith("_0") for name in written)
    for got, want in zip(bind_program(lowered.program)(list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def same_layout(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(25))
def test_random_programs_compute_the_same_when_their_small_kernels_come_together(seed: int) -> None:
    program = random_program(seed)
    ctx = PassContext.of(LowerOptions(), None, TRITON_INTERPRETER)
    gathered = gather_launches(program, ctx)
    verify_program(gathered)
    assert sorted(map(str, gathered.steps)) == sorted(map(str, program.steps))
    inputs = random_inputs(program, seed)
    copies = [[same_layout(v) if isinstance(v, torch.Tensor) else v for v in inputs] for _ in range(2)]
    results = [interpret_program(p, given) for p, given in zip((program, gathered), copies, strict=True)]
    for ours, want in zip([*results[1], *copies[1]], [*results[0], *copies[0]], strict=True):
        assert difference(want, ours) is None if isinstance(want, torch.Tensor) else ours == want


def test_what_waits_for_something_that_waits_is_one_launch_behind_it() -> None:
    """Three sums of columns, each in two kernels, and a cast of each: nine kernels, a launch for each step of three."""

    def f(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((x.sum(0).to(torch.bfloat16)).float() for x in args)

    args = [random(4096, 96, seed=k) for k in range(3)]
    lowered = lower(f, *args)
    names = launches(lowered)
    assert len(names) <= 3 < 6 <= len(lowered.program.kernels)
    for got, want in zip(bind_program(lowered.program)(list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_parts_of_one_tensor_are_written_by_one_launch() -> None:
    """The steps of a recurrence: each multiplies, and a product of each is a part of the result."""

    def f(dt: torch.Tensor, a: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        decay = torch.exp(dt.unsqueeze(-1) * a[0])
        found = []
        for k in range(5):
            h = decay[:, k] * h
            found.append(h @ a)
        return torch.stack(found, -1), torch.cat(found, 1), h

    args = [random(8, 5), random(16, 16, seed=1) / 8, random(8, 16, seed=2)]
    lowered = lower(f, *args)
    nests = [step.name for step in lowered.scheduled.steps if hasattr(step, "writes")]
    assert sum("part" in name for name in nests) >= 10 and not any("exp" in name for name in nests)
    assert sum("part" in name for name in launches(lowered)) == 1
    for got, want in zip(bind_program(lowered.program)(list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_short_sum_before_a_long_pass_does_not_keep_an_image_in_one_program_instance() -> None:
    """As where channels are normalized by how large they are in the image."""

    def f(x: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * (size / (size.mean(-1, keepdim=True) + 1e-6)) + x,)

    args = [random(4, 200, 100), random(4, 1, 100, seed=1).abs()]
    lowered = lower(f, *args)
    last = [step for step in lowered.scheduled.steps if hasattr(step, "outer")][-1]
    assert [int(loop.size.constant or 0) for loop in last.outer] == [4, 200, 100]
    for got, want in zip(bind_program(lowered.program)(list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want)


def test_an_option_leaves_each_kernel_its_own_launch() -> None:
    args = [random(64, 32), *(random(32, 32, seed=k) for k in range(4))]
    graph = make_fx(lambda *given: casts_and_products(*given), decompositions(), tracing_mode="fake")(*args)
    options = LowerOptions(processor="triton-interpreter", disable=frozenset(["gather-launches"]))
    lowered = compile_to_program(graph, options=options)
    assert isinstance(lowered, Compiled)
    assert len(launches(lowered)) == len(lowered.program.kernels)
    assert not any(record.combo for record in lowered.program.kernels)


# -- passes over graphs that a device asks for -----------------------------------------------------------------------


def test_a_product_of_an_odd_vocabulary_is_padded_and_copied_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: a linear layer, a softmax of its result, and the gradients."""
    small = replace(pad_products.PASS, run=lambda graph, ctx: pad_products.pad_products(graph, ctx, 0))
    passes = tuple(small if each is pad_products.PASS else each for each in driver.GRAPH_PASSES)
    monkeypatch.setattr(driver, "GRAPH_PASSES", passes)

    def f(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x * 2
        logits = x @ w.t()
        p = aten._log_softmax(logits, -1, False)
        back = aten._log_softmax_backward_data(g, p, -1, torch.bfloat16)
        return logits, p, back.t() @ x, back @ w

    given = [torch.randn(*sizes, dtype=torch.bfloat16) for sizes in ((16, 8), (13, 8), (16, 13))]
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*given)
    wide = compile_graph(graph, options=INTERPRETED)
    nests = [step.name for step in compile_to_program(graph, options=INTERPRETED).scheduled.steps]
    assert [name for name in nests if "pad" in name] and [name for name in nests if "cat_default_part1" in name]
    assert "_log_softmax_backward_data" not in nests, "the gradient is stored where it belongs"
    plain = compile_graph(graph, options=replace(INTERPRETED, disable=frozenset(["pad-products"])))
    for got, want in zip(wide([*given]), plain([*given]), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def test_one_kernel_adds_the_bias_of_a_convolution_and_goes_on() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.gelu(F.conv2d(x, w, b)),)

    args = [torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(4)]
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    steps = compile_to_program(graph, options=INTERPRETED).scheduled.steps
    assert [type(each).__name__ for each in steps if type(each).__name__ != "Alias"] == ["ExternCall", "LoopNest"]
    torch.testing.assert_close(compile_graph(graph, options=INTERPRETED)([*args]), list(f(*args)))


@pytest.mark.parametrize("rank", [1, 3])
def test_biases_of_signals_and_volumes(rank: int) -> None:
    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
        y = (F.conv1d if rank == 1 else F.conv3d)(x, w, b)
        return y, *torch.autograd.grad(y, (x, w, b), g)

    torch.manual_seed(0)
    small = [3] * rank
    args = [torch.randn(2, 3, *[5] * rank), torch.randn(4, 3, *small), torch.randn(4), torch.randn(2, 4, *small)]
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    for got, want in zip(compile_graph(graph, options=INTERPRETED)([*args]), f(*args), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_losses_have_the_bits_of_sums_over_rows(dtype: torch.dtype, reduction: str) -> None:
    def f(x: torch.Tensor, label: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x, label, reduction=reduction)
        return torch.autograd.grad(loss, [x], g.to(x.dtype).expand_as(loss))

    torch.manual_seed(0)
    label = torch.randint(0, 13, (7,)).index_fill(0, torch.tensor([2, 5]), -100)
    x = torch.randn(7, 13, dtype=dtype)
    graph = make_fx(f, decompositions(), tracing_mode="fake")(x, label, torch.tensor(0.7))
    ways = (INTERPRETED, replace(INTERPRETED, disable=frozenset(["loss-gradients"])))
    compiled = [compile_graph(graph, options=options) for options in ways]
    for scale in (0.7, 0.0, -0.0, float("inf"), float("nan")):
        args = [torch.randn(7, 13, dtype=dtype) * 3, label, torch.tensor(scale)]
        (got,), (want,) = (run([*args]) for run in compiled)
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7)) and torch.equal(got.signbit(), want.signbit())
        loose = {"rtol": 0.05, "atol": 0.01} if dtype.itemsize == 2 else {}
        torch.testing.assert_close(got, f(*args)[0], equal_nan=True, **loose)


def padded(f: Callable[..., Any], *args: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """With products padded however small they are."""
    small = replace(pad_products.PASS, run=lambda graph, ctx: pad_products.pad_products(graph, ctx, 0))
    passes = tuple(small if each is pad_products.PASS else each for each in driver.GRAPH_PASSES)
    monkeypatch.setattr(driver, "GRAPH_PASSES", passes)
    return lower(f, *args)


def test_logits_of_a_padded_product_are_copied_while_they_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back has eager's strides; it is read once, and 16 bytes at once up to the end of the padding."""

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = x @ w.t()
        return logits, torch.logsumexp(logits.float(), -1)

    args = random(16, 8).bfloat16(), random(20003, 8).bfloat16()
    lowered = padded(f, *args, monkeypatch=monkeypatch)
    (kernel,) = (s for s in sources(lowered) if "mm_default" in s.text)
    cubin = compile_kernel(kernel, 90, keep_ptx=True)
    assert min(vector_bytes(cubin.ptx)) == 16 and resource_facts(cubin).spills == 0
    for got, want in zip(bind_program(lowered.program, lowered.constants)([*args]), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        assert got.stride() == want.stride()


@pytest.mark.parametrize("room", [0, 5])
def test_a_row_is_read_past_its_end_only_where_that_is_its_tensor(room: int) -> None:
    """A mask that ends between 16 bytes keeps threads from loading these at once."""
    memory = random(32, 1016).bfloat16()
    x = memory.as_strided((32, 1011 + room), (1016, 1), 0)[:, :1011]
    lowered = lower(lambda x: x.float().sum(1), x)
    (kernel,) = sources(lowered)
    assert ("near_row0" in kernel.text) is False, "the last row may be the end of the memory"
    (got,) = bind_program(lowered.program)([x])
    torch.testing.assert_close(got, x.float().sum(1))


def test_a_dear_value_with_two_readers_is_computed_twice_on_a_device() -> None:
    """An activation that is scaled by norms of its columns would be stored to be read twice."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.gelu(x)
        norms = y.pow(2).sum(1, keepdim=True).sqrt()
        return (y * (norms / norms.mean(-1, keepdim=True)) + y,)

    x = random(64, 50, 256)
    lowered = lower(f, x)
    written = [step.writes for step in lowered.scheduled.steps if hasattr(step, "writes")]
    assert not any("gelu" in name for names in written for name in names)
    for got, want in zip(bind_program(lowered.program)([x]), f(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_norm_behind_a_bias_is_shared_out_over_the_device(dtype: torch.dtype) -> None:
    """The sum with the bias is stored for the backward, and read once more, not twice."""

    def f(x: torch.Tensor, bias: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + bias.view(1, -1, 1, 1)
        mean, var = y.float().mean((0, 2, 3)), y.float().var((0, 2, 3), correction=0)
        scale = w * (var + 1e-5).rsqrt()
        out = y.float() * scale.view(1, -1, 1, 1) + (b - mean * scale).view(1, -1, 1, 1)
        return y, out.to(dtype), mean, var

    args = random(8, 4, 64, 64).to(dtype) + 3, random(4).to(dtype), random(4), random(4)
    lowered = lower(f, *args)
    names = [s.name for s in sources(lowered)]
    assert len(names) == 3 and sum("partial" in n for n in names) == 1, names
    exact = f(*(a.double() for a in args))
    for got, want, eager in zip(bind_program(lowered.program)(list(args)), exact, f(*args), strict=True):
        assert (got.double() - want).norm() <= 3 * (eager.double() - want).norm() + 1e-5 * want.norm()


def scaled_exponential(x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.exp(x.float() - shift[:, None]).to(x.dtype),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [16411, 16416])
def test_threads_share_the_address_of_a_row_that_begins_anywhere(columns: int, dtype: torch.dtype) -> None:
    x, shift = random(3, columns).to(dtype), random(3, seed=1)
    lowered = lower(scaled_exponential, x, shift)
    (kernel,) = sources(lowered)
    lanes = "start_i1) + tl.max_contiguous(tl.arange(0, XBLOCK), [1])"
    assert (lanes in kernel.text) == (columns % 8 != 0), kernel.text
    (got,) = bind_program(lowered.program)([x, shift])
    torch.testing.assert_close(got, scaled_exponential(x, shift)[0])


@pytest.mark.parametrize(("columns", "count"), [(16412, 4), (16410, 2)])
def test_a_thread_loads_as_many_neighbours_as_all_rows_allow(columns: int, count: int) -> None:
    x, shift = random(3, columns).bfloat16(), random(3, seed=1)
    lowered = lower(scaled_exponential, x, shift)
    (kernel,) = sources(lowered)
    assert f"start_i1) + tl.max_contiguous(tl.arange(0, XBLOCK), [{count}])" in kernel.text
    assert max(vector_bytes(compile_kernel(kernel, 90, keep_ptx=True).ptx)) == 2 * count
    (got,) = bind_program(lowered.program)([x, shift])
    torch.testing.assert_close(got, scaled_exponential(x, shift)[0])


def test_there_are_no_more_neighbours_than_a_tile_has() -> None:
    x = random(8).bfloat16()
    lowered = lower(lambda x: (x[4:6] * 2,), x)
    (kernel,) = sources(lowered)
    assert "tl.max_contiguous(tl.arange(0, XBLOCK), [2])" in kernel.text, kernel.text
    (got,) = bind_program(lowered.program)([x])
    torch.testing.assert_close(got, x[4:6] * 2)


@pytest.mark.parametrize("long", [1009, 1 << 14])
def test_a_program_instance_goes_along_a_row_that_begins_anywhere(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does once a row, it does not do for each piece of it. Threads beside each other load neighbours, though
    what is stored begins at multiples of 16 bytes."""

    def f(x: torch.Tensor, labels: torch.Tensor, most: torch.Tensor, log: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = torch.where(labels < 0, 0.0, (log * 2 + most) / 3)[:, None]
        softmax = torch.exp(x.float() - most[:, None] - log[:, None])
        hit = torch.arange(x.shape[1]) == labels[:, None]
        grad = torch.where(hit, -scale, 0.0) + softmax * scale
        return (torch.cat([grad.to(x.dtype), x.new_zeros(len(x), 7)], 1),)

    monkeypatch.setattr(map_loops_module, "_LONG", long)
    monkeypatch.setattr(map_loops_module, "_FEW_ROWS", 6)
    x, labels = random(6, 1009).bfloat16(), torch.tensor([5, 1008, -100, 0, 77, -100])
    args = x, labels, random(6, seed=1), random(6, seed=2)
    lowered = lower(f, *args)
    (kernel,) = (source for source in sources(lowered) if "libm.exp" in source.text)
    once, *each = kernel.text.split("in range(0, 1009, RBLOCK):")
    assert "p_arg1_1" in once and len(each) == (long == 1009), kernel.text
    ptx = compile_kernel(kernel, 90, keep_ptx=True).ptx
    assert not re.search(r"and.b32\s+%r\d+, %r\d+, 1016;", ptx), "a thread's elements are neighbours"
    (got,) = bind_program(lowered.program)(list(args))
    torch.testing.assert_close(got, f(*args)[0], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thread_sums_the_gradients_of_shared_heads_by_itself(dtype: torch.dtype) -> None:
    """Without that, threads beside each other exchange parts of one sum through shared memory."""
    grad = random(2, 3, 4, 64, 32).to(dtype)
    lowered = lower(lambda g: (g.sum(2).transpose(1, 2).contiguous(),), grad)
    (source,) = sources(lowered)
    cubin = compile_kernel(source, 90, keep_ptx=True)
    assert cubin.shared == 0 and "shfl" not in cubin.ptx
    assert vector_bytes(cubin.ptx) and set(vector_bytes(cubin.ptx)) == {16}
    (got,) = bind_program(lowered.program)([grad])
    torch.testing.assert_close(got, grad.sum(2).transpose(1, 2))


def test_a_tile_is_long_where_neighbours_lie_though_the_innermost_loop_moves_along_others() -> None:
    """What is added to channels-last images by computed places: all channels at once, of some columns of the image."""

    def f(image: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return aten._unsafe_index_put(image.clone(), [None, None, rows, columns], grad, True)

    image, grad = (random(1, 32, *size).contiguous(memory_format=torch.channels_last) for size in ((2, 16), (4, 64)))
    args = image, grad, torch.arange(4)[:, None] // 2, torch.arange(64) // 4
    lowered = lower(lambda *given: (f(*given),), *args)
    (adding,) = (s for s in sources(lowered) if "atomic_add(" in s.text)
    blocks = {str(size): adding.config.block(block) for size, block in adding.grid if block}
    assert blocks == {"32": 32, "64": 32}
    (got,) = bind_program(lowered.program)(list(args))
    torch.testing.assert_close(got, f(*args))
