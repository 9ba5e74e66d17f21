"""Small programs, each with a pattern that some pass or lowering knows: what :mod:`.near_misses` changes a little."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from .layer_programs import Input

__all__ = ["SEEDS", "Seed"]

aten = torch.ops.aten
INFERENCE, TRAINING, JOINT, FROZEN = "inference", "training", "joint", "frozen"
DYNAMIC, DEVICE = "dynamic", "device"


@dataclass(frozen=True)
class Seed:
    """A program ``run`` of ``inputs``, and how it is compiled.

    ``modes`` are ``inference``, ``training`` (gradients by autograd), ``joint`` (the graph of forward and backward is
    what is changed), ``frozen`` (inputs that are weights are constants), ``dynamic`` (sizes are symbols; called once
    more with ``resized`` ones) and ``device`` (``rewrite``, a pass for devices, whose graph runs eagerly). ``mark``: a
    regular expression that the names of passes that changed something, or the report, has where the pattern is
    recognised, and ``without`` one that it has where less of it is. ``options`` are those of the lowering, by name.
    ``strides``: whether those of results are eager's (torch's own fake kernels have others for batch norms of turned
    images)."""

    name: str
    run: Callable[..., list[torch.Tensor]]
    inputs: tuple[Input, ...]
    modes: tuple[str, ...]
    mark: str
    low: torch.dtype = torch.float32
    strides: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    without: str = ""
    resized: dict[int, int] = field(default_factory=dict)
    rewrite: Callable[[GraphModule], tuple[GraphModule, int]] | None = None


def _qkv(batch: int, heads: int, queries: int, keys: int, width: int, shared: int = 1) -> tuple[Input, ...]:
    rest = (batch, heads // shared, keys, width)
    return (Input("q", (batch, heads, queries, width)), Input("k", rest), Input("v", rest))


def _weigh(scores: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return [torch.softmax(scores, -1) @ v]


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float = 0.25) -> torch.Tensor:
    return (q @ k.transpose(-1, -2)) * scale


def _seen(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).tril()


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def _capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return _weigh(torch.tanh(_scores(q, k) / 5) * 5, v)


def _later_hidden(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    seen = torch.arange(q.shape[2])[:, None] >= torch.arange(k.shape[2])
    return _weigh(torch.where(seen, _scores(q, k), -math.inf), v)


def _later_and_padding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
    seen = (torch.arange(q.shape[2])[:, None] >= torch.arange(k.shape[2])) & m
    return _weigh(torch.where(seen, _scores(q, k), -math.inf), v)


def _window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    apart = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    return _weigh(torch.where((apart >= 0) & (apart < 9), _scores(q, k), -math.inf), v)


def _triangle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    bias = torch.where(_seen(q.shape[2], k.shape[2]), 0.0, -math.inf)
    return _weigh(_scores(q, k) + bias, v)


def _two_masks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
    triangle = torch.where(_seen(q.shape[2], k.shape[2]), 0.0, -math.inf)
    return _weigh(_scores(q, k) + torch.where(m, 0.0, -math.inf) + triangle, v)


def _two_terms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    return _weigh(_scores(q, k) + a - b, v)


def _subtracted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
    return _weigh(_scores(q, k) - (1 - m.to(q.dtype)) * 1e4, v)


def _no_empty_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
    scores = torch.where(m, _scores(q, k), -math.inf)
    weights = torch.softmax(scores, -1)
    return [torch.where((scores == -math.inf).all(-1, keepdim=True), 0.0, weights) @ v]


def _dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return [F.dropout(torch.softmax(_scores(q, k), -1), 0.2) @ v]


def _wide_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    scores = (q.float() @ k.float().transpose(-1, -2)) * 0.25
    return [torch.softmax(scores, -1).to(v.dtype) @ v]


def _scaled_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return _weigh((q * 0.5) @ (k * 0.5).transpose(-1, -2), v)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor | None = None, **how: Any) -> Any:
    return [F.scaled_dot_product_attention(q, k, v, m, **how)]


_BOOL = Input("m", (20, 20), fill="bool")
_GENERATED = {"contractions": "generated"}
_ATTENTION = _qkv(2, 2, 20, 20, 16)
_WAYS = (INFERENCE, TRAINING, JOINT)
_FOUND = "recognize-attention"
_COMPARED = r"kernel \S+:.*\b(tril|ge|le|gt|lt|where)\b"  # a mask that is a tensor


def _attention(name: str, run: Any, *more: Input, inputs: tuple[Input, ...] = _ATTENTION, **rest: Any) -> Seed:
    return Seed(
        name, run, (*inputs, *more), rest.pop("modes", _WAYS), rest.pop("mark", _FOUND), options=_GENERATED, **rest
    )


_ATTENTIONS = (
    _attention("attention", lambda q, k, v: _weigh(_scores(q, k), v)),
    _attention("attention, a term", lambda q, k, v, m: _weigh(_scores(q, k) + m, v), Input("m", (20, 20))),
    _attention("attention, two terms", _two_terms, Input("a", (20, 20)), Input("b", (2, 1, 20, 20))),
    _attention("attention, subtracted", _subtracted, _BOOL),
    _attention("attention, filled", lambda q, k, v, m: _weigh(_scores(q, k).masked_fill(~m, -math.inf), v), _BOOL),
    _attention("attention, later keys", _later_hidden, without=_COMPARED),
    _attention("attention, later keys and padding", _later_and_padding, _BOOL),
    _attention("attention, window", _window),
    _attention("attention, triangle", _triangle, without=_COMPARED),
    _attention("attention, two masks", _two_masks, _BOOL),
    _attention("attention, empty rows", _no_empty_rows, _BOOL, modes=(INFERENCE,)),
    _attention("attention, capped", _capped, mark="scores are in memory"),
    _attention("attention, dropout", _dropout, modes=(INFERENCE, TRAINING)),
    _attention("attention, scaled operands", _scaled_operands, modes=(INFERENCE,)),
    _attention("attention, wide scores", _wide_scores, low=torch.bfloat16, modes=(INFERENCE, JOINT)),
    _attention(
        "attention, shared heads",
        lambda q, k, v: _weigh(_scores(q, _repeated(k, 2)), _repeated(v, 2)),
        inputs=_qkv(2, 4, 20, 20, 16, 2),
    ),
    _attention(
        "fused attention, shared heads",
        lambda q, k, v: _sdpa(q, _repeated(k, 2), _repeated(v, 2)),
        inputs=_qkv(2, 4, 20, 20, 16, 2),
        mark="attention-operands",
    ),
    _attention("fused attention, bools", lambda q, k, v, m: _sdpa(q, k, v, m), _BOOL, mark="attention-operands"),
    _attention("fused attention, causal", lambda q, k, v: _sdpa(q, k, v, is_causal=True), mark="our own"),
    _attention(
        "attention of few queries",
        lambda q, k, v, m: _sdpa(q, _repeated(k, 2), _repeated(v, 2), m),
        Input("m", (2, 1, 2, 20), fill="bool"),
        inputs=_qkv(2, 4, 2, 20, 32, 2),
        modes=(INFERENCE,),
        mark="write-out-attention",
    ),
    Seed(
        "attention for ATen",
        lambda q, k, v, m: _weigh(_scores(q, k) + m, v),
        (*_qkv(1, 1, 256, 256, 8), Input("m", (256, 256))),
        (INFERENCE,),
        "fuse-attention",
        options={"contractions": "aten"},
    ),
    Seed(
        "filled attention for ATen",
        lambda q, k, v, m: _weigh(_scores(q, k).masked_fill(m, torch.finfo(q.dtype).min), v),
        (*_qkv(1, 1, 256, 256, 8), Input("m", (256, 256), fill="bool")),
        (INFERENCE,),
        "fuse-attention",
        options={"contractions": "aten", "numerics": "fast"},
    ),
)


# --- products of few bits ---------------------------------------------------------------------------------------


def _rows_of_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def _dynamic(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
    q, scale = _rows_of_bytes(x)
    return [(torch._int_mm(q, w.t()).to(x.dtype) * scale) * s]


_FOUR_BITS = Input("w", (64, 64), fill="int4", weight=True), Input("s", (2, 64, 2), scale=0.03, weight=True)


def _of_four_bits(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
    return [aten._weight_int4pack_mm_for_cpu(x, w, 32, s) + 1]


def _of_bytes(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
    return [aten._weight_int8pack_mm(x, w, s)]


def _shifted(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
    q, scale = _rows_of_bytes(x)
    shifted = (q.to(torch.int32) + 128).to(torch.uint8)
    product = torch._int_mm(shifted, w.t()) - w.t().sum(dim=0, keepdim=True, dtype=torch.int32) * 128
    return [(product.to(x.dtype) * scale) * s]


def _weights(n: int, k: int, scale: float = 0.01) -> tuple[Input, Input]:
    bytes_ = Input("w", (n, k), fill="int8", weight=True)
    return bytes_, Input("s", (n,), fill="positive", scale=scale, weight=True)


_PRODUCTS = (
    Seed(
        "int8 weights",
        lambda x, w, s: [F.linear(x, w.to(x.dtype)) * s],
        (Input("x", (3, 32)), *_weights(24, 32)),
        (INFERENCE, FROZEN),
        "our own.*mm",
        options=_GENERATED,
    ),
    Seed(
        "int8 weights, scaled before",
        lambda x, w, s: [x @ (w.to(x.dtype) * s[:, None]).t()],
        (Input("x", (3, 32)), *_weights(24, 32)),
        (INFERENCE, FROZEN),
        "our own.*mm",
        options=_GENERATED,
    ),
    Seed(
        "int8 weights of groups",
        lambda x, w, s: [F.linear(x, (w.to(x.dtype).view(24, 2, 32) * s).view(24, 64))],
        (Input("x", (3, 64)), Input("w", (24, 64), fill="int8", weight=True), Input("s", (24, 2, 1), weight=True)),
        (INFERENCE, FROZEN),
        "our own.*mm",
        options=_GENERATED,
    ),
    Seed(
        "packed int8",
        _of_bytes,
        (Input("x", (3, 32)), *_weights(24, 32)),
        (INFERENCE,),
        "our own.*int8pack",
        options=_GENERATED,
    ),
    Seed(
        "packed int4",
        _of_four_bits,
        (Input("x", (3, 64)), *_FOUR_BITS),
        (INFERENCE,),
        "our own.*int4pack",
        options=_GENERATED,
        low=torch.bfloat16,
    ),
    Seed(
        "packed int8, many",
        _of_bytes,
        (Input("x", (40, 32)), *_weights(24, 32)),
        (INFERENCE, FROZEN),
        "widen-packed",
    ),
    Seed(
        "packed int4, many",
        _of_four_bits,
        (Input("x", (40, 64)), *_FOUR_BITS),
        (INFERENCE, FROZEN),
        "widen-packed",
    ),
    Seed(
        "int8 activations",
        _dynamic,
        (Input("x", (3, 32)), *_weights(24, 32)),
        (INFERENCE, FROZEN),
        "our own.*_int_mm",
        options=_GENERATED,
    ),
    Seed("int8 activations, many", _dynamic, (Input("x", (40, 32)), *_weights(24, 32)), (INFERENCE,), "widen-bytes"),
    Seed("shifted bytes", _shifted, (Input("x", (18, 32)), *_weights(24, 32)), (INFERENCE,), "unshift-bytes"),
)


# --- losses, activations, images --------------------------------------------------------------------------------


def _seed(name: str, run: Any, inputs: tuple[Input, ...], modes: tuple[str, ...], mark: str, **more: Any) -> Seed:
    return Seed(name, run, inputs, modes, mark, **more)


_IMAGE = Input("x", (2, 3, 8, 8))
_LABELS = Input("t", (6,), fill="ids:9")


def _pooled(x: torch.Tensor) -> list[torch.Tensor]:
    return [F.max_pool2d(F.relu(x), 3, 2, 1).sin()]


def _padded_next(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    return [F.conv2d(F.pad(F.relu(x), (1, 0, 1, 0)), w)]


def _norm(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, b: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Any:
    return [F.relu(F.batch_norm(F.conv2d(x, w, padding=1), m, v, s, b, eps=1e-3))]


def _channel(name: str, fill: str = "normal") -> Input:
    return Input(name, (4,), fill=fill, weight=True)


_OTHERS = (
    _seed(
        "cross entropy",
        lambda x, t: [F.cross_entropy(x, t)],
        (Input("x", (6, 9)), _LABELS),
        (JOINT,),
        "loss-gradients",
    ),
    _seed(
        "chunked losses",
        lambda x, w, t: [F.cross_entropy(F.linear(x, w), t)],
        (Input("x", (520, 8)), Input("w", (9, 8)), Input("t", (520,), fill="ids:9")),
        (TRAINING,),
        "slice|cat",
        options={"chunk_loss_bytes": 100},
    ),
    _seed(
        "gradients of results",
        lambda x, w: [F.linear(F.hardtanh(x, -0.5, 0.75), w)],
        (Input("x", (6, 8)), Input("w", (9, 8))),
        (TRAINING, JOINT),
        "gradients-of-results",
    ),
    _seed(
        "gradients of leaky results",
        lambda x, w: [F.linear(F.leaky_relu(x, 0.1), w)],
        (Input("x", (6, 8)), Input("w", (9, 8))),
        (TRAINING, JOINT),
        "gradients-of-results",
    ),
    _seed(
        "gradients of padded results",
        _padded_next,
        (_IMAGE, Input("w", (4, 3, 2, 2))),
        (TRAINING, JOINT),
        "gradients-of-results",
    ),
    _seed("masks before pools", _pooled, (_IMAGE,), (TRAINING, JOINT), "mask-pooled-gradients"),
    _seed("pool offsets", lambda x: [F.max_pool2d(x, 3, 2, 1)], (_IMAGE,), (TRAINING, JOINT), "keep-pool-offsets"),
    _seed(
        "folded norm",
        _norm,
        (
            _IMAGE,
            Input("w", (4, 3, 3, 3), weight=True, scale=0.2),
            *(_channel(n) for n in "sbm"),
            _channel("v", "positive"),
        ),
        (FROZEN,),
        "(?m)kernel relu: relu$",
    ),
    _seed(
        "folded factor",
        lambda x, w, b, c: [F.relu(F.conv2d(x, w, b) * c + x[:, :1, :6, :6])],
        (_IMAGE, Input("w", (4, 3, 3, 3), weight=True, scale=0.2), _channel("b"), Input("c", (4, 1, 1), weight=True)),
        (FROZEN,),
        "(?m)kernel relu: add relu$",
    ),
    _seed(
        "strided images",
        lambda x, w: [F.conv2d(x, w, stride=2)],
        (Input("x", (2, 8, 6, 6), layout="last"), Input("w", (8, 8, 1, 1))),
        (TRAINING, JOINT),
        "slice-strided-images|channels",
    ),
    _seed(
        "patches",
        lambda x, w, b: [F.relu(F.conv2d(torch.tanh(x), w, b, stride=2))],
        (Input("x", (2, 32, 7, 6), layout="last"), Input("w", (32, 32, 2, 2), scale=0.2), Input("b", (32,))),
        (INFERENCE, TRAINING, JOINT),
        "multiply-patches|convolution",
    ),
    _seed(
        "nested maxima",
        lambda x: [x.amax(1), x.amax((0, 1)), x.amin(1), x.amin((1, 2), keepdim=True)],
        (Input("x", (4, 5, 6)),),
        (INFERENCE,),
        "reuse-reductions",
    ),
    _seed(
        "taken apart and joined",
        lambda x, y: [torch.cat([x[:3], x[3:]]) + 1, torch.cat([x, y])[6:] * 2, torch.stack(x.unbind(1), 1).exp()],
        (Input("x", (6, 4)), Input("y", (5, 4))),
        (INFERENCE, TRAINING),
        "merge-splits-and-cats",
    ),
    _seed(
        "split heads",
        lambda x: [torch.cat([each * 2 for each in x.split([4, 3, 5], 1)[:2]], 1), x.chunk(3, 1)[1] + 1],
        (Input("x", (4, 12)),),
        (INFERENCE, TRAINING),
        "kernel cat_part1",
    ),
    _seed(
        "a part of an input",
        lambda x, y: [x[1:4].copy_(y * 2).sum()],
        (Input("x", (6, 4)), Input("y", (3, 4))),
        (INFERENCE,),
        "reinplace",
    ),
    _seed(
        "rows that are added to an input",
        lambda x, y: [x.index_add_(0, torch.tensor([0, 2]), y[:2]).mean()],
        (Input("x", (6, 4)), Input("y", (3, 4))),
        (INFERENCE,),
        "reinplace",
    ),
    _seed(
        "a cache",
        lambda c, n, q: [
            F.scaled_dot_product_attention(q, c.index_copy_(2, torch.tensor([3, 4]), n), c.neg(), scale=0.2)
        ],
        (Input("c", (1, 2, 12, 16)), Input("n", (1, 2, 2, 16)), Input("q", (1, 2, 2, 16))),
        (INFERENCE,),
        "reinplace",
        options=_GENERATED,
    ),
    _seed(
        "uniform tensors",
        lambda x: [x * (torch.full((6, 4), 2.0) * torch.ones(6, 4) + torch.zeros(4)), torch.ones(6, 4).cumsum(0) + x],
        (Input("x", (6, 4)),),
        (INFERENCE, TRAINING),
        "fold-uniform",
    ),
    _seed(
        "casts and views",
        lambda x: [x.double().float().bfloat16().float().view(4, 6).t().t().reshape(2, 12) + 1],
        (Input("x", (6, 4)),),
        (INFERENCE, TRAINING),
        "simplify|remove-noops",
    ),
    _seed(
        "equal calls",
        lambda x: [x.exp().sum(1) + x.exp().sum(1), x.sin() @ x.sin().t()],
        (Input("x", (6, 4)),),
        (INFERENCE,),
        "common-subexpressions",
    ),
    _seed(
        "batches of one",
        lambda x, y: [torch.bmm(x, y) + 1],
        (Input("x", (1, 6, 4)), Input("y", (1, 4, 5))),
        (INFERENCE, TRAINING),
        "simplify",
    ),
)


# --- norms, rotations, routes -----------------------------------------------------------------------------------


def _rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _experts(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    weights, chosen = torch.softmax(x @ r, -1).topk(2)
    order = chosen.flatten().argsort(stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=4).cumsum(0).to(torch.int32)
    made = torch._grouped_mm(x.repeat_interleave(2, 0)[order].bfloat16(), w.bfloat16(), offs=ends).float()
    return [(torch.zeros_like(made).index_copy(0, order, made).view(-1, 2, 16) * weights[..., None]).sum(1)]


_NORMS = (
    _seed(
        "norm before a product",
        lambda x, w, p: [F.linear(_rms(x, w), p)],
        (Input("x", (3, 32)), Input("w", (32,)), Input("p", (24, 32), scale=0.2)),
        (INFERENCE, TRAINING),
        r"kernel \S+: pow_1 mean add rsqrt",
        options=_GENERATED,
    ),
    _seed(
        "layer norm",
        lambda x, w, b: [F.layer_norm(x, (32,), w, b) + 1],
        (Input("x", (7, 32)), Input("w", (32,)), Input("b", (32,))),
        (INFERENCE, TRAINING, JOINT),
        "kernel .*native_layer_norm",
    ),
    _seed(
        "batch norm",
        lambda x, w, b: [F.relu(F.batch_norm(x, None, None, w, b, training=True))],
        (_IMAGE, Input("w", (3,)), Input("b", (3,))),
        (TRAINING, JOINT),
        "kernel .*norm",
        strides=False,
    ),
    _seed(
        "rotation",
        lambda x, c, s: [_rotated(x, c, s)],
        (Input("x", (2, 3, 5, 16)), Input("c", (5, 16)), Input("s", (5, 16))),
        (INFERENCE, TRAINING, JOINT),
        "fuse-concats|cat",
    ),
    _seed(
        "resampled",
        lambda x: [F.interpolate(x, scale_factor=2, mode="bilinear"), F.pad(x, (1, 1, 1, 1), "reflect")],
        (_IMAGE,),
        (INFERENCE, TRAINING, JOINT),
        "kernel .*_unsafe_index",
    ),
    _seed(
        "dropout",
        lambda x: [F.dropout(x.relu(), 0.3) * 2],
        (Input("x", (6, 32)),),
        (INFERENCE, TRAINING),
        "kernel .*relu.* mul",
    ),
    _seed(
        "experts",
        _experts,
        (Input("x", (3, 16)), Input("r", (16, 4)), Input("w", (4, 16, 16), scale=0.25)),
        (INFERENCE,),
        "_grouped_mm",
        low=torch.float32,
        options=_GENERATED,
    ),
    _seed(
        "chained products",
        lambda x, a, b, s: [F.silu(F.linear(x, a)) * F.linear(x, b) + s, torch.addmm(s, x, a.t(), beta=0.5, alpha=2)],
        (Input("x", (5, 16)), Input("a", (16, 16)), Input("b", (16, 16)), Input("s", (5, 16))),
        (INFERENCE, TRAINING, JOINT),
        "our own",
        options=_GENERATED,
    ),
)


#: Sizes of other calls, of patterns that are also looked for where sizes are symbols.
_RESIZED = {
    **{
        each.name: {20: 13}
        for each in _ATTENTIONS
        if each.options == _GENERATED and JOINT in each.modes and "fused" not in each.name
    },
    "int8 weights": {3: 5},
    "nested maxima": {4: 3, 5: 2},
    "split heads": {4: 5},
    "equal calls": {6: 5},
    "batches of one": {6: 7},
    "norm before a product": {3: 5},
    "layer norm": {7: 3},
    "rotation": {5: 7},
    "chained products": {5: 9},
    "resampled": {8: 9},
}


def _with_other_sizes(seed: Seed) -> Seed:
    resized = _RESIZED.get(seed.name)
    return seed if resized is None else replace(seed, modes=(*seed.modes, DYNAMIC), resized=resized)


SEEDS: tuple[Seed, ...] = tuple(map(_with_other_sizes, (*_ATTENTIONS, *_PRODUCTS, *_OTHERS, *_NORMS)))
