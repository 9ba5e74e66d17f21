"""Views in graphs of ATen operators, recorded where torch's fake kernels say that a value is contiguous.

Note [Views of copies]
    There ``torch.export`` and ``make_fx`` record a view for a reshape, and leave out a ``contiguous()``. Where the
    value lies otherwise in eager mode, the view is one of a contiguous copy. The graph does not tell which of both the
    program had. It matters if the value or the view is written to, and if outputs hold both or two such views: with a
    ``contiguous()`` they share memory, with a reshape they don't. Such graphs are refused. So are views of arguments,
    which eager mode refuses as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from aotkit_functionalize import Unsupported
from aotkit_functionalize.tracing import has_data_mutation, is_functional

__all__ = ["VIEWS", "RecordedViews", "cannot_be_a_view"]

VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


@dataclass(frozen=True, slots=True)
class _Copy:
    source: torch.Tensor
    copy: torch.Tensor
    refusal: Unsupported


class RecordedViews:
    """The copies of one run of a graph, see Note [Views of copies]."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def copy_of(self, source: Any, given: Iterable[Any], refusal: Unsupported) -> torch.Tensor:
        """A contiguous copy to make a view of; raises ``refusal`` if ``source`` is or views one of ``given``."""
        if not is_functional(source) or _memory(source) in map(_memory, filter(is_functional, given)):
            raise refusal
        copied = _Copy(source, source.contiguous(), refusal)
        self._copies.append(copied)
        return copied.copy

    def check(self, outputs: Iterable[Any]) -> None:
        """Raise the refusal of a copy for which it matters what the program had."""
        returned = {_memory(value) for value in outputs if is_functional(value)}
        for copied in self._copies:
            others = {_memory(other.copy) for other in self._copies if _memory(other.source) == _memory(copied.source)}
            if has_data_mutation(copied.source) or has_data_mutation(copied.copy):
                raise copied.refusal
            if len(returned & {_memory(copied.source), *others}) > 1:
                raise copied.refusal


def cannot_be_a_view(error: Exception) -> bool:
    """Whether torch says that a view of these sizes would need a copy."""
    text = str(error)
    return "Cannot view a tensor" in text or "view size is not compatible" in text


def _memory(value: torch.Tensor) -> int:
    """The same number for tensors that share memory."""
    return int(value.untyped_storage()._cdata)
