"""Attention: ATen's and our kernels, forward and backward, interleaved, with errors against float64.

First ATen's fused call, each way. Then training steps of attention as models write it (:mod:`.attention_forms`): heads
that are shared, bools, dropout, written out, with a bias that is trained; eager against ``backend="aotkit"``.

python -m tools.bench.attention                     BERT, GPT-2, Llama and ViT shapes, float32 and bfloat16
python -m tools.bench.attention --threads 2         wall time of two threads (else processor time of one)
python -m tools.bench.attention --dtype bfloat16    one type only
python -m tools.bench.attention --sizes 8x8x49x64   fused calls of these sizes: batch, heads, length, head
python -m tools.bench.attention --forms documents near      steps whose names begin so, and no fused calls
python -m tools.bench.attention --contractions generated   all fused calls ours, also where ATen's are chosen

Queries, keys and values are views of one projection, as models make them. Turns follow each other at once, and the
median of the ratios within a round is reported. An error is the norm of the difference relative to that of the result
(of the gradients the worst); it may be 1.3 times ATen's, of a step 3 times that and 6e-6.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.targets.cpu import host_machine
from aotkit_inductor_lower.targets.cpu.ways import ways_of
from tools.bench.__main__ import machine
from tools.bench.attention_forms import FORMS, Form, measure_form
from tools.bench.turns import begin, compared, geometric_mean

__all__ = ["SHAPES", "Row", "Shape", "main", "measure"]

aten = torch.ops.aten
Call = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention: batch, heads, queries and keys, numbers of a head; ``mask``: none, causal or added."""

    name: str
    sizes: tuple[int, int, int, int]
    mask: str = ""


SHAPES = (
    Shape("BERT", (4, 12, 128, 64)),
    Shape("BERT, padded", (4, 12, 128, 64), "added"),
    Shape("BERT, long", (2, 12, 512, 64)),
    Shape("GPT-2", (4, 12, 128, 64), "causal"),
    Shape("GPT-2, long", (1, 12, 1024, 64), "causal"),
    Shape("Llama", (1, 16, 512, 128), "causal"),
    Shape("ViT", (4, 12, 197, 64)),
    Shape("long", (1, 12, 1024, 64)),
    Shape("small heads", (8, 8, 256, 32)),
)


@dataclass(slots=True)
class Row:
    """One direction of one shape: times in ms, the speed over ATen's, and errors of both."""

    shape: Shape
    direction: str
    dtype: torch.dtype
    aten: float
    own: float
    ratio: float
    errors: tuple[float, float]


def _programs(causal: bool) -> dict[str, Call]:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {"attn_mask": mask[0]} if mask else {}
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, **given)

    def backward(g: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {"attn_mask": tensors[5]} if len(tensors) > 5 else {}
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(g, *tensors[:5], 0.0, causal, **given)

    return {"forward": forward, "backward": backward}


def _operands(shape: Shape, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    batch, heads, length, width = shape.sizes
    q, k, v = torch.randn(batch, length, 3, heads, width, dtype=dtype).permute(2, 0, 3, 1, 4)
    gradient = torch.randn(batch, length, heads, width, dtype=dtype).transpose(1, 2)
    mask = []
    if shape.mask == "added":
        padding = torch.zeros(batch, 1, 1, length, dtype=dtype)
        padding[..., -length // 8 :] = torch.finfo(dtype).min
        mask = [padding.expand(batch, 1, length, length)]
    out, sums = _programs(shape.mask == "causal")["forward"](q, k, v, *mask)
    return {"forward": [q, k, v, *mask], "backward": [gradient, q, k, v, out, sums, *mask]}


def _exact(shape: Shape, operands: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """The results in float64."""
    q, k, v = (tensor.double().requires_grad_() for tensor in operands["forward"][:3])
    scores = q @ k.mT * shape.sizes[3] ** -0.5
    if shape.mask == "causal":
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    elif shape.mask:
        scores = scores + operands["forward"][3].double()
    out = scores.softmax(-1) @ v
    return {
        "forward": [out.detach()],
        "backward": list(torch.autograd.grad(out, (q, k, v), operands["backward"][0].double())),
    }


def measure(
    shape: Shape, dtype: torch.dtype, rounds: int, clock: Callable[[], float], options: LowerOptions
) -> list[Row]:
    """Both directions in interleaved turns."""
    operands = _operands(shape, dtype)
    exact = _exact(shape, operands)
    return [
        _measured(shape, dtype, direction, program, operands[direction], exact[direction], rounds, clock, options)
        for direction, program in _programs(shape.mask == "causal").items()
    ]


def _measured(
    shape: Shape,
    dtype: torch.dtype,
    direction: str,
    program: Call,
    args: list[torch.Tensor],
    exact: Sequence[torch.Tensor],
    rounds: int,
    clock: Callable[[], float],
    options: LowerOptions,
) -> Row:
    own = compile_graph(make_fx(program, tracing_mode="fake")(*args), options=options)
    assert isinstance(own, CompiledGraph)

    times = compared(lambda: program(*args), lambda: own(list(args)), rounds, clock)
    off = [_error(program(*args), exact), _error(own(list(args)), exact)]
    return Row(shape, direction, dtype, *times, (off[0], off[1]))


def _error(results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    return max(float((got.double() - true).norm() / true.norm()) for got, true in zip(results, exact, strict=False))


def _sizes(text: str) -> tuple[int, int, int, int]:
    batch, heads, length, width = (int(part) for part in text.split("x"))
    return batch, heads, length, width


def main() -> int:
    """Returns 1 if an error is larger than it may be."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.attention", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="*", default=("float32", "bfloat16"))
    parser.add_argument("--sizes", nargs="+", type=_sizes)
    parser.add_argument("--forms", nargs="+")
    parser.add_argument("--contractions", choices=("auto", "generated"), default="auto")
    chosen = parser.parse_args()
    options = LowerOptions(check_inputs=False, contractions=chosen.contractions)
    clock = begin(chosen.threads)
    shapes: Sequence[Shape] = SHAPES
    forms: Sequence[Form] = FORMS
    if chosen.sizes is not None:
        shapes, forms = [Shape("", sizes) for sizes in chosen.sizes], ()
    elif chosen.forms is not None:
        shapes, forms = (), [form for form in FORMS if form.name.startswith(tuple(chosen.forms))]
    ways = sorted(way for way in ways_of(host_machine()) if way.startswith("attention"))
    print(f"{machine()}; threads: {chosen.threads}; kernels of ours: {', '.join(ways) or 'none'}\n")
    print("| attention | batch, heads, length, head | type | way | ATen ms | ours ms | x ATen | ATen off | ours off |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|")
    found: list[Row] = []
    for name in chosen.dtype:
        for shape in shapes:
            for row in measure(shape, getattr(torch, name), chosen.rounds, clock, options):
                found.append(row)
                what = f"{shape.name}{f' ({shape.mask} mask)' if shape.mask else ''} | {shape.sizes} | {name}"
                numbers = f"{row.aten:.2f} | {row.own:.2f} | {row.ratio:.2f}"
                print(
                    f"| {what} | {row.direction} | {numbers} | {row.errors[0]:.1e} | {row.errors[1]:.1e} |", flush=True
                )
    wrong = any(row.errors[1] > 1.3 * row.errors[0] for row in found)
    steps: dict[str, list[float]] = {}
    for name in chosen.dtype:
        for form in forms:
            timed = measure_form(form, getattr(torch, name), chosen.rounds, clock)
            steps.setdefault(name, []).append(timed.ratio)
            wrong = wrong or timed.errors[1] > 3 * (timed.errors[0] + 2e-6)
            batch, heads, shared, length, width = form.sizes
            sizes = (batch, heads if heads == shared else f"{heads}/{shared}", length, width)
            what = f"{form.name} | ({', '.join(map(str, sizes))}) | {name} | step"
            numbers = f"{timed.aten:.2f} | {timed.own:.2f} | {timed.ratio:.2f}"
            print(f"| {what} | {numbers} | {timed.errors[0]:.1e} | {timed.errors[1]:.1e} |", flush=True)
    print()
    for name in chosen.dtype:
        for direction in ("forward", "backward"):
            ratios = [r.ratio for r in found if r.direction == direction and r.dtype is getattr(torch, name)]
            if ratios:
                print(f"{name} {direction}: geometric mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}")
        if name in steps:
            print(f"{name} step: geometric mean {geometric_mean(steps[name]):.2f}, least {min(steps[name]):.2f}")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
