"""Pass: convolutions whose places share no pixels, and their gradients, become products of matrices.

Before ``convolution(x, w, b, stride)`` of a stride as large as the weights, without padding. After ``addmm(b, p, m)``
with a row of ``p`` for each patch of the images, and the weights as a matrix ``m``. Before ``convolution_backward``, of
such a convolution: a product that gives the patches' gradients, which are put side by side, and one of the arriving
gradients with ``p``. What is left of the call is called.

Note [Patches as rows]
    The patches of images are these images with their pixels in another order, but for pixels right and below that fill
    no patch. So a convolution of patches is one product, and nothing is added up or multiplied twice. Where the
    channels of a pixel lie together, a row of a patch does in memory, and to order pixels by patches is to copy such
    rows; elsewhere it is to copy rows of pixels of a channel, and weights are taken in that order, too. The copy is a
    kernel of ours, so that it is made by what computes the images, where that is one, and that of gradients by what
    reads them. Weights as a matrix are a view, if they lie as the images do; of constants, then, nothing is copied.

Note [Which patches are products]
    Measured on Zen 3 (AVX2 and FMA, no AVX-512; `python -m tools.bench.convolutions --only patches`, and with `--layout
    contiguous`), where MKL's products run faster than oneDNN's convolutions. Of float32 forward and by weights from
    :data:`RESULTS` results and :data:`SUMMED` numbers of a patch on; of less the copy takes as long as the product.
    Gradients by images always, also where a patch is a pixel and channels lie together, for which nothing is copied.
    Of bfloat16, for which ATen has no vectors there, and products are kernels of ours, all that fill a tile
    (:data:`SHORT`); of one tap by weights, as the others are ours anyway. Other processors were not measured, and keep
    the call, or what they have for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node

from ..passes import NO_FUEL, Decision, Pass, PassContext
from ..target import on_host
from .node_facts import before_writes
from .patterns import emit
from .replace import replace_node
from .rewriting import drop_dead_nodes

__all__ = ["PASS", "multiply_patches"]

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_BY_IMAGES, _BY_WEIGHTS, _BY_BIAS = range(3)
_NAMES = {None: "", _BY_IMAGES: " by its input", _BY_WEIGHTS: " by its weights"}
RESULTS, SUMMED = 32, 128
SHORT = 16, 16  # results and numbers of a patch, of bfloat16


def multiply_patches(graph: Graph, ctx: PassContext) -> Graph:
    """Run the pass."""
    early = frozenset(before_writes(graph))
    done = 0
    for node in [node for node in graph.nodes if node.target in (_FORWARD, _BACKWARD)]:
        patches = _Patches.of(node, ctx, node in early)
        if patches is None:
            continue
        env = node.args[0].meta["val"].fake_mode.shape_env
        with nullcontext() if env is None else env.suppress_guards():
            rewritten = _forward if node.target is _FORWARD else _backward
            done += rewritten(graph, patches, ctx)
    if done:
        drop_dead_nodes(graph)
    return graph


@dataclass(frozen=True, slots=True)
class _Patches:
    """A convolution of patches, ``taps`` in size, ``places`` of them down and across an image, or its gradients.

    ``together``: the channels of a pixel are neighbours in a row of a patch. ``source`` and ``weights``: as they were
    before they were copied into another layout."""

    node: Node
    images: Node
    source: Node
    weights: Node
    places: tuple[int, int]
    taps: tuple[int, int]
    together: bool

    @staticmethod
    def of(node: Node, ctx: PassContext, early: bool) -> _Patches | None:
        """What a call computes, if it is one of patches. ``early``: what was copied before it is still there."""
        first = int(node.target is _BACKWARD)
        tensors = [arg for arg in node.args[: first + 2] if isinstance(arg, Node)]
        values: list[Any] = [each.meta.get("val") for each in tensors]
        if len(values) != first + 2 or not all(isinstance(v, FakeTensor) and v.dim() == 4 for v in values):
            return None
        own = all(on_host(v) and v.dtype == values[0].dtype for v in values)
        if not own or str(values[0].dtype).removeprefix("torch.") not in ctx.target.capabilities.patches:
            return None
        images, weights = values[first:]
        taps = _numbers(weights.shape[2:])
        size = _numbers((*images.shape[1:], *weights.shape[:2]))
        *numbers, transposed, _, groups = node.args[first + 3 : first + 9]  # behind the bias, or its sizes
        stride, pad, dilation = map(_numbers, numbers)
        if taps is None or size is None or 0 in (*taps, *size) or node.kwargs or transposed or groups != 1:
            return None
        if stride is None or pad is None or dilation is None or {*pad} != {0} or {*dilation} != {1}:
            return None
        if (stride * 2 if len(stride) == 1 else stride) != taps:
            return None
        source, matrix = (_before_copies(each) if early else each for each in tensors[first:])
        places = size[1] // taps[0], size[2] // taps[1]
        plain = source.meta["val"].stride(1) != 1 and matrix.meta["val"].is_contiguous()
        return _Patches(node, tensors[first], source, matrix, places, (taps[0], taps[1]), not plain)

    @property
    def channels(self) -> int:
        """Of the images."""
        return int(self.weights.meta["val"].shape[1])

    @property
    def results(self) -> int:
        """Channels of the result."""
        return int(self.weights.meta["val"].shape[0])

    @property
    def summed(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.taps[0] * self.taps[1]

    def why_not(self, number: int | None) -> str:
        """Why the convolution itself (``None``), or one of its gradients, stays a call; ``""`` if it does not."""
        wide = self.images.meta["val"].dtype is torch.float32
        if self.taps == (1, 1):
            taken = number == _BY_IMAGES and self.together if wide else number == _BY_WEIGHTS
            return "" if taken else "of one tap, whose call, or kernel, is a product already"
        if wide and number == _BY_IMAGES:
            return ""
        least = (RESULTS, SUMMED) if wide else SHORT
        if self.results < least[0] or self.summed < least[1]:
            return "a small product, beside which it takes long to order pixels by patches"
        return ""

    # -- matrices, as functions of what stands for tensors in a graph --------------------------------------------

    def of_images(self, x: Any) -> Any:
        """A row for each patch."""
        (rows, columns), (down, across) = self.places, self.taps
        _, _, height, width = self.source.meta["val"].shape
        x = aten.slice.Tensor(x, 2, 0, rows * down) if height != rows * down else x
        x = aten.slice.Tensor(x, 3, 0, columns * across) if width != columns * across else x
        x = aten.view.default(x, [-1, self.channels, rows, down, columns, across])
        x = aten.permute.default(x, [0, 2, 4, 3, 5, 1] if self.together else [0, 2, 4, 1, 3, 5])
        lies = self.taps == (1, 1) and _has_channels_together(self.source)
        x = x if lies else aten.clone.default(x, memory_format=torch.contiguous_format)
        return aten.view.default(x, [-1, self.summed])

    def of_weights(self, w: Any) -> Any:
        """A row for each result, numbers in the order in which a patch has them."""
        if self.together:
            w = aten.permute.default(w, [0, 2, 3, 1])
        lies = _has_channels_together(self.weights) if self.together else self.weights.meta["val"].is_contiguous()
        w = w if lies else aten.clone.default(w, memory_format=torch.contiguous_format)
        return aten.view.default(w, [self.results, self.summed])

    def of_gradients(self, grad: Any) -> Any:
        """A row for each place."""
        lies = _has_channels_together(self.node.args[0])
        grad = aten.permute.default(grad, [0, 2, 3, 1])
        grad = grad if lies else aten.clone.default(grad, memory_format=torch.contiguous_format)
        return aten.view.default(grad, [-1, self.results])

    def result(self, rows: Any) -> Any:
        """Images of a matrix with a row for each place."""
        return aten.permute.default(aten.view.default(rows, [-1, *self.places, self.results]), [0, 3, 1, 2])

    def images_of(self, rows: Any) -> Any:
        """Images of a matrix with a row for each patch; 0 where there is none."""
        (down, across), (high, wide) = self.taps, self.places
        if self.together:
            apart = aten.view.default(rows, [-1, high, wide, down, across, self.channels])
            order, size = [0, 1, 3, 2, 4, 5], [-1, high * down, wide * across, self.channels]
        else:
            apart = aten.view.default(rows, [-1, high, wide, self.channels, down, across])
            order, size = [0, 3, 1, 4, 2, 5], [-1, self.channels, high * down, wide * across]
        if self.taps != (1, 1) or not self.together:
            apart = aten.clone.default(aten.permute.default(apart, order), memory_format=torch.contiguous_format)
        made = aten.view.default(apart, size)
        made = aten.permute.default(made, [0, 3, 1, 2]) if self.together else made
        _, _, height, width = self.images.meta["val"].shape
        left = [0, width - wide * across, 0, height - high * down]
        return aten.constant_pad_nd.default(made, left) if any(left) else made

    def weights_of(self, matrix: Any) -> Any:
        """Weights of a matrix like :meth:`of_weights`."""
        if not self.together:
            return aten.view.default(matrix, [self.results, self.channels, *self.taps])
        matrix = aten.view.default(matrix, [self.results, *self.taps, self.channels])
        return aten.permute.default(matrix, [0, 3, 1, 2])


def _before_copies(node: Node) -> Node:
    """What a tensor is a copy of."""
    while node.target is aten.clone.default and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _has_channels_together(node: Any) -> bool:
    return bool(node.meta["val"].is_contiguous(memory_format=torch.channels_last))


def _numbers(sizes: Any) -> tuple[int, ...] | None:
    """Sizes that are known."""
    known = tuple(size for size in sizes if isinstance(size, int))
    return known if len(known) == len(sizes) else None


def _forward(graph: Graph, patches: _Patches, ctx: PassContext) -> int:
    """A convolution as a product; how many rewrites that was."""
    node = patches.node
    if not _taken(patches, None, ctx):
        return 0

    def product(x: Any, w: Any, bias: Any) -> Any:
        rows, matrix = patches.of_images(x), aten.t.default(patches.of_weights(w))
        found = aten.mm.default(rows, matrix) if bias is None else aten.addmm.default(bias, rows, matrix)
        return patches.result(found)

    made = _as_it_lay(graph, node, node.meta["val"], product, x=patches.source, w=patches.weights, bias=node.args[2])
    return int(made is not None and replace_node(node, made))


def _backward(graph: Graph, patches: _Patches, ctx: PassContext) -> int:
    """Gradients as products, those that are taken; how many rewrites that was."""
    node = patches.node
    grad, wanted = node.args[0], list(node.args[-1])  # type: ignore[arg-type]

    def by_images(grad: Any, w: Any) -> Any:
        return patches.images_of(aten.mm.default(patches.of_gradients(grad), patches.of_weights(w)))

    def by_weights(grad: Any, x: Any) -> Any:
        return patches.weights_of(aten.mm.default(aten.t.default(patches.of_gradients(grad)), patches.of_images(x)))

    ways: dict[int, tuple[Callable[..., Any], dict[str, Any]]] = {
        _BY_IMAGES: (by_images, {"w": patches.weights}),
        _BY_WEIGHTS: (by_weights, {"x": patches.source}),
    }
    made = 0
    for number, (way, given) in ways.items():
        if wanted[number] and _taken(patches, number, ctx):
            gradient = _as_it_lay(graph, node, node.meta["val"][number], way, grad=grad, **given)
            made += _replaced(graph, node, number, gradient)
    of_call = node.meta["val"]
    if made and wanted[_BY_BIAS] and of_call[_BY_IMAGES] is None and of_call[_BY_WEIGHTS] is None:
        made += _replaced(graph, node, _BY_BIAS, emit(graph, _sum_of_places, node, grad=grad))
    return made


def _sum_of_places(grad: Any) -> Any:
    return aten.sum.dim_IntList(grad, [0, 2, 3])


def _taken(patches: _Patches, number: int | None, ctx: PassContext) -> bool:
    """Whether a product takes the place of a result of the call, with a record. (Of one tap who computes the call is
    decided later.)"""
    why_not = patches.why_not(number)
    if why_not and patches.taps == (1, 1):
        return False
    taken = not why_not and ctx.fuel.take()
    reason = "as a product of matrices, which takes less time than oneDNN's call" if taken else why_not or NO_FUEL
    images, weights = (each.meta["val"] for each in (patches.images, patches.weights))
    what = f"{images.dtype} patches of {[*images.shape]} x {[*weights.shape]}".removeprefix("torch.")
    first, said = f"patches of {patches.node.name}{_NAMES[number]}", f"{what}{_NAMES[number]}: {reason}"
    ctx.decisions.append(Decision("contraction", first, str(patches.node.target), False, said))
    return taken


def _as_it_lay(graph: Graph, node: Node, old: Any, function: Callable[..., Any], **given: Any) -> Node | None:
    """What ``function`` computes, with the strides of the value that it takes the place of."""
    last = node.prev
    made = emit(graph, function, node, **given)
    if made is not None and made.meta["val"].stride() != old.stride():
        layout = torch.contiguous_format if old.is_contiguous() else torch.channels_last
        made = emit(graph, lambda x: aten.clone.default(x, memory_format=layout), node, x=made)
    if made is not None and made.meta["val"].stride() == old.stride():
        return made
    while node.prev is not last:
        graph.erase_node(node.prev)
    return None


def _replaced(graph: Graph, node: Node, number: int, made: Node | None) -> int:
    """One result of the call by another node, and no longer by the call; 1 if there is one."""
    if made is None:
        return 0
    for user in [user for user in node.users if user.target is operator.getitem and user.args[1] == number]:
        user.replace_all_uses_with(made)
        graph.erase_node(user)
    left = [bool(each) and place != number for place, each in enumerate(node.args[-1])]  # type: ignore[arg-type]
    node.args = (*node.args[:-1], left)
    node.meta["val"] = tuple(value if kept else None for value, kept in zip(node.meta["val"], left, strict=True))
    return 1


def _is_wanted(ctx: PassContext) -> bool:
    """Where it was measured, and contractions are not all to be ATen's, or kernels."""
    return bool(ctx.target.capabilities.patches) and ctx.options.contractions == "auto"


PASS = Pass(
    "multiply-patches",
    multiply_patches,
    why="where places share no pixels a convolution is a product of matrices, which is faster than its call",
    after=("channels-last",),
    when=_is_wanted,
)
