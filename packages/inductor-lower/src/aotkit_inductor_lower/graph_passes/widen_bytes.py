"""Pass: products of bytes that no library multiplies as such become products of floats, without a rounding.

Before ``_int_mm(x, w)``, after ``int32(float(x) @ float(w))``, or the sum of several such along the rows of ``x``.

Note [Products of bytes as floats]
    A float32 holds each whole number up to 2**24. Sums of 1024 products of signed bytes do not go beyond, nor do those
    of 512 with bytes of which one has no sign, whatever the order is in which they are added, and so nothing of such a
    product is lost; longer sums are taken in parts, which are added as whole numbers, and wrap around as eager's do.
    On processors without instructions for bytes, ATen's ``_int_mm`` is three loops around a multiplication: of 512
    tokens an int8 model with dynamic activations takes 37.1 s with it and 1.5 with this (one thread of an AMD EPYC,
    Zen 3: `python -m tools.bench.decode --prefill --rounds 1 --formats "int8 dynamic"`). Other such processors were not
    measured, and keep the call. Products of few rows are kernels of ours (:mod:`..targets.cpu.choose_few_rows`) where
    weights follow each other along the sum, and not touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..passes import Pass, PassContext
from .node_facts import before_writes
from .patterns import emit
from .replace import replace_node
from .rewriting import drop_dead_nodes

__all__ = ["EXACT", "PASS", "widen_bytes"]

aten = torch.ops.aten

#: Numbers of which a sum of products is exact in float32: of signed bytes, of others with signed ones.
EXACT = {torch.int8: 1 << 10, torch.uint8: 1 << 9}


def widen_bytes(graph: Graph, ctx: PassContext) -> Graph:
    """Run the pass."""
    done = False
    for node in before_writes(graph):
        if node.target is not aten._int_mm.default or node.kwargs or ctx.fuel.left < 1:
            continue
        if _widen(graph, node, ctx.target.capabilities.float_bytes):
            ctx.fuel.spend(1)
            done = True
    if done:
        drop_dead_nodes(graph)
    return graph


def _widen(graph: Graph, node: Node, least: int) -> bool:
    a, b = (arg.meta.get("val") if isinstance(arg, Node) else None for arg in node.args)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    rows, summed = a.shape
    if a.dtype not in EXACT or b.dtype is not torch.int8 or not isinstance(summed, int):
        return False
    few = isinstance(rows, int) and rows < least and b.stride(0) == 1
    if summed == 0 or few:
        return False
    step = EXACT[a.dtype]

    def sums(x: Any, w: Any) -> Any:
        total = None
        for start in range(0, summed, step):
            part = aten._to_copy.default(_product(x, w, start, min(start + step, summed), summed), dtype=torch.int32)
            total = part if total is None else aten.add.Tensor(total, part)
        return total

    made = emit(graph, sums, node, x=node.args[0], w=node.args[1])
    return made is not None and replace_node(node, made)


def _product(x: Any, w: Any, start: int, end: int, summed: int) -> Any:
    """Of some of the numbers that are summed, in float32."""
    if (start, end) != (0, summed):
        x, w = aten.slice.Tensor(x, 1, start, end), aten.slice.Tensor(w, 0, start, end)
    x, w = (aten._to_copy.default(each, dtype=torch.float32) for each in (x, w))
    return aten.mm.default(x, w)


def _is_wanted(ctx: PassContext) -> bool:
    """If the target has no better way, and contractions are not all to be ATen's."""
    return ctx.target.capabilities.float_bytes > 0 and ctx.options.contractions != "aten"


PASS = Pass(
    "widen-bytes",
    widen_bytes,
    why="without instructions for bytes ATen multiplies them one by one, and floats lose nothing of such products",
    after=("unshift-bytes",),
    when=_is_wanted,
)
