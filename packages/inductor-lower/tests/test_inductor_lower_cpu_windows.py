"""Loads of computed places that are one permutation where the lanes lie near, and rows below each other in strips."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, compile_to_program, decompositions
from aotkit_inductor_lower.graph_partition import PartitionedGraph
from aotkit_inductor_lower.targets.cpu import generic_machine, map_loops
from aotkit_inductor_lower.targets.cpu.generate import generate

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.bool)
PROCESSORS = (None, "x86-64-v3")
interpolate = torch.nn.functional.interpolate


def some(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(sizes).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, sizes).to(dtype)


def run(
    f: Callable[..., torch.Tensor], args: Sequence[torch.Tensor], processor: str | None = None, mode: str = "fake"
) -> torch.Tensor:
    options = LowerOptions(processor=processor, redzones=True) if processor else LowerOptions(redzones=True)
    graph = make_fx(lambda *args: (f(*args),), decompositions(), tracing_mode=mode)(*args)
    return compile_graph(graph, options=options)(list(args))[0]


def text_of(f: Callable[..., Any], *args: torch.Tensor, bits: int = 512) -> str:
    graph = make_fx(lambda *args: (f(*args),), decompositions(), tracing_mode="fake")(*args)
    compiled = compile_to_program(graph)
    assert not isinstance(compiled, PartitionedGraph)
    return generate(compiled.scheduled, generic_machine(bits), keep_text=True).text


def places(kind: str, count: int) -> torch.Tensor:
    """Where each of ``count`` elements is taken from, of 100."""
    at = torch.arange(count)
    return {
        "rising": at * 100 // count,
        "one by one": at % 100,
        "in pairs": at // 2 % 100,
        "two by two": at * 2 % 100,
        "falling": 99 - at * 100 // count,
        "there and back": (at % 7 - 3).abs(),
        "anywhere": torch.randint(0, 100, (count,)),
        "from the end": -1 - at % 100,
        "first and last": at % 2 * 99,
        "end": torch.full((count,), 99),
        "rising, but for one": torch.where(at % 16 == 5, 98, at // 3 % 100),
        "a step too far": at % 16 * 2 + (at % 16 == 15),
    }[kind]


KINDS = (
    "rising", "one by one", "in pairs", "two by two", "falling", "there and back", "anywhere", "from the end",
    "first and last", "end", "rising, but for one", "a step too far",
)  # fmt: skip


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_elements_of_rows_wherever_they_lie(kind: str, dtype: torch.dtype, processor: str | None) -> None:
    for count in (16, 48, 61, 130):
        x, at = some(dtype, 3, 100), places(kind, count)
        assert torch.equal(run(lambda x, at: x[:, at], (x, at), processor), x[:, at]), count


SIZES = ((2, 3, 17, 33), (40, 61)), ((2, 3, 24, 24), (48, 48)), ((1, 2, 5, 40), (70, 31)), ((3, 1, 9, 16), (9, 112))


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("corners", (False, True))
@pytest.mark.parametrize("mode", ("nearest", "nearest-exact", "bilinear", "bicubic"))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last), ids=str)
@pytest.mark.parametrize("dynamic", ("fake", "symbolic"))
def test_images_in_other_sizes(
    dynamic: str,
    layout: torch.memory_format,
    sizes: Any,
    mode: str,
    corners: bool,
    dtype: torch.dtype,
    processor: str | None,
) -> None:
    if mode.startswith("nearest") and corners:
        corners = False
    keep = {} if mode.startswith("nearest") else {"align_corners": corners}
    x = some(dtype, *sizes[0]).contiguous(memory_format=layout)

    def resized(x: torch.Tensor) -> torch.Tensor:
        return interpolate(x.relu(), size=sizes[1], mode=mode, **keep)

    got, wide = run(resized, (x,), processor, dynamic), resized(x.double())
    worst, own = ((y.double() - wide).abs().max() for y in (got, resized(x)))
    assert worst <= 3 * (own + 2e-6 * wide.abs().max()) and got.dtype == dtype


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("mode", ("nearest", "bilinear", "bicubic"))
@pytest.mark.parametrize("dynamic", ("fake", "symbolic"))
@pytest.mark.parametrize("size", ((70, 81), (2, 48), (33, 17), (1, 160), (3, 1500)), ids=str)
def test_rows_in_strips_have_the_bits_that_they_have_one_after_the_other(
    mode: str, dynamic: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = some(torch.float32, 2, 3, 17, 40)
    x[0, 0, 3, 4], x[0, 1, 5, 30], x[1, 2, 16, 39] = float("nan"), float("inf"), float("-inf")
    resized = functools.partial(interpolate, size=size, mode=mode)
    with monkeypatch.context() as patch:
        got = run(resized, (x,), mode=dynamic)
        patch.setattr(map_loops, "loop_within", lambda *_: None)
        other = run(resized, (x,), mode=dynamic)
    assert torch.equal(got.view(torch.int32), other.view(torch.int32))
    assert torch.equal(got.isfinite(), resized(x).isfinite())


def test_what_depends_on_the_column_is_computed_before_the_rows() -> None:
    text = text_of(lambda x: interpolate(x.relu(), scale_factor=2, mode="nearest"), torch.randn(2, 3, 24, 24))
    loop = text.index("i_", text.index("i_") + 1)
    vectors = [line for line in text.splitlines() if "fptosi <16 x float>" in line]
    assert len(vectors) == 1 and text.index(vectors[0]) > loop
    rows = text[text.index(vectors[0]) :]
    assert rows.index(".loop:") < rows.index("vpermi2var")  # the loop over rows begins behind it


def test_lanes_are_permuted_where_the_processor_can() -> None:
    def pairs(x: torch.Tensor, **how: Any) -> torch.Tensor:
        return interpolate(x, size=(48, 48), **how)

    x, double = torch.randn(2, 3, 24, 24), torch.randn(2, 3, 24, 24).double()
    assert "llvm.x86.avx512.vpermi2var.d.512" in text_of(pairs, x)
    to_corners = functools.partial(pairs, mode="bilinear", align_corners=True)
    assert "llvm.x86.avx512.vpermi2var.q.512" in text_of(to_corners, double)
    assert "vpermi2var" not in text_of(pairs, x, bits=256)


def test_a_place_out_of_range_is_reported_from_every_loop() -> None:
    x, rows, columns = torch.randn(2, 40, 40), torch.arange(40), torch.arange(40)

    def f(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return x[:, (rows * 3 - rows - rows)[:, None], (columns * 4 - columns * 3 + 1) - 1]

    assert torch.equal(run(f, (x, rows, columns)), x)
    for which, at in itertools.product((1, 2), (0, 17, 39)):
        args = [x, rows.clone(), columns.clone()]
        args[which][at] = 40
        with pytest.raises(IndexError):
            run(f, args)
