"""Loads of every so-many-th element, which are whole vectors of all between them: results, and what is not read."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, compile_to_program, decompositions
from aotkit_inductor_lower.graph_partition import PartitionedGraph
from aotkit_inductor_lower.targets.cpu import generic_machine
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.render import body

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool)
PROCESSORS = (None, "x86-64-v3")


def some(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(sizes).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, sizes).to(dtype)


def run(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, processor: str | None) -> torch.Tensor:
    options = LowerOptions(processor=processor) if processor else LowerOptions()
    graph = make_fx(lambda x: (f(x),), decompositions(), tracing_mode="fake")(x)
    return compile_graph(graph, options=options)([x])[0]


def _largest(stride: int, pad: int, x: torch.Tensor) -> torch.Tensor:
    largest, at = torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [stride, stride], [pad, pad])
    return torch.nan_to_num(largest) + at


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", (16, 33, 67))
def test_every_so_many_th_element(count: int, dtype: torch.dtype, processor: str | None) -> None:
    for space in range(2, body.MOST_SPACED + 2):
        x = some(dtype, 3, space * count)[:, space - 1 :: space]
        assert torch.equal(run(torch.logical_not, x, processor), ~x.bool()), space


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("pad", (0, 1))
@pytest.mark.parametrize("stride", (2, 3, 4))
@pytest.mark.parametrize("size", (7, 17, 50, 66))
def test_pools_of_rows_that_are_read_with_steps(
    size: int, stride: int, pad: int, dtype: torch.dtype, processor: str | None
) -> None:
    x = some(dtype, 2, 3, size, size)
    x[0, 0, 1, 1], x[0, 1, 2, 3], x[1, 0, 0, 0] = float("nan"), float("inf"), float("-inf")

    largest = functools.partial(_largest, stride, pad)
    mean = functools.partial(torch.nn.functional.avg_pool2d, kernel_size=3, stride=stride, padding=pad)
    for pool in (largest, mean):
        torch.testing.assert_close(run(pool, x, processor), pool(x), equal_nan=True)


def test_whole_vectors_are_loaded_and_no_lanes_one_by_one() -> None:
    x = torch.randn(2, 3, 64, 64)
    graph = make_fx(functools.partial(_largest, 2, 1), decompositions(), tracing_mode="fake")(x)
    compiled = compile_to_program(graph)
    assert not isinstance(compiled, PartitionedGraph)
    text = generate(compiled.scheduled, generic_machine(512), keep_text=True).text
    assert "llvm.masked.load.v16f32" in text
    assert "insertelement <16 x float>" not in text
