"""Pass: local rewrites that hold for every value, NaN, infinities and signed zeros included.

One row each: chains of views and of conversions, batches of one, running sums of a repeated integer. They change no
bit of a result, but for batches of one: there a library is called for `mm` in place of `bmm`, and may add the same
terms in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..passes import Pass
from .node_facts import same_tensor_type
from .patterns import Bound, Rewrite, apply_rewrites
from .rewriting import rewriting

__all__ = ["PASS", "SIMPLIFICATIONS", "simplify"]

aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default


def _then(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Two permutations as one; negative numbers count from the end."""
    return [first[p] % len(first) for p in second]


def _widens(bound: Bound) -> bool:
    """Whether a conversion keeps every value, so that what is done to its result may be done to its argument: only a
    type with as many digits and as large an exponent does (float32 -> bfloat16 -> float32 stays)."""
    source, middle = bound["x"].meta["val"].dtype, bound["middle"]
    return (source, middle) in _LOSSLESS


_LOSSLESS = frozenset(
    (
        *((half, wide) for half in (torch.float16, torch.bfloat16) for wide in (torch.float32, torch.float64)),
        (torch.float32, torch.float64),
        *((torch.uint8, wide) for wide in (torch.int16, torch.int32, torch.int64)),
        *((torch.int8, wide) for wide in (torch.int16, torch.int32, torch.int64)),
        *((torch.int16, wide) for wide in (torch.int32, torch.int64)),
        (torch.int32, torch.int64),
    )
)


def _single_batch(bound: Bound) -> bool:
    value = bound["a"].meta["val"]
    return isinstance(value.shape[0], int) and value.shape[0] == 1


def _one_term(bound: Bound) -> bool:
    """Whether each element of a matrix product is one product, as in ``einsum("bi,bj->bij")``."""
    size = bound["a"].meta["val"].shape[-1]
    return isinstance(size, int) and size == 1


def _products(a: Any, b: Any) -> Any:
    """The sum of one term: it begins with zero, so no element is a negative zero."""
    return aten.add.Tensor(aten.mul.Tensor(a, b), 0)


def _whole_running_sum(bound: Bound) -> bool:
    """Whether one integer is added up, and each partial sum is exact: then a product gives the same bits."""
    x, root = bound["x"], bound["root"].meta["val"]
    if not isinstance(x, Node) or x.target is not aten.full.default or x.meta["val"].dtype is not root.dtype:
        return False
    shape, value = root.shape, x.args[1]
    if isinstance(value, bool) or not isinstance(value, int | float) or not all(isinstance(s, int) for s in shape):
        return False
    if not shape or not math.isfinite(value) or value != int(value) or math.copysign(1, value) < 0:
        return False
    limit = {torch.float32: 2**24, torch.float64: 2**53, torch.int64: 2**62}.get(root.dtype, 0)
    return int(value) * shape[bound["dim"]] < limit


def _applied(packet: Any) -> Callable[..., Any]:
    return lambda x: packet.default(x)


def _of_integers(bound: Bound) -> bool:
    dtype = bound["x"].meta["val"].dtype
    return not dtype.is_floating_point and not dtype.is_complex


def _same_sizes(bound: Bound) -> bool:
    """Whether all of it is overwritten: the sizes are those of the whole."""
    return isinstance(bound["new"], Node) and same_tensor_type(bound["new"], bound["root"])


def _copies_as_it_is(bound: Bound) -> bool:
    """Whether the copy changes nothing but strides, which the scatter does not look at."""
    return isinstance(bound["new"], Node) and same_tensor_type(bound["x"], bound["new"], strides=False)


def _multiples(x: Any, dim: int) -> Any:
    full = x.node
    val, shape, (_, value) = full.meta["val"], list(full.meta["val"].shape), full.args
    sizes = [1] * len(shape)
    sizes[dim] = shape[dim]
    kind = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
    steps = x.tracer.create_proxy("call_function", aten.arange.start_step, (1, shape[dim] + 1, 1), kind)
    return aten.clone.default(
        aten.expand.default(aten.view.default(aten.mul.Tensor(steps, value), sizes), shape),
        memory_format=torch.contiguous_format,
    )


SIMPLIFICATIONS: tuple[Rewrite, ...] = (
    Rewrite(lambda x, a, b: aten.view.default(aten.view.default(x, a), b), lambda x, b: aten.view.default(x, b)),
    Rewrite(
        lambda x, a, b: aten.permute.default(aten.permute.default(x, a), b),
        lambda x, a, b: x if _then(a, b) == [*range(len(a))] else aten.permute.default(x, _then(a, b)),
    ),
    Rewrite(lambda x: aten.t.default(aten.t.default(x)), lambda x: x),
    Rewrite(lambda x, a, b: aten.transpose.int(aten.transpose.int(x, a, b), a, b), lambda x: x),
    Rewrite(lambda x, a, b: aten.transpose.int(aten.transpose.int(x, a, b), b, a), lambda x: x),
    Rewrite(lambda x, d: aten.squeeze.dim(aten.unsqueeze.default(x, d), d), lambda x: x),
    Rewrite(
        lambda x, middle, dtype: _convert(_convert(x, middle), dtype),
        lambda x, dtype: x if x.node.meta["val"].dtype is dtype else _convert(x, dtype),
        _widens,
    ),
    Rewrite(
        lambda x, middle, dtype: aten._to_copy.default(aten._to_copy.default(x, dtype=middle), dtype=dtype),
        lambda x, dtype: x if x.node.meta["val"].dtype is dtype else aten._to_copy.default(x, dtype=dtype),
        _widens,
    ),
    Rewrite(lambda a, b: aten.bmm.default(a, b), _products, _one_term),
    Rewrite(lambda a, b: aten.mm.default(a, b), _products, _one_term),
    Rewrite(
        lambda a, b: aten.bmm.default(a, b),
        lambda a, b: aten.unsqueeze.default(aten.mm.default(aten.squeeze.dim(a, 0), aten.squeeze.dim(b, 0)), 0),
        _single_batch,
    ),
    Rewrite(lambda x: aten.pow.Tensor_Scalar(x, 1), lambda x: x),
    Rewrite(lambda x: aten.mul.Tensor(x, 1), lambda x: x),
    Rewrite(lambda x: aten.mul.Tensor(x, 1.0), lambda x: x),
    *(Rewrite(_applied(op), lambda x: x, _of_integers) for op in (aten.ceil, aten.floor, aten.round, aten.trunc)),
    Rewrite(lambda x, times: aten.repeat.default(x, times), lambda x: x, lambda bound: set(bound["times"]) == {1}),
    Rewrite(
        lambda x, pads, value: aten.constant_pad_nd.default(x, pads, value),
        lambda x: x,
        lambda bound: set(bound["pads"]) == {0},
    ),
    Rewrite(lambda x, new, d, a, b: aten.slice_scatter.default(x, new, d, a, b), lambda new: new, _same_sizes),
    Rewrite(lambda x, new: aten.copy.default(x, new), lambda new: new),
    Rewrite(
        lambda k, x, new, d, a, b: aten.slice_scatter.default(k, aten.copy.default(x, new), d, a, b),
        lambda k, new, d, a, b: aten.slice_scatter.default(k, new, d, a, b),
        _copies_as_it_is,
    ),
    Rewrite(
        lambda k, x, new, d, i: aten.select_scatter.default(k, aten.copy.default(x, new), d, i),
        lambda k, new, d, i: aten.select_scatter.default(k, new, d, i),
        _copies_as_it_is,
    ),
    Rewrite(lambda x, dim: aten.cumsum.default(x, dim), _multiples, _whole_running_sum),
)


def simplify(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of rewrites."""
    return apply_rewrites(graph, SIMPLIFICATIONS, fuel)


PASS = Pass(
    "simplify",
    rewriting(simplify),
    why="chains of views and conversions become one, and batches of one a plain product",
    after=("remove-noops", "fold-uniform"),
)
