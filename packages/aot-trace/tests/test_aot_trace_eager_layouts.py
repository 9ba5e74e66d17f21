"""Results of operators with a rule of their own for strides are laid out as in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_aot_trace import capture

aten = torch.ops.aten

# Of a gradient and a tensor, both of one shape.
OPERATORS = {
    "mse": lambda g, x: aten.mse_loss_backward(g, x, x.sin(), 0),
    "mse-mean": lambda g, x: aten.mse_loss_backward(g.sum(), x, x.sin(), 1),
    "smooth-l1": lambda g, x: aten.smooth_l1_loss_backward(g, x, x.sin(), 0, 1.0),
    "huber": lambda g, x: aten.huber_loss_backward(g, x, x.sin(), 0, 1.0),
    "binary-cross-entropy": lambda g, x: aten.binary_cross_entropy_backward(g, x.sigmoid(), x.abs(), None, 0),
    "soft-margin": lambda g, x: aten.soft_margin_loss_backward(g, x, x.sin(), 0),
    "glu": lambda g, x: aten.glu_backward(g[:, ::2], x, 1),
    "isin": lambda g, x: torch.isin(x, g),
    "isin-number": lambda g, x: torch.isin(x, 1.0),
    "index-fill": lambda g, x: x.index_fill(1, torch.tensor([0, 2]), 1.0),
    "index-fill-tensor": lambda g, x: x.index_fill(0, torch.tensor([1]), torch.tensor(2.0)),
    "floor-divide": lambda g, x: torch.floor_divide(x, g),
    "floor-divide-number": lambda g, x: torch.floor_divide(x, torch.tensor(2.0)),
    "roll": lambda g, x: x.roll(1, 1),
    "roll-back": lambda g, x: x.roll(-1, -2),
    "roll-by-nothing": lambda g, x: x.roll(x.shape[0], 0),
    "roll-both": lambda g, x: x.roll((1, 2), (2, 0)),
    "roll-flat": lambda g, x: x.roll(3),
}


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)[:, ::2]


FORMS = (
    torch.clone,
    lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    with_gaps,
)


def strides(x: torch.Tensor) -> list[int]:
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("name", OPERATORS)
def test_results_lie_as_eagers_do(name: str) -> None:
    run = OPERATORS[name]
    inputs = [form(torch.randn(2, 4, 3, 5)) for one in FORMS for other in FORMS for form in (one, other)]

    def call(*given):
        return [run(g, x) for g, x in zip(given[::2], given[1::2], strict=True)]

    expected = call(*inputs)
    graph = capture(call, inputs).graph
    (output,) = graph.graph.find_nodes(op="output")
    for node, found, wanted in zip(output.args[0], graph(*inputs), expected, strict=True):
        assert strides(node.meta["val"]) == strides(wanted)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("symbolic", [False, True])
def test_unpooled_images_and_losses_by_class_lie_as_eagers_do(symbolic: bool) -> None:
    inputs = [form(torch.randn(2, 3, 3, 4)) for form in FORMS]
    inputs += [torch.randn(3, 2, 1, 2).permute(1, 0, 2, 3), torch.randn(2, 4, 3).transpose(1, 2)[..., None]]
    inputs = inputs[1 : 2 if symbolic else None]
    inputs += [torch.arange(16).reshape(4, 4).expand(3, 3, 4, 4), (torch.arange(24) % 3).reshape(2, 4, 3).mT]

    def call(*given):
        *given, places, classes = given
        at = [tuple(map(slice, x.shape)) for x in given]
        found = [aten.max_unpool2d(x, places[part], [6, 8]) for x, part in zip(given, at, strict=True)]
        return [*found, torch.nn.functional.nll_loss(given[0], classes, reduction="none")]

    expected = call(*inputs)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = capture(call, [mode.from_tensor(x) for x in inputs] if symbolic else inputs).graph
    (output,) = graph.graph.find_nodes(op="output")
    for node, found, wanted in zip(output.args[0], graph(*inputs), expected, strict=True):
        assert [int(step) for step in strides(node.meta["val"])] == strides(wanted)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_pools_of_rows_are_contiguous_where_no_gradient_is_wanted(requires_grad: bool) -> None:
    def pools(x):
        return [torch.max_pool1d(x, 2), torch.max_pool1d(x.detach(), 3, 1), torch.max_pool1d_with_indices(x, 2)[0]]

    x = torch.randn(2, 6, 4).transpose(1, 2).requires_grad_(requires_grad)
    found = capture(torch.fx.symbolic_trace(pools), [x])
    (output,) = found.graph.graph.find_nodes(op="output")
    results = pools(x)
    for node, wanted in zip(output.args[0][: len(results)], results, strict=True):  # behind them are saved values
        assert strides(node.meta["val"]) == strides(wanted)


def duals(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(torch.max_pool1d(forward_ad.make_dual(x.mT * 2, x.mT.sin()), 2)).primal


TRANSFORMED = {
    "vmap": torch.func.vmap(lambda row: torch.max_pool1d(row.mT, 2)),
    "shared": lambda x: torch.func.vmap(lambda row: torch.max_pool1d(x[0].mT, 2) + row.sum())(x),
    "jvp": lambda x: torch.func.jvp(lambda rows: torch.max_pool1d(rows[0].mT, 2), (x,), (x * 2,))[1],
    "grad": lambda x: torch.func.grad(lambda rows: (lambda pool: (pool.sum(), pool))(pool_of(rows)), has_aux=True)(x)[
        1
    ],
    "duals": lambda x: duals(x[0]),
}


def pool_of(rows):
    return torch.max_pool1d(rows[0].mT, 2)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_pools_of_rows_within_transforms_lie_as_eagers_do(name: str) -> None:
    found = []

    def backend(graph, examples):
        found.append(capture(graph, examples).graph)
        return graph

    x = torch.randn(3, 2, 6, 4)
    torch._dynamo.reset()
    torch.compile(TRANSFORMED[name], backend=backend, fullgraph=True)(x)
    (output,) = found[0].graph.find_nodes(op="output")
    assert strides(output.args[0][-1].meta["val"]) == strides(TRANSFORMED[name](x))
