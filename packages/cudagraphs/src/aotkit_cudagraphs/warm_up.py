"""The first call of a callable with new inputs: it runs as it is, watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .dispatch import written_tensors
from .user_lines import user_line_here


class WatchWrites(TorchDispatchMode):
    """Notes which of some storages ATen calls write, and where in the user's code."""

    supports_higher_order_operators = True

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._inputs: dict[int, list[int]] = {}
        self.written: dict[int, str | None] = {}
        for index, value in enumerate(inputs):
            if _has_storage(value):
                self._inputs.setdefault(value.untyped_storage()._cdata, []).append(index)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            for index in self._inputs.get(tensor.untyped_storage()._cdata, ()) if _has_storage(tensor) else ():
                self.written.setdefault(index, user_line_here())
        return func(*args, **kwargs)


def watched(call: Callable[[list[Any]], Any], inputs: list[Any]) -> tuple[Any, dict[int, str | None]]:
    """Run the call; its result, and the inputs that it wrote with the user's lines."""
    watch = WatchWrites(inputs)
    with watch:
        result = call(inputs)
    return result, watch.written


def result_storages(result: Any) -> list[tuple[int, StorageWeakRef]]:
    """Index and storage (held weakly) of each tensor among the leaves of a result."""
    leaves = pytree.tree_leaves(result)
    return [(leaf, StorageWeakRef(value.untyped_storage())) for leaf, value in enumerate(leaves) if _has_storage(value)]


def _has_storage(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
