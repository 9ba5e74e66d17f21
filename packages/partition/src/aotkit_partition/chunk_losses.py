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

    A region begins with the product that makes the logits. What depends on it has the same rows, or is a sum over
    them. It is left as it is, if anything else needs a value as large as the logits; if something in it needs what
    depends on all rows; if rows are weighed by gradients of their own; for float16, whose gradients vanish without the
    scale that the true gradient brings; and for a number of rows that is not known.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.fx import Graph, GraphModule, Node

from ._torch_compat import copy_module, without_modes
from .joint import is_backward_input
from .op_facts import node_facts

__all__ = ["chunk_losses"]

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # reductions of a loss
_CHUNK_BYTES = 1 << 26  # of logits
_LEAST_ROWS, _MOST_CHUNKS = 128, 16
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)

_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_VIEWS = (
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.detach.default, _aten.alias.default,
)  # fmt: skip
_COPIES = (_aten._to_copy.default, _aten.clone.default)
_TURNS = (_aten.t.default, _aten.transpose.int, _aten.permute.default)
_ROW_SUMS = (_aten.amax.default, _aten.sum.dim_IntList, _aten._log_softmax.default, _aten.logsumexp.default)
_LOSS, _LOSS_BACKWARD = _aten.nll_loss_forward.default, _aten.nll_loss_backward.default
_SOFTMAX_BACKWARD = _aten._log_softmax_backward_data.default
#: Linear in each argument; the others are constants for that.
_LINEAR = {
    *_VIEWS, *_TURNS, *_COPIES, _aten.neg.default, _aten.sum.dim_IntList, _aten.mm.default, _aten.mul.Tensor,
    _aten.mul.Scalar, _SOFTMAX_BACKWARD,
}  # fmt: skip
_LINEAR_IN_FIRST = {_aten.div.Tensor, _aten.div.Scalar}
_LINEAR_IN_ALL = {_aten.add.Tensor, _aten.sub.Tensor}


def chunk_losses(module: GraphModule, min_bytes: int) -> tuple[GraphModule, tuple[str, ...]]:
    """The graph with its large losses in chunks, see Note [Losses in chunks].

    Args:
        module: a joint graph, or one without a backward, with fake values in ``node.meta["val"]``. It is not changed.
        min_bytes: logits of fewer bytes (in float32) stay whole. 0: all do.

    Returns:
        The graph, ``module`` itself if nothing was rewritten; and the names of the products whose result is no more.
    """
    if min_bytes <= 0 or not any(_is_large(node, min_bytes) for node in module.graph.nodes):
        return module, ()
    copy, found = copy_module(module), []
    for seed in [node for node in copy.graph.nodes if _is_large(node, min_bytes)]:
        region = _Finder(copy, seed).region()
        if region is not None and _saves(region):
            found.append(seed.name)
            _Writer(copy.graph, region).write()
    if not found:
        return module, ()
    copy.recompile()
    return copy, tuple(found)


def _is_large(seed: Node, min_bytes: int) -> bool:
    value = seed.meta.get("val")
    if seed.op != "call_function" or seed.target not in _PRODUCTS or seed.kwargs:
        return False
    if not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES:
        return False
    known = all(type(size) is int for size in value.shape)
    return known and value.numel() * 4 >= min_bytes and value.shape[0] >= 2 * _LEAST_ROWS


# -- what may be cut into chunks ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Region:
    """What depends on some logits: ``nodes`` in order, from the product to the last sum.

    ``kept``: values with rows that are smaller than the logits and needed outside; ``sums``: over all rows.
    ``linear``: what is linear in the gradient of the loss. ``loss``, ``backward``: the two calls."""

    seed: Node
    rows: int
    nodes: list[Node] = field(default_factory=list)
    kept: list[Node] = field(default_factory=list)
    sums: list[Node] = field(default_factory=list)
    linear: set[Node] = field(default_factory=set)
    loss: Node | None = None
    backward: Node | None = None

    @property
    def calls(self) -> tuple[Any, ...]:
        """Target, the weight of classes, reduction and ignored class: of a loss."""
        assert self.loss is not None
        return self.loss.args[1:5]


class _Finder:
    """Follows what depends on a product, see Note [Losses in chunks]."""

    def __init__(self, module: GraphModule, seed: Node) -> None:
        self.module = module
        self.found = _Region(seed, seed.meta["val"].shape[0], [seed])
        self.leading = {seed: 1}  # dimensions that are rows, of values with rows
        self.turned: set[Node] = set()  # matrices with rows across
        self.outer = _reached([n for n in module.graph.nodes if is_backward_input(n)])  # not there when it runs
        self.columns = seed.meta["val"].shape[1]

    def region(self) -> _Region | None:
        """The region, or ``None`` if it can't be cut."""
        found, past = self.found, False
        if not all(self.is_given(a) for a in found.seed.args):
            return None
        for node in self.module.graph.nodes:
            past = past or node is found.seed
            if not past or node is found.seed:
                continue
            within = [i for i in node.all_input_nodes if i in self.leading or i in self.turned or i in found.sums]
            if not within:
                if not self.outer.isdisjoint(node.all_input_nodes):
                    self.outer.add(node)
                continue
            if any(self.is_whole(i) for i in within) or self.is_statistic(node, within):
                if not self.takes(node):
                    return None
                found.nodes.append(node)
            else:
                if node.target is operator.getitem and within == [found.loss]:
                    found.nodes.append(node)
                self.outer.add(node)
        return self.finished()

    def is_whole(self, node: Node) -> bool:
        """Whether a value of the region is as large as the logits, so that only the region may use it."""
        if node in self.turned:
            return True
        return node in self.leading and self.rest(node) == (self.columns,) and node not in self.found.kept

    def is_statistic(self, node: Node, within: Sequence[Node]) -> bool:
        """Whether a node goes on with one number per row: the logarithm of a sum, say."""
        rows = [i for i in within if i in self.leading and i not in self.found.kept and self.rest(i) in ((), (1,))]
        return len(rows) > 0 and self.is_pointwise(node)

    def rest(self, node: Node) -> tuple[int, ...]:
        return tuple(node.meta["val"].shape[self.leading[node] :])

    def is_pointwise(self, node: Node) -> bool:
        return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _COPIES

    def takes(self, node: Node) -> bool:
        """Classify a node that uses a value of the region; ``False`` if it can't be cut."""
        facts = node_facts(node, self.module, {})
        if facts is None or facts.is_random or facts.is_mutating or facts.has_side_effects:
            return False
        if any(isinstance(given, Node) for given in node.kwargs.values()):
            return False
        if any(i in self.found.sums for i in node.all_input_nodes) and node.target is not _LOSS_BACKWARD:
            return False
        if not self.follow_gradient(node):
            return False
        for targets, take in (
            (_VIEWS, self.take_view), (_TURNS, self.take_turn), (_ROW_SUMS, self.take_along_row),
            ((_aten.mm.default,), self.take_product), ((_LOSS,), self.take_loss),
            ((_LOSS_BACKWARD,), self.take_loss_backward), ((_SOFTMAX_BACKWARD,), self.take_softmax_backward),
        ):  # fmt: skip
            if node.target in targets:
                return take(node)
        return self.is_pointwise(node) and self.take_pointwise(node)

    def follow_gradient(self, node: Node) -> bool:
        """Note whether a node is linear in the gradient of the loss; ``False`` if it depends on it otherwise."""
        linear = self.found.linear
        used = [i for i in node.all_input_nodes if i in linear]
        if not used:
            return True
        first_only = node.args[0] in linear and not any(a in linear for a in node.args[1:] if isinstance(a, Node))
        once = len(used) == 1 and sum(a is used[0] for a in node.args) == 1
        ok = (
            (node.target in _LINEAR and once and (first_only or node.target is not _SOFTMAX_BACKWARD))
            or (node.target in _LINEAR_IN_FIRST and first_only)
            or (node.target in _LINEAR_IN_ALL and all(a in linear for a in node.args[:2]))
        )
        linear.add(node)
        return ok

    # Each of these says which rows a node has.

    def take_view(self, node: Node) -> bool:
        """Rows in other leading dimensions. What follows them must stay."""
        source = node.args[0]
        if source not in self.leading or not isinstance(node.meta["val"], torch.Tensor):
            return False
        rest, shape, rows = self.rest(source), tuple(node.meta["val"].shape), 1
        leading = len(shape) - len(rest)
        for size in shape[: max(leading, 0)]:
            rows *= size
        if leading < 1 or shape[leading:] != rest or rows != self.found.rows:
            return False
        self.leading[node] = leading
        return True

    def take_turn(self, node: Node) -> bool:
        source = node.args[0]
        if self.leading.get(source) != 1 or len(node.meta["val"].shape) != 2 or self.rest(source) != (self.columns,):
            return False
        if node.meta["val"].shape != tuple(reversed(source.meta["val"].shape)) or self.found.rows == self.columns:
            return False
        self.turned.add(node)
        return True

    def take_along_row(self, node: Node) -> bool:
        """A sum, or more, along each row, or (of a sum) along all rows."""
        source = node.args[0]
        if source not in self.leading:
            return False
        rank, dims = len(source.meta["val"].shape), node.args[1]
        dims = [d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
        leading = self.leading[source]
        if node.target is _aten.sum.dim_IntList and dims == list(range(leading)):
            self.found.sums.append(node)
            return leading == 1 and "dtype" not in node.kwargs
        self.leading[node] = leading
        return leading == 1 and dims == [rank - 1]

    def take_product(self, node: Node) -> bool:
        """A product with a factor that is given: rows again, or the sum over all rows."""
        left, right = node.args[:2]
        assert isinstance(left, Node) and isinstance(right, Node)
        if left in self.leading and self.leading[left] == 1 and self.is_given(right):
            self.leading[node] = 1
            self.found.kept.append(node)
            return True
        summed = (left in self.turned and self.is_given(right)) or (
            self.is_given(left) and self.leading.get(right) == 1 and self.is_whole(right)
        )
        self.found.sums += [node] if summed else []
        return summed

    def take_pointwise(self, node: Node) -> bool:
        """Rows of all operands, but for those that are the same for each row."""
        ranks = {self.leading[i] for i in node.all_input_nodes if i in self.leading}
        value = node.meta["val"]
        if ranks != {1} or any(i in self.turned for i in node.all_input_nodes) or not isinstance(value, torch.Tensor):
            return False
        self.leading[node] = 1
        others = [i for i in node.all_input_nodes if i not in self.leading]
        return value.shape[0] == self.found.rows and all(map(self.is_given, others))

    def take_loss(self, node: Node) -> bool:
        source, target, weight, reduction = node.args[:4]
        self.found.sums.append(node)
        usual = weight is None and reduction in (_MEAN, _SUM) and self.found.loss is None
        self.found.loss = node
        return usual and source in self.leading and self.is_given(target)

    def take_loss_backward(self, node: Node) -> bool:
        gradient, source, target, weight, reduction, ignored = node.args[:6]
        found = self.found
        if found.loss is None or found.backward is not None or (target, weight, reduction, ignored) != found.calls:
            return False
        assert isinstance(gradient, Node)
        found.backward = node
        found.linear.add(node)
        self.leading[node] = 1
        return self.leading.get(source) == 1 and gradient.meta["val"].numel() == 1 and gradient not in self.leading

    def take_softmax_backward(self, node: Node) -> bool:
        gradient, output, dim = node.args[:3]
        self.leading[node] = 1
        rows = self.leading.get(gradient) == 1 and self.leading.get(output) == 1
        return rows and dim in (1, -1)

    def is_given(self, used: Any) -> bool:
        """Whether an operand is there before the region runs: nothing of the backward, nothing that needs a loss."""
        if not isinstance(used, Node):
            return True
        return used not in self.leading and used not in self.turned and used not in self.outer

    def finished(self) -> _Region | None:
        """The region, if only sums and small rows of it are used outside."""
        found = self.found
        inside = set(found.nodes)
        if found.loss is None:
            return None
        for node in found.nodes:
            outside = [user for user in node.users if user not in inside]
            if not outside or node in found.sums or node in found.kept:
                continue
            if node.target is operator.getitem:
                continue
            return None
        return found if _movable(found, self.module) else None


def _given(region: _Region) -> list[Node]:
    """What the region uses and does not make, but for the gradient of the loss."""
    inside = set(region.nodes)
    found: dict[Node, None] = {}
    for node in region.nodes:
        for used in node.all_input_nodes:
            if used not in inside and not (node is region.backward and used is node.args[0]):
                found[used] = None
    return list(found)


def _reached(starts: Sequence[Node]) -> set[Node]:
    """All that depends on some nodes, and these."""
    found, open_nodes = set(starts), list(starts)
    while open_nodes:
        users = [user for user in open_nodes.pop().users if user not in found]
        found.update(users)
        open_nodes += users
    return found


def _movable(region: _Region, module: GraphModule) -> bool:
    """Whether all that the region is given can be computed before it."""
    facts = [node_facts(node, module, {}) for node in _before(region) if node.op == "call_function"]
    return not any(f is None or f.is_random or f.is_mutating or f.has_side_effects for f in facts)


def _before(region: _Region) -> list[Node]:
    """What the region is given, with all that this comes from, as far as it stands behind the product."""
    order = {node: place for place, node in enumerate(region.seed.graph.nodes)}
    found: set[Node] = set()
    open_nodes = _given(region)
    while open_nodes:
        node = open_nodes.pop()
        if node in found or order[node] < order[region.seed]:
            continue
        found.add(node)
        open_nodes += node.all_input_nodes
    return sorted(found, key=order.__getitem__)


def _saves(region: _Region) -> bool:
    """Whether chunks take clearly less memory: the sums are there twice while they grow."""
    logits = region.seed.meta["val"].numel()
    sums = sum(node.meta["val"].numel() for node in region.sums if isinstance(node.meta["val"], torch.Tensor))
    rows = sum(node.meta["val"].numel() for node in region.kept)
    return 2 * sums + rows + 2 * logits // _count(region) < 1.5 * logits


def _count(region: _Region) -> int:
    """How many chunks."""
    wanted = -(-region.seed.meta["val"].numel() * 4 // _CHUNK_BYTES)
    return max(2, min(wanted, _MOST_CHUNKS, region.rows // _LEAST_ROWS))


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.bfloat16 else dtype


# -- the graph in chunks -----------------------------------------------------------------------------------------


class _Writer:
    """Writes a region again, in chunks."""

    def __init__(self, graph: Graph, region: _Region) -> None:
        self.graph, self.region = graph, region
        self.totals: dict[Node, Node] = {}
        self.parts: dict[Node, list[Node]] = {node: [] for node in region.kept}

    def write(self) -> None:
        """Replace the region."""
        region = self.region
        for node in _before(region):
            region.seed.prepend(node)
        with self.graph.inserting_before(region.seed):
            self.weight = self.write_weight()
            count = _count(region)
            places = [region.rows * k // count for k in range(count + 1)]
            for start, end in zip(places, places[1:], strict=False):
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
        if reduction == _SUM:
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
            if node.target in _VIEWS:
                self.own[node] = self.own[node.args[0]]  # type: ignore[index]
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
            return self.call(node.target, self.operand(node.args[0]), node.args[1], node)
        value = node.meta["val"]
        args = [self.operand(a) if self.has_rows(a, value) else a for a in node.args]
        return self.call(node.target, *args, node, **node.kwargs)

    def has_rows(self, used: Any, value: torch.Tensor) -> bool:
        """Whether an operand has a row for each row of the result, and not one for all."""
        return isinstance(used, Node) and (used in self.own or used.meta["val"].ndim == value.ndim)

    def product(self, node: Node) -> Node:
        """The logits."""
        *bias, left, right = node.args
        assert isinstance(left, Node)
        full = [b if b.meta["val"].ndim < 2 else self.operand(b) for b in bias if isinstance(b, Node)]
        return self.call(node.target, *full, self.operand(left), right, node)

    def write_loss(self, node: Node) -> None:
        target, weight, _, ignored = self.region.calls
        args = self.operand(node.args[0]), self.operand(target), weight, _SUM, ignored
        self.own[node] = self.call(_LOSS, *args, node)
        self.accumulate(node, self.call(operator.getitem, self.own[node], 0, node))

    def write_backward(self, node: Node) -> None:
        target, weight, _, ignored = self.region.calls
        assert self.region.loss is not None
        total = self.call(operator.getitem, self.own[self.region.loss], 1, node)
        args = self.gradient(), self.operand(node.args[1]), self.operand(target), weight, _SUM, ignored, total
        self.own[node] = self.call(_LOSS_BACKWARD, *args, node)

    # -- sums ---------------------------------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """The sum over the rows of this chunk, added to that of the chunks before."""
        left, right = node.args[:2]
        if node.target is not _aten.mm.default:
            self.accumulate(node, self.call(node.target, self.operand(left), *node.args[1:], node, **node.kwargs))
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
            if item.args[1] == 0:
                item.replace_all_uses_with(value)
            elif self.weight is not None:
                item.replace_all_uses_with(self.weight)

    def write_result(self, node: Node, total: Node) -> None:
        """A result for whoever uses it outside, times the gradient of the loss where it is linear in that."""
        region, value = self.region, node.meta["val"]
        with self.graph.inserting_before(node):
            if node in region.linear:
                assert region.backward is not None
                total = self.call(_aten.mul.Tensor, total, region.backward.args[0], node)
            total = self.as_type(total, value.dtype, node)
        inside = set(region.nodes)
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user not in inside)
