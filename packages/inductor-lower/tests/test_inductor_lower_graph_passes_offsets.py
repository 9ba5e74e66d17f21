"""A view of a tensor that a graph pass replaces starts where the tensor that takes its place starts.

The tensor in between is a copy of its own in eager and begins its storage; what replaces it may lie anywhere. An ATen
call reads a view by address, so each kind of view is read by one here.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph
from aotkit_inductor_lower.graph_passes.replace import replace_node

aten = torch.ops.aten
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])

REPLACED = {
    "clone": lambda x, y: aten.clone(x[1:]),
    "clone of a column range": lambda x, y: aten.clone(x[:, 2:]),
    "cast to the same type": lambda x, y: aten._to_copy(x[2:], dtype=torch.float64),
    "copy from a view": lambda x, y: aten.copy(x[:4], y[2:]),
    "copy over a view": lambda x, y: aten.copy(x[2:], aten.clone(y[:4])),
    "scattered copy": lambda x, y: aten.slice_scatter(x[1:], y[1:], 0, 0, 5),
    "pieces put together": lambda x, y: aten.cat(list(aten.split.Tensor(x[2:], 2))),
    "one piece put together": lambda x, y: aten.cat([y[2:]]),
    "part of parts": lambda x, y: aten.slice.Tensor(aten.cat([x[1:], y[1:]]), 0, 5, 10),
    "sum with a factor of one": lambda x, y: aten.mul.Tensor(x[1:], 1.0),
    "transposed back": lambda x, y: aten.clone(aten.t(x[1:])).t(),
}
VIEWS = {
    "unsqueeze": lambda t: aten.unsqueeze(t, 0),
    "view": lambda t: aten.view(t, [1, *t.shape]),
    "permute": lambda t: aten.permute(t, [1, 0]),
    "transpose": lambda t: aten.transpose.int(t, 0, 1),
    "expand": lambda t: aten.expand(t, [3, *t.shape]),
    "slice": lambda t: aten.slice.Tensor(t, 0, 1, 3),
    "select": lambda t: aten.select.int(t, 0, 1),
    "diagonal": lambda t: aten.diagonal(t),
    "unfold": lambda t: aten.unfold(t, 1, 2, 1),
    "split": lambda t: aten.split.Tensor(t, 2)[1],
    "unbind": lambda t: aten.unbind.int(t)[1],
    "two views": lambda t: aten.select.int(aten.unsqueeze(t, 1), 0, 2),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(("replaced", "view"), list(itertools.product(REPLACED, VIEWS)))
def test_views_of_a_replaced_tensor_begin_where_the_new_one_does(replaced, view, mode):
    def f(x, y):
        return (aten.logcumsumexp(VIEWS[view](REPLACED[replaced](x, y)), 0),)

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        graph = make_fx(f, tracing_mode=mode)(x, y)
    compiled = compile_graph(graph)
    externs = [call.target for call in compiled.report().externs]
    if RELEASE < (2, 13) and mode == "symbolic":  # a trace asks nothing about positions
        externs = [target for target in externs if target != "aten.select.int"]
    assert externs == ["aten.logcumsumexp.default"]
    torch.testing.assert_close(compiled([x, y])[0], f(x, y)[0])


def test_a_tensor_whose_storage_is_addressed_is_not_replaced_by_one_elsewhere():
    def f(x, y):
        return (aten.as_strided(aten.clone(x[1:]), [2, 2], [5, 1], 1) + y,)

    x, y = torch.arange(30, dtype=torch.float64).view(6, 5), torch.ones(2, 2, dtype=torch.float64)
    graph = make_fx(f, tracing_mode="fake")(x, y)
    strided = graph.graph.find_nodes(op="call_function", target=aten.as_strided.default)[0]
    clone = strided.args[0]
    assert not replace_node(clone, clone.args[0])
    assert strided.args[0] is clone
    torch.testing.assert_close(compile_graph(graph)([x, y])[0], f(x, y)[0])
