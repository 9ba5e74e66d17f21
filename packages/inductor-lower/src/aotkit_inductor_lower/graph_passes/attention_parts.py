"""What attention that is written out is made of: products, masks, dropout and operands, found in a graph."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..ops.positions import Number, same_number, same_sizes
from .attention_nodes import (
    RESHAPES,
    deepest,
    hiding,
    is_left,
    is_turned,
    number_of,
    same_below,
    scaled_by,
)
from .attention_places import seen_places
from .known_sizes import concrete, is_dense, is_usable, same_count
from .node_facts import shared_heads

__all__ = [
    "Operand",
    "Written",
    "find_operand",
    "find_written",
    "fits_scores",
    "is_cast",
    "scores_of_products",
]

aten = torch.ops.aten
_PASSED = RESHAPES | {aten._to_copy.default, aten.where.self, aten.mul.Tensor}
_MOST_STEPS = 16  # from a softmax to the product with its weights
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Operand:
    """Heads ``source`` that a factor of a product is made of, times ``scale``. ``whole``: the same where several heads
    of queries share one and have copies of it."""

    source: Node
    scale: float | None = None
    whole: Node | None = None

    @property
    def factor(self) -> float:
        """What it is multiplied by, which may be 0."""
        return 1.0 if self.scale is None else self.scale


@dataclass(slots=True)
class Written:
    """Attention that is written out. ``shape``: batch, heads, queries, keys, numbers of a head. ``products``: of
    queries and keys, and of weights and values, with their factors as these take them: ``query3``, ``key3``,
    ``weights3``, ``value3``. ``probabilities``: what the backward of the softmax reads. ``condition``: what scores are
    hidden by, and ``seen`` what is left of it beside ``causal`` and ``window``
    (:class:`~.attention_places.Places`). ``cap``: scores are it times the tangent of what they are over it; 0: they are
    what they are. ``negated``: ``added`` is subtracted. ``more``: what else is added, and whether it is subtracted.
    ``noise``: what dropout multiplies by, or which weights are kept (``is_kept``); ``drawn``: what it is made of.
    ``inner``: nodes that nothing needs any more once it is a call."""

    shape: tuple[Number, Number, Number, Number, int]
    products: tuple[Node, Node]
    operands: tuple[Operand, Operand, Operand]
    probabilities: Node
    scale: float
    added: Node | None = None
    seen: Node | None = None
    inverted: bool = False
    hidden: float = -math.inf
    replaces: bool = False
    causal: bool = False
    noise: Node | None = None
    drawn: Node | None = None
    is_kept: bool = False
    kept_scale: float = 1.0
    zero_empty: bool = False
    inner: list[Node] = field(default_factory=list)
    condition: Node | None = None
    negated: bool = False
    window: int = 0
    cap: float = 0.0
    more: tuple[tuple[Node, bool], ...] = ()

    @property
    def kept(self) -> float:
        """The probability with which dropout keeps a weight."""
        assert self.drawn is not None
        number = self.drawn.args[1]
        assert isinstance(number, int | float)
        return 1.0 - number if self.is_kept else float(number)

    @property
    def out(self) -> Node:
        return self.products[1]

    @property
    def narrow(self) -> torch.dtype | None:
        """The type of queries and keys where their product is one of float32, which they are copied to."""
        return _narrow(*self.products)

    @property
    def factors(self) -> tuple[Node, Node, Node, Node]:
        """Queries, keys, weights and values as the products take them."""
        query, key = self.products[0].args[:2]
        weights, value = self.products[1].args[:2]
        assert isinstance(query, Node) and isinstance(key, Node) and isinstance(weights, Node)
        assert isinstance(value, Node)
        return query, key, weights, value

    @property
    def shares_heads(self) -> bool:
        return self.operands[1].whole is not None

    @property
    def may_lose_queries(self) -> bool:
        """Whether there may be queries that see no key, though keys are hidden by where they are, too."""
        _, _, queries, keys, _ = self.shape
        masked = self.seen is not None or self.added is not None
        beyond = self.window and not statically_known_true(queries < keys + self.window)
        return self.causal and not self.zero_empty and bool(masked or beyond)

    def with_copied_heads(self) -> Written:
        """The same, read from the copies of heads that are shared."""
        query, key, value = (replace(o, source=o.whole or o.source, whole=None) for o in self.operands)
        return replace(self, operands=(query, key, value))


def find_operand(
    node: Node,
    shape: tuple[Number, Number, Number, int],
    *,
    turned: bool = False,
    scales: bool = True,
    wide: bool = False,
) -> Operand | None:
    """The heads of a factor of a product, ``turned`` over somewhere, before they were scaled, if that counts, and
    before they were copied to float32 (``wide``), which changes none of their numbers."""
    batch, heads, length, width = shape
    given = is_turned(node, 3)
    if turned and given is not None:
        node, turned = given, False
    scale = None
    found = deepest(node, (batch, heads, width, length) if turned else shape)
    while found is not None:
        source = is_turned(found, 4) if turned else None
        if source is not None:
            found, turned = deepest(source, shape), False
        elif scales and scale is None and (number := scaled_by(found)) is not None:
            scale = number
            found = deepest(found.args[0], (batch, heads, width, length) if turned else shape)
        elif wide and is_cast(found):
            found, wide = deepest(found.args[0], (batch, heads, width, length) if turned else shape), False
        else:
            break
    if found is None or turned:
        return None
    return Operand(found, scale)


def find_written(softmax: Node, *, bodies: bool = False, places: bool = True) -> Written | None:
    """The attention around a softmax. ``bodies``: keys that are too far back may be hidden by where they are,
    and scores may have a cap. ``places``: keys may be hidden by where they are at all, not by a condition only."""
    value = softmax.meta["val"]
    if value.dim() != 4 or value.dtype not in _TYPES:
        return None
    if softmax.args[1] not in (-1, 3) or softmax.args[2] is not False:
        return None
    if not all(is_usable(size) for size in value.shape):
        return None
    found = _Finder(softmax, bodies, places)
    return found.result() if found.go_down() and found.go_up() else None


class _Finder:
    """Walks from a softmax to both products."""

    def __init__(self, softmax: Node, bodies: bool, places: bool) -> None:
        self.softmax, self.bodies, self.places, self.window = softmax, bodies, places, 0
        self.cap, self.narrowed = 0.0, False
        self.inner: list[Node] = [softmax]
        self.scale = 1.0
        self.added: Node | None = None
        self.chosen: Node | None = None  # the sum's term that ``seen`` is the condition of, where nothing else is
        self.seen: Node | None = None
        self.condition: Node | None = None
        self.negated = False
        self.more: list[tuple[Node, bool]] = []
        self.inverted = self.replaces = self.causal = self.zero_empty = self.is_kept = False
        self.hidden, self.kept_scale = -math.inf, 1.0
        self.noise: Node | None = None
        self.drawn: Node | None = None
        self.probabilities = softmax
        self.score_product: Node | None = None
        self.out: Node | None = None

    # -- scores --------------------------------------------------------------------------------------------

    def go_down(self) -> bool:
        """From the softmax to the product of queries and keys: masks first, then scales."""
        node = self.softmax.args[0]
        while isinstance(node, Node) and node.op == "call_function":
            self.inner.append(node)
            if node.target is aten.bmm.default:
                self.score_product = node
                return True
            following = self._below(node)
            if following is None:
                return False
            node = following
        return False

    def _below(self, node: Node) -> Node | None:
        """The scores that a node makes others of; ``None`` for any other node."""
        first = node.args[0]
        if node.target in RESHAPES or is_cast(node):
            if is_cast(node) and node.meta["val"].dtype is torch.float16:
                return None  # larger scores become infinite there, and these are not rounded
            self.narrowed |= node.meta["val"].dtype is not torch.float32 and is_cast(node)
            return first if isinstance(first, Node) and _same_count(first, node) else None
        number = scaled_by(node)
        if number is not None:
            self.scale *= number
            return first if math.isfinite(self.scale) and isinstance(first, Node) else None
        if node.target is aten.tanh.default:
            return self._cap(first)
        if self.scale != 1.0 or self.cap or self.narrowed or not self._lies_as_scores(node):
            return None  # what a mask adds may become infinite where it is narrowed
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
            return self._add(node) if self.added is None else self._add_more(node)
        choice = hiding(node) if self.seen is None and self.added is None else None
        if choice is None:
            return None
        self.seen, self.inverted, self.hidden, scores = choice
        self.replaces, self.condition = True, self.seen
        if self.places and not self.inverted and self.hidden == -math.inf:
            self._find_places(self.seen)
        return scores

    def _lies_as_scores(self, node: Node) -> bool:
        """Whether a mask of a node is one of the scores as the softmax has them, and of no other view of them."""
        value, (batch, heads, *rest) = node.meta["val"], self.softmax.meta["val"].shape
        return same_sizes(value.shape, (batch, heads, *rest)) or same_sizes(value.shape, (batch * heads, *rest))

    def _cap(self, first: object) -> Node | None:
        """What a tangent is taken of, which so far is multiplied by the cap of scores."""
        if self.cap or self.scale <= 0 or not self.bodies:
            return None
        self.cap = self.scale
        return first if isinstance(first, Node) else None

    def _find_places(self, seen: Node) -> None:
        """Whether a condition hides later keys, alone or beside another."""
        sizes = tuple(self.softmax.meta["val"].shape)
        found = seen_places(seen, sizes, windows=self.bodies)
        if found is None:
            return
        self.causal, self.window, self.seen = True, found.window, found.rest
        if self.seen is None:
            self.replaces = False
        elif not fits_scores(self.seen, sizes, (torch.bool,)):
            self.seen = seen

    def _add(self, node: Node) -> Node | None:
        """A mask that is added to scores, the other operand."""
        left, right = node.args[:2]
        if not _is_tensor(left) or not _is_tensor(right):
            return None
        scores, mask = (left, right) if is_left(left, right) else (right, left)
        subtracts = node.target is aten.sub.Tensor
        if subtracts and scores is not left:
            return None
        if self.chosen is not None and self.hidden != -math.inf:  # which is no mask any more, but a term beside this
            self.added, self.more = self.chosen, [(mask, subtracts)]
            self.seen, self.inverted, self.hidden, self.chosen = None, False, -math.inf, None
            return scores
        if subtracts:
            self.added, self.negated = mask, True
            return scores
        choice = hiding(same_below(mask)) if self.seen is None else None
        self.added = mask
        if choice is not None:
            seen, self.inverted, self.hidden, added = choice
            self.added = None if number_of(added) == 0 else added
            alone = self.added is None and not self.inverted and self.hidden == -math.inf
            triangle = alone and _is_lower_triangle(seen, node)
            self.causal |= self.places and triangle
            self.seen = None if self.places and triangle else seen
            self.chosen = mask if self.added is None and self.seen is not None else None
        return scores

    def _add_more(self, node: Node) -> Node | None:
        """One more term, where the one before is no choice of its own."""
        left, right = node.args[:2]
        if not _is_tensor(left) or not _is_tensor(right) or not (self.seen is None or self.replaces):
            return None
        scores, term = (left, right) if is_left(left, right) else (right, left)
        subtracts = node.target is aten.sub.Tensor
        if hiding(same_below(term)) is not None or (subtracts and scores is not left):
            return None
        self.more.append((term, subtracts))
        return scores

    # -- weights -------------------------------------------------------------------------------------------

    def go_up(self) -> bool:
        """From the softmax to the product of weights and values."""
        self._find_zeros()
        node = self.probabilities
        while True:
            following = [user for user in node.users if self._goes_on(user, node)]
            if len(following) != 1:
                return False
            (user,) = following
            if user.target is aten.bmm.default:
                self.out = user
                return user.args[0] is node and user.args[1] is not node
            if user.target is aten.mul.Tensor and not self._find_dropout(user, node):
                return False
            self.inner.append(user)
            node = user
            if user.target is aten.native_dropout.default:
                part = self._find_kept(user)
                if part is None:
                    return False
                node = part

    def _find_zeros(self) -> None:
        """Rows without a key become 0."""
        for user in self.softmax.users:
            if user.target is not aten.where.self or user.args[2] is not self.softmax or number_of(user.args[1]) != 0:
                continue
            every = user.args[0]
            if not isinstance(every, Node) or every.target is not aten.all.dim:
                continue
            test, dim, *keeps = every.args
            if dim not in (-1, 3) or keeps != [True] or not isinstance(test, Node):
                continue
            if test.target is aten.eq.Scalar and test.args == (self.softmax.args[0], -math.inf):
                self.zero_empty, self.probabilities = True, user
                zeros = user.args[1]
                self.inner += [test, every, user, *([zeros] if isinstance(zeros, Node) else [])]
                return

    def _goes_on(self, user: Node, node: Node) -> bool:
        if user.target in RESHAPES or user.target is aten.bmm.default:
            return _same_count(user, node) or user.target is aten.bmm.default
        if user.target is aten._to_copy.default:
            return is_cast(user)
        drops = user.target in (aten.mul.Tensor, aten.native_dropout.default)
        return drops and node.meta["val"].dim() == 4

    def _find_kept(self, dropout: Node) -> Node | None:
        """What dropout makes of the weights, where it is one call, which tells what it kept, too."""
        parts = {user.args[1]: user for user in dropout.users if user.target is operator.getitem}
        rate, train = dropout.args[1:3]
        known = isinstance(rate, int | float) and 0 < rate < 1 and train is True
        if self.noise is not None or not known or len(parts) != len(dropout.users) or 0 not in parts:
            return None
        self.drawn, self.is_kept, self.kept_scale = dropout, True, 1 / (1 - float(rate))  # type: ignore[arg-type]
        self.noise = parts.get(1)
        self.inner += parts.values()  # others may not read what was kept: it is drawn anew, and for its bytes once
        return parts[0]

    def _find_dropout(self, user: Node, node: Node) -> bool:
        """Whether a factor of the weights is ``bernoulli(..) / kept``, each time another."""
        noise = user.args[1] if user.args[0] is node else user.args[0]
        if self.noise is not None or not isinstance(noise, Node) or noise.target is not aten.div.Scalar:
            return False
        drawn, kept = noise.args
        if not isinstance(drawn, Node) or drawn.target is not aten.bernoulli.p or not isinstance(kept, int | float):
            return False
        value, like = noise.meta["val"], drawn.args[0]
        if not same_sizes(value.shape, node.meta["val"].shape) or not is_dense(value) or kept <= 0:
            return False
        self.noise, self.drawn = noise, drawn
        self.kept_scale = (torch.ones((), dtype=value.dtype) / kept).item()
        self.inner += [noise, drawn, *([like] if isinstance(like, Node) else [])]
        return True

    # -- all -----------------------------------------------------------------------------------------------

    def result(self) -> Written | None:
        """What was found, with the operands."""
        scores, out = self.score_product, self.out
        assert scores is not None and out is not None
        batch, heads, queries, keys = self.softmax.meta["val"].shape
        width = scores.args[0].meta["val"].shape[2]  # type: ignore[union-attr]
        sizes = (batch * heads, queries)
        if concrete(width) is None or not same_sizes(scores.meta["val"].shape, (*sizes, keys)):
            return None
        if not same_sizes(out.meta["val"].shape, (*sizes, width)):
            return None
        wide = _narrow(scores, out) is not None
        if scores.meta["val"].dtype not in _TYPES or not self._masks_fit():
            return None
        if out.meta["val"].dtype != scores.meta["val"].dtype and not wide:
            return None
        left, right = scores.args
        query = find_operand(left, (batch, heads, queries, width), wide=wide)  # type: ignore[arg-type]
        key = find_operand(right, (batch, heads, keys, width), turned=True, wide=wide)  # type: ignore[arg-type]
        value = find_operand(out.args[1], (batch, heads, keys, width))  # type: ignore[arg-type]
        if query is None or key is None or value is None or value.scale is not None:
            return None
        dtypes = {operand.source.meta["val"].dtype for operand in (query, key, value)}
        if dtypes != {out.meta["val"].dtype}:
            return None
        scale = self.scale * query.factor * key.factor
        if scale == 0:
            return None
        return Written(
            (batch, heads, queries, keys, width),
            (scores, out),
            _shared(query, key, value),
            self.probabilities,
            scale,
            self.added,
            self.seen,
            self.inverted,
            self.hidden,
            self.replaces,
            self.causal,
            self.noise,
            self.drawn,
            self.is_kept,
            self.kept_scale,
            self.zero_empty,
            self.inner,
            self.condition,
            self.negated,
            self.window,
            self.cap,
            tuple(self.more),
        )

    def _masks_fit(self) -> bool:
        """Whether kernels read the masks as they are, or as copies of them."""
        sizes = tuple(self.softmax.meta["val"].shape)
        if self.seen is not None and not fits_scores(self.seen, sizes, (torch.bool,)):
            return False
        if not self.more:
            return self.added is None or fits_scores(self.added, sizes, _TYPES)
        assert self.added is not None
        values = [term.meta["val"] for term in (self.added, *(term for term, _ in self.more))]
        if any(value.dtype != torch.float32 or not _spreads(value, sizes) for value in values):
            return False  # they are added up as scores are
        return any(value.dim() and same_number(value.shape[-1], sizes[-1]) for value in values)


def _is_tensor(value: object) -> TypeGuard[Node]:
    """Whether it is a node for a tensor, and for no float that only a call tells."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def scores_of_products(softmax: Node) -> torch.Tensor | None:
    """The product with weights of a softmax that is between two products, whatever is done to its scores."""
    shape, below = softmax.meta["val"].shape, softmax.args[0]
    if len(shape) != 4 or not all(is_usable(size) for size in shape):
        return None
    whole = softmax.meta["val"]
    seen: set[Node] = set()
    ahead = [below] if isinstance(below, Node) else []
    while ahead and not any(node.target is aten.bmm.default for node in ahead):
        seen.update(ahead)
        sources = {source for node in ahead for source in node.all_input_nodes} - seen
        ahead = [node for node in sources if _has_count(node, whole)]
    ahead_of, passed = softmax, 0
    while ahead and passed < _MOST_STEPS:
        users = [user for user in ahead_of.users if user.target is aten.bmm.default]
        if users:
            return users[0].meta["val"] if users[0].args[0] is ahead_of else None  # type: ignore[no-any-return]
        following = [user for user in ahead_of.users if user.target in _PASSED and _has_count(user, whole)]
        if not following:
            return None
        ahead_of, passed = following[-1], passed + 1
    return None


def _has_count(node: Node, whole: torch.Tensor) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and same_count(value, whole)


def _narrow(scores: Node, out: Node) -> torch.dtype | None:
    """The type of a product of weights and values, where that of the scores is float32, and theirs isn't."""
    wide, dtype = scores.meta["val"].dtype, out.meta["val"].dtype
    return dtype if wide is torch.float32 and dtype in (torch.bfloat16, torch.float16) else None


def fits_scores(mask: Node, sizes: tuple[Number, ...], types: tuple[torch.dtype, ...]) -> bool:
    """Whether a mask is one of the scores of such sizes, with an element for each key, of one of the types."""
    value = mask.meta["val"]
    if value.dtype not in types or not 1 <= value.dim() <= 4:
        return False
    return same_number(value.shape[-1], sizes[-1]) and _spreads(value, sizes)


def _spreads(value: torch.Tensor, sizes: tuple[Number, ...]) -> bool:
    """Whether a tensor is one of so many elements where it is repeated."""
    pairs = zip(reversed(value.shape), reversed(sizes), strict=False)
    return value.dim() <= len(sizes) and all(same_number(n, 1) or same_number(n, whole) for n, whole in pairs)


def _shared(query: Operand, key: Operand, value: Operand) -> tuple[Operand, Operand, Operand]:
    """The operands, read from heads that are shared by several, where keys and values both are."""
    keys, values = shared_heads(key.source), shared_heads(value.source)
    if keys is None or values is None:
        return query, key, value
    counts = {concrete(each.meta["val"].shape[1]) for each in (query.source, keys, values)}
    if None in counts or not same_number(keys.meta["val"].shape[1], values.meta["val"].shape[1]):
        return query, key, value
    return query, replace(key, source=keys, whole=key.source), replace(value, source=values, whole=value.source)


def _is_lower_triangle(seen: Node, scores: Node) -> bool:
    """Whether each query sees the keys up to its own number."""
    if seen.target is not aten.tril.default or len(seen.args) > 1 or seen.kwargs:
        return False
    ones = seen.args[0]
    if not isinstance(ones, Node) or ones.target not in (aten.ones.default, aten.full.default):
        return False
    if ones.target is aten.full.default and ones.args[1] is not True:
        return False
    return same_sizes(seen.meta["val"].shape, scores.meta["val"].shape[-2:])


def is_cast(node: Node) -> bool:
    """Whether a node is a copy to another of the types that kernels read."""
    source = node.args[0] if node.args else None
    if node.target is not aten._to_copy.default or not isinstance(source, Node):
        return False  # also what returns the graph's results, which has no value
    value = node.meta["val"]
    if source.meta["val"].device != value.device:
        return False
    return {value.dtype, source.meta["val"].dtype} <= set(_TYPES)


def _same_count(a: Node, b: Node) -> bool:
    return same_count(a.meta["val"], b.meta["val"])
