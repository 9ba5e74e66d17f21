"""A linear layer and a cross-entropy loss, forward and backward, in chunks of rows: large logits are never whole.

Note [Losses in chunks]
    The logits of a language model are its largest tensor: a row for each token, an element for each word. Nobody needs
    them but the loss, its gradient needs them once more, and both are sums over the rows. So the joint graph computes
    logits, loss and gradients of some rows, adds them up, and goes on with the next rows in the same memory::

        for each chunk:   logits = h[chunk] @ w;   loss += cross_entropy(logits);   d = softmax(logits) - one_hot
                          dh[chunk] = d @ w.t();   dw += d.t() @ h[chunk]

    The gradient of the loss is not known yet when this runs, in the forward, but all that follows is linear in it: it
    is taken for 1, and the sums are multiplied by it in the backward. The partitioner then saves the gradients, which
    are as large as weight and activation, and not the logits. (As in Liger kernels, Hsu et al. 2024, and Cut Cross
    Entropy, Wijmans et al. 2024; here it is found in a graph, whatever stands between the product and the loss.)

    Only a gradient that is infinite or nan is another matter for ignored rows: theirs is 0, whatever the loss's is (it
    may be divided by the number of words, in a batch without any), and 0 times infinity is nan. So the gradient that
    the results are multiplied by is 0 for ignored rows, and for sums over rows of which all are ignored.

    A region begins with the product that makes the logits. What depends on it has the same rows, or is a sum over
    them. It is left as it is, if anything else needs a value as large as the logits; if something in it needs what
    depends on all rows; if rows are weighed by gradients of their own; for float16, whose gradients vanish without the
    scale that the true gradient brings; and for a number of rows that is not known.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
import torch.fx
from torch.fx import Graph, GraphModule, Node

from ._torch_compat import copy_module, without_modes
from .loss_regions import (
    LOSS,
    LOSS_BACKWARD,
    SUM,
    VIEWS,
    LossRegion,
    arguments,
    computed_before,
    find_region,
    makes_logits,
)

__all__ = ["chunk_losses"]

_aten = torch.ops.aten


def chunk_losses(module: GraphModule, min_bytes: int) -> tuple[GraphModule, tuple[str, ...]]:
    """The graph with its large losses in chunks, see Note [Losses in chunks].

    Args:
        module: a joint graph, or one without a backward, with fake values in ``node.meta["val"]``. It is not changed.
        min_bytes: logits of fewer bytes (in float32) stay whole. 0: all do.

    Returns:
        The graph, ``module`` itself if nothing was rewritten; and the names of the products whose result is no more.
    """
    if min_bytes <= 0 or not any(makes_logits(node, min_bytes) for node in module.graph.nodes):
        return module, ()
    copy, found = copy_module(module), []
    for seed in [node for node in copy.graph.nodes if makes_logits(node, min_bytes)]:
        region = find_region(copy, seed)
        if region is not None:
            found.append(seed.name)
            _Writer(copy.graph, region).write()
    if not found:
        return module, ()
    copy.recompile()
    return copy, tuple(found)


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.bfloat16 else dtype


class _Writer:
    """Writes a region again, in chunks."""

    def __init__(self, graph: Graph, region: LossRegion) -> None:
        self.graph, self.region = graph, region
        self.totals: dict[Node, Node] = {}
        self.parts: dict[Node, list[Node]] = {node: [] for node in region.kept}

    def write(self) -> None:
        """Replace the region."""
        region = self.region
        for node in computed_before(region):
            region.seed.prepend(node)
        with self.graph.inserting_before(region.seed):
            if region.backward is not None:
                target, _, _, ignored = region.calls
                self.ignored = self.call(_aten.eq.Scalar, target, ignored, region.backward)
            self.weight = self.write_weight()
            count = region.num_chunks
            places = [region.rows * k // count for k in range(count + 1)]
            for start, end in itertools.pairwise(places):
                self.write_chunk(start, end)
            whole = {node: self.call(_aten.cat.default, parts, node) for node, parts in self.parts.items()}
        self.write_losses()
        for node, total in (*whole.items(), *self.totals.items()):
            if node is not region.loss:
                self.write_result(node, total)
        for node in reversed(region.nodes):
            if not node.users:
                self.graph.erase_node(node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new call; a last argument that is a node of the region is what it stands for."""
        *given, like = args
        node = self.graph.call_function(target, tuple(given), kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta", "desc")}
        with without_modes():
            values = torch.fx.node.map_arg((tuple(given), kwargs), lambda used: used.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def as_type(self, value: Node, dtype: torch.dtype, like: Node) -> Node:
        same = value.meta["val"].dtype is dtype
        return value if same else self.call(_aten._to_copy.default, value, like, dtype=dtype)

    def write_weight(self) -> Node | None:
        """By how much the sum of the losses is divided: how many rows are not ignored."""
        target, _, reduction, ignored = self.region.calls
        loss = self.region.loss
        assert loss is not None
        if reduction == SUM:
            return None
        taken = self.call(_aten.ne.Scalar, target, ignored, loss)
        dtype = _sum_type(loss.meta["val"][0].dtype)
        return self.call(_aten.sum.default, self.call(_aten._to_copy.default, taken, loss, dtype=dtype), loss)

    def gradient(self) -> Node:
        """The gradient of the sum of the losses where that of the loss is 1."""
        loss = self.region.loss
        assert loss is not None
        if self.weight is None:
            return self.call(_aten.ones_like.default, self.call(operator.getitem, self.own[loss], 0, loss), loss)
        dtype = loss.meta["val"][0].dtype
        return self.as_type(self.call(_aten.reciprocal.default, self.weight, loss), dtype, loss)

    # -- a chunk ------------------------------------------------------------------------------------------------

    def write_chunk(self, start: int, end: int) -> None:
        region = self.region
        self.own: dict[Node, Node] = {}
        self.bounds = start, end
        for node in region.nodes:
            if node.target in VIEWS:
                self.own[node] = self.own[arguments(node)[0]]  # type: ignore[index]
            elif node in region.kept:
                self.parts[node].append(self.again(node))
            elif node is region.loss:
                self.write_loss(node)
            elif node is region.backward:
                self.write_backward(node)
            elif node in region.sums:
                self.add(node)
            elif node.target is not operator.getitem:
                self.own[node] = self.again(node)

    def operand(self, used: Any, across: int = 0) -> Any:
        """The chunk of an operand, ``across`` being the dimension of its rows if it has them."""
        if not isinstance(used, Node):
            return used
        if used in self.own:
            return self.own[used]
        value = used.meta["val"]
        if not isinstance(value, torch.Tensor) or value.ndim <= across or value.shape[across] != self.region.rows:
            return used
        return self.call(_aten.slice.Tensor, used, across, *self.bounds, used)

    def again(self, node: Node) -> Node:
        """A node of the region, of this chunk."""
        if node is self.region.seed:
            return self.product(node)
        if node in self.region.kept:
            return self.call(node.target, self.operand(arguments(node)[0]), arguments(node)[1], node)
        value = node.meta["val"]
        if node.target is _aten.expand.default:
            return self.call(node.target, self.operand(arguments(node)[0]), [-1, *value.shape[1:]], node)
        args = [self.operand(a) if self.has_rows(a, value) else a for a in arguments(node)]
        return self.call(node.target, *args, node, **node.kwargs)

    def has_rows(self, used: Any, value: torch.Tensor) -> bool:
        """Whether an operand has a row for each row of the result, and not one for all."""
        return isinstance(used, Node) and (used in self.own or used.meta["val"].ndim == value.ndim)

    def product(self, node: Node) -> Node:
        """The logits."""
        *bias, left, right = arguments(node)
        assert isinstance(left, Node)
        full = [b if b.meta["val"].ndim < 2 else self.operand(b) for b in bias if isinstance(b, Node)]
        return self.call(node.target, *full, self.operand(left), right, node)

    def write_loss(self, node: Node) -> None:
        target, weight, _, ignored = self.region.calls
        args = self.operand(arguments(node)[0]), self.operand(target), weight, SUM, ignored
        self.own[node] = self.call(LOSS, *args, node)
        self.accumulate(node, self.call(operator.getitem, self.own[node], 0, node))

    def write_backward(self, node: Node) -> None:
        target, weight, _, ignored = self.region.calls
        assert self.region.loss is not None
        total = self.call(operator.getitem, self.own[self.region.loss], 1, node)
        args = self.gradient(), self.operand(arguments(node)[1]), self.operand(target), weight, SUM, ignored, total
        self.own[node] = self.call(LOSS_BACKWARD, *args, node)

    # -- sums ---------------------------------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """The sum over the rows of this chunk, added to that of the chunks before."""
        left, right = arguments(node)[:2]
        if node.target is not _aten.mm.default:
            self.accumulate(node, self.call(node.target, self.operand(left), *arguments(node)[1:], node, **node.kwargs))
            return
        factors = self.operand(left, across=1), self.operand(right)
        total = self.totals.get(node)
        if total is not None and node.meta["val"].dtype is not torch.bfloat16:
            self.totals[node] = self.call(_aten.addmm.default, total, *factors, node)
            return
        self.accumulate(node, self.call(_aten.mm.default, *factors, node))

    def accumulate(self, node: Node, part: Node) -> None:
        """Add one chunk's sum; bfloat16 in float32, so that it is rounded once."""
        part = self.as_type(part, _sum_type(part.meta["val"].dtype), node)
        total = self.totals.get(node)
        self.totals[node] = part if total is None else self.call(_aten.add.Tensor, total, part, node)

    # -- what comes out -----------------------------------------------------------------------------------------

    def write_losses(self) -> None:
        """Loss and number of rows for whoever uses them outside."""
        region = self.region
        assert region.loss is not None
        dtype = region.loss.meta["val"][0].dtype
        with self.graph.inserting_before(region.seed):
            value = self.totals[region.loss]
            if self.weight is not None:
                value = self.call(_aten.div.Tensor, value, self.weight, region.loss)
                self.weight = self.as_type(self.weight, dtype, region.loss)
            value = self.as_type(value, dtype, region.loss)
        for item in [user for user in region.loss.users if user.target is operator.getitem]:
            if arguments(item)[1] == 0:
                item.replace_all_uses_with(value)
            elif self.weight is not None:
                item.replace_all_uses_with(self.weight)

    def write_result(self, node: Node, total: Node) -> None:
        """A result for whoever uses it outside, times the gradient of the loss where it is linear in that."""
        region, value = self.region, node.meta["val"]
        with self.graph.inserting_before(node):
            if node in region.linear:
                total = self.call(_aten.mul.Tensor, total, self.factor(node), node)
            total = self.as_type(total, value.dtype, node)
        inside = set(region.nodes)
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user not in inside)

    def factor(self, node: Node) -> Node:
        """The gradient of the loss, for the rows that have one."""
        backward = self.region.backward
        assert backward is not None
        by_row = node in self.region.kept
        none = (_aten.unsqueeze.default, self.ignored, 1) if by_row else (_aten.all.default, self.ignored)
        return self.call(_aten.masked_fill.Scalar, arguments(backward)[0], self.call(*none, node), 0, node)
