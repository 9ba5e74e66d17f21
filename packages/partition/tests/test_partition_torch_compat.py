"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import torch

from aotkit_partition import _torch_compat

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_memory_budgets_of_regions_are_there_from_torch_2_13_on() -> None:
    assert _torch_compat.region_memory_budget_supported() == (RELEASE >= (2, 13))
