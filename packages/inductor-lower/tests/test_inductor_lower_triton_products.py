"""Tiles of generated matrix products: each computes the same, and compiles to what the device's units want."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.ir import DType
from aotkit_inductor_lower.kernel_ir.nodes import Kernel
from aotkit_inductor_lower.kernel_passes.linearize import extents_of, linearize
from aotkit_inductor_lower.kernel_passes.normal_form import normalize
from aotkit_inductor_lower.targets.triton import TritonError, compile_kernel, kernels_of, resource_facts
from aotkit_inductor_lower.targets.triton.compile import vector_bytes
from aotkit_inductor_lower.targets.triton.harness import harness_text
from aotkit_inductor_lower.targets.triton.jit import interpret_kernel
from aotkit_inductor_lower.targets.triton.products import ProductTile, Sizes, ranked
from aotkit_inductor_lower.targets.triton.records import Gpu
from aotkit_inductor_lower.targets.triton.render.matmul import dot_site, emit_matmul, product_sources
from aotkit_inductor_lower.targets.triton.target import TRITON_INTERPRETER, cuda_capabilities

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

BF16 = torch.bfloat16
Graph = Callable[..., tuple[torch.Tensor, ...]]


def lower(f: Graph, args: Sequence[torch.Tensor], **settings: Any) -> Compiled:
    """``f`` with the kernels of a CUDA device."""
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    options = LowerOptions(verify=True, processor="triton-interpreter", contractions="generated", **settings)
    return compile_to_program(graph, options=options)


def product_of(lowered: Compiled) -> Kernel:
    """The only product's kernel."""
    (kernel,) = (k for k in normalize(linearize(lowered.scheduled)).kernels if dot_site(k) is not None)
    return kernel


def empty(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Tensors of shapes."""
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


def linear(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Both factors lie along the sum."""
    return (F.linear(x, w),)


def input_gradient(g: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One does."""
    return (g @ w,)


def weight_gradient(g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """None does."""
    return (g.t() @ x,)


def of_transposed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The other one does."""
    return (x.t() @ w.t(),)


def followed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A bias, gelu and a residual."""
    return (F.gelu(F.linear(x, w, b)) + r,)


def computed_before(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Something is computed of a factor."""
    return (F.linear(torch.relu(x) * 2, w),)


TILES = (
    ProductTile(128, 256, 64, 8, 3, walks=True),
    ProductTile(128, 128, 64, 8, 3, walks=True, group=2),
    ProductTile(128, 64, 32, 4, 3, group=2),
    ProductTile(32, 64, 32, 2, 2, group=3),
)
CASES: dict[str, tuple[Graph, list[tuple[int, ...]]]] = {
    "linear": (linear, [(136, 96), (264, 96)]),
    "odd columns": (linear, [(130, 72), (257, 72)]),
    "input gradient": (input_gradient, [(136, 104), (104, 264)]),
    "weight gradient": (weight_gradient, [(120, 136), (120, 264)]),
    "of transposed": (of_transposed, [(72, 136), (264, 72)]),
    "computed before": (computed_before, [(136, 72), (264, 72)]),
    "followed": (followed, [(136, 64), (264, 64), (264,), (136, 264)]),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows}x{tile.columns}{' walk' * tile.walks}")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.covers("F5e.4")
def test_each_tile_computes_the_product(case: str, tile: ProductTile) -> None:
    f, shapes = CASES[case]
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=g).to(BF16) for shape in shapes]
    lowered = lower(f, args)
    kernel = product_of(lowered)
    source = emit_matmul(kernel, tile, Gpu(processors=2))  # so that instances walk over several tiles
    assert ("make_tensor_descriptor" in source.text) == (bool(tile.walks) and case != "computed before")
    (want,) = f(*args)
    result = next(a.name for a in source.arguments if a.written and a.kind == "pointer")
    given = {a.name: t for a, t in zip((a for a in source.parameters if not a.written), args, strict=True)}
    got = torch.full_like(want, 7.0)
    interpret_kernel(source, given | {result: got})
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1.6e-2)


def test_what_is_computed_of_a_factor_is_computed_as_it_is_loaded() -> None:
    kernel = product_of(lower(computed_before, empty((8192, 768), (3072, 768))))
    source = emit_matmul(kernel, ProductTile(128, 128, 64, 8, 3, walks=True))
    assert "descriptor" not in source.text
    cubin = compile_kernel(source, 90, keep_ptx=True)
    assert "wgmma.mma_async" in cubin.ptx and widths(cubin.ptx) == {16}
    assert resource_facts(cubin).stack == 0


def heads(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Products of each head, of 64 numbers, of rows of heads."""
    left, right = (t.view(t.shape[0], -1, 64).transpose(0, 1) for t in (q, k))
    return (torch.bmm(left, right.transpose(1, 2)),)


def batch(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Products of one matrix each."""
    return (torch.bmm(q, k.transpose(1, 2)),)


@pytest.mark.parametrize(("f", "shape"), [(batch, (2, -1, 72)), (heads, (-1, 128))])
def test_pieces_of_several_products_are_described_by_one_matrix(f: Graph, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    args = [torch.randn([n if k < 0 else k for k in shape], generator=g).to(BF16) for n in (136, 264)]
    lowered = lower(f, args)
    source = emit_matmul(product_of(lowered), ProductTile(128, 128, 64, 4, 3, walks=True), Gpu(processors=3))
    assert "make_tensor_descriptor" in source.text
    (want,) = f(*args)
    got = torch.full_like(want, 7.0)
    result = next(a.name for a in source.arguments if a.written and a.kind == "pointer")
    given = {a.name: t for a, t in zip((a for a in source.parameters if not a.written), args, strict=True)}
    interpret_kernel(source, given | {result: got})
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1.6e-2)


def test_what_no_descriptor_can_say_is_loaded_by_pointers() -> None:
    tile = ProductTile(128, 128, 64, 4, 3, walks=True)
    odd = product_of(lower(linear, empty((200, 97), (304, 97)), disable=("pad-products",)))
    computed = product_of(lower(lambda x, w: linear(torch.relu(x), w), empty((200, 96), (304, 96))))
    part = product_of(lower(heads, empty((200, 128), (264, 128))))
    for kernel in (odd, computed):
        assert "descriptor" not in emit_matmul(kernel, tile).text
    assert "descriptor" in emit_matmul(part, tile).text
    # Steps of 48 through 64 numbers of a head: what is behind them is another head's.
    assert "descriptor" not in emit_matmul(part, ProductTile(128, 128, 48, 4, 3, walks=True)).text
    kernel = product_of(lower(linear, empty((200, 96), (304, 96))))
    assert "descriptor" not in emit_matmul(kernel, tile, unaligned={"w_1"}).text
    assert "descriptor" in emit_matmul(kernel, tile, unaligned={"mm"}).text


# -- what they compile to ------------------------------------------------------------------------------------------

LARGE: dict[str, tuple[Graph, list[tuple[int, ...]]]] = {
    "linear": (linear, [(8192, 768), (3072, 768)]),
    "odd columns": (linear, [(8192, 768), (50257, 768)]),
    "input gradient": (input_gradient, [(8192, 3072), (3072, 768)]),
    "weight gradient": (weight_gradient, [(8192, 3072), (8192, 3072)]),
    "followed": (followed, [(8192, 768), (3072, 768), (3072,), (8192, 3072)]),
}


def widths(ptx: str) -> set[int]:
    """Bytes of the copies to shared memory."""
    found = re.findall(r"cp\.async\.c[ag]\.shared\.global.*\], \[.*\], (0x[0-9a-f]+|\d+)", ptx)
    return {int(width, 0) for width in found}


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.covers("F5e.4")
def test_pieces_of_factors_are_copied_sixteen_bytes_a_thread(case: str) -> None:
    f, shapes = LARGE[case]
    kernel = product_of(lower(f, empty(*shapes), disable=("pad-products",)))
    wide = case in ("linear", "input gradient", "weight gradient")
    source = emit_matmul(kernel, ProductTile(128, 256 if wide else 128, 64, 8, 3))
    assert "int64" not in source.text and "tl.where" not in source.text
    cubin = compile_kernel(source, 90, keep_ptx=True)
    facts = resource_facts(cubin)
    assert facts.spills == facts.stack == 0
    assert "wgmma.mma_async" in cubin.ptx and widths(cubin.ptx) == {16}
    assert "ld.global" not in cubin.ptx or case == "followed"
    assert set(vector_bytes(cubin.ptx, "st")) == ({2} if case == "odd columns" else {16})
    older = compile_kernel(source, 80, keep_ptx=True) if case == "linear" else None
    assert older is None or ("mma.sync" in older.ptx and widths(older.ptx) == {16})


@pytest.mark.parametrize("case", ["linear", "weight gradient", "odd columns"])
def test_a_walk_has_its_factors_copied_by_the_device(case: str) -> None:
    f, shapes = LARGE[case]
    kernel = product_of(lower(f, empty(*shapes), disable=("pad-products",)))
    source = emit_matmul(kernel, ProductTile(128, 256, 64, 8, 3, walks=True))
    cubin = compile_kernel(source, 90, keep_ptx=True)
    facts = resource_facts(cubin)
    assert facts.spills == facts.stack == 0
    assert "wgmma.mma_async" in cubin.ptx and "cp.async.bulk.tensor.2d" in cubin.ptx and not widths(cubin.ptx)
    (descriptors,) = (a for a in source.arguments if a.kind == "descriptors")
    assert source.arguments[-1] is descriptors and cubin.hidden == 1
    assert descriptors.extent == 2 * 128 // 8 * 132 and [str(size) for size, _ in source.grid] == ["132"]


def test_shared_memory_is_as_expected_and_too_much_of_it_is_refused() -> None:
    kernel = product_of(lower(weight_gradient, empty((8192, 768), (8192, 768))))  # in parts: results are float32
    sizes = Sizes(4, 768, 768, 2048, result_bytes=4)
    small, large = ProductTile(128, 128, 64, 4, 3, walks=True), ProductTile(128, 256, 64, 8, 3, walks=True)
    assert abs(compile_kernel(emit_matmul(kernel, small), 90).shared - small.shared(sizes)) < 33 << 10
    assert large.shared(sizes) > Gpu().shared and large not in ranked(sizes, Gpu(), described=True)
    with pytest.raises(TritonError, match="bytes of shared memory, too many for sm_90"):
        compile_kernel(emit_matmul(kernel, large), 90)


def test_a_script_of_a_walk_gives_it_memory_for_descriptors() -> None:
    lowered = lower(linear, empty((200, 96), (304, 96)))
    extents = extents_of(lowered.scheduled.buffers)
    tiles = (ProductTile(128, 128, 64, 4, 3, walk) for walk in (True, False))
    texts = [harness_text(emit_matmul(product_of(lowered), tile), extents) for tile in tiles]
    assert ["triton.set_allocator(memory)" in text for text in texts] == [True, False]
    assert [compile(text, "script", "exec") is not None for text in texts] == [True, True]


def test_memory_that_a_kernel_does_not_get_is_refused() -> None:
    kernel = product_of(lower(linear, empty((8192, 768), (3072, 768))))
    source = emit_matmul(kernel, ProductTile(128, 128, 64, 4, 3, walks=True))
    with pytest.raises(TritonError, match="asks for scratch memory of its own"):
        compile_kernel(replace(source, arguments=source.parameters), 90)


# -- which tile ----------------------------------------------------------------------------------------------------


def test_ways_that_are_compared_take_the_same_arguments_and_fit_the_device() -> None:
    kernel = product_of(lower(linear, empty((8192, 768), (3072, 768))))
    made = product_sources(kernel, most=10)
    assert len(made) == 10 and len({s.arguments for s in made}) == 1 and made[0].arguments[-1].kind == "descriptors"
    assert {"make_tensor_descriptor" in s.text for s in made} == {True, False}
    old = product_sources(kernel, Gpu(86, 84), most=10)
    assert all("descriptor" not in s.text for s in old)
    assert compile_kernel(old[0], 86).shared <= Gpu(86).shared


def test_large_products_get_large_tiles_and_small_ones_enough_of_them() -> None:
    def tiles(sizes: Sizes) -> int:
        best = ranked(sizes, Gpu(), described=True)[0]
        return -(-sizes.rows // best.rows) * -(-sizes.columns // best.columns) * sizes.count

    large = ranked(Sizes(1, 8192, 3072, 768), Gpu(), described=True)[0]
    assert large.rows * large.columns >= 128 * 256
    assert tiles(Sizes(1, 1024, 1024, 1024)) >= 60
    few = ranked(Sizes(1, 8, 4096, 4096), Gpu(), described=True)[0]
    assert few.rows <= 32
    single = ranked(Sizes(1, 1024, 1024, 1024, factor_bytes=4), Gpu(), described=False)[0]
    assert not single.walks and single.shared(Sizes(1, 1024, 1024, 1024, 4)) <= Gpu().shared


# -- sums in parts -------------------------------------------------------------------------------------------------


def scaled_gradient(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A weight's gradient, with something after it."""
    return ((g.t() @ x) * 0.5 + w,)


def test_a_long_sum_of_few_tiles_is_computed_in_parts_and_repeats() -> None:
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=g).to(BF16) for shape in ((4096, 72), (4096, 40), (72, 40))]
    lowered = lower(scaled_gradient, args)
    product, rest = kernels_of(lowered.program)
    assert "tl.dot" in product.source.text and "tl.dot" not in rest.source.text
    assert "atomic" not in product.source.text + rest.source.text
    assert [a.dtype for a in product.source.arguments if a.written and a.kind == "pointer"] == [DType.F32]
    bound = bind_program(lowered.program)
    first, second = (bound(list(args))[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, *scaled_gradient(*args), rtol=1.6e-2, atol=0.1)


def test_a_product_of_enough_tiles_is_whole() -> None:
    lowered = lower(scaled_gradient, empty((4096, 2048), (4096, 1024), (2048, 1024)))
    assert len(kernels_of(lowered.program)) == 1


# -- odd rows of a result ------------------------------------------------------------------------------------------


def biased(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Logits of a batch."""
    return (F.linear(x.view(2, -1, x.shape[1]), w, b),)


def of_loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Logits that are not returned."""
    return (F.linear(x, w, b).float().logsumexp(-1),)


MEASURED = replace(TRITON_INTERPRETER, capabilities=replace(TRITON_INTERPRETER.capabilities, stores_odd_rows=True))


@pytest.mark.parametrize(
    ("f", "rows", "inner", "columns", "form"),
    [
        (biased, 8192, 768, 50257, "dot"),
        (biased, 8192, 768, 30522, "dot"),
        (biased, 8192, 768, 50264, "aten"),  # no odd rows
        (biased, 8192, 760, 50257, "dot"),
        (biased, 8192, 764, 50257, "padded"),  # factors have odd rows
        (biased, 64, 768, 50257, "aten"),  # few rows
        (biased, 128, 768, 512 + 1, "aten"),  # a small product
        (biased, 1 << 16, 64, 50257, "padded"),  # offsets of 64 bits
        (of_loss, 8192, 768, 50257, "padded"),
    ],
)
def test_a_returned_result_of_odd_rows_is_generated_where_that_was_measured(
    f: Graph, rows: int, inner: int, columns: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotkit_inductor_lower.targets.select._NAMED", {"triton-interpreter": MEASURED})
    given = empty((rows, inner), (columns, inner), (columns,))
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*given)
    options = LowerOptions(verify=True, processor="triton-interpreter")
    lowered = compile_to_program(graph, options=options)
    texts = [kernel.source.text for kernel in kernels_of(lowered.program)]
    assert sum("tl.dot" in text for text in texts) == (form == "dot")
    assert ("rows of the result begin anywhere" in str(lowered.records)) == (form == "dot")
    assert any("pad" in kernel.source.name for kernel in kernels_of(lowered.program)) == (form == "padded")
    if form == "dot":
        assert len(texts) == 1 and "flatten=True" in texts[0]
        aten = compile_to_program(graph, options=replace(options, contractions="aten"))
        assert not any("tl.dot" in kernel.source.text for kernel in kernels_of(aten.program))


def test_only_a_device_of_the_kind_that_was_measured_generates_odd_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for capability, wanted in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert cuda_capabilities("cuda:0").stores_odd_rows == wanted
    assert not cuda_capabilities("cuda:1").stores_odd_rows  # there is none


# -- on a device ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (linear, [(1024, 768), (3072, 768)]),
        (linear, [(1024, 768), (8193, 768)]),
        (input_gradient, [(1024, 3072), (3072, 768)]),
        (weight_gradient, [(8192, 768), (8192, 768)]),
        (of_transposed, [(768, 1024), (3072, 768)]),
        (batch, [(16, 512, 64), (16, 512, 64)]),
        (heads, [(512, 768), (512, 768)]),
        (followed, [(1024, 768), (3072, 768), (3072,), (1024, 3072)]),
        (computed_before, [(1024, 768), (3072, 768)]),
    ],
)
def test_each_tile_computes_the_product_on_a_device(f: Graph, shapes: list[tuple[int, ...]]) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    args = [torch.randn(shape, generator=g, device="cuda").to(BF16) for shape in shapes]
    want = [each.to(BF16) for each in f(*(a.float() for a in args))]
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    lowered = compile_to_program(graph, options=LowerOptions(contractions="generated", disable=("pad-products",)))
    first, second = ([r.clone() for r in bind_program(lowered.program)(list(args))] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    largest = max(float(w.abs().max()) for w in want)
    torch.testing.assert_close(first, want, rtol=1.6e-2, atol=1e-2 * largest)
