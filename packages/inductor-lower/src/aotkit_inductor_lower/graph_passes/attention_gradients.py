"""The gradients of attention that is written out, found in a joint graph, and how what was computed elsewhere takes the
place of a result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from ..ops.positions import Number, same_sizes
from .attention_nodes import RESHAPES, hiding, is_turned, scaled_by
from .attention_parts import Operand, Written, find_operand, is_cast
from .known_sizes import dense_order, is_concrete, is_dense, written_size
from .patterns import emit
from .replace import replace_node

__all__ = ["Gradients", "Place", "erase_unused", "find_gradients", "find_place", "sum_of_copies"]

aten = torch.ops.aten
_VIEWS = frozenset((aten.view.default, aten._unsafe_view.default, aten.reshape.default))


@dataclass(frozen=True, slots=True)
class Place:
    """The nodes that heads of some shape take the place of: each of that shape, or with the last two dimensions
    ``turned``. ``product``: what made them, ``rest``: who else reads that, where it has three dimensions."""

    product: Node
    nodes: tuple[tuple[Node, bool], ...]
    rest: tuple[Node, ...] = ()

    def take(self, graph: Graph, made: Node, escaping: set[Node]) -> None:
        """Let all who read these nodes read ``made``."""
        for old, turned in self.nodes:
            new = emit(graph, _turned, old, x=made) if turned else made
            assert new is not None
            if old in escaping or not replace_node(old, new):
                new = emit(graph, _like, old, x=new, old=old)
                assert new is not None
                replace_node(old, new)
        if self.rest:
            new = emit(graph, _flat, self.product, x=made)
            assert new is not None
            for user in self.rest:
                user.replace_input_with(self.product, new)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Where the gradients of attention are computed; none of them in a graph without a backward. ``first``: the first
    product, before which all may be computed. ``gradient``: of the result. ``slope``: what the gradient of the scores
    is multiplied by for query and key. ``of_scores``, and ``readers``: who else reads it. ``shares_heads``: the
    gradients of keys and values are those of heads that are shared."""

    of_query: Place | None = None
    of_key: Place | None = None
    of_value: Place | None = None
    gradient: Operand | None = None
    first: Node | None = None
    slope: float = 0.0
    of_scores: Node | None = None
    readers: tuple[Node, ...] = ()
    shares_heads: bool = True


def _turned(x: object) -> object:
    return aten.transpose.int(x, 2, 3)


def _flat(x: Any) -> object:
    """Heads one after the other."""
    batch, heads, length, width = (written_size(x, dim) for dim in range(4))
    count = batch * heads if isinstance(batch, int) and isinstance(heads, int) else -1
    return aten.view.default(aten.clone.default(x, memory_format=torch.contiguous_format), [count, length, width])


def _like(x: Any, old: Any) -> object:
    """In memory as that of another."""
    value = old.node.meta["val"]
    if is_dense(value):
        return aten.clone.default(x, memory_format=torch.contiguous_format)
    if is_concrete(value):
        return aten.copy.default(aten.new_empty_strided.default(x, list(value.shape), list(value.stride())), x)
    order = dense_order(value)
    assert order is not None  # find_place looked
    made = aten.clone.default(aten.permute.default(x, list(order)), memory_format=torch.contiguous_format)
    return aten.permute.default(made, [order.index(dim) for dim in range(len(order))])


def erase_unused(graph: Graph, node: Node) -> None:
    """Erase a call that nothing needs any more, with its views: it might draw random numbers, as far as the removal of
    dead nodes knows."""
    below = {node}
    for other in graph.nodes:
        if any(source in below for source in other.all_input_nodes):
            below.add(other)
    for other in reversed(graph.nodes):
        if other in below and not other.users and other.op != "output":
            graph.erase_node(other)


def find_place(
    product: Node, shape: tuple[Number, ...], scale: float | None, turned: bool, narrow: torch.dtype | None = None
) -> Place | None:
    """Where the heads are read that a product of three dimensions computes. ``scale``: they are multiplied by it.
    ``narrow``: and copied to this type, as which they are read."""
    want = (*shape[:2], shape[3], shape[2]) if turned else shape
    nodes: list[tuple[Node, bool]] = []
    rest: list[Node] = []
    for user in product.users:
        if user.target not in _VIEWS or not same_sizes(user.meta["val"].shape, want):
            if scale is not None or turned or narrow is not None:
                return None
            rest.append(user)
            continue
        found = [(user, turned)]
        if scale is not None:
            scaled = list(user.users)
            if not scaled or any(scaled_by(other) != scale for other in scaled):
                return None
            found = [(other, turned) for other in scaled]
        if narrow is not None:
            copies = [_narrowed(*each, narrow) for each in found]
            found = [copy for each in copies for copy in each]
            if not all(copies):
                return None
        if not all(_can_be_written(node.meta["val"]) for node, _ in found):
            return None
        nodes += found
    return Place(product, tuple(nodes), tuple(rest))


def _can_be_written(value: torch.Tensor) -> bool:
    """Whether a tensor that lies as this one does can be written, whatever its sizes are."""
    return is_concrete(value) or dense_order(value) is not None


def _narrowed(node: Node, turned: bool, dtype: torch.dtype) -> list[tuple[Node, bool]]:
    """The copies in a type that are all there is of heads, some maybe turned back before; nothing where others are."""
    found: list[tuple[Node, bool]] = []
    for user in node.users:
        if user.target is aten._to_copy.default and user.meta["val"].dtype is dtype:
            found.append((user, turned))
        elif turned and is_turned(user, 4) is node and (copies := _narrowed(user, False, dtype)):
            found += copies
        else:
            return []
    return found


def find_gradients(written: Written) -> Gradients | None:
    """The gradients, or none of them in a graph without; ``None`` if something else reads what is in between."""
    softmaxes = [u for u in written.probabilities.users if u.target is aten._softmax_backward_data.default]
    if not softmaxes:
        return Gradients() if _closed(written.inner, (written.out, *_drawing(written))) else None
    if len(softmaxes) > 1:
        return None
    return _Finder(written, softmaxes[0]).find()


def _drawing(written: Written) -> list[Node]:
    return [node for node in (written.drawn, written.noise) if node is not None]


def _closed(inner: Sequence[Node], others: Sequence[Node]) -> bool:
    """Whether only these nodes read those that are no longer needed."""
    known = {*inner, *others}
    return all(user in known for node in inner for user in node.users)


class _Finder:
    """Walks both ways from the backward of a softmax."""

    def __init__(self, written: Written, softmax: Node) -> None:
        self.written, self.softmax = written, softmax
        self.inner = [*written.inner, softmax]
        self.of_scores = softmax
        self.slope = 1.0

    def find(self) -> Gradients | None:
        written = self.written
        weights_product = self._down()
        if weights_product is None or self.softmax.args[1] is not written.probabilities:
            return None
        if self.softmax.args[2] not in (-1, 3):
            return None
        gradient3, value_turned = weights_product.args
        _, _, weights3, value3 = written.factors
        if is_turned(value_turned, 3) is not value3 or not isinstance(gradient3, Node):
            return None
        of_value = self._product_with(weights3, gradient3)
        scores3 = self._up()
        if of_value is None or scores3 is None:
            return None
        query3, key3, _, _ = written.factors
        of_query = self._product_of(scores3, key3)
        of_key = self._product_with(query3, scores3)
        if of_query is None or of_key is None:
            return None
        readers = tuple(user for user in self.of_scores.users if user not in self.inner)
        replaced = (written.out, weights_product, of_value, of_query, of_key, *_drawing(written), *readers)
        if not _closed(self.inner, replaced):
            return None
        return self._places((of_query, of_key, of_value), gradient3, weights_product, readers)

    def _places(
        self, products: tuple[Node, Node, Node], gradient3: Node, first: Node, readers: tuple[Node, ...]
    ) -> Gradients | None:
        written = self.written
        batch, heads, queries, keys, width = written.shape
        of_queries, of_keys = (batch, heads, queries, width), (batch, heads, keys, width)
        query, key, value = written.operands
        gradient = find_operand(gradient3, of_queries, scales=False)
        places = (
            find_place(products[0], of_queries, query.scale, False, written.narrow),
            find_place(products[1], of_keys, key.scale, True, written.narrow),
            find_place(products[2], of_keys, value.scale, False),
        )
        if gradient is None or None in places:
            return None
        if gradient.source.meta["val"].dtype != written.out.meta["val"].dtype:
            return None
        slope = self.slope * query.factor * key.factor
        found = Gradients(*places, gradient, _earliest([first, *products]), slope)
        if readers:
            found = replace(found, of_scores=self.of_scores, readers=readers)
        return _of_shared_heads(found, written)

    def _down(self) -> Node | None:
        """From the backward of the softmax to the product of the gradient and the values."""
        node, reader, noise = self.softmax.args[0], self.softmax, self.written.noise
        scale = 1.0
        while isinstance(node, Node) and list(node.users) == [reader]:
            if node.target is aten.bmm.default:
                want = self.written.kept_scale if self.written.is_kept else 1.0
                return node if noise is None and math.isclose(scale, want, rel_tol=1e-6) else None
            self.inner.append(node)
            following = node.args[0]
            number = scaled_by(node)
            if number is not None:
                scale *= number
            elif node.target is aten.mul.Tensor:
                other, beside = self._other_factor(node, noise)
                following, scale, noise = other, scale * beside, None
            elif not _passes(node):
                return None
            reader, node = node, following
        return None

    def _other_factor(self, node: Node, noise: Node | None) -> tuple[Argument, float]:
        """What a node multiplies by what dropout multiplies weights by, and a number beside that."""
        for factor, other in (node.args[:2], node.args[1::-1]):
            passed: list[Node] = []
            found, scale = factor, 1.0
            while self.written.is_kept and isinstance(found, Node) and found is not noise:
                number = scaled_by(found)
                widens = found.target is aten._to_copy.default and found.meta["val"].is_floating_point()
                if number is None and not widens:
                    break
                passed.append(found)
                scale *= 1.0 if number is None else number
                found = found.args[0]
            if found is noise and noise is not None:
                self.inner += passed
                return other, scale
        return None, 1.0

    def _up(self) -> Node | None:
        """From the backward of the softmax to what is multiplied with queries and keys."""
        return self._up_from(self.softmax, self.written.condition is not None)

    def _up_from(self, source: Node, hides: bool) -> Node | None:
        """From a gradient of the scores, which others may read, too, if no mask is left (``hides``)."""
        self.of_scores = source
        for user in source.users:
            inner, slope = [*self.inner], self.slope
            found = self._up_along(user, source, hides)
            if found is not None:
                return found
            self.inner, self.slope = inner, slope
        return None

    def _up_along(self, node: Node, source: Node, hides: bool) -> Node | None:
        bends = self.written.cap != 0
        while True:
            number = scaled_by(node) if node.args and node.args[0] is source else None
            choice = hiding(node) if hides else None
            if number is not None:
                self.slope *= number
            elif choice is not None and self._is_the_mask(choice, source):
                hides = False
                if source is self.softmax:
                    self.inner.append(node)
                    return self._up_from(node, hides)
            elif bends and node.target is aten.tanh_backward.default and self._is_of_scores(node, source):
                bends = False
            elif not _passes(node):
                return None
            self.inner.append(node)
            if node.meta["val"].dim() == 3 and len(node.users) == 2:
                return None if hides or bends else node
            if len(node.users) != 1:
                return None
            source, node = node, next(iter(node.users))

    def _is_of_scores(self, node: Node, source: Node) -> bool:
        """Whether the tangent is the one that was found below the softmax."""
        gradient, tangent = node.args
        return gradient is source and tangent in self.written.inner

    def _is_the_mask(self, choice: tuple[Node, bool, float, Node], source: Node) -> bool:
        condition, inverted, number, tensor = choice
        same = condition is self.written.condition and inverted == self.written.inverted
        alike = same_sizes(source.meta["val"].shape, self.softmax.meta["val"].shape)
        return same and alike and number == 0 and tensor is source

    def _product_with(self, factor: Node, other: Node) -> Node | None:
        """The product of the transpose of a factor, and something."""
        for turned in factor.users:
            if is_turned(turned, 3) is factor:
                for product in turned.users:
                    if product.target is aten.bmm.default and product.args == (turned, other):
                        if factor in self.inner:
                            self.inner.append(turned)
                        return product
        return None

    def _product_of(self, left: Node, factor: Node) -> Node | None:
        """The product of something and the transpose of a factor."""
        for product in left.users:
            if (
                product.target is aten.bmm.default
                and product.args[0] is left
                and is_turned(product.args[1], 3) is factor
            ):
                return product
        return None


def _passes(node: Node) -> bool:
    """Whether a node gives on the numbers of a gradient, but for a rounding to a type of attention's."""
    return node.target in RESHAPES or is_cast(node)


def _earliest(nodes: Sequence[Node]) -> Node:
    wanted = set(nodes)
    return next(node for node in nodes[0].graph.nodes if node in wanted)


def _of_shared_heads(found: Gradients, written: Written) -> Gradients:
    """With the places of the gradients of heads that are shared, where these are found."""
    if not written.shares_heads:
        return found
    assert found.of_key is not None and found.of_value is not None
    places = [
        _summed(place, operand.source)
        for place, operand in zip((found.of_key, found.of_value), written.operands[1:], strict=True)
    ]
    if None in places:
        return replace(found, shares_heads=False)
    return replace(found, of_key=places[0], of_value=places[1])


def _summed(place: Place, heads: Node) -> Place | None:
    """The sums over heads that share one, of what is computed at a place."""
    if len(place.nodes) != 1 or place.rest:
        return None
    node, turned = place.nodes[0]
    if turned:
        readers = list(node.users)
        if len(readers) != 1 or is_turned(readers[0], 4) is not node:
            return None
        node = readers[0]
    found = sum_of_copies(node, tuple(heads.meta["val"].shape))
    if found is None or not _can_be_written(found.meta["val"]):
        return None
    return Place(place.product, ((found, False),))


def sum_of_copies(node: Node, shape: tuple[Number, ...]) -> Node | None:
    """Of the gradients of copies of heads, their sum, of ``shape``."""
    batch, heads, length, width = shape
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.sum.dim_IntList:
            value = node.meta["val"]
            if value.dim() != 5 or not same_sizes(value.shape, (batch, heads, value.shape[2], length, width)):
                return None
            if user.args[1] not in ([2], [-3]) or "dtype" in user.kwargs:
                return None
            return _of_shape(user, shape)
        if user.target not in RESHAPES:
            return None
        node = user
    return None


def _of_shape(node: Node, shape: tuple[Number, ...]) -> Node | None:
    while not same_sizes(node.meta["val"].shape, shape):
        if len(node.users) != 1:
            return None
        (node,) = node.users
        if node.target not in (*_VIEWS, aten.squeeze.dim, aten.squeeze.dims):
            return None
    return node
