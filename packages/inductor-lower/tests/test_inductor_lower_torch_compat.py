"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import _torch_compat, compile_graph

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_a_lone_bound_that_is_nan_counts_from_torch_2_12_on() -> None:
    assert _torch_compat.lone_nan_bound_counts() == (RELEASE >= (2, 12))


def test_checks_are_no_dead_code_which_torch_does_not_know_of_all_before_2_13() -> None:
    _torch_compat.keep_checks()  # again: nothing changes

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum())
        return torch.linalg.inv(x) * 2

    compiled = compile_graph(make_fx(lambda x: (fn(x),), tracing_mode="fake")(torch.eye(3)))
    torch.testing.assert_close(compiled([torch.eye(3)])[0], fn(torch.eye(3)))
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        compiled([torch.zeros(3, 3)])
    with pytest.raises(torch.linalg.LinAlgError):
        compiled([torch.ones(3, 3)])


def test_what_is_too_large_for_8_bits_is_no_number_before_torch_2_13() -> None:
    assert _torch_compat.large_numbers_become_float8() == (RELEASE >= (2, 13))


def test_fakes_of_what_is_scattered_into_repeated_elements_keep_them_before_torch_2_12() -> None:
    with FakeTensorMode() as mode:
        x, part = mode.from_tensor(torch.arange(3.0).expand(4, 3)), mode.from_tensor(torch.ones(3))
        result = torch.select_scatter(x, part, 0, 1)
        assert (result.stride() == (0, 1)) == (RELEASE < (2, 12))
        assert _torch_compat.scattered_strides(x, result) == (3, 1)


def test_a_graph_with_fake_values_that_repeat_elements_is_left_to_aten_and_refused() -> None:
    """As torch before 2.12 makes them."""
    x, part = torch.arange(3.0).expand(4, 3), torch.ones(3)
    graph = make_fx(lambda x, y: (torch.select_scatter(x, y, 0, 1),), tracing_mode="fake")(x, part)
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.select_scatter.default)
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty_strided((4, 3), (0, 1))
    compiled = compile_graph(graph)
    assert "repeats elements" in compiled.report().externs[0].reason
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        compiled([x, part])
