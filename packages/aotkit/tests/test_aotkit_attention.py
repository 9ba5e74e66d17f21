"""Training through attention: gradients as exact as eager's, where kernels of ours compute it and where ATen does."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aotkit
from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.targets.cpu.target import cpu_target

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


class Layer(nn.Module):
    """Heads from one projection, with fewer heads of keys than of queries, as language models have them."""

    def __init__(self, width: int = 128, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, self.each = heads, shared, width // heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, (heads + 2 * shared) * self.each)
        self.join = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        parts = self.project(self.norm(x)).unflatten(-1, (-1, self.each)).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.shared, self.shared), dim=1)
        k, v = (t.repeat_interleave(self.heads // self.shared, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return x + self.join(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, causal)
        return x.square().mean()


def padding(length: int) -> Tensor:
    """The second sequence is a third shorter."""
    seen = torch.ones(2, 1, 1, length, dtype=torch.bool)
    seen[1, ..., -length // 3 :] = False
    return seen


def gradients(run: Callable[..., Tensor], model: nn.Module, autocast: bool, *args: object) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = run(*args)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "causal", "padded"])
def test_training_equals_eager(kind: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Model()
    exact, x = copy.deepcopy(model).double(), torch.randn(2, 90, 128)
    args = {"plain": (x,), "causal": (x, None, True), "padded": (x, padding(90).expand(2, 1, 90, 90))}[kind]
    wide = (x.double(), *args[1:])
    true = gradients(exact, exact, False, *wide)
    eager = gradients(model, model, autocast, *args)
    torch._dynamo.reset()
    own = gradients(torch.compile(model, backend="aotkit"), model, autocast, *args)
    assert len(own) == len(eager)
    for got, want, right in zip(own, eager, true, strict=True):
        off, known = (((t.double() - right).norm() / right.norm()).item() for t in (got, want))
        assert off <= 3 * (known + 2e-6)


def test_results_do_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    model, x, threads = Model(), torch.randn(2, 100, 128), torch.get_num_threads()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aotkit", options={"contractions": "generated"})
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append([t.clone() for t in gradients(compiled, model, False, x, None, True)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_explain_says_who_computes_it() -> None:
    model, x = Model(), torch.randn(2, 90, 128)
    ours = cpu_target().computes_attention((90, 90), 32, "float32", LowerOptions())
    own = str(aotkit.explain(model, x, options=aotkit.Options(cache=False)))
    aten = str(aotkit.explain(model, x, options=aotkit.Options(contractions="aten", cache=False)))
    for call in (f"{FLASH}.default", f"{FLASH}_backward.default"):
        calls = re.compile(rf"ATen \d+x {re.escape(call)}:")
        kernels = re.compile(rf"our own \d+x {re.escape(call)} ")
        assert calls.search(aten) and not kernels.search(aten)
        assert bool(kernels.search(own)) == ours != bool(calls.search(own))
