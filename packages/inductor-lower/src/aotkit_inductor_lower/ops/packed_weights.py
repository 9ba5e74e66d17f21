"""Weights of 4 and 8 bits as ATen's products take them.

Note [Weights of four bits as ATen packs them]
    ``_weight_int4pack_mm_for_cpu`` takes weights of 4 bits, a scale and a zero for each ``group`` of them in a
    column::

        weight[n, k] = (q[n, k] - 8) * scale[k // group, n] + zero[k // group, n]

    ``_convert_weight_to_int4pack_for_cpu`` has written ``q`` in panels of columns, 64 with AVX-512 and 32 with AVX2,
    row by row: a byte has column ``c`` of the panel's first half and, in its upper bits, column ``c`` of the second.

    How ATen packs here is seen by packing a small matrix (:func:`panel_columns`). Scales that do not fit the group
    size are refused, since ATen would read memory beyond them, and so are weights that are not packed for the CPU
    (those for CUDA have integers of 32 bits in four dimensions), which ATen refuses in the call.

``_weight_int8pack_mm`` takes a plain matrix of bytes and a scale for each of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

__all__ = ["INT4", "INT8", "misfit", "panel_columns", "panels_of_layout"]

_aten = torch.ops.aten
INT4, INT8 = _aten._weight_int4pack_mm_for_cpu.default, _aten._weight_int8pack_mm.default

_GROUPS = (32, 64, 128, 256)  # that ATen has


def misfit(node: Node) -> str:
    """Why the weight and scales of a call with four bits do not fit its group, or each other, if they do not."""
    given: tuple[Any, ...] = tuple(arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args)
    x, weight, group, scales = given
    if group not in _GROUPS:
        return f"its groups have {group} numbers, and there are products for {_GROUPS} only"
    packed = [weight.shape[0], x.shape[1] // 2]
    if weight.dtype is not torch.uint8 or list(weight.shape) != packed:
        found = f"{str(weight.dtype).removeprefix('torch.')} of shape {list(weight.shape)}"
        return f"its weight is {found}, and packed for the CPU it would be uint8 of shape {packed}"
    expected = [-(-x.shape[1] // group), weight.shape[0], 2]
    if list(scales.shape) != expected:
        return f"its scales have shape {list(scales.shape)}, and the weight has {expected}"
    return ""


@lru_cache(maxsize=1)
def panel_columns() -> int:
    """Columns of a panel in the layout that ATen packs weights of four bits in here, see Note [Weights of four bits as
    ATen packs them]; 0 for a layout that is not known."""
    return panels_of_layout(_aten._convert_weight_to_int4pack_for_cpu.default)


def panels_of_layout(pack: Callable[[torch.Tensor, int], torch.Tensor]) -> int:
    """The same of any function that packs."""
    columns, summed = 64, 4
    column, step = torch.arange(columns)[:, None], torch.arange(summed)
    numbers = (column * 7 + step * 3 + column // 16) % 16
    packed = pack(numbers.int(), 2).flatten()
    for panel in (64, 32):
        halves = numbers.view(columns // panel, 2, panel // 2, summed).permute(0, 3, 1, 2)
        if torch.equal(packed, (halves[:, :, 0] | halves[:, :, 1] << 4).flatten().to(torch.uint8)):
            return panel
    return 0
