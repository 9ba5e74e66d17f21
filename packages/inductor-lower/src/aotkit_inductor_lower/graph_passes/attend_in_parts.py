"""Pass: fused attention of few queries becomes a call whose keys kernels cut in parts.

Before ATen's fused attention of a device, in inference, with few queries and a mask, or keys and values that are copies
of heads which several heads of queries share. After :data:`~..ops.attention.ATTENTION` of the heads as they are, and of
the bool that the mask is made of, so that neither copies nor a mask of numbers are made. Requires a target that cuts
keys in parts (``Capabilities.attention_rows``); see Note [Keys in parts] in :mod:`..targets.triton.attention`. With
``contractions="generated"`` whatever the operands are, and however many queries.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.attention import ATTENTION
from ..ops.positions import same_number, same_sizes
from ..passes import Pass, PassContext
from .attention_nodes import number_of
from .attention_operands import bool_mask, is_read, made_of, part_of, take_parts
from .node_facts import shared_heads, until_first_write
from .patterns import emit
from .rewriting import rewriting

__all__ = ["PASS", "attend_in_parts"]

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Form:
    """Where arguments are: of the mask, if it has a place, the share that dropout takes, and whether it is causal."""

    mask: int | None
    dropout: int
    causal: int


_FORMS: Mapping[Any, _Form] = MappingProxyType(
    {
        aten._scaled_dot_product_efficient_attention.default: _Form(3, 5, 6),
        aten._scaled_dot_product_cudnn_attention.default: _Form(3, 5, 6),
        aten._scaled_dot_product_flash_attention.default: _Form(None, 3, 4),
        aten._scaled_dot_product_flash_attention_for_cpu.default: _Form(None, 3, 4),
    }
)


def attend_in_parts(
    graph: Graph, fuel: int, rows: int, *, takes: Callable[[_Call], bool] = lambda call: True, always: bool = False
) -> int:
    """Run the pass; the number of attentions found. ``rows``: queries that are few. ``takes``: whether there are
    kernels for a call. ``always``: take all of these."""
    found = 0
    for node in until_first_write(graph):  # keys that are shared are read later than they were copied
        if found < fuel and node.target in _FORMS:
            call = _Call.of(node)
            if call is not None and (always or call.is_worth_it(rows)) and takes(call):
                found += _rewrite(graph, call)
    return found


@dataclass(slots=True)
class _Call:
    """A call, with heads that are not copied. ``seen`` and ``added``: its mask; ``inverted``: that says what is not
    seen."""

    node: Node
    result: Node
    operands: tuple[Node, Node, Node]
    shared: bool
    causal: bool
    scale: float
    added: Node | None = None
    seen: Node | None = None
    inverted: bool = False

    @staticmethod
    def of(node: Node) -> _Call | None:
        """The call that a node is, where only its result is read, and kernels read the operands as they lie."""
        form = _FORMS[node.target]
        query, key, value = node.args[:3]
        assert isinstance(query, Node) and isinstance(key, Node) and isinstance(value, Node)
        users = [user for user in node.users if user.users]
        if len(users) != 1 or users[0].target is not operator.getitem or users[0].args[1] != 0:
            return None
        dropped, causal = (node.args[k] if len(node.args) > k else 0 for k in (form.dropout, form.causal))
        keys, values = shared_heads(key), shared_heads(value)
        shared = keys is not None and values is not None
        if keys is not None and values is not None:
            key, value = keys, values
        scale = node.kwargs.get("scale")
        width = query.meta["val"].shape[-1]
        if scale is None and isinstance(width, int):
            scale = width**-0.5
        if dropped or not isinstance(scale, float) or not _fit(query, key, value):
            return None
        found = _Call(node, users[0], (query, key, value), shared, bool(causal), scale)
        mask = node.kwargs.get("attn_mask") if form.mask is None else node.args[form.mask]
        return found if mask is None or found.takes_mask(mask) else None

    def takes_mask(self, mask: object) -> bool:
        """Note the mask. Whether kernels read it."""
        query, key, _ = self.operands
        chosen = bool_mask(mask, query, key)
        if chosen is not None:
            self.added, self.seen, self.inverted = chosen.added, chosen.seen, chosen.inverted
            return True
        below = made_of(mask)
        for each in (below, mask):
            if (
                isinstance(each, Node)
                and each.meta["val"].dtype is torch.bool
                and is_read(each, query, key, (torch.bool,))
            ):
                self.seen = each
                return True
            if isinstance(each, Node) and is_read(each, query, key, _FLOATS):
                self.added = each
                return number_of(each) is None
        return False

    def is_worth_it(self, rows: int) -> bool:
        """Whether queries are few, and there is something that ATen's call reads more of."""
        queries = self.operands[0].meta["val"].shape[2]
        masked = self.seen is not None or self.added is not None
        return isinstance(queries, int) and queries <= rows and (masked or self.shared)

    def lengths(self) -> tuple[int | None, int | None]:
        """Of queries and keys, where known."""
        query, key = (each.meta["val"].shape[2] for each in self.operands[:2])
        return query if isinstance(query, int) else None, key if isinstance(key, int) else None


def _fit(query: Node, key: Node, value: Node) -> bool:
    """Whether kernels read the operands as they lie."""
    tensors = [each.meta["val"] for each in (query, key, value)]
    first = tensors[0]
    if first.dtype not in _FLOATS or any(t.dtype != first.dtype or not same_number(t.stride(-1), 1) for t in tensors):
        return False
    if (
        not same_sizes(tensors[1].shape, tensors[2].shape)
        or not isinstance(first.shape[3], int)
        or not same_number(first.shape[3], tensors[1].shape[3])
    ):
        return False
    heads, shared = first.shape[1], tensors[1].shape[1]
    return isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared == 0


def _rewrite(graph: Graph, call: _Call) -> int:
    seen = call.seen
    if seen is not None and call.inverted:
        seen = emit(graph, lambda x: aten.logical_not.default(x), call.node, x=seen)
    settings = [call.added, seen, None, call.scale, -math.inf, False, 1.0, call.causal]
    made = emit(graph, lambda args: ATTENTION(*args), call.node, args=[*call.operands, *settings, True])
    if made is None:
        return 0
    take_parts(graph, call.node, [part_of(graph, call.node, made, 0)], set())  # which is memory of its own, too
    for unused in [user for user in call.node.users if not user.users]:
        graph.erase_node(unused)
    graph.erase_node(call.node)  # which might draw random numbers, as far as the removal of dead nodes knows
    return 1


def _run(graph: Graph, ctx: PassContext) -> Graph:
    rows, options = ctx.target.capabilities.attention_rows, ctx.options
    if options.contractions == "aten" or not rows or "generate-attention" in options.disable:
        return graph
    always = options.contractions == "generated"

    def run(graph: Graph, fuel: int) -> int:
        return attend_in_parts(graph, fuel, rows, takes=functools.partial(_takes, ctx), always=always)

    return rewriting(run)(graph, ctx)


def _takes(ctx: PassContext, call: _Call) -> bool:
    """Whether the target has kernels for a call."""
    value = call.operands[0].meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    target = ctx.target
    own = target.capabilities.owns(value.device)
    return own and target.computes_attention(call.lengths(), value.shape[3], dtype, ctx.options)


PASS = Pass(
    "attend-in-parts",
    _run,
    why="a few queries keep few multiprocessors of a device at work, unless their keys are cut in parts",
    after=("write-out-attention",),
)
