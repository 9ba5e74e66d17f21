"""Training through attention that is written out, with dropout, masks and heads that are shared: eager's gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aotkit
from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.targets.cpu import host_machine
from aotkit_inductor_lower.targets.cpu.target import cpu_target

is_ours = cpu_target().computes_attention((64, 64), 32, "float32", LowerOptions())
OWN = "aotkit_lower.attention"


def dropped(weights: Tensor, p: float, noise: Tensor | None) -> Tensor:
    """Dropout, of given random numbers where eager is compared in another type."""
    if not p:
        return weights
    return F.dropout(weights, p) if noise is None else weights * noise.to(weights.dtype)


def copies(heads: Tensor, times: int) -> Tensor:
    """Heads of keys for each of queries, as language models write it."""
    batch, count, length, width = heads.shape
    whole = heads[:, :, None].expand(batch, count, times, length, width)
    return whole.reshape(batch, count * times, length, width)


@dataclass(frozen=True)
class Form:
    """A way to write attention. ``run`` takes query, key, value, a mask of numbers, one of bools, and random numbers of
    dropout, if these are given."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
    p: float = 0.0
    shared: int = 1
    trains_mask: bool = False
    calls: tuple[str, ...] = (f"{OWN}.default", f"{OWN}_backward.default")


def _bert(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores + torch.where(seen, 0.0, -1e30).to(q.dtype)
    return dropped(scores.softmax(-1), 0.1, noise) @ v


def _relative(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    return (q @ k.mT + bias).softmax(-1) @ v


def _relative_hidden(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    scores = q @ k.mT / 4 + torch.where(seen, bias, -1e9)
    return dropped(scores.softmax(-1), 0.2, noise) @ v


def _filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    lower = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT / 5.0).masked_fill(~lower, float("-inf")).softmax(-1) @ v


def _shared(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    k, v = copies(k, 2), copies(v, 2)
    weights = (torch.matmul(q, k.transpose(2, 3)) * 0.3).softmax(-1, dtype=q.dtype)
    return dropped(weights, 0.1, noise) @ v


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    if noise is None:
        return F.scaled_dot_product_attention(q, k, v, seen, dropout_p=0.1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) * noise.to(q.dtype)) @ v


def _fused_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias)


def _fused_shared(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, copies(k, 2), copies(v, 2), seen)


def _fused_groups(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor, noise: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


WITH_SCORES = (f"{OWN}.default", f"{OWN}_backward.with_scores")
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
FORMS = [
    Form("bert", _bert, 0.1),
    Form("relative", _relative, trains_mask=True, calls=WITH_SCORES),
    Form("relative hidden", _relative_hidden, 0.2, trains_mask=True, calls=WITH_SCORES),
    Form("filled", _filled),
    Form("shared", _shared, 0.1, shared=2),
    Form("fused", _fused, 0.1),
    Form("fused bias", _fused_bias, trains_mask=True, calls=WITH_SCORES),
    Form("fused shared", _fused_shared, shared=2),
    Form("fused groups", _fused_groups, shared=2, calls=(f"{FLASH}.default", f"{FLASH}_backward.default")),
]


@dataclass
class Step:
    """One step: a projection before the heads and one after them, and a mask that may be trained."""

    form: Form
    dtype: torch.dtype
    length: int = 64
    heads: int = 4
    width: int = 32
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        kept = self.heads // self.form.shared
        whole = self.heads * self.width
        self.tensors = {
            "x": torch.randn(2, self.length, whole),
            "project": torch.randn((self.heads + 2 * kept) * self.width, whole) * whole**-0.5,
            "join": torch.randn(whole, whole) * whole**-0.5,
            "bias": torch.randn(1, self.heads, self.length, self.length),
        }
        self.tensors = {name: tensor.to(self.dtype) for name, tensor in self.tensors.items()}
        self.seen = torch.rand(2, 1, self.length, self.length) < 0.7
        self.seen[..., 0] = True

    def function(self, noise: Tensor | None = None) -> Callable[..., Tensor]:
        form, heads, kept, width = self.form, self.heads, self.heads // self.form.shared, self.width

        def run(x: Tensor, project: Tensor, join: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
            parts = F.linear(x, project).unflatten(-1, (-1, width)).transpose(1, 2)
            q, k, v = parts.split((heads, kept, kept), dim=1)
            made = form.run(q, k, v, bias, seen, noise).transpose(1, 2).flatten(2)
            return F.linear(made, join).square().sum()

        return run

    def gradients(self, function: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        given = {name: tensor.detach().to(dtype or self.dtype) for name, tensor in self.tensors.items()}
        trained = [tensor.requires_grad_() for name, tensor in given.items() if name != "bias" or self.form.trains_mask]
        torch.manual_seed(5)
        loss = function(*given.values(), self.seen)
        return [loss.detach(), *torch.autograd.grad(loss, trained)]

    def noise(self) -> Tensor | None:
        """What eager's dropout draws."""
        if not self.form.p:
            return None
        torch.manual_seed(5)
        sizes = (2, self.heads, self.length, self.length)
        return F.dropout(torch.ones(sizes, dtype=self.dtype), self.form.p).double()


def compiled(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aotkit", options={"fallback": "error", **options})


def off(got: Tensor, true: Tensor) -> float:
    return ((got.double() - true).norm() / true.norm()).item()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_gradients_are_as_exact_as_eagers(form: Form) -> None:
    step = Step(form, torch.float32)
    eager = step.gradients(step.function())
    own = step.gradients(compiled(step.function()))
    true = step.gradients(step.function(step.noise()), torch.float64)
    for got, want, right in zip(own, eager, true, strict=True):
        assert off(got, right) <= 3 * (off(want, right) + 2e-6)


@pytest.mark.parametrize("form", [f for f in FORMS if not f.name.startswith("fused")], ids=lambda form: form.name)
def test_so_they_are_in_bfloat16(form: Form) -> None:
    step = Step(form, torch.bfloat16)
    eager = step.gradients(step.function())
    own = step.gradients(compiled(step.function()))
    true = step.gradients(step.function(step.noise()), torch.float64)
    for got, want, right in zip(own, eager, true, strict=True):
        assert off(got, right) <= 3 * (off(want, right) + 2e-6)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_explain_says_that_kernels_compute_it(form: Form) -> None:
    step = Step(form, torch.float32)
    given = [tensor.requires_grad_() for tensor in step.tensors.values()]
    given[3].requires_grad_(form.trains_mask)
    report = str(aotkit.explain(step.function(), *given, step.seen, options=aotkit.Options(cache=False)))
    assert all(("our own 1x " + call in report) == is_ours for call in form.calls)
    if is_ours and form.shared > 1:
        assert "[2, 4, 64, 32] x [2, 2, 64, 32]" in report


@pytest.mark.parametrize("processor", ["x86-64-v3", *(["x86-64-v4"] if host_machine().vector_bits == 512 else [])])
def test_so_they_are_without_tile_registers(processor: str) -> None:
    for form in (FORMS[0], FORMS[2], FORMS[7]):
        step = Step(form, torch.float32)
        eager = step.gradients(step.function())
        own = step.gradients(compiled(step.function(), processor=processor))
        for got, want in zip(own, eager, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_results_do_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    for form in (FORMS[2], FORMS[4]):
        step = Step(form, torch.float32)
        run = compiled(step.function(), contractions="generated")
        try:
            found = []
            for count in (1, 2):
                torch.set_num_threads(count)
                found.append([tensor.clone() for tensor in step.gradients(run)])
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_weights_that_are_returned_stay() -> None:
    """And so does who reads the scores."""
    q, k, v = (torch.randn(2, 4, 64, 32, requires_grad=True) for _ in range(3))

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = (q @ k.mT).softmax(-1)
        return weights @ v, weights

    for got, want in zip(compiled(both)(q, k, v), both(q, k, v), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_second_derivatives() -> None:
    """Are taken through what was written, not through the call that it became."""
    q, k, v = (torch.randn(1, 2, 32, 32, requires_grad=True) for _ in range(3))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT * 0.2).softmax(-1) @ v).square().sum()

    def second(function: Callable[..., Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(function(q, k, v), (q,), create_graph=True)
        return torch.autograd.grad(first.square().sum(), (k,))[0]

    torch.testing.assert_close(second(compiled(run)), second(run), rtol=1e-3, atol=1e-4)


def test_inference_draws_nothing_and_keeps_nothing() -> None:
    step = Step(FORMS[3], torch.float32)
    given = [*step.tensors.values(), step.seen]
    with torch.no_grad():
        torch.testing.assert_close(compiled(step.function())(*given), step.function()(*given), rtol=1e-5, atol=1e-4)
        report = str(aotkit.explain(step.function(), *given, options=aotkit.Options(cache=False)))
    assert (f"our own 1x {OWN}.default" in report) == is_ours
