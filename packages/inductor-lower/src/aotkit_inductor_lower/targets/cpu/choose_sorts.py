"""Which stable sorts are kernels of ours.

Note [Which sorts are ours]
    Digit by digit a row takes a time by its length alone, and to clear and add up counters the same for all rows; ATen
    compares. From 64 elements of 32 bits on, 40 of fewer bits and 160 of 64 bits, ours takes less time than ATen's
    stable sort and its unstable one: of 1000 elements a tenth to a third of it, of 128 000 float32 less than a tenth
    (``python -m tools.bench.sampling --sorts``, one thread of a Zen 4; on a Zen 3, with AVX2, the same lengths part
    what is quicker from what is not). Rows of unknown length count as long ones:
    lowering asks the same (:func:`~...lowering.long_sorts.is_long`), since what may stand for an unstable sort is told
    there.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir import Buffer, LoopNest
from ...kernel_passes.normal_form import kernel_of
from ...lowering.long_sorts import is_long
from ...target import Choice
from .render.types import width
from .sort_site import sort_site

__all__ = ["choose_sort"]

_LONGEST = 1 << 31  # of a row: places are numbers of 32 bits


def choose_sort(nest: LoopNest, buffers: Mapping[str, Buffer]) -> Choice:
    """``"digits"`` or ATen's call."""
    site = sort_site(kernel_of(nest, buffers))
    if site is None:
        return Choice("aten", "the target has no form for its elements")
    count = site.count.constant
    if not is_long(site.count, width(site.dtype) // 8):
        return Choice("aten", f"of {count} elements comparisons take no more time")
    if count is not None and count >= _LONGEST:
        return Choice("aten", "places in rows of that length have more than 32 bits")
    return Choice("digits", "sorting digit by digit takes less time than comparing")
