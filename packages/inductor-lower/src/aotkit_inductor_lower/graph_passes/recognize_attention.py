"""Pass: attention that is written out becomes a call that kernels compute, in training too.

Before ``bmm(dropout(softmax(bmm(query, key.T) * scale + mask)), value)``, with copies and views between, and in a joint
graph its gradients. After :data:`~..ops.attention.ATTENTION`, and one call for all gradients (Note [Attention as an
operator]). Requires a target that computes it, that nothing else reads scores or weights, sizes that are
known to be equal in every call where they must be (Note [Sizes that are the same] in :mod:`.known_sizes`), and float32,
bfloat16 or float16. Queries and keys may be copied to float32 before their product: numbers of fewer bits multiply
exactly, so kernels read these. A gradient of the scores that is read by itself (a mask that is trained) is a result of
the backward. Attention that has another form stays as it is written, with its scores in memory; a decision says so.

Note [What a mask may be]
    A sum with a tensor, or with several of float32 (also a ``where`` between one and a number: then the condition is
    read, not the tensor that the ``where`` makes), or ``where`` and ``masked_fill``, whose condition hides scores
    whatever they are. In the backward of these the gradient is 0 under the mask; in that of a sum it goes to the mask
    as it is. A condition of positions that hides later keys (``arange(queries)[:, None] >= arange(keys)``) is no tensor
    that is read, nor is a window
    beside it, where the target knows these; another one beside it (``&``) is.

Note [Dropout of weights]
    ATen draws the random numbers, in their order, as in eager mode, but a byte for each: it draws the same ones for
    every type. The call reads these, and they are kept for the backward.

Note [Queries that see no key]
    Softmax makes nan of such a query's weights, so all gradients of values are nan in eager mode: those of keys that
    the query was never to see as well. Kernels that hide later keys by where they are compute no block of these. Where
    gradients are wanted, and another mask may hide all that is left, the whole condition is a mask: under it gradients
    of scores are 0, whatever the weights are, and no block is left out for a query that is lost. Rows that become 0 in
    the place of nan (``zero_empty``) need none of this.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.attention import ATTENTION, ATTENTION_BACKWARD, ATTENTION_BACKWARD_WITH_SCORES
from ..ops.positions import same_number
from ..passes import Decision, Pass, PassContext
from ..target import on_host
from .attention_gradients import Gradients, erase_unused, find_gradients, find_place
from .attention_parts import Operand, Written, find_written, scores_of_products
from .known_sizes import concrete, share_sizes, written_size
from .node_facts import before_writes, escaping_nodes, same_tensor_type
from .patterns import emit
from .replace import replace_node, views_of
from .rewriting import rewriting
from .turned_casts import copy_before_turning

__all__ = ["JOINT_PASS", "PASS", "has_attention", "recognize_attention"]

IN_MEMORY = "scores are in memory: kernels of attention have scales, masks that are added and one that hides"
aten = torch.ops.aten
Takes = Callable[[Written], bool]


def has_attention(graph: Graph) -> bool:
    """Whether there may be something to do."""
    return any(node.target in (aten._softmax.default,) for node in graph.nodes)


def recognize_attention(graph: Graph, fuel: int, takes: Takes, *, bodies: bool = False) -> int:
    """Run the pass; the number of attentions found. ``takes``: whether the target computes one; ``bodies``: it hides
    keys that are too far back by where they are, and caps scores."""
    found = 0
    share_sizes(graph)
    copy_before_turning(graph)
    escaping, early = escaping_nodes(graph), before_writes(graph)
    copies = {node for node in early if node.target is aten.clone.default} - escaping
    for node in early:
        if found < fuel and node.target is aten._softmax.default:
            found += _rewrite(graph, node, takes, escaping, copies, bodies)
    return found


def _rewrite(graph: Graph, softmax: Node, takes: Takes, escaping: set[Node], copies: set[Node], bodies: bool) -> int:
    written = find_written(softmax, bodies=bodies)
    if written is None or not takes(written):
        return 0
    gradients = find_gradients(written)
    if gradients is not None and gradients.of_query is not None and written.may_lose_queries:
        written = find_written(softmax, bodies=bodies, places=False)
        gradients = find_gradients(written) if written is not None else None
    if written is None or gradients is None:
        return 0
    if not gradients.shares_heads:
        written = written.with_copied_heads()
    return int(_Rewriter(graph, written, gradients, escaping, copies, bodies).run())


@dataclass(slots=True)
class _Rewriter:
    graph: Graph
    written: Written
    gradients: Gradients
    escaping: set[Node]
    copies: set[Node]
    bodies: bool

    def run(self) -> bool:
        """Write the calls in the place of what was found."""
        written, place = self.written, self.written.out
        batch, heads, queries, _, width = written.shape
        of_result = find_place(written.out, (batch, heads, queries, width), None, False)
        if of_result is None:
            return False
        masks = self._masks(place)
        operands = [self._lines(operand, place) for operand in written.operands]
        settings = (written.scale, written.hidden, written.replaces, written.kept_scale, written.causal)
        more = [written.window, written.cap] if written.window or written.cap else []
        call = self._emit(place, _calling(ATTENTION), args=[*operands, *masks, *settings, written.zero_empty, *more])
        self._takes_in(call, len(operands))
        result, tops, totals = (self._part(place, call, k) for k in range(3))
        of_result.take(self.graph, result, self.escaping)
        self._drop_copies(result)
        if self.gradients.of_query is not None:
            self._write_gradients([*operands, result, tops, totals], [*masks, *settings], more)
        if written.drawn is not None:
            erase_unused(self.graph, written.drawn)
        return True

    def _drop_copies(self, result: Node) -> None:
        """Erase copies of the result that lie as it does: the heads of one query side by side, as what reads them next
        has them copied. In a joint graph both would be kept for the backward, as outputs of the forward. (What counts
        elements from the start of a storage finds the same ones: both begin theirs, with equal strides.)"""
        for view in (result, *views_of(result)):
            for user in [user for user in view.users if user in self.copies and same_tensor_type(user, view)]:
                if replace_node(user, view):
                    self.graph.erase_node(user)
                    self.copies.discard(user)

    def _write_gradients(self, saved: list[Node], rest: list[Any], more: list[Any]) -> None:
        found = self.gradients
        place = found.first
        assert place is not None and found.gradient is not None
        target = ATTENTION_BACKWARD if found.of_scores is None else ATTENTION_BACKWARD_WITH_SCORES
        gradient = self._lines(found.gradient, place)
        call = self._emit(place, _calling(target), args=[gradient, *saved, *rest, found.slope, *more])
        self._takes_in(call, 1 + len(saved))
        for k, old in enumerate((found.of_query, found.of_key, found.of_value)):
            assert old is not None
            made = self._part(place, call, k)
            old.take(self.graph, made, self.escaping)
        if found.of_scores is not None:
            made = self._part(place, call, 3)
            self._give_scores(found.of_scores, made)

    def _takes_in(self, call: Node, first: int) -> None:
        """Tell the partitioner that a kernel computes masks: ``added`` and ``seen``, from the first argument on."""
        if self.bodies:
            call.meta["takes_in"] = (first, first + 1)

    def _give_scores(self, old: Node, made: Node) -> None:
        """Let who reads the gradient of the scores by itself read ``made``."""
        users = self.gradients.readers
        dtype = old.meta["val"].dtype
        with_type = made if dtype is torch.float32 else self._emit(users[0], _cast_to(dtype), x=made)
        for user in users:
            user.replace_input_with(old, with_type)

    def _part(self, place: Node, call: Node, number: int) -> Node:
        return self._emit(place, lambda call: operator.getitem(call, number), call=call)

    def _emit(self, place: Node, function: Callable[..., Any], **given: Any) -> Node:
        made = emit(self.graph, function, place, **given)
        assert made is not None
        return made

    def _lines(self, operand: Operand, place: Node) -> Node:
        """The operand with the numbers of a head side by side."""
        if same_number(operand.source.meta["val"].stride(-1), 1):
            return operand.source
        return self._emit(place, _copied, x=operand.source)

    def _masks(self, place: Node) -> list[Node | None]:
        written = self.written
        made: list[Node | None] = []
        for mask in (written.added, written.seen):
            if mask is not None and mask is written.seen and written.inverted:
                mask = self._emit(place, _inverse, x=mask)
            if mask is not None and mask is written.added:
                mask = self._sum_of_terms(mask, place)
            if mask is not None and not same_number(mask.meta["val"].stride(-1), 1):
                mask = self._emit(place, _copied, x=mask)
            made.append(mask)
        if written.drawn is None:
            return [*made, None]
        return [*made, self._draw(written.drawn)]

    def _sum_of_terms(self, first: Node, place: Node) -> Node:
        """All that is added to scores."""
        made = self._emit(place, _negative, x=first) if self.written.negated else first
        for term, subtracts in self.written.more:
            made = self._emit(place, _difference if subtracts else _sum, x=made, y=term)
        return made

    def _draw(self, drawn: Node) -> Node:
        """Which weights are kept: the same random numbers, as bytes, drawn where they were."""
        kept = self.written.kept
        query, key, _ = (operand.source for operand in self.written.operands)
        on_device = self.written.is_kept and not on_host(drawn.meta["val"][0])

        def draw(x: Any, y: Any) -> Any:
            sizes = [*(written_size(x, dim) for dim in range(3)), written_size(y, 2)]
            if on_device:  # where dropout draws in an order of its own, alike for all types
                room = aten.new_empty.default(x, sizes)
                return operator.getitem(aten.native_dropout.default(room, 1 - kept, True), 1)
            room = aten.new_empty.default(x, sizes, dtype=torch.bool)
            return aten.bernoulli.p(room, kept)

        return self._emit(drawn, draw, x=query, y=key)


def _calling(target: Any) -> Callable[..., Any]:
    return lambda args: target(*args)


def _cast_to(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda x: aten._to_copy.default(x, dtype=dtype)


def _copied(x: Any) -> Any:
    return aten.clone.default(x, memory_format=torch.contiguous_format)


def _negative(x: Any) -> Any:
    return aten.neg.default(x)


def _sum(x: Any, y: Any) -> Any:
    return aten.add.Tensor(x, y)


def _difference(x: Any, y: Any) -> Any:
    return aten.sub.Tensor(x, y)


def _inverse(x: Any) -> Any:
    return aten.logical_not.default(x)


def _run(graph: Graph, ctx: PassContext) -> Graph:
    options = ctx.options
    if options.contractions == "aten" or not has_attention(graph) or "generate-attention" in options.disable:
        return graph

    def takes(written: Written) -> bool:
        *_, queries, keys, width = written.shape
        return written.scale > 0 and _computes(ctx, written.out.meta["val"], (concrete(queries), concrete(keys)), width)

    bodies = ctx.target.capabilities.attention_bodies
    return rewriting(lambda graph, fuel: recognize_attention(graph, fuel, takes, bodies=bodies))(graph, ctx)


def _computes(ctx: PassContext, out: torch.Tensor, lengths: tuple[int | None, int | None], width: int) -> bool:
    """Whether the target computes attention of such sizes, with a result like ``out``."""
    dtype = str(out.dtype).removeprefix("torch.")
    owns = ctx.target.capabilities.owns(out.device)
    return owns and ctx.target.computes_attention(lengths, width, dtype, ctx.options)


def _run_last(graph: Graph, ctx: PassContext) -> Graph:
    """As :func:`_run`, with a decision for each attention that has another form."""
    made = _run(graph, ctx)
    for node in made.nodes if ctx.options.contractions != "aten" else ():
        out = scores_of_products(node) if node.target is aten._softmax.default else None
        if out is None or not isinstance(out.shape[2], int):
            continue
        queries, keys = (concrete(size) for size in node.meta["val"].shape[2:])
        if not _computes(ctx, out, (queries, keys), out.shape[2]):
            continue
        sizes = list(node.meta["val"].shape)
        said = f"attention {out.dtype} with scores {sizes}: {IN_MEMORY}".replace("torch.", "")
        ctx.decisions.append(Decision("contraction", node.name, "attention", False, said))
    return made


PASS = Pass(
    "recognize-attention",
    _run_last,
    why="attention that is written out becomes one call each way, and its scores are never in memory",
    after=("fold-uniform",),
)
JOINT_PASS = Pass(
    "recognize-attention",
    _run,
    why="both directions of attention agree about what the forward keeps: no scores, no weights",
)
