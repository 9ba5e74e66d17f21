"""Which stable sorts are kernels of ours.

Note [Which sorts are ours]
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir import Buffer, LoopNest
from ...kernel_passes.normal_form import kernel_of
from ...target import Choice
from .sort_site import sort_site

__all__ = ["choose_sort"]

_LONGEST = 1 << 31  # of a row: places are numbers of 32 bits


def choose_sort(nest: LoopNest, buffers: Mapping[str, Buffer]) -> Choice:
    """``"digits"`` or ATen's call."""
    site = sort_site(kernel_of(nest, buffers))
    if site is None:
        return Choice("aten", "the target has no form for its elements")
    count = site.count.constant
    if count is not None and not 2 <= count < _LONGEST:
        return Choice("aten", "rows of that length are left to ATen")
    return Choice("digits", "sorting digit by digit takes less time than comparisons")
