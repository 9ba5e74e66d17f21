"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import torch

from aotkit_functionalize import _torch_compat

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_fakes_hold_other_attributes_from_torch_2_12_on() -> None:
    assert _torch_compat.fakes_other_attributes() == (RELEASE >= (2, 12))
