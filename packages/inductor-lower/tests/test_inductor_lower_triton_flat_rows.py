"""Rows that begin at odd places: where they touch, a program instance takes them for one long row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program, decompositions
from aotkit_inductor_lower.targets.triton import KernelSource, compile_kernel, kernels_of, vector_bytes

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")


def ran(f: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[KernelSource]:
    """The kernels of ``f``, which must compute what eager does."""
    graph = make_fx(lambda *given: (f(*given),), decompositions(), tracing_mode="fake")(*args)
    made = compile_to_program(graph, options=LowerOptions(processor="triton-interpreter", verify=True))
    (got,) = bind_program(made.program)(list(args))
    torch.testing.assert_close(got, f(*args))
    return [kernel.source for kernel in kernels_of(made.program)]


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes))).bfloat16()


def counted(x: torch.Tensor) -> torch.Tensor:
    """With the numbers of rows and columns."""
    rows, columns = (torch.arange(n, dtype=x.dtype) for n in x.shape[-2:])
    return x * rows[:, None] - columns


FLAT = {
    "one number a row": (lambda x, b: x + b[:, None], [(3, 40, 35), (40,)], "// 35"),
    "one a column": (lambda x, b: x + b, [(64, 150), (150,)], "% 150"),
    "both": (lambda x, b, c: (x + b[:, None]) * c, [(2, 40, 33), (40,), (33,)], "% 33"),
    "positions": (counted, [(24, 49)], "// 49"),
    "nothing beside": (lambda x, y: x * y.mT.contiguous().mT, [(24, 49), (24, 49)], ""),
    "few of them": (lambda x, b: x + b[:, None], [(3, 4, 5), (4,)], "// 5"),
}


@pytest.mark.parametrize("case", FLAT)
def test_short_rows_that_touch_are_one(case: str) -> None:
    f, sizes, text = FLAT[case]
    sources = ran(f, *(drawn(*each) for each in sizes))
    if text:
        assert any(text in source.text for source in sources)


ROWS = {
    "rows that begin well": (lambda x, b: x + b[:, None], [(40, 36), (40,)]),
    "a gap between rows": (lambda x, b: x[:, :35] + b[:, None], [(40, 37), (40,)]),
    "a transpose": (lambda x, b: (x + b[:, None]).mT.contiguous(), [(40, 35), (40,)]),
    "rows of no even start together": (lambda x, b: x[:, 1:] + b[:, None], [(3, 41, 35), (40,)]),
    "long rows": (lambda x, b: x + b[:, None], [(40, 1001), (40,)]),
}


@pytest.mark.parametrize("case", ROWS)
def test_others_stay_rows(case: str) -> None:
    f, sizes = ROWS[case]
    sources = ran(f, *(drawn(*each) for each in sizes))
    assert not any(f"// {sizes[0][-1]}" in source.text for source in sources)


def test_a_thread_loads_sixteen_bytes_of_them() -> None:
    (source,) = ran(lambda x, b: x + b[:, None], drawn(64, 48, 35), drawn(48))
    ptx: Any = compile_kernel(source, 90, keep_ptx=True).ptx
    assert 16 in vector_bytes(ptx, "ld") and 16 in vector_bytes(ptx, "st")


def test_loops_of_a_sum_that_touch_in_one_tensor_are_one_there() -> None:
    """Though they don't in another: Triton sees no neighbours in a quotient and a remainder."""
    x, y = drawn(40, 64, 49).float(), drawn(64, 40, 49).float()
    sources = ran(lambda x, y: (x * y.transpose(0, 1)).sum((1, 2)), x, y)
    (text,) = (source.text for source in sources if "tl.load(p_x" in source.text or "arg0" in source.text)
    place = next(line for line in text.splitlines() if "* 3136 +" in line)
    assert "%" not in place and "above" not in place and "above" in text
