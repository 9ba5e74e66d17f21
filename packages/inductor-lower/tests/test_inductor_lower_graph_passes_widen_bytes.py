"""Products of bytes as products of floats, on processors that ATen has no instructions for bytes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.graph_passes.rewriting import copy_graph
from aotkit_inductor_lower.graph_passes.widen_bytes import EXACT, PASS
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.targets.cpu.machine import level_machine
from aotkit_inductor_lower.targets.cpu.target import target_of

aten = torch.ops.aten
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_unsigned = pytest.mark.skipif(
    RELEASE < (2, 12),
    reason="before torch 2.12 torch multiplies no unsigned bytes, see test_inductor_lower_int8_products.py",
)
LEFT = [torch.int8, pytest.param(torch.uint8, marks=needs_unsigned)]


def _bytes(rows: int, summed: int, columns: int, left: torch.dtype = torch.int8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + summed)
    low, high = (-128, 128) if left is torch.int8 else (0, 256)
    x = torch.randint(low, high, (rows, summed), generator=generator).to(left)
    return x, torch.randint(-128, 128, (columns, summed), generator=generator).to(torch.int8)


def _passed(
    x: Any, w: Any, processor: str = "znver3", options: LowerOptions | None = None, mode: str = "fake"
) -> torch.fx.GraphModule:
    """The graph of ``x @ w`` behind the pass, for a processor that this one need not be."""
    traced = make_fx(torch._int_mm, tracing_mode=mode)(x, w)
    graph = copy_graph(traced)
    context = PassContext.of(options, target=target_of(level_machine("x86-64-v3"), processor))
    if PASS.when(context):
        graph = PASS.run(graph, context)
    return torch.fx.GraphModule(traced, graph)


def _count(made: torch.fx.GraphModule, op: Any) -> int:
    return sum(node.target is op for node in made.graph.nodes)


@pytest.mark.parametrize("left", LEFT, ids=str)
@pytest.mark.parametrize("summed", [1, 512, 513, 1024, 1025, 2816])
def test_no_bit_is_lost(left: torch.dtype, summed: int) -> None:
    x, w = _bytes(17, summed, 24, left)
    made = _passed(x, w.t())
    assert _count(made, aten._int_mm.default) == 0 and _count(made, aten.mm.default) == -(-summed // EXACT[left])
    assert torch.equal(made(x, w.t()), (x.long() @ w.long().t()).int())


@pytest.mark.parametrize("left", LEFT, ids=str)
def test_the_largest_sums_are_exact(left: torch.dtype) -> None:
    least, most = torch.iinfo(left).min, torch.iinfo(left).max
    for number, weight in ((least, -128), (most, -128), (most, 127)):
        x, w = torch.full((18, 2100), number, dtype=left), torch.full((16, 2100), weight, dtype=torch.int8)
        x[:, ::7], w[:, 1::5] = 1, 3  # odd sums, which the largest floats cannot hold
        assert torch.equal(_passed(x, w.t())(x, w.t()), (x.long() @ w.long().t()).int())


@pytest.mark.parametrize("along", [True, False])
def test_few_rows_are_kernels_where_the_weight_lies_along_the_sum(along: bool) -> None:
    x, w = _bytes(16, 64, 32)
    given = w.t() if along else w.t().contiguous()
    made = _passed(x, given)
    assert _count(made, aten._int_mm.default) == along
    assert torch.equal(made(x, given), torch._int_mm(x, given))


def test_rows_known_at_run_time_only() -> None:
    x, w = _bytes(40, 1100, 32)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    rows = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(x, symbolic_context=rows), mode.from_tensor(w.t())
    made = _passed(*fake, mode="real")
    assert _count(made, aten._int_mm.default) == 0
    for count in (40, 3):
        assert torch.equal(made(x[:count], w.t()), torch._int_mm(x[:count], w.t()))


def test_a_sum_whose_length_is_known_at_run_time_only_stays() -> None:
    x, w = _bytes(40, 100, 32)
    made = _passed(x, w.t(), mode="symbolic")
    assert _count(made, aten._int_mm.default) == 1 and torch.equal(made(x, w.t()), torch._int_mm(x, w.t()))


@pytest.mark.parametrize("processor", ["znver4", "sapphirerapids", "haswell"])
def test_other_processors_keep_the_call(processor: str) -> None:
    x, w = _bytes(40, 64, 32)
    assert _count(_passed(x, w.t(), processor), aten._int_mm.default) == 1


def test_all_is_aten_on_request() -> None:
    x, w = _bytes(40, 64, 32)
    assert _count(_passed(x, w.t(), options=LowerOptions(contractions="aten")), aten._int_mm.default) == 1
