"""Windows side by side: a pool loads whole rows, and their columns are parted in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program, decompositions
from aotkit_inductor_lower.targets.triton import KernelSource, compile_kernel, kernels_of, vector_bytes

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")


def ran(f: Callable[..., tuple[Tensor, ...]], *args: Tensor, runs: bool = True) -> list[KernelSource]:
    """The kernels of ``f``, which must compute what eager does. ``runs``: the interpreter takes long for reductions."""
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    made = compile_to_program(graph, options=LowerOptions(processor="triton-interpreter", verify=True))
    if not runs:
        return [kernel.source for kernel in kernels_of(made.program)]
    for got, want in zip(bind_program(made.program)(list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    return [kernel.source for kernel in kernels_of(made.program)]


def drawn(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes))).to(dtype)
    x.view(-1)[::37] = float("nan")
    return x


def pool(*kernel: int, **settings: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The largest of each window, and where it is."""
    return lambda x: F.max_pool2d(x, kernel, return_indices=True, **settings)  # type: ignore[return-value]


def sums(x: Tensor) -> tuple[Tensor, ...]:
    batch, rows, columns = x.shape
    parts = x.view(batch, rows // 2, 2, columns // 4, 4).float()
    return (parts.sum((2, 4)), parts.amax((2, 4)))


def different(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """Windows of two columns, of four, and of two again."""
    first, second, third = x.unflatten(-1, (-1, 2)).sum(-1), y.unflatten(-1, (-1, 4)), z.unflatten(-1, (-1, 2))
    scale = second.amax(-1) + first
    return ((third * scale[..., None]).sum(-1),)


SIDE_BY_SIDE = {
    "two by two": (pool(2, 2), (2, 1, 4, 8), torch.bfloat16),
    "columns past the tile": (pool(2, 2), (1, 2, 4, 10), torch.bfloat16),
    "rows past the tile": (pool(2, 2), (1, 1, 6, 8), torch.float32),
    "an odd row": (pool(2, 2), (1, 2, 5, 9), torch.float32),
    "two by four": (pool(2, 4), (1, 2, 4, 16), torch.bfloat16),
    "four by two": (pool(4, 2), (1, 2, 8, 8), torch.bfloat16),
    "one by two": (pool(1, 2), (1, 2, 2, 16), torch.bfloat16),
    "columns one below the other": (lambda x: pool(2, 2)(x.mT), (1, 2, 4, 8), torch.bfloat16),
    "several reductions": (sums, (2, 4, 16), torch.bfloat16),
}


@pytest.mark.parametrize("case", SIDE_BY_SIDE)
def test_rows_are_loaded_whole(case: str) -> None:
    f, sizes, dtype = SIDE_BY_SIDE[case]
    sources = ran(f, drawn(*sizes, dtype=dtype))
    assert any("columns_" in source.text for source in sources)


def test_windows_of_different_widths_in_one_kernel() -> None:
    (source,) = ran(different, *(drawn(4, 16 * width, dtype=torch.float16) for width in (2, 4, 2)))
    assert source.text.count("columns_i1_by_2 = ") == source.text.count("columns_i1_by_4 = ") == 1


OTHERS = {
    "windows that overlap": (pool(2, 2, stride=1), (1, 2, 4, 8)),
    "windows with a gap": (pool(2, 2, stride=3), (1, 2, 4, 8)),
    "windows that begin before": (pool(2, 2, padding=1), (1, 2, 4, 8)),
    "three columns": (pool(3, 3), (1, 2, 6, 9)),
    "a step": (pool(2, 2, dilation=2), (1, 2, 6, 8)),
    "as much as a thread loads": (lambda x: (x.float().unflatten(-1, (-1, 8)).sum(-1),), (2, 4, 16)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_windows_are_loaded_as_they_are(case: str) -> None:
    f, sizes = OTHERS[case]
    sources = ran(f, drawn(*sizes))
    assert not any("columns_" in source.text for source in sources)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_thread_loads_sixteen_bytes(dtype: torch.dtype) -> None:
    (source,) = ran(pool(2, 2), torch.empty(32, 64, 64, 128, dtype=dtype), runs=False)
    ptx: Any = compile_kernel(source, 90, keep_ptx=True).ptx
    assert set(vector_bytes(ptx, "ld")) == {16}
