"""Attention as operators of ours: what ATen's fused attention for the CPU lacks, as one call each way.

Note [Attention as an operator]
    ``softmax(query @ key.mT * scale + bias) @ value``, where ``bias`` is ``where(seen, added, hidden)``: ``added`` is 0
    and all is ``seen`` where these are left out. ``kept`` are the weights that dropout leaves, which are multiplied by
    ``kept_scale``. ``causal`` hides later keys by -inf, and ``window``, where it is not 0, all but so many keys up to
    the query's own place. Scores with a ``cap`` that is not 0 are ``cap * tanh(score / cap)``, before they have masks.
    Heads of keys and values may be fewer than those of queries, each for several heads of queries, one after the other.

    Of a query whose scores are all -inf the result is nan, as ``softmax`` has it, or 0 with ``zero_empty``, as ATen's
    attention has it.

    The largest score of a query, and the sum of its weights relative to that, are results as well: the backward makes
    weights of them again. (ATen keeps the logarithm of the sum, which loses the sum where scores are large, as those
    are that a mask of the smallest finite number hides.)

    The gradients of the scores (with_scores) are float32, before ``slope``, which those of query and key are scaled by.

    Passes write these calls only where the target has kernels for them. The functions below are for all others who run
    such a graph: they say what it means, in ATen's operators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["ATTENTION", "ATTENTION_BACKWARD", "ATTENTION_BACKWARD_WITH_SCORES"]

_NAME = "aotkit_lower"
_OPERANDS = (
    "Tensor? added, Tensor? seen, Tensor? kept, float scale, float hidden, bool replaces, float kept_scale, bool causal"
)
_SAVED = "Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor result, Tensor tops, Tensor totals"

_library = torch.library.Library(_NAME, "DEF")
_library.define(
    f"attention(Tensor query, Tensor key, Tensor value, {_OPERANDS}, bool zero_empty, int window=0, float cap=0.0) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.define(
    f"attention_backward({_SAVED}, {_OPERANDS}, float slope, int window=0, float cap=0.0) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    f"attention_backward.with_scores({_SAVED}, {_OPERANDS}, float slope, int window=0, float cap=0.0) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _lines_of(heads: Tensor) -> Tensor:
    """New memory for heads: those of one line lie side by side."""
    batch, count, length, width = heads.shape
    return heads.new_empty(batch, length, count, width).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Settings:
    """The arguments of the operators behind the tensors that all have; ``last`` is ``zero_empty`` or ``slope``."""

    added: Tensor | None
    seen: Tensor | None
    kept: Tensor | None
    scale: float
    hidden: float
    replaces: bool
    kept_scale: float
    causal: bool
    last: Any
    window: int = 0
    cap: float = 0.0

    def products(self, query: Tensor, key: Tensor) -> Tensor:
        """The scores before they have a cap and masks."""
        return query.float() @ _each(key, query).mT * self.scale

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """The scores, with their masks."""
        scores = self.products(query, key)
        scores = self.cap * (scores / self.cap).tanh() if self.cap else scores
        bias = self.added.float() if self.added is not None else torch.zeros((), device=query.device)
        if self.seen is not None and self.replaces:
            scores = torch.where(self.seen, scores + bias, self.hidden)
        else:
            scores = scores + (bias if self.seen is None else torch.where(self.seen, bias, self.hidden))
        if not self.causal:
            return scores
        every = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(every.triu(1), -math.inf)
        return scores.masked_fill(every.tril(-self.window), -math.inf) if self.window else scores

    def dropped(self, weights: Tensor) -> Tensor:
        """What dropout makes of weights, or of their gradients."""
        return weights if self.kept is None else weights * (self.kept * self.kept_scale)


def _each(heads: Tensor, query: Tensor) -> Tensor:
    """Heads of keys or values, for each of queries."""
    return heads.float().repeat_interleave(query.shape[1] // max(heads.shape[1], 1), 1)


def _attention(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    settings = _Settings(*given)
    scores = settings.scores(query, key)
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    if settings.last:
        top = torch.where(top == -math.inf, 0.0, top)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if settings.last:
        total = torch.where(total == 0, 1.0, total)
    made = settings.dropped(weights).to(query.dtype).float() @ _each(value, query) / total
    return _lines_of(query).copy_(made), _per_query(query).copy_(top[..., 0]), _per_query(query).copy_(total[..., 0])


def _per_query(query: Tensor) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, heads, length, dtype=torch.float32)


def _backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, ...]:
    result, tops, totals, *rest = given
    settings = _Settings(*rest)
    weights = (settings.scores(query, key) - tops[..., None]).exp() / totals[..., None]
    slopes = settings.dropped(gradient.float() @ _each(value, query).mT)
    changes = (slopes - (result.float() * gradient.float()).sum(-1, keepdim=True)) * weights
    if settings.seen is not None and settings.replaces:
        changes = torch.where(settings.seen, changes, 0.0)
    bent = changes
    if settings.cap:
        bent = changes * (1 - (settings.products(query, key) / settings.cap).tanh() ** 2)
    own = (bent * settings.last).to(query.dtype).float()
    of_query = own @ _each(key, query)
    of_key = _summed(own.mT @ query.float(), key)
    of_value = _summed(settings.dropped(weights).to(query.dtype).float().mT @ gradient.float(), value)
    made = zip((query, key, value), (of_query, of_key, of_value), strict=True)
    return (*(_lines_of(like).copy_(each) for like, each in made), changes)


def _summed(each: Tensor, like: Tensor) -> Tensor:
    """Over the heads that share one."""
    return each.unflatten(1, (like.shape[1], -1)).sum(2) if each.shape[1] != like.shape[1] else each


def _backward_alone(*given: Any) -> tuple[Tensor, ...]:
    return _backward(*given)[:3]


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return _lines_of(query), _per_query(query), _per_query(query)


def _fake_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, ...]:
    return tuple(_lines_of(each) for each in (query, key, value))


def _fake_with_scores(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, ...]:
    scores = query.new_empty(*query.shape[:3], key.shape[2], dtype=torch.float32)
    return (*_fake_backward(gradient, query, key, value), scores)


for _op, _run, _shape in (
    ("attention", _attention, _fake),
    ("attention_backward", _backward_alone, _fake_backward),
    ("attention_backward.with_scores", _backward, _fake_with_scores),
):
    _library.impl(_op, _run, "CompositeExplicitAutograd")
    _library.impl(
        _op, _shape, "Meta"
    )  # register_fake looks for its caller's source in every module there is: 5 ms each

_ops = torch.ops.aotkit_lower
ATTENTION = _ops.attention.default
ATTENTION_BACKWARD = _ops.attention_backward.default
ATTENTION_BACKWARD_WITH_SCORES = _ops.attention_backward.with_scores
