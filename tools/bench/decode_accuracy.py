"""How far logits of quantised models are from float64, ours and eager's, and why greedy tokens part.

python -m tools.bench.decode_accuracy               all formats but float32's
python -m tools.bench.decode_accuracy --formats int4 --tokens 64

Both ways write tokens by themselves from the same prompt. Up to the first token that differs both have read the same
words, and there logits of both are compared with those of the same quantised model in float64. "At it" is the first
difference: how far apart the logits of both ways' tokens are in eager mode and in float64, and eager's largest error.
Where tokens differ although ours is as near to float64, the gap is one that eager's own error covers. In float64
activations of *int8 dynamic* are quantised as well. Needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tools.bench.__main__ import machine
from tools.bench.decode import (
    FORMATS,
    Decoder,
    Int4Linear,
    Int8DynamicLinear,
    Int8Linear,
    make_model,
    prompt_words,
)

__all__ = ["Difference", "Linear64", "compare", "in_float64", "main"]


class Linear64(nn.Module):
    """A linear layer with the same weight as another one, whatever its format, in float64."""

    weight: torch.Tensor

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if isinstance(layer, Int4Linear):
            numbers, scales = layer.numbers_and_scales()
            weight = (numbers.double() * scales.double()).flatten(1)
        elif isinstance(layer, Int8Linear):
            weight = layer.weight.double() * layer.scale.double()[:, None]
        else:
            assert isinstance(layer, nn.Linear)
            weight = layer.weight.detach().double()
        self.register_buffer("weight", weight)
        self.dynamic = isinstance(layer, Int8DynamicLinear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, of bytes if the layer quantises what it gets."""
        if self.dynamic:
            scale = (x.abs().amax(-1, keepdim=True) / 127.5).clamp(min=1e-5)
            x = (x / scale).round().clamp(-128, 127) * scale
        return x @ self.weight.t()


def in_float64(model: nn.Module) -> nn.Module:
    """The same quantised model, computed in float64."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | Int8Linear | Int4Linear):
                setattr(module, name, Linear64(child))
    return model.double()


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest errors of logits up to the first token that differs, and the logits of both tokens there: eager's less
    ours, ``first`` is ``None`` if all tokens are equal."""

    eager: float
    ours: float
    first: int | None
    gap_in_eager: float = 0.0
    gap_in_float64: float = 0.0
    eager_there: float = 0.0


def compare(
    ours: tuple[list[int], list[torch.Tensor]], eager: tuple[list[int], list[torch.Tensor]], true: torch.Tensor
) -> Difference:
    """Of tokens and logits of each way. ``tokens[k + 1]`` is the largest of ``logits[k]``; ``true[k]`` is what
    that should be after eager's tokens."""
    (own, of_own), (words, of_eager) = ours, eager
    first = next((k for k, (a, b) in enumerate(zip(words, own, strict=True)) if a != b), None)
    count = len(of_eager) if first is None else first
    errors = [[(found[k].double() - true[k]).abs().max().item() for k in range(count)] for found in (of_eager, of_own)]
    largest, of_ours = map(max, errors)
    if first is None:
        return Difference(largest, of_ours, None)
    here, a, b = first - 1, words[first], own[first]
    gap, true_gap = ((logits[a].double() - logits[b].double()).item() for logits in (of_eager[here], true[here]))
    return Difference(largest, of_ours, first, gap, true_gap, errors[0][here])


@torch.no_grad()
def measure(form: str, tokens: int) -> Difference:
    """One format."""
    torch._dynamo.reset()
    model = make_model(form)
    kept: list[tuple[list[int], list[torch.Tensor]]] = []
    for call in (torch.compile(model, backend="aotkit"), model):
        logits: list[torch.Tensor] = []
        way = Decoder(model, _noted(call, logits), time.process_time)
        way.prefill()
        for _ in range(tokens):
            way.token()
        kept.append((way.tokens, logits))
    ours, eager = kept
    words = torch.tensor([prompt_words() + eager[0][:-1]])
    true = in_float64(model)(words, use_cache=False).logits[0, len(prompt_words()) :]
    return compare(ours, eager, true)


def _noted(call: Callable[..., Any], logits: list[torch.Tensor]) -> Callable[..., Any]:
    def run(*args: Any, **others: Any) -> Any:
        result = call(*args, **others)
        logits.append(result.logits[0, -1].clone())
        return result

    return run


def main() -> int:
    """Returns 1 if logits of a format are more than 1.5 times as far from float64 as eager's."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.decode_accuracy", description=__doc__)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS)[1:], choices=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=24)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}\n")
    print("| weights | eager's error | ours | parts at | gap there, eager | float64 | eager's error there |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    worse = False
    for form in chosen.formats:
        found = measure(form, chosen.tokens)
        worse |= found.ours > 1.5 * found.eager
        there = "– | – | – | –"
        if found.first is not None:
            gaps = f"{found.gap_in_eager:.3f} | {found.gap_in_float64:+.3f} | {found.eager_there:.3f}"
            there = f"{found.first} | {gaps}"
        print(f"| {form} | {found.eager:.2g} | {found.ours:.2g} | {there} |", flush=True)
    return int(worse)


if __name__ == "__main__":
    raise SystemExit(main())
