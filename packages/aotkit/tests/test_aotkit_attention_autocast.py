"""Attention that is written out in a region of autocast: queries and keys turn in float32, products are of bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.graph_passes import recognize_attention
from aotkit_inductor_lower.targets.cpu.target import cpu_target

is_ours = cpu_target().computes_attention((48, 48), 32, "bfloat16", LowerOptions())
LENGTH, HEADS, WIDTH = 48, 4, 32
Run = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


def turned(x: Tensor) -> Tensor:
    """Rotary embedding; its angles are float32, or the type that is compared with."""
    angles = torch.arange(LENGTH)[:, None] * 100.0 ** -(torch.arange(WIDTH // 2) / WIDTH * 2)
    angles = torch.cat([angles, angles], -1).to(x.dtype if x.dtype is torch.float64 else torch.float32)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def copies(x: Tensor) -> Tensor:
    batch, count, length, width = x.shape
    return x[:, :, None].expand(batch, count, HEADS // count, length, width).reshape(batch, HEADS, length, width)


def later(like: Tensor) -> Tensor:
    """What hides later keys, added."""
    hides = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return torch.zeros(LENGTH, LENGTH, dtype=like.dtype).masked_fill(hides, torch.finfo(like.dtype).min)


def llama(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
    q, k, v = turned(q), copies(turned(k)), copies(v)
    scores = torch.matmul(q, k.transpose(2, 3)) * WIDTH**-0.5 + later(q)
    weights = F.softmax(scores, -1, dtype=q.dtype).to(q.dtype)
    return torch.matmul(weights, v)


def dropping(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
    q, k, v = turned(q), copies(turned(k)), copies(v)
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3 + later(q), -1, dtype=q.dtype).to(q.dtype)
    return (F.dropout(weights, 0.1) if noise is None else weights * noise) @ v


def scaled_queries(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
    return ((turned(q) * 0.17) @ copies(turned(k)).mT + bias).float().to(bias.dtype).softmax(-1) @ copies(v)


def filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
    hides = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = (turned(q) @ copies(turned(k)).mT / math.sqrt(WIDTH)).masked_fill(hides, -math.inf)
    return scores.softmax(-1) @ copies(v)


def only_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
    return ((q @ copies(turned(k)).mT) * WIDTH**-0.5).softmax(-1) @ copies(v)


# What is another function than attention of what the products take, or may be.


def narrow_masks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
    """The sum with the mask is rounded to float16, where some of it is infinite."""
    large = torch.where(bias > 1, -60000.0, 0.0).to(bias.dtype)
    scores = turned(q) @ copies(turned(k)).mT * WIDTH**-0.5 + large - 8000
    narrow = scores if bias.dtype is torch.float64 else scores.half()
    return narrow.to(bias.dtype).softmax(-1) @ copies(v)


def kept_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
    """Who reads the copy of the keys reads it as it was, and a gradient of it is not of attention alone."""
    keys = copies(turned(k)).mT
    keys = keys if bias.dtype is torch.float64 else keys.bfloat16()
    return (turned(q) @ keys * WIDTH**-0.5).softmax(-1) @ copies(v) + keys.mT * 0.5


def coarse_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
    """Rounded twice, of which attention would leave out one."""
    keys = copies(turned(k)).mT
    keys = keys if bias.dtype is torch.float64 else keys.half()
    return (turned(q) @ keys * WIDTH**-0.5).softmax(-1) @ copies(v)


def turned_weights(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, noise: Tensor | None) -> Tensor:
    return (turned(q) @ copies(turned(k)).mT * WIDTH**-0.5).softmax(-1).mT @ copies(v)


@dataclass(frozen=True)
class Form:
    run: Run
    shared: int = 1
    found: bool = True
    p: float = 0.0


FORMS = [
    Form(dropping, 2, p=0.1),
    Form(llama),
    Form(scaled_queries),
    Form(filled),
    Form(kept_keys),
    Form(only_keys),
    Form(llama, 2),
    Form(coarse_keys, found=False),
    Form(narrow_masks, found=False),
    Form(turned_weights, found=False),
]


def tensors(form: Form) -> list[Tensor]:
    torch.manual_seed(0)
    kept = HEADS // form.shared
    return [
        torch.randn(2, LENGTH, HEADS * WIDTH),
        torch.randn((HEADS + 2 * kept) * WIDTH, HEADS * WIDTH) * 0.2,
        torch.randn(1, HEADS, LENGTH, LENGTH),
    ]


def function(form: Form, noise: Tensor | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    kept = HEADS // form.shared

    def run(x: Tensor, project: Tensor, bias: Tensor) -> Tensor:
        parts = F.linear(x, project).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        q, k, v = parts.split((HEADS, kept, kept), dim=1)
        return form.run(q, k, v, bias, noise)

    return run


def gradients(run: Callable[..., Tensor], given: list[Tensor], *, autocast: bool = True) -> list[Tensor]:
    x, project, bias = (tensor.detach() for tensor in given)
    x.requires_grad_(), project.requires_grad_()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = run(x, project, bias)
    return [out.detach(), *torch.autograd.grad(out.to(x.dtype).square().sum(), (x, project))]


def off(got: Tensor, true: Tensor) -> float:
    return ((got.double() - true).norm() / true.norm()).item()


@pytest.fixture
def attentions(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many attentions the passes have found."""
    counts, find = [], recognize_attention.recognize_attention

    def counted(*args: Any, **kwargs: Any) -> int:
        counts.append(find(*args, **kwargs))
        return counts[-1]

    monkeypatch.setattr(recognize_attention, "recognize_attention", counted)
    return lambda: sum(counts)


def compiled(form: Form) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function(form), backend="aotkit", options={"fallback": "error", "cache": False})


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.run.__name__}-{form.shared}")
def test_it_is_found_where_it_is_attention_and_as_exact_as_eagers(form: Form, attentions: Callable[[], int]) -> None:
    given = tensors(form)
    torch.manual_seed(5)
    noise = F.dropout(torch.ones(2, HEADS, LENGTH, LENGTH), form.p).double() if form.p else None
    true = gradients(function(form, noise), [tensor.double() for tensor in given], autocast=False)
    eager = gradients(function(form), given)
    own = gradients(compiled(form), given)
    assert attentions() == (form.found and is_ours)
    for got, want, right in zip(own, eager, true, strict=True):
        assert got.dtype is want.dtype and off(got, right) <= 3 * (off(want, right) + 2e-6)


@torch.no_grad()
def test_without_gradients_it_is_found_and_as_exact_as_eagers(attentions: Callable[[], int]) -> None:
    form = Form(llama, 2)
    given = tensors(form)
    true = function(form)(*(tensor.double() for tensor in given))
    with torch.autocast("cpu", torch.bfloat16):
        own, eager = compiled(form)(*given), function(form)(*given)
    assert attentions() == is_ours and own.dtype is eager.dtype
    assert off(own, true) <= 3 * off(eager, true)
