"""What a training step keeps of its max pools: a byte for each window, and eager's gradients."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import aotkit
from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.driver import prepare_joint_graph

aten = torch.ops.aten


def pooled(x: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """A pool of what is no input, so that nothing else needs to be kept."""
    return torch.nn.functional.max_pool2d(x * 1, **how)


def drawn(seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """An image and a pool over it; in some images much is equal, nan or -inf."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    taps = [r.randint(1, 4), r.randint(1, 4)]
    how = {
        "kernel_size": taps,
        "stride": r.choice([None, [r.randint(1, 3), r.randint(1, 4)]]),
        "padding": [r.randint(0, each // 2) for each in taps],
        "dilation": [r.randint(1, 3), r.randint(1, 3)],
        "ceil_mode": r.random() < 0.4,
    }
    least = [(each - 1) * by + 1 for each, by in zip(taps, how["dilation"], strict=True)]
    sizes = [r.choice([1, 2])] * (r.random() < 0.8) + [r.randint(1, 3), *(each + r.randint(0, 9) for each in least)]
    x = torch.randn(sizes, generator=g)
    if r.random() < 0.5:
        x = x.round()
    if r.random() < 0.3:
        x = torch.where(torch.rand(sizes, generator=g) < 0.4, r.choice([float("nan"), float("-inf")]), x)
    if len(sizes) == 4 and r.random() < 0.5:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, how


def gradient(f: Any, x: torch.Tensor, how: dict[str, Any]) -> list[torch.Tensor]:
    """The result, and the gradient by the image."""
    x = x.detach().requires_grad_()
    y = f(x, how)
    y.backward(torch.arange(1.0, y.numel() + 1).reshape(y.shape))
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize("seed", range(40))
def test_gradients_go_to_the_pixels_that_eager_mode_chooses(seed: int) -> None:
    x, how = drawn(seed)
    joint = aotkit.stages(lambda x: pooled(x, how)).capture(x.clone().requires_grad_()).graph
    prepared = prepare_joint_graph(joint)
    assert prepared is not joint
    y = pooled(x, how)
    tangent = torch.arange(1.0, y.numel() + 1).reshape(y.shape)
    for got, want in zip(prepared(x, tangent), gradient(pooled, x, how), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_compiled_pools_have_eagers_gradients(seed: int) -> None:
    x, how = drawn(seed)
    run = torch.compile(pooled, backend="aotkit", options={"fallback": "error"})
    for got, want in zip(gradient(run, x, how), gradient(pooled, x, how), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
        assert got.stride() == want.stride()


def test_a_byte_is_kept_for_each_window() -> None:
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    split = aotkit.stages(lambda x: pooled(x, {"kernel_size": 2})).capture(x).partition()
    kept = [node.meta["val"] for node in split.forward.graph.output_node().args[0]]
    windows = [value for value in kept if value.shape == (2, 3, 8, 8)]
    assert sorted(str(value.dtype) for value in windows) == ["torch.float32", "torch.uint8"]


def test_what_fits_no_byte_or_is_returned_is_kept_as_it_is() -> None:
    x = torch.randn(1, 1, 40, 40, requires_grad=True)

    def both(x: torch.Tensor) -> Any:
        return torch.nn.functional.max_pool2d(x * 1, 2, return_indices=True)

    for f in (lambda x: pooled(x, {"kernel_size": [17, 16]}), both):
        graph = aotkit.stages(f).capture(x).graph
        assert prepare_joint_graph(graph) is graph
    small = aotkit.stages(lambda x: pooled(x, {"kernel_size": 2})).capture(x).graph
    for options in (LowerOptions(disable=("keep-pool-offsets",)), LowerOptions(fuel=0)):
        assert prepare_joint_graph(small, options) is small
