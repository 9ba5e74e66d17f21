"""Pass: the gradient of a cross-entropy loss is computed element by element, without a walk over its rows.

Before ``_log_softmax_backward_data(nll_loss_backward(grad, ..), y)``, which is ``g - exp(y) * sum(g)`` with a sum over
each row of ``g``. A row of that ``g`` has one number that is not 0, at the label, so its sum is this number, exactly.
After, the same formula with the number in place of the sum. Requires a matrix, and no weights of the classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph

from ..passes import Pass
from .patterns import Bound, Rewrite, apply_rewrites
from .rewriting import rewriting

__all__ = ["PASS", "loss_gradients"]

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _along(dim: int) -> Callable[..., Any]:
    """What is looked for, where the classes are this dimension."""

    def written(grad: Any, x: Any, label: Any, reduction: Any, ignored: Any, total: Any, y: Any, dtype: Any) -> Any:
        found = aten.nll_loss_backward.default(grad, x, label, None, reduction, ignored, total)
        return aten._log_softmax_backward_data.default(found, y, dim, dtype)

    return written


def _computed(grad: Any, x: Any, label: Any, reduction: Any, ignored: Any, total: Any, y: Any, dtype: Any) -> Any:
    own = x.node.meta["val"].dtype
    wide = own if own is torch.float64 else torch.float32

    def widened(value: Any) -> Any:
        return value if value.node.meta["val"].dtype is wide else _to(value, wide)

    rows = aten.nll_loss_backward.default(grad, x, label, None, reduction, ignored, total)
    rows = rows if own is wide else _to(rows, wide)
    one = widened(grad)
    one = aten.div.Tensor(one, widened(total)) if reduction == 1 else one
    one = aten.neg.default(one)
    one = one if own is wide else _to(_to(one, own), wide)  # as rounded as it is in its row
    counts = aten.ne.Scalar(label, ignored)
    # A sum that begins with 0 is no negative zero.
    sums = aten.unsqueeze.default(aten.add.Tensor(aten.where.self(counts, one, aten.zeros_like.default(one)), 0.0), 1)
    result = aten.sub.Tensor(rows, aten.mul.Tensor(aten.exp.default(widened(y)), sums))
    return result if dtype is wide else _to(result, dtype)


def _to(value: Any, dtype: torch.dtype) -> Any:
    return aten._to_copy.default(value, dtype=dtype)


def _is_known(bound: Bound) -> bool:
    x, dtype = bound["x"].meta["val"], bound["root"].meta["val"].dtype
    return (
        x.dim() == 2
        and isinstance(bound["reduction"], int)
        and isinstance(bound["ignored"], int)
        and x.dtype in _FLOATS
        and bound["y"].meta["val"].dtype is x.dtype
        and dtype is bound["dtype"]
        and (dtype is x.dtype or x.dtype in (torch.float32, torch.float64))
    )


_REWRITES = tuple(Rewrite(_along(dim), _computed, _is_known) for dim in (1, -1))


def loss_gradients(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of gradients."""
    return apply_rewrites(graph, _REWRITES, fuel)


PASS = Pass(
    "loss-gradients",
    rewriting(loss_gradients),
    why="the sum of a row that has one number is that number",
    after=("remove-noops",),
)
