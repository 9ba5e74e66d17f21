"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import inspect

import torch
from torch._dynamo import compiled_autograd

from aotkit_runtime_wrappers import _torch_compat

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_a_backward_of_ours_can_be_pasted_from_torch_2_13_on() -> None:
    """Where torch asks the function that it calls for its prologue and epilogue."""
    asks = "._bw_prologue_fn" in inspect.getsource(compiled_autograd)
    assert _torch_compat.backward_can_be_pasted() == (RELEASE >= (2, 13)) == asks
