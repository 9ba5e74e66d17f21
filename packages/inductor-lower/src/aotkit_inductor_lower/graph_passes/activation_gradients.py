"""Passes over joint graphs: gradients of activations read what is kept anyway.

``gradients-of-results``: before ``hardtanh_backward(grad, x, low, high)``, after the same of ``y = hardtanh(x, low,
high)``, which the next layer keeps; behind a pad (``constant_pad_nd(y)``, read by a gradient of a convolution) of the
part of its result that ``y`` is. ``leaky_relu_backward`` and, of a pad, ``threshold_backward`` likewise.

``mask-pooled-gradients``: before ``threshold_backward(max_pool2d_with_indices_backward(grad, y, ..), y)``, after
``max_pool2d_with_indices_backward(threshold_backward(grad, pooled), ..)``: what is pooled is kept, ``y`` not.

Note [Gradients of results]
    ``hardtanh`` is between its bounds where ``x`` is, and a nan of a nan, so the gradient has the same bits; the bounds
    must be numbers of the tensor's type, since the result is rounded and they are not. (The gradient of an in-place
    ``hardtanh_`` is eager's own example.) A caller may write to a result that leaves the graph, which eager mode does
    not read again, so such results are left alone.

Note [Masks before pools]
    A window's gradient goes to its maximum, so to an element whose value the pooled result has. An activation that only
    hides gradients hides those of all windows with that maximum, or none. Of its image the pool's gradient reads the
    sizes and nothing else: an empty tensor says them, which takes no memory where the kernel is ours.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..passes import Pass
from .node_facts import escaping_nodes, same_tensor_type
from .patterns import emit
from .rewriting import rewriting

__all__ = ["POOLED_PASS", "RESULTS_PASS", "has_activation_gradients", "mask_pooled_gradients", "read_results"]

aten = torch.ops.aten
_HARDTANH, _HARDTANH_GRADIENT = aten.hardtanh.default, aten.hardtanh_backward.default
_LEAKY, _LEAKY_GRADIENT = aten.leaky_relu.default, aten.leaky_relu_backward.default
_THRESHOLD = aten.threshold_backward.default
_GRADIENTS = (_HARDTANH_GRADIENT, _LEAKY_GRADIENT, _THRESHOLD)
_MASKS = (_HARDTANH_GRADIENT, _THRESHOLD)
_PAD, _POOL = aten.constant_pad_nd.default, aten.max_pool2d_with_indices.default
_POOL_GRADIENT = aten.max_pool2d_with_indices_backward.default


def has_activation_gradients(graph: Graph) -> bool:
    """Whether there may be something to do."""
    return any(graph.find_nodes(op="call_function", target=target) for target in _GRADIENTS)


def _gradients(graph: Graph, targets: Sequence[Any]) -> Iterator[Node]:
    for target in targets:
        yield from graph.find_nodes(op="call_function", target=target)


def read_results(graph: Graph, fuel: int) -> int:
    """Run the pass ``gradients-of-results``; the number of rewrites. See Note [Gradients of results]."""
    found, escaping = 0, escaping_nodes(graph)
    for node in _gradients(graph, _GRADIENTS):
        read = node.args[1]
        result = _result(node)
        if found >= fuel or result is None or result in escaping:
            continue
        padded = _kept_pad(result, node)
        if padded is not None and padded not in escaping and _read_inside(graph, node, padded, result):
            found += 1
        elif result is not read and same_tensor_type(result, read):  # type: ignore[arg-type]
            _read(node, result)
            found += 1
    return found


def _result(node: Node) -> Node | None:
    """The result of the activation that a gradient is of, where that says as much as what was given to it."""
    read = node.args[1]
    if not isinstance(read, Node) or not isinstance(read.meta.get("val"), torch.Tensor):
        return None
    if node.target is _THRESHOLD:
        return read if read.target is aten.relu.default else None
    forward = _HARDTANH if node.target is _HARDTANH_GRADIENT else _LEAKY
    numbers = _numbers(node)
    if numbers is None or not _are_exact(numbers, read.meta["val"].dtype, node.target):
        return None
    if read.target is forward:  # of an in-place activation, or rewritten already
        return read if _forward_numbers(read) == numbers else None
    made = (user for user in read.users if user.target is forward and user.args[0] is read)
    return next((user for user in made if _forward_numbers(user) == numbers), None)


def _numbers(node: Node) -> tuple[float, ...] | None:
    """The bounds or the slope of a gradient."""
    numbers = node.args[2:4] if node.target is _HARDTANH_GRADIENT else node.args[2:3]
    plain = all(isinstance(number, int | float) for number in numbers)
    return tuple(float(number) for number in numbers) if plain else None  # type: ignore[arg-type]


def _forward_numbers(node: Node) -> tuple[object, ...]:
    """The bounds or the slope of an activation, with those that its schema has for it."""
    declared = (argument.default_value for argument in node.target._schema.arguments[1:])  # type: ignore[union-attr]
    return tuple(node.args[k + 1] if k + 1 < len(node.args) else default for k, default in enumerate(declared))


def _are_exact(numbers: Sequence[float], dtype: torch.dtype, target: object) -> bool:
    """Whether a result is on the same side of the bounds as what it was made of."""
    if target is _LEAKY_GRADIENT:
        return numbers[0] >= 0
    return all(torch.tensor(number, dtype=dtype).item() == number for number in numbers)


def _kept_pad(result: Node, gradient: Node) -> Node | None:
    """The pad that alone reads a result in the forward, and whose own result a gradient of a convolution reads."""
    others = [user for user in result.users if user is not gradient]
    if len(others) != 1 or others[0].target is not _PAD or others[0].args[0] is not result:
        return None
    pad = others[0]
    sizes = pad.args[1]
    adds = isinstance(sizes, list | tuple) and all(isinstance(size, int) and size >= 0 for size in sizes)
    return pad if adds and any(user.target is aten.convolution_backward.default for user in pad.users) else None


def _read_inside(graph: Graph, node: Node, pad: Node, result: Node) -> bool:
    """Let a gradient read the part of a pad's result that is no padding."""
    sizes, last = pad.args[1], result.meta["val"].dim() - 1
    assert isinstance(sizes, list | tuple)

    def written(grad: Any, image: Any) -> Any:
        for k, (before, behind) in enumerate(zip(sizes[::2], sizes[1::2], strict=True)):
            if before or behind:
                image = aten.slice.Tensor(image, last - k, before, -behind if behind else sys.maxsize)
        return _of(node)(grad, image)

    return _replace(graph, node, written, grad=node.args[0], image=pad)


def _of(node: Node) -> Callable[[Any, Any], Any]:
    """The same gradient, of another result."""
    rest = (True,) if node.target is _LEAKY_GRADIENT else ()
    count = 3 if rest else len(node.args)
    return lambda grad, result: node.target(grad, result, *node.args[2:count], *rest)  # type: ignore[operator]


def _read(node: Node, result: Node) -> None:
    node.update_arg(1, result)
    if node.target is _LEAKY_GRADIENT:
        node.args = (*node.args[:3], True)


def _replace(graph: Graph, node: Node, written: Callable[..., Any], **given: Any) -> bool:
    """Write something in the place of a node, if it has the same type and layout."""
    before = node.prev
    new = emit(graph, written, node, **given)
    if new is not None and same_tensor_type(new, node):
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        return True
    while node.prev is not before:
        graph.erase_node(node.prev)
    return False


def mask_pooled_gradients(graph: Graph, fuel: int) -> int:
    """Run the pass ``mask-pooled-gradients``; the number of rewrites. See Note [Masks before pools]."""
    found, escaping = 0, escaping_nodes(graph)
    for node in _gradients(graph, _MASKS):
        pooled = _pooled(node) if found < fuel else None
        if pooled is not None and pooled not in escaping and _mask_pooled(graph, node, pooled):
            found += 1
    return found


def _pooled(node: Node) -> Node | None:
    """What the activation was pooled to whose gradient is masked, if nothing else reads the activation."""
    pooling, image = node.args[:2]
    if not isinstance(pooling, Node) or pooling.target is not _POOL_GRADIENT or len(pooling.users) != 1:
        return None
    if not isinstance(image, Node) or image is not pooling.args[1]:
        return None
    forwards = [user for user in image.users if user not in (node, pooling)]
    if len(forwards) != 1 or forwards[0].target is not _POOL or not _sizes_are_known(image.meta["val"]):
        return None
    parts = [user for user in forwards[0].users if user.target is operator.getitem and user.args[1] == 0]
    indices = pooling.args[-1]
    has_indices = isinstance(indices, Node) and indices.target is operator.getitem and indices.args == (forwards[0], 1)
    return parts[0] if len(parts) == 1 and has_indices else None


def _sizes_are_known(value: torch.Tensor) -> bool:
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


def _mask_pooled(graph: Graph, node: Node, pooled: Node) -> bool:
    pooling = node.args[0]
    assert isinstance(pooling, Node)
    image, rest = pooling.args[1].meta["val"], pooling.args[2:-1]  # type: ignore[union-attr]
    sizes, strides = list(image.shape), list(image.stride())

    def written(grad: Any, result: Any, indices: Any) -> Any:
        like = aten.new_empty_strided.default(grad, sizes, strides)  # made of the gradient, so in the backward
        return aten.max_pool2d_with_indices_backward.default(_of(node)(grad, result), like, *rest, indices)

    return _replace(graph, node, written, grad=pooling.args[0], result=pooled, indices=pooling.args[-1])


RESULTS_PASS = Pass(
    "gradients-of-results",
    rewriting(read_results),
    why="the result of an activation is kept for the next layer, so that what it was made of need not be",
)
POOLED_PASS = Pass(
    "mask-pooled-gradients",
    rewriting(mask_pooled_gradients),
    why="the gradient of an activation before a max pool reads the pooled result, so that the whole one is not kept",
    after=("gradients-of-results",),
)
