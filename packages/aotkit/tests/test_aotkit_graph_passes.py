"""What passes elsewhere rewrite, and capture and scheduling do here: the graphs and the numbers show it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import aotkit


def compiled(fn: Callable[..., Any], *args: torch.Tensor) -> tuple[Any, list[Any]]:
    """The result, and the reports of the graphs."""
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "observer": recorder, "cache": False}
    result = torch.compile(fn, backend="aotkit", fullgraph=True, options=options)(*args)
    return result, [record.report for record in recorder.graphs]


def captured(fn: Callable[..., Any], *args: torch.Tensor) -> list[tuple[str, str]]:
    """The operators of the captured graph with their arguments."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    aotkit.aot_function(fn, keep)(*args)
    calls = (node for node in graphs[0].graph.nodes if node.op == "call_function")
    return [(str(node.target), str((node.args, dict(node.kwargs)))) for node in calls]


SPELLINGS: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
    ("sum", lambda x: torch.sum(x, axis=1, keepdims=True), lambda x: torch.sum(x, dim=1, keepdim=True)),
    ("mean", lambda x: torch.mean(input=x, axis=0), lambda x: x.mean(0)),
    ("cat", lambda x: torch.cat(tensors=[x, x], axis=1), lambda x: torch.cat([x, x], 1)),
    ("stack", lambda x: torch.stack(tensors=[x, x], dim=1), lambda x: torch.stack([x, x], 1)),
    ("split", lambda x: torch.split(tensor=x, split_size_or_sections=2, dim=1)[0] + 1, lambda x: x.split(2, 1)[0] + 1),
    ("squeeze", lambda x: torch.squeeze(input=x[:1], dim=0) + 1, lambda x: x[:1].squeeze(0) + 1),
    ("reshape", lambda x: torch.reshape(input=x, shape=(-1,)) + 1, lambda x: x.reshape(-1) + 1),
    ("clamp", lambda x: torch.clamp(input=x, min=0.0), lambda x: x.clamp(0.0)),
]


@pytest.mark.covers("F5f.1", "F5f.2")
@pytest.mark.parametrize("named, plain", [row[1:] for row in SPELLINGS], ids=[row[0] for row in SPELLINGS])
def test_names_of_arguments_leave_no_trace_in_the_graph(named: Callable[..., Any], plain: Callable[..., Any]) -> None:
    x = torch.arange(12.0).view(3, 4)
    assert captured(named, x) == captured(plain, x)
    assert torch.equal(named(x), plain(x))


@pytest.mark.covers("F5f.19")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("scale", [2.0, -2.0, 0.0, math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("divide", [False, True], ids=["times", "over"])
def test_a_scaled_softmax_is_one_kernel_with_eagers_nan(scale: float, divide: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x / scale if divide else x * scale, -1)

    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    x[1, 3], x[2, 5], x[3, 7], x[4] = math.nan, math.inf, -math.inf, 0.0
    result, reports = compiled(f, x)
    assert [report.kernel_count for report in reports] == [1]
    torch.testing.assert_close(result, f(x), equal_nan=True)


@pytest.mark.covers("F5f.26")
def test_a_linear_layer_in_bfloat16_rounds_where_eager_rounds() -> None:
    g = torch.Generator().manual_seed(1)
    x, w, b = (torch.randn(*s, generator=g).bfloat16() for s in ((5, 32), (8, 32), (8,)))
    with torch.no_grad():
        result, _ = compiled(lambda x, w, b: F.relu(F.linear(x, w, b)), x, w, b)
        assert torch.equal(result, F.relu(F.linear(x, w, b)))


@pytest.mark.covers("F5f.32")
def test_checks_and_ranges_of_a_profiler_split_no_kernel() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        torch._check(x.shape[0] > 2)
        with torch.profiler.record_function("inner"):
            y = y * x.cos()
        return y - 3

    x = torch.randn(40)
    result, reports = compiled(f, x)
    torch.testing.assert_close(result, f(x))
    assert [report.kernel_count for report in reports] == [1]


OUTER: list[tuple[str, Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = [
    ("batches", lambda a, b: torch.einsum("bni,bnj->bnij", a, b).sin(), (2, 3, 4), (2, 3, 5)),
    ("vectors", lambda a, b: torch.einsum("i,j->ij", a, b) * 2, (4,), (5,)),
    ("rows", lambda a, b: torch.einsum("bi,bj->bij", a, b).sin(), (2, 4), (2, 5)),
    ("columns and rows", lambda a, b: (a[:, None] @ b[None]).exp(), (7,), (33,)),
    ("angles", lambda f, p: (f[None, :, None].expand(2, -1, 1) @ p[:, None]).transpose(1, 2).cos(), (8,), (2, 10)),
    ("nothing", lambda a, b: torch.einsum("bi,bj->bij", a, b).sin(), (0, 4), (0, 5)),
]


@pytest.mark.covers("F5f.6")
@pytest.mark.parametrize("f, first, second", [row[1:] for row in OUTER], ids=[row[0] for row in OUTER])
def test_a_matrix_product_of_one_term_is_part_of_a_kernel(
    f: Callable[..., Any], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    g = torch.Generator().manual_seed(2)
    a, b = (torch.randn(size, generator=g, dtype=torch.float64) for size in (first, second))
    for x, y in ((a, b), (a.bfloat16(), b.bfloat16())):
        result, (report,) = compiled(f, x, y)
        torch.testing.assert_close(result, f(x, y), check_stride=True)
        assert report.kernel_count == 1 and not report.externs


@pytest.mark.covers("F5f.6")
def test_a_matrix_product_of_one_term_passes_on_nan_and_infinity() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -2.0], dtype=torch.float64)
    result, (report,) = compiled(lambda a, b: (a[:, None] @ b[None]) + 1, odd, odd)
    torch.testing.assert_close(result, odd[:, None] * odd + 1, equal_nan=True)
    assert not report.externs
