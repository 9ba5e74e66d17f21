"""Iterations beside each other, which read once what they have in common: the same bits as one after the other."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, compile_to_program, decompositions
from aotkit_inductor_lower.graph_partition import PartitionedGraph
from aotkit_inductor_lower.ir import Compute, Const, DType, Index, Instr, Load, Store
from aotkit_inductor_lower.kernel_ir.known_conditions import moved, within
from aotkit_inductor_lower.symbolic import Symbol, sym, to_expr
from aotkit_inductor_lower.targets.cpu import beside, generic_machine, map_loops
from aotkit_inductor_lower.targets.cpu.generate import generate

aten = torch.ops.aten
OPTIONS = LowerOptions(contractions="generated", redzones=True)


def body() -> list[Instr]:
    """``out[y] = x[y - 1] where that is in a row of 10 places, else 5``."""
    return [
        Index("place", sym("y") - 1, DType.I64),
        Const("none", 0, DType.I64),
        Const("size", 10, DType.I64),
        Compute("after", "ge", ("place", "none"), DType.BOOL),
        Compute("before", "lt", ("place", "size"), DType.BOOL),
        Compute("inside", "logical_and", ("after", "before"), DType.BOOL),
        Load("value", "x", (sym("y") - 1,), DType.F32, "inside", 3.0),
        Const("other", 5.0, DType.F32),
        Compute("chosen", "where", ("inside", "value", "other"), DType.F32),
        Store("out", (sym("y"),), "chosen"),
    ]


def test_conditions_that_always_hold_are_gone() -> None:
    assert within(body(), {Symbol("y"): (1, 10)}) == (
        Load("value", "x", (sym("y") - 1,), DType.F32),
        Store("out", (sym("y"),), "value"),
    )


def test_what_is_read_where_a_condition_never_holds() -> None:
    assert within(body(), {Symbol("y"): (0, 0)}) == (Const("other", 5.0, DType.F32), Store("out", (sym("y"),), "other"))
    last = Store("out", (sym("y"),), "value")
    assert within([*body()[:-2], last], {Symbol("y"): (11, 12)}) == (Const("value", 3.0, DType.F32), last)


@pytest.mark.parametrize("places", [(0, 1), (10, 11), (0, 20)])
def test_conditions_that_hold_at_some_places_stay(places: tuple[int, int]) -> None:
    (load,) = [i for i in within(body(), {Symbol("y"): places}) if isinstance(i, Load)]
    assert load.mask is not None and load.other == 3.0


def test_a_condition_is_known_for_the_iteration_that_a_body_is_moved_to() -> None:
    assert within(moved(body(), Symbol("y"), 1), {Symbol("y"): (0, 9)})[0] == Load("value", "x", (sym("y"),), DType.F32)
    assert moved(body(), Symbol("y"), 0) == tuple(body())


def test_a_store_under_a_condition_that_never_holds_keeps_it() -> None:
    stores = [*body()[:-1], Store("out", (sym("y"),), "chosen", mask="inside")]
    (always,) = [i for i in within(stores, {Symbol("y"): (1, 10)}) if isinstance(i, Store)]
    (never,) = [i for i in within(stores, {Symbol("y"): (0, 0)}) if isinstance(i, Store)]
    assert always.mask is None and never.mask is not None


def test_indices_that_are_computed_tell_nothing() -> None:
    index = Index("place", sym("y") + to_expr(sym("s0")), DType.I64)
    (load,) = [i for i in within([index, *body()[1:]], {Symbol("y"): (1, 5)}) if isinstance(i, Load)]
    assert load.mask is not None


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("size", range(4, 40))
@pytest.mark.parametrize("width", beside.WIDTHS)
def test_blocks_take_each_iteration_once(size: int, width: int) -> None:
    blocks = list(beside.blocks_of(size, width))
    taken = [at + k for start, stop, step in blocks for at in range(start, stop, step) for k in range(step)]
    assert taken == list(range(size)) and len(blocks) <= 2


# -- kernels ---------------------------------------------------------------------------------------------


def windows(draw: random.Random) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A depthwise convolution, one of its gradients, or a pool, with something before and behind; and its images, in
    which some numbers are not finite."""
    channels, taps = draw.choice([16, 20, 32, 33, 40]), (draw.randint(1, 3), draw.randint(2, 3))
    stride, dilation = [draw.randint(1, 2) for _ in "ab"], [draw.randint(1, 2) for _ in "ab"]
    pad = [draw.randint(0, min(2, (t - 1) * d)) for t, d in zip(taps, dilation, strict=True)]
    sizes = [draw.randint(4, 17) for _ in "ab"]
    layout = draw.choice([torch.channels_last, torch.channels_last, torch.contiguous_format])
    x = torch.randn(2, channels, *sizes).contiguous(memory_format=layout)
    w = torch.randn(channels, 1, *taps)
    for tensor in (x, w):
        for value in (float("inf"), float("nan"), -0.0):
            at = tuple(draw.randrange(size) for size in tensor.shape)
            tensor[at] = value
    how = (stride, pad, dilation, False, [0, 0], channels)
    kind = draw.choice(["forward", "input", "weights", "pool"])
    if kind == "pool":
        half = [min(p, t // 2) for p, t in zip(pad, taps, strict=True)]
        return lambda x: (aten.max_pool2d_with_indices(x.relu(), taps, stride, half, dilation)[0] + 1,), [x]
    if kind == "forward":
        return lambda x, w: (aten.convolution(x.sigmoid() * 2, w, None, *how).relu(),), [x, w]
    grad = torch.randn_like(aten.convolution(x, w, None, *how))
    mask = [kind == "input", kind == "weights", False]
    backward = aten.convolution_backward
    return lambda g, x, w: tuple(r for r in backward(g, x, w, None, *how, mask) if r is not None), [grad, x, w]


def run(f: Callable[..., Any], args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    return list(compile_graph(graph, options=OPTIONS)(list(args)))


@pytest.mark.sample(16)
@pytest.mark.parametrize("seed", range(40))
def test_windows_have_the_bits_that_they_have_one_after_the_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    f, args = windows(draw)
    got = run(f, args)
    monkeypatch.setattr(map_loops, "loop_beside", lambda *_: None)
    monkeypatch.setattr(map_loops, "with_sums_beside", lambda kernel: kernel)
    for one, other, eager in zip(got, run(f, args), f(*args), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
        finite = eager.isfinite() & one.isfinite()
        torch.testing.assert_close(one[finite], eager[finite], rtol=1e-4, atol=1e-4)


def text_of(direction: str, size: int) -> str:
    x = torch.randn(2, 32, size, size).contiguous(memory_format=torch.channels_last)
    w = torch.randn(32, 1, 3, 3)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 32)
    if direction == "forward":
        graph = make_fx(lambda x, w: (aten.convolution(x, w, None, *how),), tracing_mode="fake")(x, w)
    else:
        mask = [direction == "input", direction == "weights", False]
        graph = make_fx(
            lambda g, x, w: aten.convolution_backward(g, x, w, None, *how, mask)[mask.index(True)], tracing_mode="fake"
        )(x, x, w)
    compiled = compile_to_program(graph, options=LowerOptions(contractions="generated"))
    assert not isinstance(compiled, PartitionedGraph)
    return generate(compiled.scheduled, generic_machine(512), keep_text=True).text


@pytest.mark.parametrize("direction", ["forward", "input", "weights"])
def test_neighbours_read_a_place_once(direction: str) -> None:
    """Of a row of 14 places seven are beside each other. They read nine places of three rows. The row in the middle is
    in the image, so there only those beside the seven have a mask."""
    assert text_of(direction, 14).count("= call <16 x float> @llvm.masked.load") == 9 + 2 + 9


def test_short_rows_are_read_place_after_place() -> None:
    assert text_of("forward", 3).count("= call <16 x float> @llvm.masked.load") == 9
