"""Pass: what a backward is told about the maxima of windows is a byte for each.

Before, in a joint graph, ``max_pool2d_with_indices_backward(grad, x, .., indices)`` of the indices of the forward.
After, the same call on indices that are computed of bytes, which are computed of the forward's indices: the partitioner
keeps the bytes, an eighth of the memory.

Note [Offsets of maxima]
    The place of a maximum is a number of a pixel of the image. Where its window begins is known, so which pixel of the
    window it is says as much, and windows have few of them. The place minus that of the window's first pixel, which may
    lie in the padding, is ``row * dilation * width + column * dilation``; the second summand is less than ``width``, so
    both are found by a division. ATen has a maximum inside of the image for every window, also of nans and of -inf.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node

from ..passes import Pass
from .node_facts import escaping_nodes
from .patterns import emit
from .rewriting import rewriting

__all__ = ["JOINT_PASS", "has_max_pools", "keep_pool_offsets"]

aten = torch.ops.aten
_FORWARD = aten.max_pool2d_with_indices.default
_BACKWARD = aten.max_pool2d_with_indices_backward.default
_BYTE = 256
_COMPARED = 8
_MOST_PIXELS = 1 << 31


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows of a pool: rows and columns of them, their taps, steps, pads and dilation, and the image's width."""

    count: tuple[int, int]
    taps: tuple[int, int]
    steps: tuple[int, int]
    pads: tuple[int, int]
    dilation: tuple[int, int]
    width: int

    def first(self, rows: Any, columns: Any) -> Any:
        """The places of the windows' first pixels, of the numbers of their rows and columns."""
        top = aten.sub.Tensor(aten.mul.Tensor(rows, self.steps[0] * self.width), self.pads[0] * self.width)
        left = aten.sub.Tensor(aten.mul.Tensor(columns, self.steps[1]), self.pads[1])
        return aten.add.Tensor(aten.unsqueeze.default(top, 1), left)

    def offsets(self, indices: Any, rows: Any, columns: Any) -> Any:
        """Bytes of places."""
        inside = aten.sub.Tensor(aten._to_copy.default(indices, dtype=torch.int32), self.first(rows, columns))
        down, right = self.dilation[0] * self.width, self.dilation[1]
        row = _divided(inside, down, self.taps[0])
        column = _divided(aten.sub.Tensor(inside, aten.mul.Tensor(row, down)), right, self.taps[1])
        return aten._to_copy.default(aten.add.Tensor(aten.mul.Tensor(row, self.taps[1]), column), dtype=torch.uint8)

    def places(self, offsets: Any, rows: Any, columns: Any) -> Any:
        """Places of bytes."""
        tap = aten._to_copy.default(offsets, dtype=torch.int32)
        row = _divided(tap, self.taps[1], self.taps[0])
        column = aten.sub.Tensor(tap, aten.mul.Tensor(row, self.taps[1]))
        inside = aten.add.Tensor(
            aten.mul.Tensor(row, self.dilation[0] * self.width), aten.mul.Tensor(column, self.dilation[1])
        )
        return aten._to_copy.default(aten.add.Tensor(inside, self.first(rows, columns)), dtype=torch.int64)


def _divided(number: Any, by: int, least: int) -> Any:
    """The quotient of numbers that are not negative, less than ``least``: for a few, a count of comparisons, since
    vectors of integers are not divided by instructions."""
    if by == 1:
        return number
    if least > _COMPARED:
        return aten.div.Tensor_mode(number, by, rounding_mode="floor")
    reached = [aten._to_copy.default(aten.ge.Scalar(number, by * k), dtype=torch.int32) for k in range(1, least)]
    return functools.reduce(aten.add.Tensor, reached) if reached else aten.mul.Tensor(number, 0)


def has_max_pools(graph: Graph) -> bool:
    """Whether there may be something to do."""
    return bool(graph.find_nodes(op="call_function", target=_BACKWARD))


def keep_pool_offsets(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of rewrites. See Note [Offsets of maxima]."""
    found, escaping = 0, escaping_nodes(graph)
    for pool in graph.find_nodes(op="call_function", target=_FORWARD):
        windows = _windows(pool)
        if windows is None:
            continue
        for indices in _parts(pool, 1):
            readers = list(indices.users)
            if found < fuel and readers and indices not in escaping and all(map(_is_backward, readers)):
                _write_bytes(graph, windows, indices, readers)
                found += 1
    return found


def _parts(node: Node, number: int) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == number]


def _is_backward(node: Node) -> bool:
    return node.target is _BACKWARD


def _windows(pool: Node) -> _Windows | None:
    """The windows of a pool whose offsets fit bytes, and whose sizes are known."""
    image, values = pool.args[0].meta["val"], pool.meta["val"][0]  # type: ignore[union-attr]
    given = dict(zip(("taps", "steps", "pads", "dilation"), pool.args[1:5], strict=False))
    taps = _pair(given["taps"])
    steps, pads, dilation = (
        _pair(given.get(name) or default) for name, default in (("steps", taps), ("pads", 0), ("dilation", 1))
    )
    numbers = (*taps, *steps, *pads, *dilation, *image.shape, *values.shape)
    if not isinstance(image, FakeTensor) or not all(isinstance(number, int) for number in numbers):
        return None
    height, width = image.shape[-2:]
    rows, columns = values.shape[-2:]
    fits = taps[0] * taps[1] <= _BYTE and (taps[1] - 1) * dilation[1] < width
    if not fits or (height + 2 * pads[0]) * (width + 2 * pads[1]) >= _MOST_PIXELS or values.numel() == 0:
        return None
    return _Windows((rows, columns), taps, steps, pads, dilation, width)


def _pair(given: Any) -> tuple[Any, Any]:
    numbers = list(given) if isinstance(given, list | tuple) else [given]
    return (numbers[0], numbers[-1])


def _write_bytes(graph: Graph, windows: _Windows, indices: Node, readers: list[Node]) -> None:
    behind = indices.next
    rows, columns = (_numbers(graph, indices, behind, count) for count in windows.count)
    offsets = emit(graph, windows.offsets, behind, indices=indices, rows=rows, columns=columns)
    made = columns.next
    while made is not behind:
        made.meta.update(_told(indices))  # of whether it is recomputed, too
        made = made.next
    for reader in readers:
        places = emit(graph, windows.places, reader, offsets=offsets, rows=rows, columns=columns)
        assert offsets is not None and places is not None, "operators of integers take integers"
        reader.replace_input_with(indices, places)


def _numbers(graph: Graph, indices: Node, behind: Node, count: int) -> Node:
    """0, 1, .. before the node ``behind``."""
    value = indices.meta["val"]
    kwargs = {"dtype": torch.int32, "layout": torch.strided, "device": value.device, "pin_memory": False}
    with graph.inserting_before(behind):
        made = graph.call_function(aten.arange.start_step, (0, count, 1), kwargs)
    made.meta.update(_told(indices))
    with value.fake_mode:
        made.meta["val"] = aten.arange.start_step(0, count, 1, **kwargs)
    return made


def _told(node: Node) -> dict[str, Any]:
    """What is known of a node beside its value."""
    return {key: each for key, each in node.meta.items() if key not in ("val", "tensor_meta")}


JOINT_PASS = Pass(
    "keep-pool-offsets",
    rewriting(keep_pool_offsets),
    why="a byte for each window says where its maximum was, in the place of the eight that eager mode keeps",
    after=("mask-pooled-gradients",),
)
