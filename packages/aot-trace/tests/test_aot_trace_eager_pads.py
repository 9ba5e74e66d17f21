"""Gradients of pads are laid out as in eager mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aotkit_aot_trace import capture

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("sizes", [(2, 3, 6, 5), (2, 3, 4, 6, 5)])
@pytest.mark.parametrize("last", [(True, True), (True, False), (False, True)], ids=["both", "padded", "gradient"])
def test_the_gradient_of_a_pad_is_laid_out_like_what_was_padded(mode, sizes, last):
    rank = len(sizes) - 2
    padded = [*sizes[:2], *(size + 3 for size in sizes[2:])]
    x, g = (
        t.contiguous(memory_format=FORMATS[len(sizes)]) if is_last else t
        for t, is_last in zip((torch.randn(sizes), torch.randn(padded)), last, strict=True)
    )

    def gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(F.pad(leaf, [1, 2] * rank, mode=mode), leaf, g)
        return found

    with torch.enable_grad():
        wanted = gradient(x, g)
    name = f"{'reflection' if mode == 'reflect' else 'replication'}_pad{rank}d_backward"
    op = getattr(torch.ops.aten, name).default
    graph = capture(lambda g, x: [op(g, x, [1, 2] * rank)], [g, x]).graph
    (node,) = (n for n in graph.graph.nodes if n.target is op)
    assert node.meta["val"].stride() == wanted.stride()
    (found,) = graph(g, x)
    assert found.stride() == wanted.stride() and torch.equal(found, wanted)
