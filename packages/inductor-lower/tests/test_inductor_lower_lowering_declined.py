"""Uses of an operator that its rule leaves to ATen on purpose: the result is eager's, and the report says why."""

from __future__ import annotations

import math

import pytest
import torch

from aotkit_inductor_lower import compile_graph

aten = torch.ops.aten
F = torch.nn.functional

X, V, ONE = torch.arange(24.0).reshape(4, 6).sin(), torch.arange(5.0), torch.tensor(2.0)
N = torch.arange(24).reshape(4, 6) % 7 - 3
AT, SOURCE = torch.tensor([1, 3]), torch.arange(12.0).reshape(2, 6)
IMAGE = torch.arange(48).reshape(1, 3, 4, 4) % 11
LOG = X[0].log_softmax(0)

LEFT = {
    "logsumexp of integers": (lambda x: aten.logsumexp(x, [1]), (N,), "logsumexp", "of integers"),
    "pooled integers": (
        lambda x: aten.max_pool2d_with_indices(x, [2, 2])[0], (IMAGE,), "max_pool2d_with_indices", "of integers",
    ),
    "averaged integers": (lambda x: aten.avg_pool2d(x, [2, 2]), (IMAGE,), "avg_pool2d", "of integers"),
    "bits of another width": (lambda x: x.view(torch.int16) + 1, (X,), "view", "another width"),
    "bits as bools": (lambda x: x.view(torch.bool) ^ True, ((N > 0).to(torch.uint8),), "view", "bools"),
    "index_select of a scalar": (
        lambda x, i: aten.index_select(x, 0, i), (ONE, AT[:1] * 0), "index_select", "on scalars",
    ),
    "index_select by a scalar": (lambda x, i: aten.index_select(x, 0, i), (X, AT[0]), "index_select", "on scalars"),
    "a mask that adds": (lambda x, m, v: aten.index_put(x, [m], v, True), (X, X > 0, ONE), "index_put", "masks"),
    "a mask and a vector": (lambda x, m, v: aten.index_put(x, [m], v), (X, X > 0.9, V[:1].expand(1)), None, ""),
    "windows of a scalar": (lambda x: x.unfold(0, 1, 1) + 1, (ONE,), "unfold", "of a scalar"),
    "roll of all": (lambda x: x.roll(5), (X,), "roll", "flattened"),
    "a single sample's loss": (lambda x, t: F.nll_loss(x, t), (LOG, AT[0]), "nll_loss_forward", "single sample"),
    "a single sample's gradient": (
        lambda g, x, t: aten.nll_loss_backward(g, x, t, None, 1, -100, g), (ONE, LOG, AT[0]), "nll_loss_backward",
        "single sample",
    ),
    "scatter into a scalar": (lambda x, i, s: aten.scatter(x, 0, i, s), (ONE, AT[:1] * 0, V[1:2]), "scatter", "sizes"),
    "a scalar's slices": (lambda x, i: aten.index_fill(x, 0, i, 3.0), (ONE, AT[:1] * 0), "index_fill", "of a scalar"),
    "copies of a scalar": (lambda x, i, s: aten.index_copy(x, 0, i, s), (V, AT[:1], ONE), "index_copy", "of a scalar"),
    "slices of integers": (
        lambda x, i, s: aten.index_reduce(x, 0, i, s, "amax"), (N, AT, N[:2] + 9), "index_reduce", "integer slices",
    ),
    "by frequency": (
        lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, True), (SOURCE, AT * 0 + 2),
        "embedding_dense_backward", "by frequency",
    ),
    "trigamma": (lambda x: torch.polygamma(1, x + 3), (X,), "polygamma", "derivatives of the digamma"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_uses_that_a_rule_declines_are_done_by_aten(check, name: str) -> None:
    f, args, op, reason = LEFT[name]
    result = check(f, *args, aten=(op,) if op else ())
    for call in result.compiled.report().externs:
        assert reason in call.reason


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_variance_of_too_few_numbers_is_eagers(check) -> None:
    x = torch.tensor([[1.0, 2.0, 4.0], [3.0, 3.0, 3.0]], dtype=torch.float64)
    check(lambda x: [x.var(1, correction=c) for c in (2, 3, 4, 7)], x)


def test_an_output_argument_given_by_name_is_written_to() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    out = graph.call_function(aten.logcumsumexp.out, (x, 0), {"out": y})
    graph.output((graph.call_function(aten.mul.Tensor, (out, 2)), graph.call_function(aten.add.Tensor, (y, 1))))
    x, y = X.clone(), torch.zeros(4, 6)
    compiled = compile_graph(torch.fx.GraphModule({}, graph), [x, y])
    double, more = compiled([x, y])
    want = X.logcumsumexp(0)
    assert [call.target for call in compiled.report().externs] == ["aten.logcumsumexp.out"]
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(double, want * 2)
    torch.testing.assert_close(more, want + 1)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.norm(p=0, dim=1),
        lambda x: x.norm(p=math.inf, dim=1),
        lambda x: x.norm(p=-math.inf, dim=1),
        lambda x: x.norm(p=1, dim=1),
        lambda x: x.norm(p=3.5, dim=1),
        lambda x: x.norm(p=-2, dim=1),
    ],
)
def test_norms_of_every_order_are_generated(check, f) -> None:
    check(f, X.double())


def test_ranges_that_begin_or_step_between_integers_are_generated(check) -> None:
    check(lambda x: x[0] * torch.arange(0.5, 6.5, 1), X)
    check(lambda x: x[0] * torch.arange(0, 3, 0.5), X)
    check(lambda x: x[0] * torch.arange(7, 1, -1), X)
