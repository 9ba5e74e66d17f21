"""Operators on lists of tensors equal eager bit for bit, and an optimizer's update is one kernel per parameter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, decompositions
from aotkit_inductor_lower.lowering.foreach import foreach_decompositions

pytest.importorskip("expecttest", reason="torch's own lists of operators need expecttest, which is missing")
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_unary_op_db,
)

OPS = [*foreach_unary_op_db, *foreach_binary_op_db, *foreach_pointwise_op_db, *foreach_other_op_db]


@pytest.mark.covers("F5g.23")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_lists_of_tensors_equal_eager(op):
    passed = False
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, noncontiguous=False), 3):
        leaves, spec = torch.utils._pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def call(*tensors, leaves=leaves, spec=spec, places=places, op=op):
            values = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            first, args, kwargs = torch.utils._pytree.tree_unflatten(values, spec)
            kwargs = {k: v for k, v in kwargs.items() if k not in ("values", "disable_fastpath", "zero_size")}
            return op.method_variant(first, *args, **kwargs)

        tensors = [leaves[k] for k in places]
        try:
            want = call(*tensors)
        except (RuntimeError, TypeError):
            continue  # eager refuses the sample
        graph = make_fx(call, decompositions(), tracing_mode="fake")(*tensors)
        if graph.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
            continue  # numbers read from tensors are refused
        got = compile_graph(graph)(list(tensors))
        passed = True
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, equal_nan=True)
        break
    assert passed


def adam(params, grads, means, squares, step):
    means = torch._foreach_lerp(means, grads, 0.1)
    squares = torch._foreach_addcmul(torch._foreach_mul(squares, 0.999), grads, grads, 0.001)
    roots = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(squares), 0.9), 1e-8)
    return torch._foreach_addcdiv(params, means, roots, -1e-3), means, squares


@pytest.mark.covers("F5g.23")
def test_an_update_of_many_parameters_is_one_kernel_each():
    torch.manual_seed(0)
    lists = [[torch.rand(5, k % 3 + 1) for k in range(30)] for _ in range(4)]
    flat = [tensor for tensors in lists for tensor in tensors]

    def update(*flat):
        results = adam(*(list(flat[k : k + 30]) for k in range(0, 120, 30)), 1)
        return [tensor for tensors in results for tensor in tensors]

    compiled = compile_graph(make_fx(update, decompositions(), tracing_mode="fake")(*flat))
    report = compiled.report()
    assert report.kernel_count == 30 and not report.externs
    for got, want in zip(compiled(list(flat)), update(*flat), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_every_list_operator_of_the_table_has_an_ordinary_one():
    assert len(foreach_decompositions()) > 60
