"""What a graph node has become: a tensor is an index map over a buffer.

Note [Views cost nothing]
    A :class:`View` maps the indices of its own dimensions to indices of a buffer. A view op composes maps, so
    reshape, permute, expand, slice and select make no loop nest. Whoever reads the view substitutes its loop
    variables. Only an ATen call that needs the tensor itself makes an ``Alias`` (same memory) or a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..symbolic import Expr, Symbol, to_expr

__all__ = ["DIMS", "FloatExpr", "NodeValue", "View", "dim_exprs"]

DIMS = tuple(Symbol(f"d{k}") for k in range(64))
_DIM_EXPRS = tuple(to_expr(s) for s in DIMS)


def dim_exprs(count: int) -> tuple[Expr, ...]:
    """The canonical index variables ``d0 .. d(count-1)`` in which views are written."""
    return _DIM_EXPRS[:count]


@dataclass(frozen=True, slots=True)
class FloatExpr:
    """A Python float known when the graph runs: it depends on dynamic sizes, such as ``2 / x.numel()``, or on a float
    argument, which comes as a tensor of one element. An op of the loop IR and its operands, or ``item`` of that tensor.

    A nest that reads it computes it in f64, as Python does, outside of its loops.
    """

    op: str
    args: tuple[FloatExpr | Expr | float | View, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor value: ``value[d0, d1, ...] == buffer[indices]`` with ``indices`` over the variables ``d0, d1, ...``.

    ``shares`` says that eager's tensor is the same memory as the buffer (``strides`` and ``offset``, in
    elements from the buffer's first one, then describe it); a reader that needs a real tensor can alias it.
    """

    buffer: str
    dtype: torch.dtype
    sizes: tuple[Expr, ...]
    indices: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    offset: Expr
    shares: bool = True

    @property
    def identity(self) -> bool:
        """Whether the map changes nothing (the sizes may still be a part of the buffer's)."""
        return self.indices == _DIM_EXPRS[: len(self.indices)] and len(self.indices) == len(self.sizes)

    def at(self, index: Sequence[Expr]) -> tuple[Expr, ...]:
        """Buffer indices of the element at ``index``."""
        if self.identity:
            return tuple(index)
        env = dict(zip(DIMS, index, strict=False))
        return tuple(e.substitute(env) for e in self.indices)


NodeValue = View | Expr | FloatExpr | float | bool | None | tuple["NodeValue", ...] | list["NodeValue"]
