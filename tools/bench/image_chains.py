"""Chains over images: pads, resampling, pooling and depthwise convolutions with what stands around them, forward and
backward together, with the pixels of a channel side by side and (`, last`) with the channels of a pixel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from tools.bench.chain_cases import STEP, Chain, Sizes, Tensors, normal

__all__ = ["IMAGE_CHAINS"]


def images(sizes: Sizes, generator: torch.Generator, weights: Sequence[Sizes] = (), last: bool = False) -> Tensors:
    """Images, and weights of these sizes for each channel."""
    x = normal(*sizes, generator=generator)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    return [x, *(normal(sizes[1], *own, generator=generator) + 1 for own in weights)]


def padded_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A batch norm and an activation, before a convolution that pads on two sides."""
    normed = functional.batch_norm(x, None, None, weight, bias, training=True)
    return functional.pad(functional.silu(normed), (0, 1, 0, 1))


def reflected(x: torch.Tensor) -> torch.Tensor:
    """As style transfer pads."""
    return functional.pad(functional.relu(x), (2, 2, 2, 2), mode="reflect")


def twice_as_large(x: torch.Tensor) -> torch.Tensor:
    """As decoders of pyramids do."""
    return functional.interpolate(functional.relu(x), scale_factor=2, mode="nearest")


def bilinear(x: torch.Tensor) -> torch.Tensor:
    """The same with weights."""
    return functional.interpolate(functional.relu(x), scale_factor=2, mode="bilinear")


def bicubic(x: torch.Tensor) -> torch.Tensor:
    """Of sixteen neighbours."""
    return functional.interpolate(functional.relu(x), scale_factor=2, mode="bicubic")


def highest(x: torch.Tensor) -> torch.Tensor:
    """The pool of a stem."""
    return functional.max_pool2d(functional.relu(x), 3, 2, 1)


def averaged(x: torch.Tensor) -> torch.Tensor:
    """A pool with overlapping windows."""
    return functional.avg_pool2d(functional.relu(x), 3, 2, 1)


def depthwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The middle of an inverted residual."""
    return functional.relu6(functional.conv2d(x, weight, padding=1, groups=x.shape[1]))


SMALL, LARGE = (2, 64, 24, 24), (8, 96, 56, 56)
_PARTS: dict[str, tuple[Callable[..., torch.Tensor], Sequence[Sizes], float]] = {
    "norm, silu, pad": (padded_norm, ((), ()), 6),
    "relu, reflection pad": (reflected, (), 5),
    "relu, bilinear": (bilinear, (), 11),
    "relu, bicubic": (bicubic, (), 11),
    "relu, nearest": (twice_as_large, (), 11),
    "relu, max pool": (highest, (), 3.5),
    "relu, average pool": (averaged, (), 3.5),
    "depthwise, relu6": (depthwise, ((1, 3, 3),), 6),
}
IMAGE_CHAINS: dict[str, Chain] = {
    f"{name}{', last' if last else ''}": Chain(
        function, functools.partial(images, weights=weights, last=last), SMALL, LARGE, moved, STEP
    )
    for name, (function, weights, moved) in _PARTS.items()
    for last in (False, True)
}
