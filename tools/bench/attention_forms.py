"""Attention as models write it, a training step of it: eager and compiled, interleaved. A part of
:mod:`tools.bench.attention`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.bench.turns import compared

__all__ = ["FORMS", "Form", "Timed", "measure_form"]

Run = Callable[["Form", Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
P = 0.1
APART = 256  # words of a document, and how far back what is near lies


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write attention. ``sizes``: batch, heads, heads of keys, queries and keys, numbers of a head. ``sees``:
    of which keys a query sees its own and earlier ones, those of its document, or those at most so far before it."""

    name: str
    sizes: tuple[int, int, int, int, int]
    run: Run
    drops: bool = False
    trains_mask: bool = False
    sees: str = "earlier"

    def seen(self) -> Tensor:
        """The mask, for all batches."""
        batch, length = self.sizes[0], self.sizes[3]
        places = torch.arange(length)
        apart = places[:, None] - places
        kinds = {
            "earlier": apart >= 0,
            "documents": places[:, None] // APART == places // APART,
            "near": (apart >= 0) & (apart < APART),
        }
        return kinds[self.sees][None, None].expand(batch, 1, -1, -1).contiguous()


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds of eager's step and of ours, the speed over eager's, and errors of both."""

    aten: float
    own: float
    ratio: float
    errors: tuple[float, float]


def _copies(heads: Tensor, times: int) -> Tensor:
    batch, count, length, width = heads.shape
    whole = heads[:, :, None].expand(batch, count, times, length, width)
    return whole.reshape(batch, count * times, length, width)


def _drop(weights: Tensor, noise: Tensor | None) -> Tensor:
    return F.dropout(weights, P) if noise is None else weights * noise.to(weights.dtype)


def _repeated(form: Form, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    times = form.sizes[1] // form.sizes[2]
    return F.scaled_dot_product_attention(q, _copies(k, times), _copies(v, times), is_causal=True)


def _grouped(form: Form, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _bools(form: Form, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, seen)


def _fused_drop(
    form: Form, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None
) -> Tensor:
    if noise is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=P)
    return _drop((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1), noise) @ v


def _written(form: Form, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def _written_drop(
    form: Form, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None
) -> Tensor:
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5 + torch.where(seen, 0.0, -1e30).to(q.dtype)
    return _drop(scores.softmax(-1), noise) @ v


def _trained(form: Form, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5 + torch.where(seen, bias, -1e4).to(q.dtype)
    return scores.softmax(-1) @ v


FORMS = (
    Form("Llama, heads repeated", (1, 16, 4, 512, 128), _repeated),
    Form("Llama, enable_gqa", (1, 16, 4, 512, 128), _grouped),
    Form("BERT, bools", (4, 12, 12, 128, 64), _bools),
    Form("BERT, fused with dropout", (4, 12, 12, 128, 64), _fused_drop, drops=True),
    Form("GPT-2 written out", (4, 12, 12, 128, 64), _written),
    Form("GPT-2 written out, dropout", (4, 12, 12, 128, 64), _written_drop, drops=True),
    Form("long, written out, dropout", (1, 12, 12, 512, 64), _written_drop, drops=True),
    Form("T5, trained bias", (4, 8, 8, 256, 64), _trained, trains_mask=True),
    Form("Swin, trained bias", (64, 4, 4, 49, 32), _trained, trains_mask=True),
    Form("documents, bools", (1, 4, 4, 2048, 64), _bools, sees="documents"),
    Form("near, bools", (1, 4, 4, 2048, 64), _bools, sees="near"),
    Form("documents, written out", (1, 4, 4, 2048, 64), _written, sees="documents"),
)


class _Step:
    """A step on tensors that are views of a projection."""

    def __init__(self, form: Form, dtype: torch.dtype) -> None:
        batch, heads, shared, length, width = form.sizes
        torch.manual_seed(0)
        whole = torch.randn(batch, length, heads + 2 * shared, width, dtype=dtype).transpose(1, 2)
        self.form, self.dtype = form, dtype
        self.heads = whole.split((heads, shared, shared), dim=1)
        self.bias = torch.randn(1, heads, length, length, dtype=dtype)
        self.gradient = torch.randn(batch, length, heads, width, dtype=dtype).transpose(1, 2)
        self.seen = form.seen()

    def call(self, noise: Tensor | None = None) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
            return self.form.run(self.form, q, k, v, bias, seen, noise)

        return run

    def gradients(self, run: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        kind = dtype or self.dtype
        q, k, v = (tensor.detach().to(kind).requires_grad_() for tensor in self.heads)
        bias = self.bias.detach().to(kind).requires_grad_(self.form.trains_mask)
        out = run(q, k, v, bias, self.seen)
        wanted = [q, k, v, *([bias] if self.form.trains_mask else [])]
        return [out.detach(), *torch.autograd.grad(out, wanted, self.gradient.to(kind))]

    def noise(self) -> Tensor | None:
        if not self.form.drops:
            return None
        batch, heads, _, length, _ = self.form.sizes
        # Fused attention draws in float32, whatever its operands are.
        kind = torch.float32 if self.form.run is _fused_drop else self.dtype
        torch.manual_seed(1)
        return F.dropout(torch.ones(batch, heads, length, length, dtype=kind), P).double()


def measure_form(form: Form, dtype: torch.dtype, rounds: int, clock: Callable[[], float]) -> Timed:
    """Eager's step and ours in interleaved turns."""
    step = _Step(form, dtype)
    eager = step.call()
    torch._dynamo.reset()
    own = torch.compile(step.call(), backend="aotkit")
    exact = step.gradients(step.call(step.noise()), torch.float64)
    errors = []
    for run in (eager, own):
        torch.manual_seed(1)
        made = step.gradients(run)
        errors.append(max(float((x.double() - y).norm() / y.norm()) for x, y in zip(made, exact, strict=True)))
    times = compared(lambda: step.gradients(eager), lambda: step.gradients(own), rounds, clock)
    return Timed(*times, (errors[0], errors[1]))
