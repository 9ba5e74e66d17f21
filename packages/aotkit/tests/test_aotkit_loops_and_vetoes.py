"""Loops over slices of a tensor, scans between pointwise code, and why two kernels were not made one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import map as map_slices
from torch._higher_order_ops import scan

import aotkit

X = torch.randn(32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def compiled(fn: Callable[..., Any], *args: Tensor) -> tuple[Any, Any]:
    """The result, and the report of the only graph."""
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "cache": False, "observer": recorder}
    result = torch.compile(fn, backend="aotkit", fullgraph=True, options=options)(*args)
    (record,) = recorder.graphs
    return result, record.report


# -- scan and map ------------------------------------------------------------------------------------------------------

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
LOOPS = {
    "map": lambda x: map_slices(lambda a: (a.sin() * 2, a.sum()), x),
    "map with a closure": lambda x: map_slices(lambda a, b: a * b.sum(), x * 2, x[0]),
    "scan": lambda x: scan(lambda c, a: (c + a.sin(), c * a), x.new_zeros(x.shape[1:]), x),
    "scan from the end": lambda x: scan(lambda c, a: (c * 0.5 + a, c - a), x.sum(0), x, reverse=True),
}


@pytest.mark.covers("F5f.37")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_slices_equals_eager_for_every_length(name: str, length: int) -> None:
    given = X[:length, :5].clone()
    result, _ = compiled(LOOPS[name], given)
    torch.testing.assert_close(result, LOOPS[name](given), check_stride=True)


@pytest.mark.covers("F5f.37")
@pytest.mark.parametrize("name", ["map", "scan"])
def test_a_loop_over_nothing_is_eagers_error(name: str) -> None:
    loop = LOOPS[name]
    if name == "scan" and RELEASE >= (2, 15):  # which gives nothing then
        torch.testing.assert_close(compiled(loop, X[:0])[0], loop(X[:0]))
        return
    with pytest.raises(RuntimeError):
        loop(X[:0])
    with pytest.raises((RuntimeError, IndexError)):  # Dynamo takes the first slice itself
        compiled(loop, X[:0])


# -- scans in kernels --------------------------------------------------------------------------------------------------

SCANS = {
    "sum": lambda x: (x * 2).cumsum(1) + 1,
    "product": lambda x: (x + 1).cumprod(1).sin(),
    "maximum": lambda x: (x.abs().cummax(1)[0] - x) * 2,
    "normalized": lambda x: x.exp().cumsum(1) / x.exp().sum(1, keepdim=True),
}


@pytest.mark.covers("F5h.6")
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_and_what_is_around_it_are_one_kernel(name: str) -> None:
    result, report = compiled(SCANS[name], X)
    torch.testing.assert_close(result, SCANS[name](X))
    assert report.kernel_count == 1 and not report.externs


# -- what is not fused, and why ----------------------------------------------------------------------------------------


def many_parts(x: Tensor) -> Tensor:
    for _ in range(70):
        x = x.sin() + x.sum(1, keepdim=True)
    return x


def large(x: Tensor) -> Tensor:
    for k in range(40):
        x = torch.where(x > k, x.atan2(x + k), (x * k).sin() + x.exp() / (x.abs() + k + 1)) + x.sum(1, keepdim=True)
    return x


def around_a_sort(x: Tensor) -> Tensor:
    y = x.sin()
    return y.sort(1)[0] + y


def other_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    total = x.sum(0)
    return total, (x + total).sum(1)


def several_readers(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin().exp().atan()
    return y.cumsum(1), y.t().contiguous().cumsum(1), y.flip(0).cumsum(0)


VETOES = {
    "parts": (many_parts, "the kernel would have too many parts"),
    "size": (large, "the kernel would get too large"),
    "an ATen call between": (around_a_sort, "another step must run between them"),
    "other rows": (other_rows, "the rows of one are not the rows of the other"),
    "readers": (several_readers, "its reader takes one element at a time, and it is dear"),
    "across memory": (
        lambda x: (x * 2).cumsum(0) + 1,
        "the rows run across memory, the elements of the other along it",
    ),
    "irregular": (lambda x: x.softmax(1).flip(0), "one of them does not pass through all of the shared buffer in a"),
}


def decisions(fn: Callable[..., Any]) -> list[Any]:
    from torch.fx.experimental.proxy_tensor import make_fx

    from aotkit_inductor_lower import compile_graph, decompositions

    given = X.clone()
    compiled = compile_graph(make_fx(fn, decompositions(), tracing_mode="fake")(given))
    results = compiled([given])
    want = fn(X.clone())
    torch.testing.assert_close(results, list(want) if isinstance(want, tuple) else [want])
    return list(compiled.records)


@pytest.mark.covers("F5h.13")
@pytest.mark.parametrize("name", VETOES)
def test_a_fusion_that_is_refused_leaves_its_reason_and_right_results(name: str) -> None:
    fn, reason = VETOES[name]
    refused = [record for record in decisions(fn) if not record.fused]
    reasons = {record.reason for record in refused}
    assert any(reason in given for given in reasons), reasons
    assert all("kept apart" in str(record) for record in refused)
