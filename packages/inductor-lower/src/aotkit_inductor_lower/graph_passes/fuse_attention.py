"""Pass: attention written out becomes ATen's fused attention.

Before ``softmax(q @ k.T * scale + mask) @ v``, each product a ``bmm`` between views, copies and transposes, the scale a
factor or a divisor of the scores, with or without a mask that is added. After ATen's flash attention for the CPU, which
never writes the scores to memory. Requires that nothing else reads the scores (so not in training, where the backward
does), float32 or float64, known sizes, and a score matrix of at least ``_SMALLEST`` elements.

Note [Rows without a maximum]
    Where all scores of a row are -inf, eager's softmax gives NaN and flash attention 0. A row of the mask that is -inf
    is seen as such. Scores overflow only where the largest numbers of a query and of the keys allow it; such a row has
    0 where flash attention says the logarithm of its sum. Those rows are multiplied by NaN, all others by 1.

Note [Masks that replace scores]
    ``masked_fill`` and ``where`` also hide NaN and infinite scores, and a sum with a mask does not. So these spellings
    are rewritten under ``numerics="fast"`` only.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.positions import same_sizes
from ..passes import Pass, PassContext
from ..target import on_host
from .attention_nodes import number_of
from .node_facts import before_writes
from .patterns import emit
from .replace import replace_node
from .rewriting import rewriting

__all__ = ["PASS", "fuse_attention", "fuse_masked_attention"]

aten = torch.ops.aten
_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_SMALLEST = 256 * 256  # below, a generated softmax between two products is as fast
_LARGE = 1e30  # scores below this cannot overflow, not even with the smallest finite number added
_RESHAPES = frozenset(
    (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.clone.default)
)
_SCALES = frozenset((aten.mul.Tensor, aten.div.Tensor))
_FILLS = frozenset((aten.full.default, aten.scalar_tensor.default))


@dataclass(slots=True)
class _Scores:
    """What was found on the way from the softmax down to the first product."""

    product: Node
    scale: float = 1.0
    added: Node | None = None
    hidden: tuple[Node, bool, float] | None = None  # condition, where it holds the score is hidden, by what


def fuse_attention(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of attentions found."""
    return _fuse(graph, fuel, masked=False)


def fuse_masked_attention(graph: Graph, fuel: int) -> int:
    """The pass under ``numerics="fast"``: masks may replace scores as well."""
    return _fuse(graph, fuel, masked=True)


def _fuse(graph: Graph, fuel: int, *, masked: bool) -> int:
    found = 0
    for node in before_writes(graph):
        if found < fuel and node.target is aten.bmm.default:
            found += _rewrite(graph, node, masked)
    return found


def _rewrite(graph: Graph, node: Node, masked: bool) -> int:
    weights = _below(node.args[0], node)
    if weights is None or weights.target is not aten._softmax.default or not _over_rows(weights):
        return 0
    scores = _walk(weights, masked) if _suits(weights) else None
    if scores is None:
        return 0
    batch, heads, rows, keys = weights.meta["val"].shape
    query = _source(scores.product.args[0], (batch, heads, rows, None))
    key = _source(scores.product.args[1], (batch, heads, None, keys))
    transposed = key is None and _transposed(scores.product.args[1])  # the other way to write q @ k.T
    if transposed:
        key = _source(transposed, (batch, heads, keys, None))
    value = _source(node.args[1], (batch, heads, keys, None))
    if query is None or key is None or value is None:
        return 0
    width = query.meta["val"].shape[-1]
    if value.meta["val"].shape[-1] != width or not _mask_fits(scores.added, weights):
        return 0
    if scores.hidden is not None and scores.hidden[0].meta["val"].dim() not in (2, 4):
        return 0  # the call takes no other masks
    call = _Attention(scores, tuple(node.meta["val"].shape), bool(transposed))
    given: dict[str, Any] = {"query": query, "key": key, "value": value}
    if scores.added is not None:
        given["mask"] = scores.added
    elif scores.hidden is not None:
        given["condition"] = scores.hidden[0]
    new = emit(graph, call, node, **given)
    if new is None:
        return 0
    return int(replace_node(node, new))


@dataclass(frozen=True, slots=True)
class _Attention:
    """What is written instead, as a function of nodes."""

    scores: _Scores
    shape: tuple[int, ...]
    rows_of_keys: bool

    def __call__(self, query: Any, key: Any, value: Any, mask: Any = None, condition: Any = None) -> Any:
        if condition is not None and self.scores.hidden is not None:
            _, holds, filler = self.scores.hidden
            values = (filler, 0.0) if holds else (0.0, filler)
            # of the query's type: the call reads a mask of another one as if it had this
            mask = aten.where.self(condition, *(aten.new_full.default(query, [], value) for value in values))
        elif mask is not None:
            mask = _with_unit_stride(mask, -1, mask)
        query, value = _with_unit_stride(query, -1, query), _with_unit_stride(value, -1, value)
        if self.rows_of_keys:
            key = _with_unit_stride(key, -1, key)
        else:
            key = _with_unit_stride(key, -2, aten.transpose.int(key, 2, 3))
        settings = {"scale": self.scores.scale} if mask is None else {"attn_mask": mask, "scale": self.scores.scale}
        both = _FLASH(query, key, value, 0.0, False, **settings)
        result, total = operator.getitem(both, 0), operator.getitem(both, 1)
        widest = aten.amax.default(aten.abs.default(key), [-2, -1])
        largest = aten.mul.Tensor(aten.amax.default(aten.abs.default(query), [-1]), aten.unsqueeze.default(widest, -1))
        factor = max(1.0, abs(self.scores.scale)) * self.shape[-1]  # of sums of so many products
        bounded = aten.lt.Scalar(largest, _LARGE / factor)
        lost = aten.logical_and.default(aten.eq.Scalar(total, 0), aten.logical_not.default(bounded))
        if mask is not None:
            lost = aten.logical_or.default(lost, aten.eq.Scalar(aten.amax.default(mask, [-1]), -math.inf))
        result = aten.mul.Tensor(result, aten.unsqueeze.default(aten.where.Scalar(lost, math.nan, 1.0), -1))
        return aten.view.default(aten.clone.default(result, memory_format=torch.contiguous_format), list(self.shape))


def _with_unit_stride(given: Any, dim: int, proxy: Any) -> Any:
    """``proxy``, copied where ``given`` has gaps along ``dim``: the kernel reads rows without a stride."""
    value = given.node.meta["val"]
    if value.stride(dim) == 1:
        return proxy
    return aten.clone.default(proxy, memory_format=torch.contiguous_format)


def _below(node: Any, reader: Node) -> Node | None:
    """What a chain of views and copies was made of, each read only by the next."""
    while isinstance(node, Node) and list(node.users) == [reader]:
        if node.target not in _RESHAPES:
            return node
        reader, node = node, node.args[0]
    return None


def _over_rows(softmax: Node) -> bool:
    return softmax.args[1] in (-1, softmax.meta["val"].dim() - 1) and softmax.args[2] is False


def _suits(softmax: Node) -> bool:
    value = softmax.meta["val"]
    if value.dim() != 4 or value.dtype not in (torch.float32, torch.float64) or not on_host(value):
        return False
    if not all(isinstance(size, int) for size in value.shape):
        return False
    return bool(value.shape[2] * value.shape[3] >= _SMALLEST)


def _walk(softmax: Node, masked: bool) -> _Scores | None:
    """From the softmax down to the product: a mask first, then scales."""
    node, reader = softmax.args[0], softmax
    scale = 1.0
    added: Any = None
    hidden: Any = None
    while True:
        found = _below(node, reader)
        if found is None:
            return None
        if found.target is aten.bmm.default:
            return _Scores(found, scale, added, hidden)
        lies_as_weights = same_sizes(found.meta["val"].shape, softmax.meta["val"].shape)
        if found.kwargs or not (lies_as_weights or found.target in _SCALES):
            return None
        first, reader = found.args[0], found
        if found.target in _SCALES and (number := _number(found.args[1])) is not None:
            scale = scale * number if found.target is aten.mul.Tensor else scale / number if number else math.nan
            if not math.isfinite(scale):
                return None
            node = first
        elif found.target is aten.add.Tensor and added is hidden is None and scale == 1.0 and _is_tensor(found.args[1]):
            operands = (first, found.args[1])
            product_first = _leads_to_product(first)
            node, added = operands if product_first else operands[::-1]
        elif masked and added is hidden is None and scale == 1.0 and (choice := _choice(found)) is not None:
            node, hidden = choice
        else:
            return None


def _choice(node: Node) -> tuple[Any, tuple[Any, bool, float]] | None:
    """The scores below a mask that replaces some of them by a very small number, and the mask as ``hidden`` says it."""
    if node.target is aten.masked_fill.Scalar:
        scores, condition, filler = node.args
        found: Any = (scores, (condition, True, _number(filler)))
    elif node.target is aten.where.self:
        condition, yes, no = node.args
        holds = _number(yes) is not None
        found = (no if holds else yes, (condition, holds, _number(yes if holds else no)))
    else:
        return None
    return found if found[1][2] is not None and found[1][2] <= -_LARGE else None


def _is_tensor(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _leads_to_product(node: object) -> bool:
    """Whether this operand of a sum is the scores: scales and views of a product."""
    while isinstance(node, Node):
        if node.target is aten.bmm.default:
            return True
        if node.target not in _RESHAPES and node.target not in _SCALES:
            return False
        node = node.args[0]
    return False


def _number(value: object) -> float | None:
    """A number, or a tensor of one number that the graph makes."""
    if isinstance(value, Node) and (value.target not in _FILLS or value.meta["val"].dim()):
        return None
    return number_of(value)


def _source(node: object, shape: tuple[int | None, ...]) -> Node | None:
    """The tensor of four dimensions, of this shape where it tells one, that an operand is a view or copy of."""
    while isinstance(node, Node) and node.op == "call_function" and node.target in _RESHAPES:
        value = node.meta["val"]
        if value.dim() == 4 and node.target is not aten.clone.default and node.target is not aten.expand.default:
            break
        node = node.args[0]  # type: ignore[assignment]
    if not _is_tensor(node):
        return None
    assert isinstance(node, Node)
    got = tuple(node.meta["val"].shape)
    same = len(got) == 4 and all(want in (None, size) for want, size in zip(shape, got, strict=True))
    return node if same else None


def _transposed(node: object) -> Node | None:
    """The matrices that this node has the transposes of."""
    if not isinstance(node, Node) or node.target is not aten.transpose.int or node.meta["val"].dim() != 3:
        return None
    given, *dims = node.args
    numbers = {dim % 3 for dim in dims if isinstance(dim, int)}
    return given if numbers == {1, 2} and isinstance(given, Node) else None


def _mask_fits(mask: Node | None, softmax: Node) -> bool:
    """Whether the kernel takes this mask as it is."""
    if mask is None:
        return True
    value, scores = mask.meta["val"], softmax.meta["val"]
    if value.dtype is not scores.dtype or value.dim() not in (2, 4) or value.shape[-1] != scores.shape[-1]:
        return False
    return all(size in (1, full) for size, full in zip(reversed(value.shape), reversed(scores.shape), strict=False))


def _run(graph: Graph, ctx: PassContext) -> Graph:
    return rewriting(fuse_masked_attention if ctx.options.numerics == "fast" else fuse_attention)(graph, ctx)


PASS = Pass(
    "fuse-attention",
    _run,
    why="attention that is written out becomes one call, which never writes the scores to memory",
    after=("remove-noops",),
)
