"""Masks of attention on a device: laid out as fused kernels want them, which changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from aotkit import backend
from aotkit.frontend.masks import has_strided_masks, lay_out_masks

Q = torch.randn(2, 3, 4, 8)


def captured(f: Callable[..., Any], *args: torch.Tensor, device: str = "cuda") -> GraphModule:
    """Dynamo's graph of ``f``, with the values of its nodes as if they were on ``device``."""
    found: list[GraphModule] = []
    torch._dynamo.reset()
    torch.compile(f, backend=lambda gm, _: found.append(gm) or gm, fullgraph=True)(*args)
    (gm,) = found
    with FakeTensorMode():
        for module in (m for m in gm.modules() if isinstance(m, GraphModule)):
            for node in module.graph.nodes:
                value = node.meta.get("example_value")
                if isinstance(value, torch.Tensor):
                    sizes, strides = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
                    node.meta["example_value"] = torch.empty_strided(sizes, strides, dtype=value.dtype, device=device)
    return gm


def copies(gm: GraphModule) -> Iterator[str]:
    for module in (m for m in gm.modules() if isinstance(m, GraphModule)):
        for node in module.graph.find_nodes(op="call_method", target="contiguous"):
            yield str(node.args[0])


def run(gm: GraphModule, mask: torch.Tensor) -> torch.Tensor:
    """Dynamo's inputs are in the order of their use."""
    given = [mask if "mask" in str(node.target) else Q for node in gm.graph.find_nodes(op="placeholder")]
    return gm(*given)[0]


def expanded(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, (mask > 0)[:, None, :, None].expand(2, 1, 4, 4))


def table(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = mask.view(2, 4, 1, 1).expand(2, 4, 4, 3).contiguous().permute(0, 3, 1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias) + F.scaled_dot_product_attention(q, q, q, bias)


def changed_between(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = mask.view(2, 1, 1, 4).expand(2, 1, 4, 4).clone().mT
    first = F.scaled_dot_product_attention(q, q, q, bias)
    bias.mul_(3)
    return first + F.scaled_dot_product_attention(q, q, q, bias)


@pytest.mark.parametrize(("f", "count"), [(expanded, 1), (table, 2), (changed_between, 2)])
def test_each_call_reads_a_copy_and_gives_the_same(f: Callable[..., Any], count: int) -> None:
    mask = torch.randn(2, 4)
    gm = captured(f, Q, mask)
    before = str(gm.graph)
    assert has_strided_masks(gm)
    changed = lay_out_masks(gm)
    assert len([*copies(changed)]) - len([*copies(gm)]) == count and str(gm.graph) == before
    assert not has_strided_masks(changed)
    torch.testing.assert_close(run(changed, mask), f(Q, mask))


def test_a_mask_that_is_trained_stays() -> None:
    gm = captured(table, Q, torch.randn(2, 4))
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("example_value"), torch.Tensor) and value.is_floating_point():
            node.meta["example_value"] = value.requires_grad_()
    assert not has_strided_masks(gm)


def plain(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, mask.view(2, 1, 1, 4).expand(2, 3, 4, 4))


def without(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True) + mask.sum()


@pytest.mark.parametrize(("f", "device"), [(plain, "cuda"), (without, "cuda"), (expanded, "cpu")])
def test_what_kernels_take_as_it_is_stays(f: Callable[..., Any], device: str) -> None:
    gm = captured(f, Q, torch.randn(2, 4), device=device)
    assert not has_strided_masks(gm) and lay_out_masks(gm) is gm


def test_attention_in_a_region_is_found_too() -> None:
    def f(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(expanded, q, mask, use_reentrant=False)

    gm = captured(f, Q.clone().requires_grad_(), torch.randn(2, 4))
    assert has_strided_masks(gm) and [*copies(lay_out_masks(gm))] and not [*copies(gm)]


def test_the_backend_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[GraphModule] = []
    monkeypatch.setattr(backend, "has_strided_masks", lambda gm: asked.append(gm) or True)
    monkeypatch.setattr("aotkit.frontend.masks._is_strided", lambda node: "scaled_dot" in str(node.target))
    torch._dynamo.reset()
    mask = torch.randn(2, 4)
    torch.testing.assert_close(torch.compile(expanded, backend="aotkit")(Q, mask), expanded(Q, mask))
    assert len(asked) == 1
