"""``flex_attention`` with masks and biases that kernels compute, for the run on a device: errors and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from aotkit.attention import attend, flex_attention
from tools.device_items import Figures, alone, busy, kernels_of_step, milliseconds, release, settings_of, wait

__all__ = ["CASES", "Tables", "flex_item"]

Mod = Callable[..., torch.Tensor]


class Tables:
    """What the functions of :data:`CASES` read, for so many heads, queries and keys."""

    def __init__(self, batch: int, heads: int, length: int, device: str) -> None:
        generator = torch.Generator().manual_seed(2)
        cuts = torch.rand(batch, length, generator=generator).lt(8 / length)
        self.length = length
        self.slopes = torch.linspace(0.01, 0.5, heads, device=device)
        self.documents = cuts.cumsum(-1).to(device)
        self.table = torch.randn(heads, 2 * length, generator=generator).to(device)
        self.prefixes = torch.arange(1, batch + 1, device=device) * (length // (2 * batch))


def causal(_: Tables) -> tuple[Mod | None, Mod | None]:
    """Later keys are hidden."""
    return None, lambda b, h, q, k: q >= k


def window(of: Tables) -> tuple[Mod | None, Mod | None]:
    """And keys that are far back."""
    size = of.length // 8
    return None, lambda b, h, q, k: (q >= k) & (q - k < size)


def capped(_: Tables) -> tuple[Mod | None, Mod | None]:
    """Scores with a cap."""
    return lambda s, b, h, q, k: 20 * torch.tanh(s / 20), lambda b, h, q, k: q >= k


def slopes(of: Tables) -> tuple[Mod | None, Mod | None]:
    """A slope for each head."""
    return lambda s, b, h, q, k: s - of.slopes[h] * (q - k), lambda b, h, q, k: q >= k


def documents(of: Tables) -> tuple[Mod | None, Mod | None]:
    """Several documents in a sequence."""
    return None, lambda b, h, q, k: (of.documents[b, q] == of.documents[b, k]) & (q >= k)


def relative(of: Tables) -> tuple[Mod | None, Mod | None]:
    """A number for each head and distance."""
    return lambda s, b, h, q, k: s + of.table[h, q - k + of.length], None


def prefix(of: Tables) -> tuple[Mod | None, Mod | None]:
    """The first keys are seen by all queries; with slopes."""
    score, _ = slopes(of)
    return score, lambda b, h, q, k: (q >= k) | (k < of.prefixes[b])


CASES: dict[str, Callable[[Tables], tuple[Mod | None, Mod | None]]] = {
    each.__name__: each for each in (documents, slopes, relative, prefix, causal, window, capped)
}


def flex_item(name: str, backend: str, device: str) -> Figures:
    """How far result and gradients are from float32, the time of both directions, and the largest kernels."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, heads, shared, length, width = (4, 16, 4, 2048, 64) if device == "cuda" else (1, 4, 2, 40, 16)
    tables = Tables(batch, heads, length, device)
    score_mod, mask_mod = CASES[name](tables)
    mask = None if mask_mod is None else create_block_mask(mask_mod, batch, heads, length, length, device=device)
    generator = torch.Generator().manual_seed(1)
    leaves = [
        torch.randn(batch, count, length, width, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for count in (heads, shared, shared)
    ]
    gradient = torch.randn(batch, heads, length, width, generator=generator).to(device, torch.bfloat16)

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return flex_attention(query, key, value, score_mod, mask, enable_gqa=True)

    def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, score_mod, mask_mod, width**-0.5)[0]

    def results(run: Callable[..., Any], inputs: list[torch.Tensor]) -> torch.Tensor:
        made = run(*inputs)
        found = torch.autograd.grad(made, inputs, gradient.to(made.dtype))
        return torch.cat([each.detach().flatten().float() for each in (made, *found)]).cpu()

    with busy():
        want = results(exact, [leaf.detach().float().requires_grad_() for leaf in leaves])
        release(device)
        settings = settings_of(backend, device)
        run = call if settings is None else torch.compile(call, **settings)
        begin = time.perf_counter()
        got = results(run, leaves)
        wait(device)
        first = time.perf_counter() - begin
    figures: Figures = {"error": float((got - want).norm() / want.norm()), "first_call_seconds": first}

    def step() -> None:
        torch.autograd.grad(run(*leaves), leaves, gradient)

    with alone():
        return figures | milliseconds(step, device) | kernels_of_step(step, device)
