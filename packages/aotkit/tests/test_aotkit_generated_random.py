"""``rng="fast"``: kernels make random numbers from one draw of seeds per graph; ``rng="eager"`` draws eager's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aotkit

N = 1 << 16
X = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def fast(fn: Callable[..., Any], dynamic: bool = False, **how: Any) -> tuple[Callable[..., Any], aotkit.Recorder]:
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = {"rng": "fast", "fallback": "error", "cache": False, "observer": recorder, **how}
    return torch.compile(fn, backend="aotkit", fullgraph=True, dynamic=dynamic, options=options), recorder


def calls(recorder: aotkit.Recorder) -> list[tuple[str, int]]:
    return [(call.target, call.count) for record in recorder.graphs for call in record.report.externs]


def many(x: Tensor) -> tuple[Tensor, ...]:
    drawn = torch.rand(64, 32, dtype=torch.float64) + torch.randint(3, 9, (64, 32))
    return F.dropout(x, 0.3).sin(), x * torch.rand_like(x), torch.randn_like(x) + drawn


@pytest.mark.covers("F5f.21")
def test_a_graph_draws_all_of_its_seeds_in_one_call() -> None:
    run, recorder = fast(many)
    run(X)
    assert calls(recorder) == [("aten.randint.low", 1)]


@pytest.mark.covers("F5f.21", "F5c.3", "F5c.11")
def test_numbers_repeat_under_a_seed_and_differ_from_call_to_call() -> None:
    run, _ = fast(many)
    torch.manual_seed(3)
    first, second, state = run(X), run(X), torch.get_rng_state()
    torch.manual_seed(3)
    for drawn in (first, second):
        torch.testing.assert_close(run(X), drawn, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.covers("F5c.3", "F5c.11", "F5f.34")
def test_eager_random_numbers_are_the_default() -> None:
    run, recorder = fast(many, rng="eager")
    torch.manual_seed(3)
    got = run(X)
    torch.manual_seed(3)
    torch.testing.assert_close(got, many(X))
    assert aotkit.Options().rng == "eager" and len(calls(recorder)) > 3


def evenly_spread(sample: Tensor, distribution: Callable[[Tensor], Tensor]) -> bool:
    """Kolmogorov and Smirnov: farther off than this happens once in 10**7 times."""
    ordered = distribution(sample.double().flatten().sort()[0])
    steps = torch.arange(1, ordered.numel() + 1, dtype=torch.float64) / ordered.numel()
    return bool((ordered - steps).abs().max() < 3 / math.sqrt(ordered.numel()))


@pytest.mark.covers("F5f.21")
def test_each_kind_of_number_is_distributed_as_it_says() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.rand_like(x),
            torch.randn_like(x),
            torch.rand(N, dtype=torch.float64),
            torch.randn(N, dtype=torch.float64),
            torch.empty(N).uniform_(-3, 5),
            torch.empty(N).normal_(2, 0.5),
            torch.empty(N).exponential_(0.5),
            torch.empty(N, dtype=torch.float64).exponential_(),
            torch.empty(N).bernoulli_(0.3),
            torch.randint(-2, 5, (N,)),
        )

    torch.manual_seed(0)
    run, recorder = fast(fn)
    u, n, u64, n64, span, scaled, e, e64, hits, integers = run(torch.empty(N))
    assert calls(recorder) == [("aten.randint.low", 1)]

    def normal(t: Tensor) -> Tensor:
        return torch.special.ndtr(t)

    for sample, distribution in (
        (u, lambda t: t),
        (u64, lambda t: t),
        (n, normal),
        (n64, normal),
        (span, lambda t: (t + 3) / 8),
        (scaled, lambda t: normal((t - 2) / 0.5)),
        (e, lambda t: 1 - (-t * 0.5).exp()),
        (e64, lambda t: 1 - (-t).exp()),
    ):
        assert evenly_spread(sample, distribution)
    assert abs(hits.mean().item() - 0.3) < 6 * math.sqrt(0.21 / N) and set(hits.tolist()) == {0.0, 1.0}
    shares = integers.bincount() if integers.min() >= 0 else (integers + 2).bincount()
    assert len(shares) == 7 and (shares / N - 1 / 7).abs().max() < 6 * math.sqrt(6 / 49 / N)
    for a, b in ((u, span), (u64, n64), (u[1:], u[:-1]), (n[2:], n[:-2])):
        assert abs(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()) < 6 / math.sqrt(N)


@pytest.mark.covers("F5f.21")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_share_is_below_one_in_every_type(dtype: torch.dtype) -> None:
    run, _ = fast(lambda x: (torch.rand_like(x), torch.randn_like(x), F.dropout(torch.ones_like(x), 0.5)))
    torch.manual_seed(0)
    share, normal, kept = run(torch.empty(N, dtype=dtype))
    assert share.dtype is normal.dtype is kept.dtype is dtype
    assert share.min() >= 0 and share.max() < 1 and normal.isfinite().all()
    assert set(kept.tolist()) == {0.0, 2.0}


@pytest.mark.covers("F5f.21")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("again", [False, True], ids=["saved", "checkpointed"])
def test_the_backward_has_the_mask_of_the_forward(again: bool, dynamic: bool) -> None:
    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.3) * 3

    def fn(x: Tensor) -> Tensor:
        return checkpoint(dropped, x, use_reentrant=False) if again else dropped(x)

    run, recorder = fast(fn, dynamic)
    x = X.clone().requires_grad_()
    y = run(x)
    assert calls(recorder) == [("aten.randint.low", 1)]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, y.detach() / X)
    assert (gradient == 0).any() and (gradient != 0).any()


@pytest.mark.covers("F5f.21")
def test_a_second_derivative_has_it_too() -> None:
    run, _ = fast(lambda x: F.dropout(x, 0.3) ** 3)
    x = X.clone().requires_grad_()
    y = run(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 3 * y / X)
    torch.testing.assert_close(second, (6 * y / X**2).detach())


@pytest.mark.covers("F5f.21")
def test_neither_layout_nor_a_size_known_late_changes_a_number() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.3) + torch.rand_like(x)  # with symbolic sizes dropout is another operator

    images = torch.ones(3, 5, 6, 7, dtype=torch.float64)
    results = []
    for given, dynamic in (
        (images, False),
        (images.contiguous(memory_format=torch.channels_last), False),
        (images, True),
    ):
        torch._dynamo.reset()
        run = torch.compile(fn, backend="aotkit", dynamic=dynamic, options={"rng": "fast", "fallback": "error"})
        torch.manual_seed(5)
        results.append(run(given))
        assert results[-1].stride() == fn(given).stride()
    torch.testing.assert_close(results, [results[0]] * 3)


@pytest.mark.covers("F5f.21")
@pytest.mark.parametrize(
    "fn",
    [
        lambda: torch.empty(4).bernoulli_(1.5),
        lambda: torch.randint(0, 300, (4,), dtype=torch.uint8),
        lambda: torch.empty(4).exponential_(-1.0),
        lambda: torch.empty(4).normal_(0, -1),
    ],
)
def test_wrong_parameters_are_eagers_errors(fn: Callable[[], Tensor]) -> None:
    with pytest.raises(RuntimeError):
        fn()
    run, _ = fast(fn)
    with pytest.raises(RuntimeError):
        run()


@pytest.mark.covers("F5c.3")
def test_an_operator_left_out_of_the_table_stays_whole() -> None:
    """The table is a new dict for each caller, who may take rows out of it or bring others."""
    from aotkit_inductor_lower import decompositions

    huber = torch.ops.aten.huber_loss.default
    table = decompositions()
    assert huber in table and torch.ops.aten.bernoulli.p not in table
    del table[huber]
    graphs: list[list[Any]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    def fn(x: Tensor) -> Tensor:
        return F.huber_loss(x, x.cos())

    for rows in (table, decompositions()):
        got = aotkit.aot_function(fn, keep, decompositions=rows)(X)
        torch.testing.assert_close(got, fn(X))
    assert huber in graphs[0] and huber not in graphs[1]
