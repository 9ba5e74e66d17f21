"""Bugs found by running torch's own operator samples through the compiler; each test is one of them."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions

aten = torch.ops.aten


def check(f, *args, rtol=0.0, atol=0.0):
    """Compiled and eager agree in values (exactly unless told), types, sizes and strides."""
    graph = make_fx(lambda *given: f(*given), decompositions(), tracing_mode="fake")(*args)
    got = compile_graph(graph, options=LowerOptions(verify=True))([a.clone() for a in args])
    want = f(*args)
    for result, expected in zip(got, want if isinstance(want, tuple | list) else [want], strict=True):
        assert result.dtype == expected.dtype and result.shape == expected.shape
        if expected.numel():
            assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, equal_nan=True)


def test_a_sum_over_a_dimension_of_size_1_fuses_with_the_sum_of_its_result():
    check(lambda g: g.sum(0).sum(0).view(2, 2).sum(0), torch.arange(12.0).reshape(1, 3, 4))
    check(lambda g: (g.sum(0) + 1).amax(0), torch.arange(12.0).reshape(1, 3, 4))
    check(lambda g: g.softmax(0).sum(1), torch.arange(12.0).reshape(1, 3, 4), atol=1e-6)


@pytest.mark.parametrize("repeats", [(0, 2), (1, 1), (3, 1)])
def test_repeats_of_an_empty_tensor_are_empty(repeats):
    check(lambda x: x.repeat(*repeats), torch.randn(0))
