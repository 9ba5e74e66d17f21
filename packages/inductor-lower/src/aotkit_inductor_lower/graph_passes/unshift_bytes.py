"""Pass: products of bytes that were shifted to have no sign become products of the bytes as they were.

Before ``_int_mm(uint8(int32(x) + 128), w) - sum(w, 0) * 128``, after ``_int_mm(x, w)``. Processors with VNNI multiply
bytes without a sign with bytes that have one, and quantized models are written for that (torchao's are); but the sum of
all weights, which takes the shift away, is computed anew in each call, and takes longer than a product of few rows.
Kernels of ours, and oneDNN, multiply signed bytes on such processors as well, and know how to shift them.

Whole numbers wrap around, and so no bit changes, whatever the sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..passes import Pass
from .patterns import Bound, Rewrite, apply_rewrites
from .rewriting import rewriting

__all__ = ["PASS", "unshift_bytes"]

aten = torch.ops.aten
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_SHIFT = 128


def _product(u: Any, w: Any) -> Any:
    weights = aten.sum.dim_IntList(w, [0], True, dtype=torch.int32)
    return aten.sub.Tensor(aten._int_mm.default(u, w), aten.mul.Tensor(weights, _SHIFT))


def _signed(u: object) -> Node | None:
    """The signed bytes that unsigned ones are, shifted."""
    wide = _cast_from(u, torch.uint8, torch.int32)
    if wide is None or wide.target is not aten.add.Tensor or wide.args[1:] != (_SHIFT,) or wide.kwargs:
        return None
    return _cast_from(wide.args[0], torch.int32, torch.int8)


def _cast_from(node: object, to: torch.dtype, of: torch.dtype) -> Node | None:
    """What a node casts, if it makes numbers of the type ``to`` from those of the type ``of`` and nothing else."""
    if not isinstance(node, Node) or node.target not in _CASTS or set(node.kwargs) - {"dtype"}:
        return None
    source = node.args[0]
    types = [n.meta["val"].dtype for n in (node, source) if isinstance(n, Node)]
    return source if isinstance(source, Node) and types == [to, of] else None


def _is_shifted(bound: Bound) -> bool:
    return bound["w"].meta["val"].dtype is torch.int8 and _signed(bound["u"]) is not None


def _of_signed(u: Any, w: Any) -> Any:
    source = _signed(u.node)
    assert source is not None
    return aten._int_mm.default(torch.fx.Proxy(source, u.tracer), w)


_ROWS = (Rewrite(_product, _of_signed, _is_shifted),)


def unshift_bytes(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of products."""
    return apply_rewrites(graph, _ROWS, fuel)


PASS = Pass(
    "unshift-bytes",
    rewriting(unshift_bytes),
    why="the sum of all weights that takes a shift of bytes away takes longer than a product of few rows",
    after=("common-subexpressions",),
)
