"""Blocks of attention that a mask hides whole are not computed, and results are what they were with them."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from aotkit_inductor_lower.targets.cpu.render import attention_on_vectors
from aotkit_inductor_lower.targets.cpu.render.attention_hidden import HiddenBlocks

_spec = importlib.util.spec_from_file_location("tile_kernels", Path(__file__).with_name("tile_kernels.py"))
tile_kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tile_kernels)
generated, watched = tile_kernels.generated, tile_kernels.watched
ops = torch.ops.aotkit_lower
on_vectors = pytest.mark.skipif(not tile_kernels.LEVELS, reason="no x86-64 processor with AVX2")

INFINITY, QUERIES, KEYS, HEAD = math.inf, 290, 560, 40
TYPES = [torch.float32, torch.bfloat16]


def documents(queries: int = QUERIES, keys: int = KEYS) -> torch.Tensor:
    """Three documents of which none ends where a block does, and queries in front that see no key."""
    of_queries, of_keys = torch.arange(queries) // 110, torch.arange(keys) // 190
    seen = of_queries[:, None] == of_keys
    seen[:30] = False
    return seen


def operands(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(3)
    q, g = (torch.randn(1, 4, QUERIES, HEAD, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, 2, KEYS, HEAD, dtype=dtype) for _ in range(2))
    return [q, k, v, documents()], g


def steps(replaces: bool, causal: bool, zero: bool = True) -> tuple[Any, Any]:
    settings = (0.2, -INFINITY, replaces, 1.0, causal)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> Any:
        return ops.attention(q, k, v, None, seen, None, *settings, zero)

    def backward(*tensors: torch.Tensor) -> Any:
        return ops.attention_backward.default(*tensors[:7], None, tensors[7], None, *settings, 0.2)

    return forward, backward


def written_out(args: list[torch.Tensor], g: torch.Tensor, replaces: bool, causal: bool) -> list[torch.Tensor]:
    """In float64."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in args[:3])
    scores = q @ k.repeat_interleave(2, 1).mT * 0.2
    hidden = torch.full_like(scores, -INFINITY)
    scores = torch.where(args[3], scores, hidden) if replaces else scores + torch.where(args[3], 0.0, hidden)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -INFINITY)
    empty = (scores == -INFINITY).all(-1, keepdim=True)
    weights = torch.where(empty, 0.0, torch.where(empty, 0.0, scores).softmax(-1))
    out = weights @ v.repeat_interleave(2, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), g.double())]


def computed(args: list[torch.Tensor], g: torch.Tensor, replaces: bool, causal: bool, **options: Any) -> list[Any]:
    forward, backward = steps(replaces, causal)
    ahead = watched(generated(forward, args, **options), args)
    whole = [g, *args[:3], *ahead, args[3]]
    return [ahead[0], *watched(generated(backward, whole, **options), whole)]


@on_vectors
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("replaces", "causal"), [(True, False), (False, True), (False, False)])
def test_results_are_as_exact_as_those_with_hidden_blocks(
    replaces: bool, causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, g = operands(dtype)
    processor = tile_kernels.LEVELS[-1]
    without = computed(args, g, replaces, causal, processor=processor)
    asked: list[Any] = []

    def never(site: Any) -> bool:
        asked.append(site)
        return False

    monkeypatch.setattr(attention_on_vectors, "leaves_out", never)
    whole = computed(args, g, replaces, causal, processor=processor)
    assert len(asked) == 2
    true = written_out(args, g, replaces, causal)
    for got, other, right in zip(without, whole, true, strict=True):
        bound = 2e-6 if dtype is torch.float32 else 2e-2
        assert ((got.double() - right).norm() / right.norm()).item() <= bound
        assert ((other.double() - right).norm() / right.norm()).item() <= bound


@on_vectors
@pytest.mark.parametrize("replaces", [True, False])
def test_numbers_that_are_not_finite_reach_queries_that_do_not_see_them(
    replaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of 0 times one of them is nan, also where the whole block is hidden."""
    plain, g = operands(torch.float32)
    steps_of = []
    for leaves_out in (attention_on_vectors.leaves_out, lambda site: False):
        monkeypatch.setattr(attention_on_vectors, "leaves_out", leaves_out)
        forward, backward = steps(replaces, False)
        ahead = generated(forward, plain, processor=tile_kernels.LEVELS[-1])
        whole = [g, *plain[:3], *ahead(list(plain)), plain[3]]
        steps_of.append((ahead, generated(backward, whole, processor=tile_kernels.LEVELS[-1])))
    for value, place in itertools.product((math.nan, INFINITY, -INFINITY, 1e38), range(4)):
        args, gradient = [tensor.clone() for tensor in plain], g.clone()
        [*args[:3], gradient][place][0, 1, 200, 5] = value
        made = []
        for ahead, back in steps_of:
            first = watched(ahead, args)
            made.append([first[0], *watched(back, [gradient, *args[:3], *first, args[3]])])
        spread = 0
        for own, want in zip(*made, strict=True):
            some = want.isfinite()
            spread += int((~some).sum())
            assert torch.equal(own.isfinite(), some)
            assert (own[some] - want[some]).double().norm() <= 1e-5 * want[some].double().norm()
        assert spread or value == 1e38


@on_vectors
def test_masks_are_looked_at_where_they_hide_by_infinity_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    note = HiddenBlocks.note_seen
    monkeypatch.setattr(HiddenBlocks, "note_seen", lambda *given: (looked.append(1), note(*given))[1])
    args, _ = operands(torch.float32)
    for hidden, looks in ((-INFINITY, True), (-1e9, False)):

        def forward(*given: torch.Tensor, hidden: float = hidden) -> Any:
            return ops.attention(*given[:3], None, given[3], None, 0.2, hidden, True, 1.0, False, True)

        looked.clear()
        generated(forward, args, processor=tile_kernels.LEVELS[-1])
        assert bool(looked) == looks
