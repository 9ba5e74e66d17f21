"""Pass: products of many rows with weights that ATen packs in 4 or 8 bits become products of floats.

Before ``_weight_int4pack_mm_for_cpu(x, w, group, scales)``, after ``float(x) @ weight`` with the ``weight`` that it
means (Note [Weights of four bits as ATen packs them] in :mod:`..ops.packed_weights`), in blocks of columns;
before ``_weight_int8pack_mm(x, w, scales)``, after ``(float(x) @ float(w).t()) * scales``.

Note [Packed weights as floats]
    ATen multiplies packed weights in registers. With many rows that is as fast as its products of floats only for
    bfloat16 and with vectors of 512 bits. With those of 256 bits a prompt of 512 tokens of an int4 model takes 3.3 s,
    as floats 1.7 (`python -m tools.bench.decode --prefill --formats float32 int4`, AMD EPYC, Zen 3), and for float32
    and float16 there are no vectors at all (as seen on Zen 3; with AVX-512 this was not measured). To write the weight
    as floats takes little beside their product with hundreds of rows.
    Blocks of :data:`BLOCK` bytes are written and multiplied one after the other, so that they stay in the caches and
    large weights take no memory as floats.

    Products of few rows are kernels of ours that read the weight where it lies
    (:mod:`..targets.cpu.choose_few_rows`), and with tile registers those of many rows are, too; both are not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..ops.packed_weights import INT4, INT8, misfit, panel_columns
from ..ops.positions import at_hand
from ..passes import Pass, PassContext
from .node_facts import before_writes
from .patterns import emit
from .replace import replace_node
from .rewriting import drop_dead_nodes

__all__ = ["PASS", "widen_packed"]

aten = torch.ops.aten

BLOCK = 16 << 20  # bytes of floats
MOST_BLOCKS = 16  # whose operations a graph gets

#: A product with columns from one to another of a weight: its left factor, the weight and its scales.
_Block = Callable[[Any, Any, Any, int, int], Any]


def widen_packed(graph: Graph, ctx: PassContext) -> Graph:
    """Run the pass."""
    done = False
    for node in before_writes(graph):
        if node.target not in _WIDENERS or node.kwargs or ctx.fuel.left < 1:
            continue
        least = dict(ctx.target.capabilities.float_packed).get(_dtype(node.args[0]))
        if least is not None and _widen(graph, node, least):
            ctx.fuel.spend(1)
            done = True
    if done:
        drop_dead_nodes(graph)
    return graph


def _dtype(arg: Any) -> str:
    return str(arg.meta["val"].dtype).removeprefix("torch.") if isinstance(arg, Node) else ""


def _widen(graph: Graph, node: Node, least: int) -> bool:
    """Replace a call, if it has so many rows, or has them at hand and may have others."""
    given: list[Any] = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]
    x, weight, *_, scales = given
    known = all(isinstance(size, int) and size > 0 for size in (x.shape[1], *weight.shape))
    if not known or at_hand(x.shape[0]) < least:
        return False
    taken = scales.dtype is x.dtype and weight.is_contiguous() and scales.is_contiguous()
    block = _WIDENERS[node.target](node) if taken and x.stride() == (x.shape[1], 1) else None  # others ATen refuses
    if block is None:
        return False
    write, unit = block
    dtype, columns, step = x.dtype, weight.shape[0], _columns_of_a_block(weight.shape[0], x.shape[1], unit)

    def product(x: Any, weight: Any, scales: Any) -> Any:
        wide = x if dtype is torch.float32 else aten._to_copy.default(x, dtype=torch.float32)
        blocks = [write(wide, weight, scales, at, min(at + step, columns)) for at in range(0, columns, step)]
        total = blocks[0] if len(blocks) == 1 else aten.cat.default(blocks, 1)
        return total if dtype is torch.float32 else aten._to_copy.default(total, dtype=dtype)

    made = emit(graph, product, node, x=node.args[0], weight=node.args[1], scales=node.args[-1])
    return made is not None and replace_node(node, made)


def _columns_of_a_block(columns: int, summed: int, unit: int) -> int:
    """A multiple of the unit, as far as :data:`BLOCK` and :data:`MOST_BLOCKS` go."""
    step = max(BLOCK // (4 * summed), -(-columns // MOST_BLOCKS))
    return -(-step // unit) * unit


def _four_bits(node: Node) -> tuple[_Block, int] | None:
    """Products with columns of a weight of four bits, and how many of these lie in a panel."""
    panel = panel_columns()
    if not panel or misfit(node):
        return None
    _, weight, group, _ = cast("tuple[Node, Node, int, Node]", node.args)
    columns, summed = weight.meta["val"].shape[0], 2 * weight.meta["val"].shape[1]
    if columns % panel or summed % group:
        return None
    half, groups = panel // 2, summed // group

    def block(wide: Any, weight: Any, scales: Any, start: int, end: int) -> Any:
        panels = (end - start) // panel
        bytes_ = aten.view.default(aten.slice.Tensor(weight, 0, start, end), [panels, groups, group, half])
        bytes_ = aten.unsqueeze.default(aten.permute.default(bytes_, [1, 2, 0, 3]), 3)
        halves = [aten.bitwise_and.Scalar(bytes_, 15), aten.bitwise_right_shift.Tensor_Scalar(bytes_, 4)]
        four_bits = aten._to_copy.default(aten.cat.default(halves, 3), dtype=torch.float32)
        pairs = aten.view.default(aten.slice.Tensor(scales, 1, start, end), [groups, 1, panels, 2, half, 2])
        scale, zero = (aten._to_copy.default(aten.select.int(pairs, 5, at), dtype=torch.float32) for at in (0, 1))
        widened = aten.add.Tensor(aten.mul.Tensor(aten.sub.Tensor(four_bits, 8), scale), zero)
        return aten.mm.default(wide, aten.view.default(widened, [summed, end - start]))

    return block, panel


def _bytes(node: Node) -> tuple[_Block, int] | None:
    """Products with rows of a weight of bytes."""
    _, weight, scales = (arg.meta["val"] for arg in cast("tuple[Node, Node, Node]", node.args))
    if scales.shape != weight.shape[:1]:
        return None

    def block(wide: Any, weight: Any, scales: Any, start: int, end: int) -> Any:
        part = aten._to_copy.default(aten.slice.Tensor(weight, 0, start, end), dtype=torch.float32)
        scale = aten._to_copy.default(aten.slice.Tensor(scales, 0, start, end), dtype=torch.float32)
        scaled = aten.mul.Tensor(aten.mm.default(wide, aten.t.default(part)), scale)
        return aten.add.Tensor(scaled, aten.mul.Tensor(scale, 0.0))  # nan where eager adds up infinities of both signs

    return block, 1


_WIDENERS: dict[Any, Callable[[Node], tuple[_Block, int] | None]] = {INT4: _four_bits, INT8: _bytes}


def _is_wanted(ctx: PassContext) -> bool:
    """If ATen is slow for a type, and contractions are not all to be ATen's."""
    return bool(ctx.target.capabilities.float_packed) and ctx.options.contractions != "aten"


PASS = Pass(
    "widen-packed",
    widen_packed,
    why="ATen's products of many rows with packed weights take longer than those of floats",
    when=_is_wanted,
)
