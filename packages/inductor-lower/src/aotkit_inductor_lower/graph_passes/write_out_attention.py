"""Pass: attention of a few queries becomes two products and a softmax, which kernels of ours compute.

Note [Attention of few queries]
    A language model that writes one token after the other has one row of queries, or a few, and all keys and values of
    a cache. ATen's flash attention is built for blocks of queries: for one it takes several times as long as it takes
    to read the cache. Written out, the products are those of a few rows with a matrix, which read it once, in the type
    that it is kept in, and the scores are few. All is computed in float32, as flash attention does.

    A cache is longer than what is in it. Where the mask says which keys are seen (a bool, or -inf where they are not,
    as transformers writes it for a static cache), those that no query sees are 0 instead of what is in the cache, so
    that the products need not read them; they have no weight either way. (Not so for a nan there, which ATen
    multiplies by that weight.)

    Where several heads of queries share the keys and values of one (``repeat_kv``: unsqueeze, expand, copy), their
    rows stand below each other in one product, and the copies are not made. Rows whose scores are all -inf are 0, as
    flash attention has them.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.positions import same_sizes
from ..passes import Pass, PassContext
from .node_facts import shared_heads, until_first_write
from .patterns import emit
from .replace import replace_node
from .rewriting import rewriting

__all__ = ["PASS", "write_out_attention"]

aten = torch.ops.aten
_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_WORTH_READING = 1 << 14  # numbers in all keys: with less, ATen's one call is as fast as three kernels
_ROWS = 8  # of queries that share keys: as many as products of few rows have
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def write_out_attention(graph: Graph, fuel: int, least: int = _WORTH_READING) -> int:
    """Run the pass; the number of attentions found. ``least``: numbers in the keys."""
    found = 0
    for node in until_first_write(graph):  # keys that are shared are read later than they were copied
        if found < fuel and node.target is _FLASH:
            found += _rewrite(graph, node, least)
    return found


def _rewrite(graph: Graph, node: Node, least: int) -> int:
    query, key, value, *rest = node.args
    plain = all(not setting for setting in rest)  # no dropout, not causal
    users = [user for user in node.users if user.users]
    if not plain or not {*node.kwargs} <= {"attn_mask", "scale"} or len(users) != 1:
        return 0
    if users[0].target is not operator.getitem or users[0].args[1] != 0:  # the logarithms of the sums are for training
        return 0
    shared = shared_heads(key), shared_heads(value)
    if None not in shared and same_sizes(*(each.meta["val"].shape[:3] for each in shared)):  # type: ignore[union-attr]
        key, value = shared
    if not all(isinstance(operand, Node) for operand in (query, key, value)):
        return 0
    sizes = [*(query.meta["val"].shape), *(key.meta["val"].shape), *(value.meta["val"].shape)]  # type: ignore[union-attr]
    if not all(isinstance(size, int) for size in sizes) or query.meta["val"].dtype not in _FLOATS:  # type: ignore[union-attr]
        return 0
    if sizes[1] // max(sizes[5], 1) * sizes[2] > _ROWS or not all(sizes) or math.prod(sizes[4:8]) < least:
        return 0
    given = {"query": query, "key": key, "value": value}
    mask = node.kwargs.get("attn_mask")
    if mask is not None:
        given["mask"] = mask
        seen, alone = _seen(mask)
        if seen is not None:
            given["seen"] = seen
            given["mask"] = seen if alone else mask
    scale = node.kwargs.get("scale")
    strides = users[0].meta["val"].stride()
    call = _Attention(scale if isinstance(scale, float) else sizes[3] ** -0.5, sizes[2] > 1 and strides[2] > strides[1])
    new = emit(graph, call, users[0], **given)
    if new is None or not replace_node(users[0], new):
        return 0
    for unused in [user for user in node.users if not user.users]:
        graph.erase_node(unused)
    graph.erase_node(node)  # which might draw random numbers, as far as the removal of dead nodes knows
    return 1


def _seen(mask: object) -> tuple[Node | None, bool]:
    """Which keys queries see, one bool for all heads, if the mask is that, or is -inf where it is not; and whether the
    mask says nothing else."""
    alone = True
    while isinstance(mask, Node) and mask.target is aten.expand.default:
        mask = mask.args[0]
    if not isinstance(mask, Node):
        return None, False
    value = mask.meta["val"]
    if value.dtype is not torch.bool:
        condition, added, hidden = mask.args if mask.target is aten.where.self else (None, None, None)
        if _number(hidden) != -math.inf or not isinstance(condition, Node):
            return None, False
        if tuple(condition.meta["val"].shape) != tuple(value.shape):
            return None, False
        mask, alone = condition, _number(added) == 0
    value = mask.meta["val"]
    known = value.dim() == 4 and all(isinstance(size, int) for size in value.shape)
    return (mask, alone) if known and value.shape[1] == 1 and value.shape[3] > 1 else (None, False)


def _number(node: object) -> object:
    """The number that a tensor has everywhere, if it is made so."""
    if not isinstance(node, Node) or node.target not in (aten.scalar_tensor.default, aten.full.default):
        return None
    return node.args[0 if node.target is aten.scalar_tensor.default else 1]


@dataclass(frozen=True, slots=True)
class _Attention:
    """What is written instead, as a function of nodes."""

    scale: float
    rows_outside: bool  # of the heads, in memory

    def __call__(self, query: Any, key: Any, value: Any, mask: Any = None, seen: Any = None) -> Any:
        made = query.node.meta["val"]
        batch, heads, rows, width = made.shape
        _, groups, length, _ = key.node.meta["val"].shape
        last = value.node.meta["val"].shape[-1]
        below = heads // groups * rows

        def wide(x: Any) -> Any:
            return aten._to_copy.default(x, dtype=torch.float32) if x.node.meta["val"].dtype != torch.float32 else x

        each = aten.reshape.default(wide(query), [batch * groups, below, width])
        key, value = map(wide, (key, value))
        if seen is not None:
            key, value = (aten.where.ScalarOther(_by_any(seen), x, 0) for x in (key, value))
        keys = aten.reshape.default(key, [batch * groups, length, width])
        values = aten.reshape.default(value, [batch * groups, length, last])
        scores = aten.mul.Tensor(aten.bmm.default(each, aten.transpose.int(keys, 1, 2)), self.scale)
        scores = aten.reshape.default(scores, [batch, heads, rows, length])
        if mask is not None and mask.node.meta["val"].dtype is torch.bool:
            scores = aten.where.ScalarOther(mask, scores, -torch.inf)
        elif mask is not None:
            scores = aten.add.Tensor(scores, wide(mask))
        weights = aten._softmax.default(scores, -1, False)
        if mask is not None:
            none = aten.eq.Scalar(aten.amax.default(scores, [-1], True), -torch.inf)
            weights = aten.where.ScalarSelf(none, 0.0, weights)
        result = aten.bmm.default(aten.reshape.default(weights, [batch * groups, below, length]), values)
        result = aten.reshape.default(result, [batch, heads, rows, last])
        if made.dtype != torch.float32:
            result = aten._to_copy.default(result, dtype=made.dtype)
        if not self.rows_outside:
            return result
        turned = aten.clone.default(aten.transpose.int(result, 1, 2), memory_format=torch.contiguous_format)
        return aten.transpose.int(turned, 1, 2)


def _by_any(seen: Any) -> Any:
    """Which keys any of the queries sees, for each number of a key."""
    batch, _, queries, length = seen.node.meta["val"].shape
    if queries > 1:
        seen = aten.any.dim(seen, 2)
    return aten.reshape.default(seen, [batch, 1, length, 1])


def _run(graph: Graph, ctx: PassContext) -> Graph:
    if ctx.options.contractions == "aten" or not ctx.target.capabilities.tiles_products:
        return graph
    least = 0 if ctx.options.contractions == "generated" else _WORTH_READING
    return rewriting(functools.partial(write_out_attention, least=least))(graph, ctx)


PASS = Pass(
    "write-out-attention",
    _run,
    why="with few queries, attention takes as long as reading the keys and values once",
    after=("fuse-attention",),
)
