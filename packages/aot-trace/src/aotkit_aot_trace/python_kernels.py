"""Upsampling, which torch's Python dispatcher takes apart above autograd, done by the caller's table there.

Note [Python kernels above autograd]
    Where sizes are symbolic, torch's Python dispatcher is on. For upsampling it has kernels that run in autograd's
    place, because its backward operators take no symbolic sizes. The table would never be asked, and results would be
    others than those of the same call with sizes that are known, which the table makes equal to eager's. So while a
    function is recorded, the table's functions stand in the place of these kernels, and autograd goes through them.
    The forms that take factors instead of sizes call torch's function directly; here they call the operator by sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["table_above_autograd"]

aten = torch.ops.aten

_NEAREST = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
)
_WRONG = (aten.multilabel_margin_loss_forward.default,)  # torch's Python kernel counts targets as others
_WITH_CORNERS = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")


@contextmanager
def table_above_autograd(table: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Context of a recording; see Note [Python kernels above autograd]."""
    with ExitStack() as stack:
        for op in _WRONG:
            if op not in table:
                stack.enter_context(compat.python_kernel_above_autograd(op, None))
        for names, by_factors in ((_NEAREST, _nearest), (_WITH_CORNERS, _with_corners)):
            for packet in (getattr(aten, name) for name in names):
                if packet.default in table:
                    by_size = partial(_by_table, packet.default, table[packet.default])
                    stack.enter_context(compat.python_kernel_above_autograd(packet.default, by_size))
                    stack.enter_context(compat.python_kernel_above_autograd(packet.vec, partial(by_factors, by_size)))
        yield


def _by_table(op: Any, decompose: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    result = decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    with compat.python_kernel_above_autograd(op, None):
        return op(*args, **kwargs)


def _nearest(
    by_size: Callable[..., torch.Tensor], input: torch.Tensor, output_size: Any, scale_factors: Any
) -> torch.Tensor:
    return by_size(input, *_sizes(input, output_size, scale_factors))


def _with_corners(
    by_size: Callable[..., torch.Tensor], input: torch.Tensor, output_size: Any, align_corners: bool, scale_factors: Any
) -> torch.Tensor:
    sizes, *factors = _sizes(input, output_size, scale_factors)
    return by_size(input, sizes, align_corners, *factors)


def _sizes(x: torch.Tensor, sizes: Sequence[Any] | None, factors: Sequence[float] | None) -> list[Any]:
    """The sizes of the result, and the factors or nothing in their place. Raises ``RuntimeError`` for both or none."""
    spatial = x.shape[2:]
    if (sizes is None) == (factors is None) or len(sizes or factors or ()) != len(spatial):
        raise RuntimeError(f"upsampling takes {len(spatial)} sizes or factors for a tensor of {x.dim()} dimensions")
    if factors is None:
        return [sizes, *[None] * len(spatial)]
    return [[_times(size, factor) for size, factor in zip(spatial, factors, strict=True)], *factors]


def _times(size: Any, factor: float) -> Any:
    return size * int(factor) if factor.is_integer() else torch.sym_int(size * factor)
