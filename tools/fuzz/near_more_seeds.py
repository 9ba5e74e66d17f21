"""Patterns of passes for devices, whose graphs run eagerly, and of what a backward computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule

from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.graph_passes.attend_in_parts import attend_in_parts
from aotkit_inductor_lower.graph_passes.convolution_biases import convolution_biases
from aotkit_inductor_lower.graph_passes.pad_products import pad_products
from aotkit_inductor_lower.graph_passes.rewriting import copy_graph
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.targets.triton.target import TRITON_INTERPRETER

from .layer_programs import Input
from .near_seeds import DEVICE, SEEDS, TRAINING, Seed

__all__ = ["ALL_SEEDS"]

aten = torch.ops.aten
_flash = aten._scaled_dot_product_flash_attention_for_cpu
_Rewritten = tuple[GraphModule, int]


def _by(rewrite: Callable[[Graph, int], int], gm: GraphModule) -> _Rewritten:
    graph = copy_graph(gm)
    made = rewrite(graph, 1000)
    return GraphModule(gm, graph), made


def _padded(gm: GraphModule) -> _Rewritten:
    ctx = PassContext.of(LowerOptions(), target=TRITON_INTERPRETER)
    made = GraphModule(gm, pad_products(copy_graph(gm), ctx, 0))
    return made, ctx.fuel.used


_in_parts = partial(_by, lambda graph, fuel: attend_in_parts(graph, fuel, 64, always=True))
_apart = partial(_by, convolution_biases)


def _device(name: str, run: Any, rewrite: Any, *inputs: Input, **rest: Any) -> Seed:
    return Seed(name, run, inputs, (DEVICE,), "rewritten", rewrite=rewrite, **rest)


def _repeated(x: torch.Tensor) -> torch.Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, 2, length, width).reshape(batch, 2 * heads, length, width)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
    mask = F.pad(torch.where(m, 0.0, -torch.inf), (0, 4))[..., :20]
    return [_flash(q, _repeated(k), _repeated(v), attn_mask=mask, scale=0.3)[0] + 1]


def _later(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return [_flash(q, _repeated(k), _repeated(v), 0.0, True)[0].transpose(1, 2).sin()]


_HEADS = (Input("q", (2, 4, 20, 16)), Input("k", (2, 2, 20, 16)), Input("v", (2, 2, 20, 16)))
_MATRICES = (Input("a", (9, 11)), Input("b", (11, 13)), Input("c", (13,)))
_NARROW: dict[str, Any] = {"low": torch.bfloat16}

_OF_DEVICES = (
    _device("padded product", lambda a, b, c: [a @ b, (a @ b).view(-1) * 2], _padded, *_MATRICES, **_NARROW),
    _device(
        "padded products of what is computed",
        lambda a, b, c: [torch.addmm(c, a * 2, b).t() + 1, (a * 2).sum(0), (b.t() * 3).t()[1:] + a.sum()],
        _padded,
        *_MATRICES,
        **_NARROW,
    ),
    _device(
        "padded products behind each other",
        lambda a, b, c: [((a @ b).relu() @ b.t()).sum(1), (a @ b)[2:5].exp()],
        _padded,
        *_MATRICES,
        **_NARROW,
    ),
    _device("attention in parts", _attended, _in_parts, *_HEADS, Input("m", (20, 20), fill="bool"), strides=False),
    _device("attention in parts, causal", _later, _in_parts, *_HEADS, strides=False),
    _device(
        "biases of convolutions",
        lambda x, w, b: [F.relu(F.conv2d(x, w, b))],
        _apart,
        Input("x", (2, 3, 8, 8)),
        Input("w", (4, 3, 3, 3), scale=0.2),
        Input("b", (4,)),
    ),
)


# --- what a backward computes again -----------------------------------------------------------------------------


def _again(name: str, run: Any, *inputs: Input, **options: Any) -> Seed:
    mark = r"eligible[\s\S]*eligible[\s\S]*kernel .*\b(sin|sigmoid|tanh|bernoulli|relu)\b"  # in the second report
    return Seed(name, run, inputs, (TRAINING,), mark, options=options)


_X, _W = Input("x", (6, 8)), Input("w", (8, 8))
_RECOMPUTED = (
    _again("computed again", lambda x, w: [((x.sin() * w[0]).sigmoid() @ w).tanh()], _X, _W, memory_budget=0.0),
    _again(
        "views computed again",
        lambda x, w: [(x.sin().t()[1:5].reshape(6, 4) * 2).sigmoid() @ w[:4], x.sin().view(-1)[::2].tanh()],
        _X,
        _W,
        memory_budget=0.0,
    ),
    _again(
        "written after it was read",
        lambda x, w: [((x.sin() * w[0]).sigmoid() @ w) * (w.detach().clone().mul_(2) + 1)[:6]],
        _X,
        _W,
        memory_budget=0.0,
    ),
    _again("the least peak", lambda x, w: [((x.sin() @ w).sigmoid() @ w).tanh()], _X, _W, partitioner="min-peak"),
)

ALL_SEEDS: tuple[Seed, ...] = (*SEEDS, *_OF_DEVICES, *_RECOMPUTED)
