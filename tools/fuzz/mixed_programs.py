"""Random programs whose values are of one shape, its rows, its columns and single numbers, each made of the others.

A reduction is read by elements, by other reductions, and by what sums along the other way; gradients of these do the
same once more. What a program says with its values (indices, comparisons, whole numbers) it says of exact ones: inputs,
and what moves them, so that rounding does not decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .layer_programs import KINDS, LayerProgram, Writer, make_program

__all__ = ["MIXED_KINDS", "MixedWriter", "make_mixed_program"]

_SHAPES = (
    (7, 33),
    (33, 7),
    (16, 48),
    (5, 64),
    (64, 5),
    (3, 4, 17),
    (1, 100),
    (100, 1),
    (24, 24),
    (4, 4, 8),
    (2, 70),
    (70, 2),
    (9, 3, 40),
    (13, 129),
    (2, 3, 9, 10),
)


@dataclass
class MixedWriter(Writer):
    """``base``: the shape of most values; ``exact``: those that no operation has rounded."""

    base: tuple[int, ...] = ()
    exact: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base = self.base or self.draw.choice(_SHAPES)

    def activation(self, rank: int) -> str:
        """A new input of the shape of all, where it has so many axes."""
        if rank != len(self.base):
            return super().activation(rank)
        layout = self.draw.choice(("plain",) * 6 + ("turned", "cut", "offset"))
        name = self.input("x", *self.base, layout=layout)
        self.made.append(name)
        self.exact.append(name)
        return name

    def whole(self) -> str:
        """A value of the shape of all."""
        return self.one((len(self.base),), lambda name: self.shape(name) == self.base)

    def any(self) -> str:
        """A value that goes with those of the shape of all."""
        return self.one((len(self.base),), lambda name: _goes_with(self.shape(name), self.base))

    def exactly(self) -> str:
        """An exact value of the shape of all."""
        found = [name for name in self.exact if name in self.made and self.shape(name) == self.base]
        return self.draw.choice(found) if found and self.draw.random() < 0.8 else self.activation(len(self.base))

    def form(self, *forms: str) -> str:
        """One of these."""
        return self.draw.choice(forms)


def _goes_with(shape: tuple[int, ...], base: tuple[int, ...]) -> bool:
    return all(size in (1, of) for size, of in zip(shape, base, strict=True))


def _element(w: MixedWriter) -> None:
    x = w.any()
    w.add(
        w.form(
            f"torch.tanh({x})",
            f"{x} * 0.5 + 0.25",
            f"{x}.sigmoid()",
            f"{x}.abs() + 0.5",
            f"torch.exp(-{x}.abs())",
            f"{x}.clamp(-1, 1)",
            f"{x}.square().tanh()",
            f"F.gelu({x})",
            f"F.silu({x})",
            f"F.hardtanh({x})",
            f"F.leaky_relu({x}, 0.1)",
            f"{x} * (torch.full_like({x}, 2.0) * torch.full_like({x}, 0.25))",
            f"torch.sin({x})",
            f"torch.log1p({x}.abs())",
            f"{x}.reciprocal().tanh()" if x in w.exact else f"({x}.abs() + 1).rsqrt()",
            f"full({x})",
            f"half({x})",
        )
    )


def _two(w: MixedWriter) -> None:
    a, b = w.any(), w.any()
    w.add(
        w.form(
            f"{a} + {b}",
            f"{a} - {b}",
            f"({a} * {b}).tanh()",
            f"torch.maximum({a}, {b})",
            f"{a} / ({b}.abs() + 1)",
            f"torch.where({w.exactly()} > 0.1, {a}, {b} * 0.5)",
            f"torch.lerp({a}, {b}, 0.25)",
            f"torch.hypot({a}, {b} + 2)",
            f"torch.addcmul({a}, {b}, {w.any()}, value=0.5).tanh()",
        )
    )


def _reduced(w: MixedWriter) -> None:
    """Over the last axis, over all others, or over any."""
    rank = len(w.base)
    rows, columns = (rank - 1,), tuple(range(rank - 1))
    dims = w.draw.choice((rows, rows, columns, columns, (w.draw.randrange(rank),), tuple(range(rank))))
    x = w.whole()
    count = 1
    for dim in dims:
        count *= w.base[dim]
    keep = f"{dims}, keepdim=True"
    forms = [
        f"{x}.mean({keep})",
        f"{x}.amax({keep})",
        f"{x}.amin({keep})",
        f"({x}.sum({keep}) * {1 / count}).tanh()",
        f"{x}.logsumexp({keep})",
        f"{x}.square().mean({keep}).add(1e-5).rsqrt()",
        f"{x}.var({keep}, correction=0).add(0.1).sqrt()",
        f"torch.linalg.vector_norm({x}, 2, {keep}) * {count**-0.5}",
        f"{x}.abs().sum({keep}) / {count}",
    ]
    exact = w.exactly()
    forms += [
        f"({exact} > 0.2).sum({keep}).to({x}.dtype) / {count}",
        f"({exact} > 0).any({dims[0]}, keepdim=True).to({x}.dtype) + 0.5",
        f"({exact} * 8).to(torch.int32).amax({keep}).to({x}.dtype) / 9",
        f"{exact}.argmax({dims[0]}, keepdim=True).to({x}.dtype) / 64",
        f"({exact} * 9).long().sum({keep}).to({x}.dtype) / {9 * count}",
        f"({x} * 0.1 + 1).prod({dims[0]}, keepdim=True).tanh()",
        f"{exact}.median({dims[0]}, keepdim=True)[0]",
        f"{exact}.topk(1, {dims[0]})[0]",
    ]
    w.add(w.draw.choice(forms))


def _ordered(w: MixedWriter) -> None:
    """Softmax, norms, scans and sorts, along any axis."""
    x, dim, n = w.whole(), w.draw.randrange(len(w.base)), w.base[-1]
    exact = w.exactly()
    scale, shift = w.input("b", n, weight=True), w.input("b", n, weight=True)
    w.add(
        w.form(
            f"{x}.softmax({dim})",
            f"F.log_softmax({x}, {dim}) * 0.1",
            f"F.layer_norm({x}, ({n},), {scale}, {shift})",
            f"F.rms_norm({x}, ({n},), {scale})",
            f"F.normalize({x}, dim={dim})",
            f"{x} - {x}.mean({dim}, keepdim=True)",
            f"{x}.cumsum({dim}) / {w.base[dim]}",
            f"({x} * 0.1 + 1).cumprod({dim}).tanh()",
            f"{x}.logcumsumexp({dim}) * 0.1",
            f"{exact}.sort({dim})[0]",
            f"{exact}.sort(dim={dim}, descending=True, stable=True)[0]",
            f"{exact}.argsort({dim}).to({x}.dtype) / {w.base[dim]}",
            f"{exact}.cummax({dim})[0]",
            f"{x}.gather({dim}, {exact}.argsort({dim}))",
        )
    )


def _moved(w: MixedWriter) -> None:
    """Views, cuts, indices and windows that give the shape of all."""
    exact = w.draw.random() < 0.4
    x, dim = (w.exactly() if exact else w.whole()), w.draw.randrange(len(w.base))
    n, size = w.base[-1], w.base[dim]
    other = w.exactly()
    forms = [
        f"{x}.flip({dim})",
        f"{x}.roll({w.draw.randint(1, 3)}, {dim})",
        f"torch.cat([{x}.narrow({dim}, {size // 2}, {size - size // 2}), {x}.narrow({dim}, 0, {size // 2})], {dim})",
        f"F.pad({x}[..., 1:], (1, 0))",
        f"{x}.transpose(0, -1).contiguous().transpose(0, -1)",
        f"torch.stack([{x}, -{x}], -1).flatten(-2)[..., ::2]",
        f"{x}.tril()",
        f"{x}.index_select({dim}, torch.arange({size}).flip(0))",
        f"{x}.reshape(-1).view({w.base})",
        f"{x}.masked_fill({other} < 0, 0.125)",
        f"{x}.gather(-1, ({other}.abs() * 7).long().clamp(max={n - 1}))",
        f"torch.cat(({x}.split({max(1, size // 3)}, {dim}))[::-1], {dim})",
    ]
    name = w.add(w.draw.choice(forms))
    if exact:
        w.exact.append(name)


def _windows(w: MixedWriter) -> None:
    x, base, n = w.whole(), w.base, w.base[-1]
    line = f"{x}.reshape(1, -1, {n})"
    rows = 1
    for size in base[:-1]:
        rows *= size
    taps = w.input("w", rows, 1, 3, weight=True, scale=0.5)
    w.add(
        w.form(
            f"F.avg_pool1d({line}, 3, 1, 1).reshape({base})",
            f"F.max_pool1d({line}, 3, 1, 1).reshape({base})",
            f"F.max_pool2d({line}.relu(), 3, 1, 1).reshape({base})",
            f"F.conv1d(F.pad(F.relu6({line}), (1, 1)), {taps}, groups={rows}).reshape({base})",
            f"F.avg_pool2d({line}, 3, 1, 1).reshape({base})",
            f"F.max_pool2d({line}, 3, 1, 1).reshape({base})",
            f"F.conv1d({line}, {taps}, padding=1, groups={rows}).reshape({base})",
            f"F.conv1d({x}.reshape(-1, 1, {n}), {w.input('w', 1, 1, 3, weight=True)}, padding=1).reshape({base})",
            f"F.pad({line}, (1, 1), mode='reflect').unfold(-1, 3, 1).mean(-1).reshape({base})",
            f"{x}.diff(dim=-1, prepend={x}[..., :1])",
            f"F.conv2d({x}.reshape(1, 1, -1, {n}), {w.input('w', 1, 1, 3, 3, weight=True)}, padding=1).reshape({base})",
        )
    )


def _scattered(w: MixedWriter) -> None:
    x, other, n = w.whole(), w.exactly(), w.base[-1]
    places = f"({other}.abs() * 3).long().clamp(max={n - 1})"
    w.add(
        w.form(
            f"torch.zeros_like({x}).scatter_add(-1, {places}, {x})",
            f"{x}.scatter(-1, {other}.argsort(-1), {w.whole()})",
            f"{x}.scatter_reduce(-1, {places}, {x}.abs() + 1, 'amax')",
            f"{x}.index_add(0, torch.arange({w.base[0]}) // 2, {w.whole()})",
            f"{x}.clone().index_put_((torch.arange({w.base[0]}).flip(0),), {w.whole()}) * 0.5",
            f"F.embedding({places}, {w.input('w', n, 4, weight=True)}).sum(-1)",
        )
    )


def _written(w: MixedWriter) -> None:
    x, b = w.whole(), w.any()
    w.add(w.form(f"{x}.clone().add_({b})", f"{x}.clone().mul_(0.5).sub_({b})"))


def _parts_written(w: MixedWriter) -> None:
    """Part of a copy is written to."""
    x, b = w.whole(), w.whole()
    w.add(
        w.form(
            f"torch.slice_scatter({x}, {b}[..., 1:], -1, 1)",
            f"torch.slice_scatter({x}, {b}[..., ::2], -1, 0, None, 2)",
            f"torch.select_scatter({x}, {b}.select(0, 0), 0, 0)",
            f"torch.where(torch.arange({w.base[-1]}) % 3 == 0, {x}, {b})",
        )
    )


def _inputs_written(w: MixedWriter) -> None:
    """Which other values may be views of, so that nothing is exact any more but what comes from now on."""
    if w.training:
        return
    x, b = w.activation(len(w.base)), w.any()
    line = w.form(f"{x}.mul_(0.5).add_({b})", f"{x}[..., ::2].copy_({w.whole()}[..., ::2])", f"{x}.copy_({w.whole()})")
    w.add(line)
    w.exact.clear()


def _rows_and_columns(w: MixedWriter) -> None:
    """Sums along both ways of the same numbers, as in gradients of norms, and what is read by other sums."""
    x, other, n = w.whole(), w.whole(), w.base[-1]
    columns = f"{tuple(range(len(w.base) - 1))}, keepdim=True"
    scale = w.input("b", n, weight=True)
    made = w.add(
        w.form(
            f"F.layer_norm({x}, ({n},), {scale}, {scale})",
            f"{x} * ({x} * {other}).mean(-1, keepdim=True)",
            f"{other} * {x} / ({x}.abs().amax(-1, keepdim=True) + 0.5)",
            f"{x}.softmax(-1) * {other}",
            f"F.rms_norm({x}, ({n},), {scale}) - {other}",
        )
    )
    first = w.form(f"{made}.sum({columns})", f"({made} * {x}).sum({columns})", f"({made} - {other}).mean({columns})")
    w.add(f"{first} * {1 / n}")
    w.add(
        w.form(f"{made}.sum({columns}) * 0.1", f"{made}.amax(-1, keepdim=True)", f"({made} * {other}).mean(-1, True)")
    )


def _largest_of_more(w: MixedWriter) -> None:
    """A maximum over some axes, and one over more."""
    x, name = w.exactly(), w.form("amax", "amin")
    small = w.add(f"{x}.{name}({len(w.base) - 1}, keepdim=True)")
    w.add(f"{x}.{name}({tuple(range(len(w.base)))}, keepdim=True) - {small}")


def _attention(w: MixedWriter) -> None:
    """Written out or not, with heads that are shared and with masks of bools."""
    rows, heads, size, shared = w.form("5", "9", "33"), 2, w.draw.choice((4, 8, 16)), w.draw.choice((1, 2))
    q = w.input("x", 1, heads * shared, int(rows), size)
    k, v = w.input("x", 1, heads, int(rows), size), w.input("x", 1, heads, int(rows), size)
    if shared > 1:
        sizes = (
            f"[:, :, None].expand(1, {heads}, {shared}, {rows}, {size}).reshape(1, {heads * shared}, {rows}, {size})"
        )
        k, v = w.add(k + sizes), w.add(v + sizes)
    seen = w.input("m", 1, 1, int(rows), int(rows), fill="bool")
    added = f"torch.where({seen}, 0.0, {w.form('-1e4', '-1.0')})"
    scores = w.form("{0} @ {1}.mT * 0.3", "({0} @ {1}.mT / 3) + torch.where({2}, 0.0, -1.0)").format(q, k, seen)
    w.add(
        w.form(
            f"F.scaled_dot_product_attention({q}, {k}, {v})",
            f"F.scaled_dot_product_attention({q}, {k}, {v}, {seen})",
            f"F.scaled_dot_product_attention({q}, {k}, {v}, {added}.to({q}.dtype))",
            f"F.softmax({scores}, -1) @ {v}",
        )
    )


def _strided_points(w: MixedWriter) -> None:
    """Convolutions of every other pixel, with the channels together."""
    x = w.input("x", 2, 8, 6, 6, layout="last")
    w.add(f"F.conv2d({x}, {w.weight(16, 8, 1, 1)}, stride=2).relu()")


def _shifted_bytes(w: MixedWriter) -> None:
    """A product of bytes without a sign, as quantised models for VNNI are written."""
    if w.training:
        return
    x, q = w.input("q", w.draw.choice((3, 18)), 32, fill="int8"), w.input("q", 24, 32, fill="int8", weight=True)
    w.add(f"int8_shifted({x}, {q})")


def _product(w: MixedWriter) -> None:
    """Whose result has the shape of all."""
    x, n = w.whole(), w.base[-1]
    bias = w.input("b", n, weight=True)
    flat = f"{x}.reshape(-1, {n})"
    w.add(
        w.form(
            f"F.linear({x}, {w.weight(n, n)}, {bias})",
            f"F.gelu({x} @ {w.weight(n, n)}) + {w.any()}",
            f"({flat}.t() @ {flat} * {1 / n}).tanh()",
            f"{x} @ {w.weight(n, 1)}",
            f"F.linear({x}, {w.weight(n, n)}).softmax(-1)",
            f"F.scaled_dot_product_attention(*[{flat}.view(1, 1, -1, {n})] * 3).view({w.base})",
            f"F.scaled_dot_product_attention(*[{flat}.view(1, 1, -1, {n})] * 3, is_causal=True).view({w.base})",
        )
    )


def _loss(w: MixedWriter) -> None:
    x, n = w.whole(), w.base[-1]
    other = w.exactly()
    flat = f"{x}.reshape(-1, {n})"
    w.add(
        w.form(
            f"F.cross_entropy({flat}, {other}.reshape(-1, {n}).argmax(-1))",
            f"F.cross_entropy({flat}, {other}.reshape(-1, {n}).argmax(-1), label_smoothing=0.1, ignore_index=1)",
            f"F.mse_loss({x}, {other})",
            f"F.smooth_l1_loss({x}, {other}, beta=0.5)",
            f"F.kl_div({x}.log_softmax(-1), {other}.softmax(-1), reduction='batchmean')",
            f"F.binary_cross_entropy_with_logits({x}, {other}.sigmoid())",
            f"{x}.mean().view({(1,) * len(w.base)})",
            f"{x}.square().mean().sqrt().view({(1,) * len(w.base)})",
        )
    )


#: What a line may be, and how often; some as in :mod:`.layer_programs`.
MIXED_KINDS: tuple[tuple[Callable[[Any], None], int], ...] = (
    (_element, 6),
    (_two, 8),
    (_reduced, 10),
    (_ordered, 4),
    (_moved, 3),
    (_windows, 2),
    (_scattered, 1),
    (_written, 1),
    (_inputs_written, 1),
    (_rows_and_columns, 4),
    (_largest_of_more, 1),
    (_attention, 1),
    (_strided_points, 1),
    (_shifted_bytes, 1),
    (_parts_written, 1),
    (_product, 2),
    (_loss, 1),
    *((step, 1) for step, _ in KINDS if step.__name__ in ("_linear", "_quantised_linear", "_around")),
)


def make_mixed_program(number: int) -> LayerProgram:
    """The program of this number."""
    return make_program(number, MIXED_KINDS, MixedWriter, most=12)
