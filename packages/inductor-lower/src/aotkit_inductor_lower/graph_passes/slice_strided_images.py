"""Pass: the gradient by weights of a convolution that steps over pixels one by one is that of the pixels it reads.

Before ``convolution_backward(grad, x, w, stride 2)`` of 1x1 weights, images with their channels together. After the
same call for its other results, and ``convolution_backward(grad, x[:, :, ::2, ::2], w, stride 1)`` for that by weights:
the same sums.

Note [A gradient that writes beside its memory]
    oneDNN's ``jit_1x1:avx512_core`` gradient by weights, with a stride and channels together, writes beside its scratch
    memory on several threads: torch 2.13 on an Intel Xeon (AVX-512), 17 images of 12x12 from 8 to 16 channels, stride
    2, two threads. With a closed page behind every allocation it ends in a segmentation fault; without, in
    "corrupted size vs. prev_size" or in wrong numbers later. Eager mode does the same. With a stride of 1 there is no
    such scratch memory.
"""

from __future__ import annotations

import operator
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node

from ..passes import Pass, PassContext
from ..target import on_host
from .patterns import emit
from .rewriting import drop_dead_nodes

__all__ = ["PASS", "slice_strided_images"]

aten = torch.ops.aten
_BACKWARD = aten.convolution_backward.default
_BY_WEIGHTS = 1


def slice_strided_images(graph: Graph, _: PassContext) -> Graph:
    """Run the pass."""
    calls = graph.find_nodes(op="call_function", target=_BACKWARD)
    first = calls[0].args[1].meta["val"] if calls else None
    if not isinstance(first, FakeTensor):
        return graph
    env = first.fake_mode.shape_env
    with nullcontext() if env is None else env.suppress_guards():
        found = [node for node in calls if _is_wrong(node)]
        for node in found:
            _replace(graph, node)
    if found:
        drop_dead_nodes(graph)
    return graph


def _is_wrong(node: Node) -> bool:
    """Whether oneDNN's kernel for this call may be the one of the note."""
    _, x, w, _, stride, pad, _, transposed, _, _, wanted = node.args
    image, weights = (arg.meta["val"] for arg in (x, w) if isinstance(arg, Node))
    if not isinstance(image, FakeTensor) or image.dim() != 4 or not on_host(image):
        return False
    steps, pads = list(stride), list(pad)  # type: ignore[arg-type]
    if not all(isinstance(number, int) for number in (*steps, *pads)):  # known at run time: the call stays eager's own
        return False
    return (
        bool(wanted[_BY_WEIGHTS])  # type: ignore[index]
        and not transposed
        and max(steps) > 1
        and max(pads) == 0
        and all(size == 1 for size in weights.shape[2:])
        and image.is_contiguous(memory_format=torch.channels_last)
    )


def _replace(graph: Graph, node: Node) -> None:
    """Its gradient by weights by a call of its own, and the node for what else it gives."""
    grad, x, w, _, stride, *others, wanted = node.args
    steps = list(stride) * (1 if len(stride) == 2 else 2)  # type: ignore[arg-type]

    def by_weights(grad: Any, x: Any, w: Any) -> Any:
        for dim, step in enumerate(steps, 2):
            x = aten.slice.Tensor(x, dim, 0, sys.maxsize, step)
        x = aten.clone.default(x, memory_format=torch.channels_last)
        return _BACKWARD(grad, x, w, None, [1, 1], *others, [False, True, False])[_BY_WEIGHTS]

    own = emit(graph, by_weights, node, grad=grad, x=x, w=w)
    assert own is not None, "the same call with fewer pixels"
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == _BY_WEIGHTS:
            own.meta.update({**user.meta, "val": own.meta["val"]})
            user.replace_all_uses_with(own)
            graph.erase_node(user)
    left = [bool(each) and number != _BY_WEIGHTS for number, each in enumerate(wanted)]  # type: ignore[arg-type]
    node.args = (*node.args[:-1], left)
    node.meta["val"] = tuple(value if kept else None for value, kept in zip(node.meta["val"], left, strict=True))


PASS = Pass(
    "slice-strided-images",
    slice_strided_images,
    why="oneDNN's gradient by 1x1 weights writes beside its memory where it steps over pixels",
    after=("channels-last",),
    required=True,
)
