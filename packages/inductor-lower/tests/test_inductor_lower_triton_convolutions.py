"""Convolutions of channels-last images as implicit products: what they compute, compile to, and who computes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_graph, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.kernel_passes.linearize import linearize
from aotkit_inductor_lower.kernel_passes.normal_form import normalize
from aotkit_inductor_lower.targets.triton import compile_kernel, kernels_of, resource_facts
from aotkit_inductor_lower.targets.triton.jit import interpret_kernel
from aotkit_inductor_lower.targets.triton.products import ProductTile
from aotkit_inductor_lower.targets.triton.render.implicit import emit_implicit, implicit_site
from aotkit_inductor_lower.targets.triton.target import TRITON_INTERPRETER, TritonTarget
from aotkit_inductor_lower.targets.triton.tune import product_times

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

BF16 = torch.bfloat16
Graph = Callable[..., tuple[torch.Tensor, ...]]


def lower(f: Graph, args: Sequence[torch.Tensor], **settings: Any) -> Compiled:
    """``f`` with the kernels of a CUDA device."""
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    chosen = {"contractions": "generated"} | settings
    return compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter", **chosen))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = BF16, last: bool = True) -> list[torch.Tensor]:
    """Normal numbers; what has four dimensions is channels last."""
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    return [t.contiguous(memory_format=torch.channels_last) if last and t.dim() == 4 else t for t in made]


def convolution(stride: int, pad: int, dilation: int = 1) -> Graph:
    """Forward."""
    return lambda x, w: (F.conv2d(x, w, stride=stride, padding=pad, dilation=dilation),)


def gradients(stride: int, pad: int, dilation: int = 1) -> Graph:
    """Both of them."""

    def of(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        how = [stride] * 2, [pad] * 2, [dilation] * 2, False, [0, 0], 1
        found = torch.ops.aten.convolution_backward(g, x, w, None, *how, [True, True, False])
        return found[0], found[1]

    return of


def steps(t: torch.Tensor) -> list[int]:
    """Strides along dimensions of more than one element: those of others differ between processors in eager mode."""
    return [step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1]


def check(f: Graph, args: list[torch.Tensor], lowered: Compiled) -> None:
    """No further from the exact result than one and a half times eager, and laid out alike."""
    got, want, exact = bind_program(lowered.program)(list(args)), f(*args), f(*(a.double() for a in args))
    for ours, eager, real in zip(got, want, exact, strict=True):
        assert (ours.dtype, ours.shape, steps(ours)) == (eager.dtype, eager.shape, steps(eager))
        errors = [float((each.double() - real).abs().max()) for each in (ours, eager)]
        assert errors[0] <= 1.5 * errors[1] + 2e-5 * float(real.abs().max())


# images, channels, filters, height, width, kernel, stride, padding, dilation
SHAPES = {
    "odd image": (2, 32, 40, 9, 7, 3, 1, 1, 1),
    "stride": (3, 20, 24, 11, 10, 3, 2, 1, 1),
    "odd channels": (1, 17, 19, 8, 8, 2, 2, 0, 1),
    "dilation": (1, 48, 17, 10, 12, 3, 1, 2, 2),
    "one tap, stride": (2, 24, 40, 9, 8, 1, 2, 0, 1),
    "one tap": (2, 24, 40, 9, 8, 1, 1, 0, 1),
    "stride 3": (2, 16, 16, 13, 13, 5, 3, 2, 1),
    "many channels": (1, 100, 33, 5, 5, 3, 1, 1, 1),
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.covers("F5g.16")
def test_a_convolution_and_its_gradients_are_products_of_no_matrix_in_memory(case: str) -> None:
    n, c, o, height, width, k, stride, pad, dilation = SHAPES[case]
    x, w = tensors((n, c, height, width), (o, c, k, k))
    forward, backward = convolution(stride, pad, dilation), gradients(stride, pad, dilation)
    (y,) = forward(x, w)
    (g,) = tensors(tuple(y.shape))
    for f, args in ((forward, [x, w]), (backward, [g, x, w])):
        lowered = lower(f, args)
        assert not lowered.report.externs
        assert any("tl.dot" in kernel.source.text for kernel in kernels_of(lowered.program))
        check(f, args, lowered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_have_kernels_too(dtype: torch.dtype) -> None:
    args = tensors((2, 20, 9, 7), (24, 20, 3, 3), dtype=dtype)
    lowered = lower(convolution(1, 1), args)
    (kernel,) = kernels_of(lowered.program)
    assert ("dot_ieee(" in kernel.source.text) == (dtype is torch.float32)
    check(convolution(1, 1), args, lowered)


def test_pictures_of_three_channels_are_summed_over_all_loops_at_once() -> None:
    args = tensors((2, 3, 20, 19), (18, 3, 7, 7))
    lowered = lower(convolution(2, 3), args)
    (kernel,) = kernels_of(lowered.program)
    assert "rest_" in kernel.source.text.partition("for step")[2]  # quotients of a step's own numbers
    check(convolution(2, 3), args, lowered)


def block(x: torch.Tensor, w: torch.Tensor, *norm: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A convolution, a batch norm in inference, a residual and relu."""
    scale, shift, mean, variance, r = norm
    y = torch.ops.aten._native_batch_norm_legit_no_training(
        F.conv2d(x, w, padding=1), scale, shift, mean, variance.abs(), 0.1, 1e-5
    )
    return (F.relu(y[0] + r),)


@pytest.mark.covers("F5h.9")
def test_norm_residual_and_relu_are_computed_of_the_tiles() -> None:
    args = tensors((2, 32, 9, 7), (48, 32, 3, 3), (48,), (48,), (48,), (48,), (2, 48, 9, 7))
    lowered = lower(block, args)
    (kernel,) = kernels_of(lowered.program)
    assert "tl.dot" in kernel.source.text and not lowered.report.externs
    check(block, args, lowered)


TILES = (
    ProductTile(128, 64, 32, 4, 3, group=2),
    ProductTile(32, 64, 64, 2, 2, group=3),
    ProductTile(16, 32, 16, 2, 2),
)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows}x{tile.columns}x{tile.inner}")
@pytest.mark.parametrize("channels", [24, 64])
def test_each_tile_computes_the_convolution(tile: ProductTile, channels: int) -> None:
    args = tensors((2, channels, 9, 7), (72, channels, 3, 3))
    lowered = lower(convolution(1, 1), args)
    (kernel,) = normalize(linearize(lowered.scheduled)).kernels
    assert implicit_site(kernel) is not None
    source = emit_implicit(kernel, tile)
    (want,) = convolution(1, 1)(*args)
    result = next(a.name for a in source.arguments if a.written)
    given = {a.name: t for a, t in zip((a for a in source.parameters if not a.written), args, strict=True)}
    got = torch.full_like(want, 7.0)
    interpret_kernel(source, given | {result: got})
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1.6e-2)


def test_the_gradient_by_weights_is_summed_in_parts_and_repeats() -> None:
    args = tensors((4, 24, 24, 24), (4, 20, 24, 24), (24, 20, 3, 3))
    lowered = lower(gradients(1, 1), args)
    parts = [str(decision) for decision in lowered.records if decision.kind == "split"]
    assert len(parts) == 1 and "chunks of 2 of r0 < 4" in parts[0]
    bound = bind_program(lowered.program)
    first, second = (bound(list(args)) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert not any("atomic" in kernel.source.text for kernel in kernels_of(lowered.program))
    check(gradients(1, 1), args, lowered)


# -- who computes it -----------------------------------------------------------------------------------------------


def reasons(lowered: Compiled) -> list[str]:
    """Why."""
    return [str(decision) for decision in lowered.records if decision.kind == "contraction"]


def test_atens_call_stays_where_nothing_is_measured() -> None:
    args = tensors((2, 32, 9, 7), (40, 32, 3, 3))
    lowered = lower(convolution(1, 1), args, contractions="auto")
    assert [extern.target for extern in lowered.report.externs] == ["aten.convolution.default"]
    assert reasons(lowered)[0].endswith("ATen, nothing is measured without tune")


# what a device of the kind that was measured takes without a measure: images, weights, stride, padding, and why
TAKEN: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int, str]] = {
    "three channels": ((64, 3, 224, 224), (64, 3, 7, 7), 2, 3, "an image of three channels"),
    "patches": ((64, 3, 224, 224), (96, 3, 4, 4), 4, 0, "its places don't overlap"),
    "no overlap": ((64, 96, 56, 56), (192, 96, 2, 2), 2, 0, "its places don't overlap"),
    "overlap": ((64, 64, 56, 56), (64, 64, 3, 3), 1, 1, ""),
    "one tap": ((64, 64, 56, 56), (256, 64, 1, 1), 1, 0, ""),
    "few images": ((1, 3, 224, 224), (96, 3, 4, 4), 4, 0, ""),
}


@pytest.mark.parametrize("case", TAKEN)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_what_was_faster_by_much_is_ours_by_default(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, in the type and as large as it was measured, on the kind of device that it was measured on."""
    known = replace(TRITON_INTERPRETER, capabilities=replace(TRITON_INTERPRETER.capabilities, knows_times=True))
    image, weights, stride, pad, why = TAKEN[case]
    with FakeTensorMode():
        args = [torch.empty(s, dtype=dtype).to(memory_format=torch.channels_last) for s in (image, weights)]
        (y,) = convolution(stride, pad)(*args)
        back = [torch.empty_like(y), *args]
        plain = lower(convolution(stride, pad), args, contractions="auto")
        monkeypatch.setattr("aotkit_inductor_lower.targets.select._NAMED", {"triton-interpreter": known})
        made = lower(convolution(stride, pad), args, contractions="auto")
        gradient = lower(gradients(stride, pad), back, contractions="auto")
    assert plain.report.externs and gradient.report.externs
    assert bool(made.report.externs) != bool(why and dtype is BF16)
    if why and dtype is BF16:
        assert f"generated, {why}: as measured on an H200" in reasons(made)[0]


def test_the_faster_one_is_taken_where_they_are_measured_and_equal_ones_are_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results: list[torch.Tensor] = []
    clock = iter([2e-6, 1e-6, 2e-6, 3e-6, 2e-6, 1e-6])

    def seconds(call: Callable[[], Any]) -> float:
        found = call()
        results.append(found[0] if isinstance(found, list | tuple) else found)
        return next(clock)

    monkeypatch.setattr(TritonTarget, "measure", lambda self, compiled: product_times("cpu", compiled, seconds))

    def both(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.conv2d(x, w, padding=1)
        return (y, F.conv2d(y, w, padding=1), *gradients(1, 1)(g, x, w))

    args = tensors((2, 32, 9, 7), (32, 32, 3, 3), (2, 32, 9, 7))
    lowered = lower(both, args, contractions="auto", tune=True)
    assert len(results) == 6
    for library, generated in zip(results[::2], results[1::2], strict=True):
        assert (generated.double() - library.double()).norm() <= 5e-3 * library.double().norm()
    found = reasons(lowered)
    assert sum("generated, ATen 2.0 us, generated 1.0 us" in reason for reason in found) == 3
    assert sum("by its input: ATen, ATen 2.0 us, generated 3.0 us" in reason for reason in found) == 1
    check(both, args, lowered)


@pytest.mark.parametrize(
    ("shapes", "last", "reason"),
    [
        (((2, 32, 9, 7), (40, 32, 3, 3)), False, "its images are not channels last"),
        (((2, 32, 9, 7), (8, 32, 3, 3)), True, "fewer than 16 rows or columns"),
    ],
)
def test_what_has_no_tiles_is_atens_with_the_reason(
    shapes: tuple[tuple[int, ...], ...], last: bool, reason: str
) -> None:
    lowered = lower(convolution(1, 1), tensors(*shapes, last=last))
    assert reason in reasons(lowered)[0] and lowered.report.externs


def test_groups_are_atens() -> None:
    args = tensors((2, 32, 9, 7), (32, 1, 3, 3))
    lowered = lower(lambda x, w: (F.conv2d(x, w, padding=1, groups=32),), args)
    assert "it has groups" in reasons(lowered)[0] and lowered.report.externs


# -- what they compile to ------------------------------------------------------------------------------------------

LARGE: dict[str, tuple[Graph, tuple[tuple[int, ...], ...]]] = {
    "forward": (convolution(1, 1), ((32, 64, 56, 56), (64, 64, 3, 3))),
    "one tap, stride": (convolution(2, 0), ((32, 256, 56, 56), (512, 256, 1, 1))),
    "gradients": (gradients(1, 1), ((32, 64, 28, 28), (32, 64, 28, 28), (64, 64, 3, 3))),
}


@pytest.mark.parametrize("case", LARGE)
def test_images_are_copied_sixteen_bytes_a_thread_and_multiplied_by_the_devices_units(case: str) -> None:
    f, shapes = LARGE[case]
    empty = [torch.empty(shape, dtype=BF16).contiguous(memory_format=torch.channels_last) for shape in shapes]
    sources = [k.source for k in kernels_of(lower(f, empty).program) if "tl.dot" in k.source.text]
    assert len(sources) == (2 if case == "gradients" else 1)
    for source in sources:
        assert "int64" not in source.text
        cubin = compile_kernel(source, 90, keep_ptx=True)
        facts = resource_facts(cubin)
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*\], \[.*\], (0x[0-9a-f]+|\d+)", cubin.ptx)
        assert facts.spills == facts.stack == 0 and "wgmma.mma_async" in cubin.ptx
        assert {int(width, 0) for width in copies} == {16} and "ld.global" not in cubin.ptx


# -- on a device ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES)
def test_convolutions_on_a_device(case: str) -> None:
    n, c, o, height, width, k, stride, pad, dilation = SHAPES[case]
    x, w = (t.cuda() for t in tensors((8 * n, c, height, width), (o, c, k, k)))
    forward, backward = convolution(stride, pad, dilation), gradients(stride, pad, dilation)
    (y,) = forward(x, w)
    g = torch.randn(y.shape, device="cuda").to(BF16).contiguous(memory_format=torch.channels_last)
    for f, args in ((forward, [x, w]), (backward, [g, x, w])):
        graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
        compiled = compile_graph(graph, options=LowerOptions(contractions="generated"))
        got, want, exact = compiled(list(args)), f(*args), f(*(a.double() for a in args))
        for ours, eager, real in zip(got, want, exact, strict=True):
            assert ours.stride() == eager.stride()
            errors = [float((each.double() - real).abs().max()) for each in (ours, eager)]
            assert errors[0] <= 1.5 * errors[1] + 2e-5 * float(real.abs().max())


@pytest.mark.gpu
def test_a_block_with_norm_and_residual_on_a_device() -> None:
    args = [t.cuda() for t in tensors((8, 64, 28, 28), (64, 64, 3, 3), (64,), (64,), (64,), (64,), (8, 64, 28, 28))]
    graph = make_fx(block, decompositions(), tracing_mode="fake")(*args)
    compiled = compile_graph(graph, options=LowerOptions(contractions="generated"))
    got, want, exact = compiled(list(args)), block(*args), block(*(a.double() for a in args))
    errors = [float((each[0].double() - exact[0]).abs().max()) for each in (got, want)]
    assert errors[0] <= 1.5 * errors[1]
