"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import torch

from aotkit_inductor_lower import _torch_compat

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_a_lone_bound_that_is_nan_counts_from_torch_2_12_on() -> None:
    assert _torch_compat.lone_nan_bound_counts() == (RELEASE >= (2, 12))
