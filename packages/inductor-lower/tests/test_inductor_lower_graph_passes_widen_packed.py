"""Products of many rows with packed weights as products of floats, where ATen's take longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.errors import UnsupportedGraphError
from aotkit_inductor_lower.graph_passes import widen_packed
from aotkit_inductor_lower.graph_passes.rewriting import copy_graph
from aotkit_inductor_lower.graph_passes.widen_packed import PASS
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.targets.cpu.machine import level_machine
from aotkit_inductor_lower.targets.cpu.target import target_of

aten = torch.ops.aten
INT4, INT8 = aten._weight_int4pack_mm_for_cpu.default, aten._weight_int8pack_mm.default
TYPES = [torch.float32, torch.float16, torch.bfloat16]

Case = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], torch.Tensor]


def four_bits(rows: int, columns: int, summed: int, dtype: torch.dtype, group: int = 32) -> Case:
    """A product, its arguments, and the weight in float64."""
    generator = torch.Generator().manual_seed(rows + columns)
    numbers = torch.randint(0, 16, (columns, summed), generator=generator)
    scales = torch.randn(summed // group, columns, 2, generator=generator).to(dtype)
    scale, zero = scales.double().repeat_interleave(group, 0).unbind(2)
    x = torch.randn(rows, summed, generator=generator).to(dtype)
    args = x, aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 2), scales
    return lambda x, w, s: aten._weight_int4pack_mm_for_cpu(x, w, group, s), args, (numbers.t() - 8) * scale + zero


def bytes_(rows: int, columns: int, summed: int, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randint(-128, 128, (columns, summed), generator=generator).to(torch.int8)
    scales = torch.randn(columns, generator=generator).to(dtype)
    x = torch.randn(rows, summed, generator=generator).to(dtype)
    return aten._weight_int8pack_mm, (x, weight, scales), weight.t().double() * scales.double()


def passed(
    call: Any, args: Any, processor: str = "znver3", options: LowerOptions | None = None, mode: str = "fake"
) -> torch.fx.GraphModule:
    """The graph of a product behind the pass, for a processor that this one need not be."""
    traced = make_fx(call, tracing_mode=mode)(*args)
    graph = copy_graph(traced)
    context = PassContext.of(options, target=target_of(level_machine("x86-64-v3"), processor))
    if PASS.when(context):
        graph = PASS.run(graph, context)
    return torch.fx.GraphModule(traced, graph)


def products(made: torch.fx.GraphModule) -> tuple[int, int]:
    """With packed weights, and of floats."""
    targets = [node.target for node in made.graph.nodes]
    return sum(target in (INT4, INT8) for target in targets), targets.count(aten.mm.default)


def as_exact(result: torch.Tensor, eager: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """A result's error is on average not more than one and a half of eager's."""
    exact = x.double() @ weight
    assert (result.dtype, result.stride()) == (eager.dtype, eager.stride())
    return bool((result - exact).abs().mean() <= 1.5 * (eager - exact).abs().mean())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("make", [four_bits, bytes_])
@pytest.mark.parametrize("columns, blocks", [(64, 1), (320, 2)])
def test_a_product_is_as_exact_as_atens(
    make: Callable[..., Case], dtype: torch.dtype, columns: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widen_packed, "BLOCK", 4 * 96 * 192)
    call, args, weight = make(25, columns, 96, dtype)
    made = passed(call, args)
    assert products(made) == (0, blocks)
    assert as_exact(made(*args), call(*args), args[0], weight)


@pytest.mark.parametrize("group", [64, 128])
def test_groups_of_any_size(group: int) -> None:
    call, args, weight = four_bits(20, 64, 256, torch.float32, group)
    assert as_exact(passed(call, args)(*args), call(*args), args[0], weight)


def test_numbers_that_are_not_finite_reach_what_they_reach_in_eager() -> None:
    for make in (four_bits, bytes_):
        call, args, _ = make(17, 64, 64, torch.float32)
        args[0][0, 1], args[0][3, 2] = float("nan"), float("inf")
        result, eager = passed(call, args)(*args), call(*args)
        assert torch.equal(result.isnan(), eager.isnan()) and torch.equal(result.isinf(), eager.isinf())


def test_an_infinite_scale_of_bytes_gives_nan_as_in_eager() -> None:
    call, args, _ = bytes_(17, 64, 64, torch.float32)
    args[2][5] = float("inf")
    result, eager = passed(call, args)(*args), call(*args)
    assert torch.equal(result.isnan(), eager.isnan()) and eager[:, 5].isnan().all()


@pytest.mark.parametrize("make", [four_bits, bytes_])
def test_calls_that_are_as_fast_stay(make: Callable[..., Case]) -> None:
    def stays(rows: int, dtype: torch.dtype, **given: Any) -> bool:
        call, args, _ = make(rows, 64, 64, dtype)
        return products(passed(call, args, **given)) == (1, 0)

    assert stays(16, torch.float32) and not stays(17, torch.float32)
    assert stays(23, torch.bfloat16) and not stays(24, torch.bfloat16)
    assert stays(512, torch.bfloat16, processor="znver4") and not stays(17, torch.float16, processor="znver4")
    assert stays(512, torch.float32, options=LowerOptions(contractions="aten"))
    tiles = PassContext.of(None, target=target_of(level_machine("x86-64-amx"), "sapphirerapids"))
    assert not PASS.when(tiles)


def test_a_weight_that_is_not_as_it_was_packed_is_left_to_aten() -> None:
    call, (x, weight, scales), _ = four_bits(32, 64, 64, torch.float32)
    turned = weight.t().contiguous().t()
    assert products(passed(call, (x, turned, scales))) == (1, 0)


def test_scales_that_do_not_fit_are_refused() -> None:
    call, (x, weight, scales), _ = four_bits(32, 64, 64, torch.float32)
    traced = make_fx(call, tracing_mode="fake")(x, weight, scales[:1].contiguous())
    with pytest.raises(UnsupportedGraphError, match="its scales have shape"):
        compile_graph(traced)


@pytest.mark.parametrize("make", [four_bits, bytes_])
@pytest.mark.parametrize("at_hand", [40, 4])
def test_rows_known_at_run_time_only(make: Callable[..., Case], at_hand: int) -> None:
    call, args, weight = make(at_hand, 64, 64, torch.float32)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    rows = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = (
        mode.from_tensor(args[0], symbolic_context=rows),
        *(mode.from_tensor(each, static_shapes=True) for each in args[1:]),
    )
    made = passed(call, fake, mode="real")
    assert products(made) == ((0, 1) if at_hand == 40 else (1, 0))
    for count in (at_hand, 3):
        x = args[0][:count]
        assert as_exact(made(x, *args[1:]), call(x, *args[1:]), x, weight)


@pytest.mark.parametrize("make", [four_bits, bytes_])
def test_a_weight_that_never_changes_is_not_kept_as_floats(make: Callable[..., Case]) -> None:
    call, (x, weight, scales), exact = make(32, 256, 128, torch.float32)
    traced = make_fx(lambda x: call(x, weight, scales), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    made = compile_graph(traced, options=LowerOptions(pack_constants=True))
    assert isinstance(made, CompiledGraph)
    assert not any("pack_mm" in call.target for call in made.report().externs)
    assert sum(each.nbytes for each in made.constants.values()) < 2 * (weight.nbytes + scales.nbytes)
    assert as_exact(made([x])[0], call(x, weight, scales), x, exact)


@pytest.mark.parametrize("make", [four_bits, bytes_])
def test_factors_that_aten_refuses_for_their_strides_are_left_to_it(make: Callable[..., Case]) -> None:
    call, (x, weight, scales), _ = make(96, 64, 64, torch.float32)
    turned = x.t().contiguous().t()
    with pytest.raises(RuntimeError, match="contiguous"):
        call(turned, weight, scales)
    spaced = scales.repeat_interleave(2, 0)[::2]  # which ATen reads as if they were not
    for given in ((turned, weight, scales), (x, weight, spaced)):
        assert products(passed(call, given)) == (1, 0)
    assert products(passed(call, (x, weight, scales))) == (0, 1)
