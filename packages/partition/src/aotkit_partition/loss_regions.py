"""Where logits are made and what depends on them, as far as it can be computed in chunks of rows: see
Note [Losses in chunks] in :mod:`.chunk_losses`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.fx import GraphModule, Node

from .joint import is_backward_input
from .op_facts import node_facts

__all__ = [
    "LOSS",
    "LOSS_BACKWARD",
    "SUM",
    "VIEWS",
    "LossRegion",
    "arguments",
    "computed_before",
    "find_region",
    "makes_logits",
]


_aten = torch.ops.aten
_MEAN, SUM = 1, 2  # reductions of a loss
_CHUNK_BYTES = 1 << 26  # of logits
_LEAST_ROWS = 128  # of a chunk
_LEAST_CHUNKS, _MOST_CHUNKS = 4, 16
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)

_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
VIEWS = (
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.detach.default, _aten.alias.default,
)  # fmt: skip
_COPIES = (_aten._to_copy.default, _aten.clone.default)
_POINTWISE = (*_COPIES, _aten.tanh_backward.default, _aten.expand.default)  # torch's own tag is not on these
_TURNS = (_aten.t.default, _aten.transpose.int, _aten.permute.default)
_ROW_SUMS = (_aten.amax.default, _aten.sum.dim_IntList, _aten._log_softmax.default, _aten.logsumexp.default)
LOSS, LOSS_BACKWARD = _aten.nll_loss_forward.default, _aten.nll_loss_backward.default
_SOFTMAX_BACKWARD = _aten._log_softmax_backward_data.default
#: Linear in each argument; the others are constants for that.
_LINEAR = {
    *VIEWS, *_TURNS, *_COPIES, _aten.neg.default, _aten.sum.dim_IntList, _aten.mm.default, _aten.mul.Tensor,
    _aten.mul.Scalar, _aten.expand.default, _SOFTMAX_BACKWARD,
}  # fmt: skip
_LINEAR_IN_FIRST = {_aten.div.Tensor, _aten.div.Scalar, _aten.tanh_backward.default}
_LINEAR_IN_ALL = {_aten.add.Tensor, _aten.sub.Tensor}


def arguments(node: Node) -> tuple[Any, ...]:
    """Of a call."""
    return node.args


def makes_logits(seed: Node, min_bytes: int) -> bool:
    value = seed.meta.get("val")
    if seed.op != "call_function" or seed.target not in _PRODUCTS or seed.kwargs:
        return False
    if not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES:
        return False
    known = all(type(size) is int for size in value.shape)
    return known and value.numel() * 4 >= min_bytes and value.shape[0] >= 2 * _LEAST_ROWS


@dataclass(slots=True)
class LossRegion:
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
    def num_chunks(self) -> int:
        """How many chunks of rows are worth it."""
        wanted = -(-self.seed.meta["val"].numel() * 4 // _CHUNK_BYTES)
        return min(max(wanted, _LEAST_CHUNKS), _MOST_CHUNKS, self.rows // _LEAST_ROWS)

    @property
    def calls(self) -> tuple[Any, ...]:
        """Target, the weight of classes, reduction and ignored class: of a loss."""
        assert self.loss is not None
        return arguments(self.loss)[1:5]


def find_region(module: GraphModule, seed: Node) -> LossRegion | None:
    """What depends on the logits that ``seed`` makes; ``None`` if it can't be cut, or would take as much memory."""
    region = _Finder(module, seed).region()
    return region if region is not None and _saves(region) else None


class _Finder:
    """Follows what depends on a product, see Note [Losses in chunks]."""

    def __init__(self, module: GraphModule, seed: Node) -> None:
        self.module = module
        self.found = LossRegion(seed, seed.meta["val"].shape[0], [seed])
        self.leading = {seed: 1}  # dimensions that are rows, of values with rows
        self.turned: set[Node] = set()  # matrices with rows across
        self.outer = _reached([n for n in module.graph.nodes if is_backward_input(n)])  # not there when it runs
        self.columns = seed.meta["val"].shape[1]

    def region(self) -> LossRegion | None:
        """The region, or ``None`` if it can't be cut."""
        found, past = self.found, False
        if not all(self.is_given(a) for a in arguments(found.seed)):
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
        return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _POINTWISE

    def takes(self, node: Node) -> bool:
        """Classify a node that uses a value of the region; ``False`` if it can't be cut."""
        facts = node_facts(node, self.module, {})
        if facts is None or facts.is_random or facts.is_mutating or facts.has_side_effects:
            return False
        if any(isinstance(given, Node) for given in node.kwargs.values()):
            return False
        if any(i in self.found.sums for i in node.all_input_nodes) and node.target is not LOSS_BACKWARD:
            return False
        if not self.follow_gradient(node):
            return False
        for targets, take in (
            (VIEWS, self.take_view), (_TURNS, self.take_turn), (_ROW_SUMS, self.take_along_row),
            ((_aten.mm.default,), self.take_product), ((LOSS,), self.take_loss),
            ((LOSS_BACKWARD,), self.take_loss_backward), ((_SOFTMAX_BACKWARD,), self.take_softmax_backward),
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
        first, *rest = arguments(node)
        first_only = first in linear and not any(a in linear for a in rest if isinstance(a, Node))
        once = len(used) == 1 and sum(a is used[0] for a in (first, *rest)) == 1
        value = node.meta["val"]
        if node.target in _COPIES and isinstance(value, torch.Tensor) and value.dtype not in _DTYPES:
            return False  # whole numbers, or float16: what is small is 0 there, and would not be if multiplied before
        ok = (
            (node.target in _LINEAR and once and (first_only or node.target is not _SOFTMAX_BACKWARD))
            or (node.target in _LINEAR_IN_FIRST and first_only)
            or (node.target in _LINEAR_IN_ALL and all(a in linear for a in arguments(node)[:2]))
        )
        linear.add(node)
        return ok

    # Each of these says which rows a node has.

    def take_view(self, node: Node) -> bool:
        """Rows in other leading dimensions. What follows them must stay."""
        source = arguments(node)[0]
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
        source = arguments(node)[0]
        if self.leading.get(source) != 1 or len(node.meta["val"].shape) != 2 or self.rest(source) != (self.columns,):
            return False
        if node.meta["val"].shape != tuple(reversed(source.meta["val"].shape)) or self.found.rows == self.columns:
            return False
        self.turned.add(node)
        return True

    def take_along_row(self, node: Node) -> bool:
        """A sum, or more, along each row, or (of a sum) along all rows."""
        source, *given = arguments(node)
        if source not in self.leading or not given or given[0] is None:
            return False  # one number of all elements
        rank, dims = len(source.meta["val"].shape), given[0]
        dims = [d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
        leading = self.leading[source]
        if node.target is _aten.sum.dim_IntList and dims == list(range(leading)):
            self.found.sums.append(node)
            return leading == 1 and "dtype" not in node.kwargs
        self.leading[node] = leading
        return leading == 1 and dims == [rank - 1]

    def take_product(self, node: Node) -> bool:
        """A product with a factor that is given: rows again, or the sum over all rows."""
        left, right = arguments(node)[:2]
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
        rows = [i for i in node.all_input_nodes if i in self.leading]
        value = node.meta["val"]
        if any(i in self.turned for i in node.all_input_nodes) or not isinstance(value, torch.Tensor):
            return False
        if any(self.leading[i] != 1 or i.meta["val"].ndim != value.ndim for i in rows):
            return False  # of one number per row, repeated for other rows
        self.leading[node] = 1
        others = [i for i in node.all_input_nodes if i not in self.leading]
        return value.shape[0] == self.found.rows and all(map(self.is_given, others))

    def take_loss(self, node: Node) -> bool:
        source, target, weight, reduction = arguments(node)[:4]
        self.found.sums.append(node)
        usual = weight is None and reduction in (_MEAN, SUM) and self.found.loss is None
        self.found.loss = node
        return usual and source in self.leading and self.is_given(target)

    def take_loss_backward(self, node: Node) -> bool:
        gradient, source, target, weight, reduction, ignored, total = arguments(node)[:7]
        found = self.found
        if found.loss is None or found.backward is not None or (target, weight, reduction, ignored) != found.calls:
            return False
        while isinstance(total, Node) and total.target in VIEWS:
            total = arguments(total)[0]
        if not isinstance(total, Node) or total.target is not operator.getitem or total.args != (found.loss, 1):
            return False  # another number of rows than this loss is divided by
        assert isinstance(gradient, Node)
        found.backward = node
        found.linear.add(node)
        self.leading[node] = 1
        return self.leading.get(source) == 1 and gradient.meta["val"].numel() == 1 and gradient not in self.leading

    def take_softmax_backward(self, node: Node) -> bool:
        gradient, output, dim = arguments(node)[:3]
        self.leading[node] = 1
        rows = self.leading.get(gradient) == 1 and self.leading.get(output) == 1
        return rows and dim in (1, -1)

    def is_given(self, used: Any) -> bool:
        """Whether an operand is there before the region runs: nothing of the backward, nothing that needs a loss."""
        if not isinstance(used, Node):
            return True
        return used not in self.leading and used not in self.turned and used not in self.outer

    def finished(self) -> LossRegion | None:
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


def _given(region: LossRegion) -> list[Node]:
    """What the region uses and does not make, but for the gradient of the loss."""
    inside = set(region.nodes)
    found: dict[Node, None] = {}
    for node in region.nodes:
        for used in node.all_input_nodes:
            if used not in inside and not (node is region.backward and used is arguments(node)[0]):
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


def _movable(region: LossRegion, module: GraphModule) -> bool:
    """Whether all that the region is given can be computed before it."""
    facts = [node_facts(node, module, {}) for node in computed_before(region) if node.op == "call_function"]
    return not any(f is None or f.is_random or f.is_mutating or f.has_side_effects for f in facts)


def computed_before(region: LossRegion) -> list[Node]:
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


def _saves(region: LossRegion) -> bool:
    """Whether chunks take clearly less memory: the sums are there twice while they grow."""
    logits = region.seed.meta["val"].numel()
    sums = sum(node.meta["val"].numel() for node in region.sums if isinstance(node.meta["val"], torch.Tensor))
    rows = sum(node.meta["val"].numel() for node in region.kept)
    return 2 * sums + rows + 2 * logits // region.num_chunks < 1.5 * logits
