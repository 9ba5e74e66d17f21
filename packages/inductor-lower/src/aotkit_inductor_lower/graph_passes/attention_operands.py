"""Pass: ATen's fused attention reads heads that are shared, and masks of bools, as they are.

Before a call for the CPU whose keys and values are copies of heads, one for each head of queries that shares it
(``repeat_kv``: unsqueeze, expand, copy), or whose mask is made of a bool (``where`` between 0, or a mask, and -inf).
After the same call on the heads themselves, and :data:`~..ops.attention.ATTENTION` on the bools. In a backward the
gradients of copies, and their sum, become the gradients of the heads. Requires a target that computes the call.

A call on bools keeps something else for its backward, so both are rewritten, in a joint graph, or there is no backward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..ops.attention import ATTENTION, ATTENTION_BACKWARD
from ..ops.positions import same_number, same_sizes
from ..passes import Pass, PassContext
from .attention_gradients import Place, erase_unused, sum_of_copies
from .attention_nodes import hiding, number_of
from .attention_parts import fits_scores
from .node_facts import before_writes, escaping_nodes, shared_heads
from .patterns import emit
from .rewriting import rewriting

__all__ = ["JOINT_PASS", "PASS", "BoolMask", "bool_mask", "calls_attention", "is_read", "made_of", "part_of"]
__all__ += ["read_operands", "take_parts"]

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Takes = Callable[[Node, Node], bool]


def calls_attention(graph: Graph) -> bool:
    """Whether there may be something to do."""
    return any(node.target in (_FORWARD, _BACKWARD) for node in graph.nodes)


def read_operands(graph: Graph, fuel: int, takes: Takes) -> int:
    """Run the pass; the number of rewrites. ``takes``: whether the target computes the call, by query and key."""
    found, escaping = 0, escaping_nodes(graph)
    for rewrite in (_share_heads, _read_bools):
        for node in before_writes(graph):
            place = {_FORWARD: 0, _BACKWARD: 1}.get(node.target)  # type: ignore[call-overload]
            if found < fuel and place is not None and not node._erased:
                query, key = node.args[place : place + 2]
                if isinstance(query, Node) and isinstance(key, Node) and takes(query, key):
                    found += rewrite(graph, node, escaping)
    return found


# -- heads that are shared --------------------------------------------------------------------------------


def _share_heads(graph: Graph, node: Node, escaping: set[Node]) -> int:
    place = 0 if node.target is _FORWARD else 1
    heads = [shared_heads(operand) for operand in node.args[place + 1 : place + 3]]
    key, value = heads
    if key is None or value is None or not same_sizes(key.meta["val"].shape, value.meta["val"].shape):
        return 0
    if not all(same_number(each.meta["val"].stride(-1), 1) for each in (key, value)):
        return 0  # the call reads the numbers of a head side by side, as they are in the copies
    args = [*node.args[: place + 1], key, value, *node.args[place + 3 :]]
    if node.target is _FORWARD:
        node.args = tuple(args)
        return 1
    sums = [_gradient_of(node, number, tuple(key.meta["val"].shape)) for number in (1, 2)]
    if None in sums:
        return 0
    made = emit(graph, lambda args, kwargs: _BACKWARD(*args, **kwargs), node, args=args, kwargs=dict(node.kwargs))
    if made is None:
        return 0
    for number, part in _numbered(node):
        if number == 0:
            part.replace_input_with(node, made)
            continue
        new, old = part_of(graph, part, made, number), sums[number - 1]
        assert old is not None
        Place(part, ((old, False),)).take(graph, new, escaping)
    erase_unused(graph, node)
    return 1


def _gradient_of(node: Node, number: int, shape: tuple[int, ...]) -> Node | None:
    """The sum of the gradients of copies."""
    parts = [part for part in _parts(node) if part.args[1] == number]
    return sum_of_copies(parts[0], shape) if len(parts) == 1 else None


def _parts(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem]


def _numbered(node: Node) -> list[tuple[int, Node]]:
    return [(part.args[1], part) for part in _parts(node) if isinstance(part.args[1], int)]


def part_of(graph: Graph, place: Node, call: Node, number: int) -> Node:
    """A result of a call, before ``place``."""
    made = emit(graph, lambda call: operator.getitem(call, number), place, call=call)
    assert made is not None
    return made


# -- masks of bools ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BoolMask:
    """A mask that is made of a bool: what is added where it holds, or else -inf."""

    seen: Node
    inverted: bool
    added: Node | None


def _read_bools(graph: Graph, node: Node, escaping: set[Node]) -> int:
    if node.target is not _FORWARD:
        return 0
    query, key, value, *rest = node.args
    assert isinstance(query, Node) and isinstance(key, Node)
    mask = bool_mask(node.kwargs.get("attn_mask"), query, key)
    if mask is None or {*node.kwargs} - {"attn_mask", "scale"} or any(rest[:1]):
        return 0
    sums = [part for part in _parts(node) if part.args[1] == 1]
    backwards = [user for part in sums for user in part.users]
    if len(sums) > 1 or len(backwards) > 1 or not all(_is_of(user, node, sums[0]) for user in backwards):
        return 0
    scale = node.kwargs.get("scale")
    if scale is not None and not isinstance(scale, float):
        return 0
    scale = query.meta["val"].shape[-1] ** -0.5 if scale is None else scale
    causal = bool(rest[1]) if len(rest) > 1 else False
    seen = mask.seen
    if mask.inverted:
        inverse = emit(graph, lambda x: aten.logical_not.default(x), node, x=seen)
        assert inverse is not None
        seen = inverse
    settings = [mask.added, seen, None, scale, -math.inf, False, 1.0, causal]
    made = emit(graph, lambda args: ATTENTION(*args), node, args=[query, key, value, *settings, True])
    if made is None:
        return 0
    result, tops, totals = (part_of(graph, node, made, number) for number in range(3))
    for backward in backwards:
        gradient = backward.args[0]
        args = [gradient, query, key, value, result, tops, totals, *settings, scale]
        call = emit(graph, lambda args: ATTENTION_BACKWARD(*args), backward, args=args)
        assert call is not None
        take_parts(graph, backward, [part_of(graph, backward, call, number) for number in range(3)], escaping)
        erase_unused(graph, backward)
    take_parts(graph, node, [result], escaping)
    erase_unused(graph, node)
    return 1


def _is_of(backward: Node, node: Node, sums: Node) -> bool:
    """Whether a call computes the gradients of an attention: of its operands, its result and its settings."""
    if backward.target is not _BACKWARD or dict(backward.kwargs) != dict(node.kwargs):
        return False
    _, query, key, value, result, total, dropout, causal = backward.args
    kept = _undetached(result)
    is_result = isinstance(kept, Node) and kept.target is operator.getitem and kept.args == (node, 0)
    operands = [query, key, value] == list(node.args[:3]) and _undetached(total) is sums
    return is_result and operands and not dropout and causal == (len(node.args) > 4 and node.args[4])


def _undetached(node: object) -> object:
    while isinstance(node, Node) and node.target is aten.detach.default:
        node = node.args[0]
    return node


def take_parts(graph: Graph, node: Node, made: list[Node], escaping: set[Node]) -> None:
    """Let who reads results of ``node`` read those that were ``made``."""
    for number, part in _numbered(node):
        if number < len(made):
            Place(part, ((part, False),)).take(graph, made[number], escaping)


def bool_mask(mask: object, query: Node, key: Node) -> BoolMask | None:
    """The bool that a mask is made of, if attention of such a query and key reads it as it lies."""
    mask = made_of(mask)
    choice = hiding(mask)
    if choice is None or choice[2] != -math.inf:
        return None
    seen, inverted, _, tensor = choice
    added = None if number_of(tensor) == 0 else tensor
    if not is_read(seen, query, key, (torch.bool,)):
        return None
    if added is not None and not is_read(added, query, key, (torch.float32, torch.bfloat16, torch.float16)):
        return None
    return BoolMask(seen, inverted, added)


def made_of(mask: object) -> object:
    """What a mask is a copy of, which may be longer, or seen several times."""
    while isinstance(mask, Node) and mask.op == "call_function":
        source = mask.args[0]
        if mask.target in (aten.expand.default, aten.clone.default):
            mask = source
        elif isinstance(source, Node) and _is_padding(mask, source):
            mask = source.args[0]
        else:
            return mask
    return mask


def _is_padding(cut: Node, padded: Node) -> bool:
    """Whether a mask was padded at the end of its rows, and cut again: so its rows begin at multiples of 16 bytes."""
    if cut.target is not aten.slice.Tensor or padded.target is not aten.constant_pad_nd.default:
        return False
    start, _, step = (*cut.args[2:], None, None, None)[:3]
    if start not in (0, None) or step not in (1, None):
        return False
    source, added = padded.args[:2]
    if not isinstance(source, Node) or not isinstance(added, list | tuple) or len(added) != 2 or added[0] != 0:
        return False
    return same_sizes(source.meta["val"].shape, cut.meta["val"].shape)


def is_read(mask: Node, query: Node, key: Node, types: tuple[torch.dtype, ...]) -> bool:
    """Whether attention reads a mask as it lies."""
    sizes = (*query.meta["val"].shape[:3], key.meta["val"].shape[2])
    return fits_scores(mask, sizes, types) and same_number(mask.meta["val"].stride(-1), 1)


def _run(graph: Graph, ctx: PassContext) -> Graph:
    options = ctx.options
    if options.contractions == "aten" or not calls_attention(graph) or "generate-attention" in options.disable:
        return graph

    def takes(query: Node, key: Node) -> bool:
        value = query.meta["val"]
        queries, keys = (size if isinstance(size, int) else None for size in (value.shape[2], key.meta["val"].shape[2]))
        width, dtype = value.shape[3], str(value.dtype).removeprefix("torch.")
        known = isinstance(width, int) and isinstance(value.shape[1], int)
        known = known and ctx.target.capabilities.owns(value.device)
        return known and ctx.target.computes_attention((queries, keys), width, dtype, options)

    return rewriting(lambda graph, fuel: read_operands(graph, fuel, takes))(graph, ctx)


PASS = Pass(
    "attention-operands",
    _run,
    why="heads that are shared are not copied, and bools are read instead of numbers made of them",
    after=("write-out-attention",),
)
JOINT_PASS = Pass(
    "attention-operands",
    _run,
    why="a forward that reads bools keeps something else for its backward",
)
