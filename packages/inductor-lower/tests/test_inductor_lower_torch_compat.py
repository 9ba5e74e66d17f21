"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import pytest
import torch
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

    compiled = compile_graph(make_fx(fn, tracing_mode="fake")(torch.eye(3)))
    torch.testing.assert_close(compiled(torch.eye(3)), fn(torch.eye(3)))
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        compiled(torch.zeros(3, 3))
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.ones(3, 3))
