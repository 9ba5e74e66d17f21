"""What a plan calls where a kernel leaves rows to ATen, see Note [Equal elements] in :mod:`.lowering.sorting`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["FIX_UPS", "FIX_UP_ROWS", "fix_up_rows"]

FIX_UP_ROWS = "aotkit_inductor_lower.fix_up_rows.default"


@torch.no_grad()
def fix_up_rows(tensors: list[torch.Tensor], op: str, dim: int, number: int, flag: bool) -> None:
    """Overwrite the marked rows of the results of ``op`` along ``dim`` with ATen's. The tensors: whether any row is
    marked, which rows are, the argument, and the two results."""
    (any_marked, marked, x, *results), function = tensors, _BY_ROWS[op]
    if not any_marked.item():
        return
    places = marked.nonzero(as_tuple=True) if x.numel() > 4096 else ()
    if not places or 4 * len(places[0]) > marked.numel():  # all of them are done sooner
        function(x, dim, number, flag, tuple(results))
        return
    found = function(x.movedim(dim, -1)[places], -1, number, flag, None)
    for result, right in zip(results, found, strict=True):
        (result.movedim(dim, -1) if result.dim() == x.dim() else result)[places] = right


_BY_ROWS: dict[str, Callable[..., Any]] = {
    "sort": lambda x, dim, _, flag, out: torch.sort(x, dim=dim, descending=bool(flag), out=out),
    "topk": lambda x, dim, number, flag, out: torch.topk(x, number, dim, largest=bool(flag), out=out),
    "kthvalue": lambda x, dim, number, flag, out: torch.kthvalue(x, number, dim, bool(flag), out=out),
    "median": lambda x, dim, _, flag, out: torch.median(x, dim, bool(flag), out=out),
}
#: Calls that are no operators of torch, with nothing to do if their first tensor is false.
FIX_UPS: Mapping[str, Callable[..., None]] = MappingProxyType({FIX_UP_ROWS: fix_up_rows})
