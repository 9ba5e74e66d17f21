"""The chains of `tools.bench.chains`: functions bound by memory or by transcendental arithmetic, with their bytes.

Each case makes, from sizes and a seed, a function without arguments of its own state: `prepare` gives the inputs, the
chain maps them to outputs, and for a training chain the gradients come from autograd with a fixed upstream gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

Tensors = list[torch.Tensor]
Sizes = tuple[int, ...]

#: What is timed: the forward alone (no gradients wanted), the backward alone, both, or an update in place.
FORWARD, BACKWARD, STEP, UPDATE = "forward", "backward", "step", "update"


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain: ``function`` on the tensors of ``inputs``.

    ``small`` fits in a second-level cache, ``large`` in none. ``moved`` are the bytes that must be read or written,
    as multiples of the largest input's bytes. ``bound`` names what limits it: ``"memory"`` or ``"math"``.
    """

    function: Callable[..., torch.Tensor | Sequence[torch.Tensor]]
    inputs: Callable[[Sizes, torch.Generator], Tensors]
    small: Sizes
    large: Sizes
    moved: float
    timed: str = FORWARD
    bound: str = "memory"


def normal(*sizes: int, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """Standard normal numbers times ``scale``."""
    return torch.randn(*sizes, generator=generator) * scale


def one_and_columns(count: int, offset: float = 0.0) -> Callable[[Sizes, torch.Generator], Tensors]:
    """A matrix and ``count`` vectors as long as its rows."""

    def make(sizes: Sizes, generator: torch.Generator) -> Tensors:
        vectors = [normal(sizes[-1], generator=generator) + offset for _ in range(count)]
        return [normal(*sizes, generator=generator), *vectors]

    return make


def matrices(count: int) -> Callable[[Sizes, torch.Generator], Tensors]:
    """Equal matrices."""
    return lambda sizes, generator: [normal(*sizes, generator=generator) for _ in range(count)]


def bias_gelu_residual(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A feed-forward block's element-wise part."""
    return functional.gelu(x + bias) + residual


def bias_gelu_inputs(sizes: Sizes, generator: torch.Generator) -> Tensors:
    """Two matrices and the bias."""
    return [*matrices(2)(sizes, generator), normal(sizes[-1], generator=generator)]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Over the last dimension."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As models write it out."""
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + 1e-6))


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension."""
    return functional.softmax(x, -1)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over the rows."""
    return functional.cross_entropy(logits, target)


def cross_entropy_inputs(sizes: Sizes, generator: torch.Generator) -> Tensors:
    """Logits and classes."""
    return [normal(*sizes, generator=generator), torch.randint(0, sizes[1], sizes[:1], generator=generator)]


def rope(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Sequence[torch.Tensor]:
    """Rotary positions on queries and keys, heads before positions."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return query * cos + rotate(query) * sin, key * cos + rotate(key) * sin


def rope_inputs(sizes: Sizes, generator: torch.Generator) -> Tensors:
    """Queries, keys, and the tables of one head."""
    length, width = sizes[-2:]
    turns = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * turns
    angles = torch.cat((angles, angles), -1)
    return [*matrices(2)(sizes, generator), angles.cos(), angles.sin()]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A gated feed-forward block's element-wise part."""
    return functional.silu(gate) * up


def logs_and_powers(x: torch.Tensor) -> torch.Tensor:
    """Logarithms, their inverses and a power."""
    grown = x.abs() + 0.5
    return torch.log(grown) + torch.log1p(grown) * torch.expm1(-grown) + torch.pow(grown, 1.7)


def waves(x: torch.Tensor) -> torch.Tensor:
    """Sine, cosine and hyperbolic tangent."""
    return torch.sin(x) * torch.cos(3.0 * x) + torch.tanh(x)


def mish(x: torch.Tensor) -> torch.Tensor:
    """``x * tanh(softplus(x))``."""
    return functional.mish(x)


ADAM_BETAS, ADAM_EPS, ADAM_RATE = (0.9, 0.999), 1e-8, 1e-3


def adam_inputs(sizes: Sizes, generator: torch.Generator) -> Tensors:
    """``sizes[0]`` parameters, each with gradient and two moments, in a row; half of them vectors a tenth as long."""
    count, elements = sizes
    tensors: Tensors = []
    for position in range(count):
        length = elements if position % 2 == 0 else max(16, elements // 10)
        value, grad = normal(length, generator=generator), normal(length, generator=generator)
        tensors += [
            value,
            grad,
            normal(length, generator=generator, scale=0.1),
            torch.rand(length, generator=generator),
        ]
    return tensors


def adam(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """One update of every parameter, in place."""
    beta1, beta2 = ADAM_BETAS
    values, grads, firsts, seconds = (list(tensors[k::4]) for k in range(4))
    torch._foreach_lerp_(firsts, grads, 1 - beta1)
    torch._foreach_mul_(seconds, beta2)
    torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(seconds)
    torch._foreach_div_(roots, math.sqrt(1 - beta2**10))
    torch._foreach_add_(roots, ADAM_EPS)
    torch._foreach_addcdiv_(values, firsts, roots, -ADAM_RATE / (1 - beta1**10))
    return ()


def gate(x: torch.Tensor) -> torch.Tensor:
    """The weights of the two experts of a token, of as many as a row has."""
    best = functional.softmax(x, -1).topk(2).values
    return best / best.sum(-1, keepdim=True)


def sorted_rows(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Short rows, doubled."""
    return [(x * 2).sort(-1).values]


def column_sum(x: torch.Tensor) -> torch.Tensor:
    """One sum for each column."""
    return x.sum(0)


def column_variance(x: torch.Tensor) -> torch.Tensor:
    """One variance for each column."""
    return x.var(0)


def moved_and_scaled(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """An affine map with a scale and a shift for each column."""
    return x * scale + shift


CHAINS: dict[str, Chain] = {
    "bias+gelu+residual": Chain(bias_gelu_residual, bias_gelu_inputs, (96, 768), (8192, 1024), 3),
    "layer norm": Chain(layer_norm, one_and_columns(2), (128, 768), (16384, 768), 2),
    "layer norm backward": Chain(layer_norm, one_and_columns(2), (96, 768), (12288, 768), 3, BACKWARD),
    "rms norm": Chain(rms_norm, one_and_columns(1), (128, 768), (16384, 768), 2),
    "rms norm backward": Chain(rms_norm, one_and_columns(1), (96, 768), (12288, 768), 3, BACKWARD),
    "softmax": Chain(softmax, one_and_columns(0), (256, 384), (16384, 768), 2),
    "softmax backward": Chain(softmax, one_and_columns(0), (128, 384), (12288, 768), 3, BACKWARD),
    "cross-entropy": Chain(cross_entropy, cross_entropy_inputs, (32, 4096), (1024, 16384), 3, STEP),
    "adam": Chain(adam, adam_inputs, (100, 800), (100, 160000), 7, UPDATE),
    "rope": Chain(rope, rope_inputs, (1, 4, 128, 64), (4, 16, 1024, 128), 4),
    "swiglu": Chain(swiglu, matrices(2), (96, 768), (8192, 1024), 3),
    "mish": Chain(mish, matrices(1), (128, 768), (8192, 1024), 2, bound="math"),
    "log, log1p, expm1, pow": Chain(logs_and_powers, matrices(1), (128, 768), (8192, 1024), 2, bound="math"),
    "best two of 8 experts": Chain(gate, matrices(1), (512, 8), (131072, 8), 1.25, bound="math"),
    "best two of 64 experts": Chain(gate, matrices(1), (512, 64), (32768, 64), 1.03, bound="math"),
    "rows of 16 sorted": Chain(sorted_rows, matrices(1), (512, 16), (131072, 16), 2, bound="math"),
    "sum of 3 columns": Chain(column_sum, matrices(1), (8192, 3), (1 << 20, 3), 1),
    "sum of 8 columns": Chain(column_sum, matrices(1), (8192, 8), (1 << 20, 8), 1),
    "variance of 8 columns": Chain(column_variance, matrices(1), (8192, 8), (1 << 20, 8), 1),
    "8 columns scaled": Chain(moved_and_scaled, one_and_columns(2), (8192, 8), (1 << 20, 8), 2),
    "13 columns scaled": Chain(moved_and_scaled, one_and_columns(2), (8192, 13), (1 << 20, 13), 2),
    "softmax of one row": Chain(softmax, one_and_columns(0), (1, 65536), (1, 1 << 23), 2),
    "sin, cos, tanh": Chain(waves, matrices(1), (128, 768), (8192, 1024), 2, bound="math"),
}
