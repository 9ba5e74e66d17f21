"""Random programs of products, convolutions and attention, with what models put before and behind them.

A program is Python text over activations and weights, whose sizes are large enough for products to become kernels of
ours. The same text runs in the types of the program and, with helpers that neither cast nor round, in float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["KINDS", "Input", "LayerProgram", "Writer", "exact_helpers", "helpers", "make_program", "without_unused"]

_ROWS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 48, 64, 65, 100, 130)
_FEATURES = (1, 3, 7, 8, 15, 16, 24, 31, 32, 33, 48, 64, 65, 80, 96, 100, 128, 160, 192)


@dataclass(frozen=True)
class Input:
    """A tensor that the program gets. ``fill``: ``normal``, ``nan``, ``inf``, ``huge``, ``tiny``, ``bool``, ``ids:N``,
    ``int8``, ``int4`` or ``positive``; ``layout``: ``plain``, ``last`` (channels last), ``turned``, ``cut`` or
    ``offset``; values are multiplied by ``scale``; ``half``: bfloat16, whatever the program's type is."""

    name: str
    shape: tuple[int, ...]
    fill: str = "normal"
    layout: str = "plain"
    scale: float = 1.0
    weight: bool = False
    half: bool = False


@dataclass(frozen=True)
class LayerProgram:
    """``lines`` of the body of a function of all ``inputs``.

    ``low`` is the type of most tensors; ``training``: whether gradients are asked for; ``autocast``: run with products
    in bfloat16; ``frozen``: whether weights are constants; ``dynamic``: whether sizes are symbols.
    """

    lines: tuple[str, ...]
    inputs: tuple[Input, ...]
    low: torch.dtype
    training: bool
    autocast: bool
    frozen: bool
    dynamic: bool

    @property
    def source(self) -> str:
        """The function as Python text."""
        names = ", ".join(each.name for each in self.inputs)
        return f"def f({names}):\n" + "".join(f"    {line}\n" for line in self.lines)

    def function(self, names: dict[str, Any]) -> Callable[..., Any]:
        """The function itself, with these helpers."""
        names = dict(names)
        exec(compile(self.source, "<program>", "exec"), names)
        found: Callable[..., Any] = names["f"]
        return found

    def __str__(self) -> str:
        marks = [str(self.low), *(n for n in ("training", "autocast", "frozen", "dynamic") if getattr(self, n))]
        inputs = (f"# {i.name}: {list(i.shape)} {i.fill} {i.layout}{' bfloat16' * i.half}" for i in self.inputs)
        return "\n".join([f"# {', '.join(marks)}", *inputs, self.source])


# --- what the text calls, in the program's types and in float64 -------------------------------------------------


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of whole numbers from -127 to 127, and what one is worth in each."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
    return (x / scale).round().clamp(-127, 127), scale


def helpers() -> dict[str, Any]:
    """As models are written."""

    def int8_linear(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w.to(x.dtype)) * s

    def int8_packed(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), w, s)

    def int8_dynamic(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        q, scale = _quantised(x)
        return (torch._int_mm(q.to(torch.int8), w.t()).to(x.dtype) * scale) * s

    def int4_packed(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, group: int) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), w, group, s)

    def int8_shifted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        shifted = (x.to(torch.int32) + 128).to(torch.uint8)
        return (torch._int_mm(shifted, w.t()) - w.t().sum(0, keepdim=True, dtype=torch.int32) * 128).float()

    named = (int8_linear, int8_packed, int8_dynamic, int8_shifted, int4_packed)
    return {
        "torch": torch,
        "F": F,
        "half": lambda x: x.to(torch.bfloat16),
        "full": lambda x: x.to(torch.float32),
        **{each.__name__: each for each in named},
    }


def exact_helpers() -> dict[str, Any]:
    """The same in float64, without casts; weights of 4 bits come as whole numbers."""

    def int8_linear(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w.double()) * s

    def int8_dynamic(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        q, scale = _quantised(x)
        return (q @ w.double().t()) * scale * s

    def int4_packed(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, group: int) -> torch.Tensor:
        scale, zero = (each.t().repeat_interleave(group, 1) for each in s.unbind(-1))
        return x @ ((w.double() - 8) * scale + zero).t()

    return {
        "torch": torch,
        "F": F,
        "half": lambda x: x,
        "full": lambda x: x,
        "int8_linear": int8_linear,
        "int8_packed": int8_linear,
        "int8_dynamic": int8_dynamic,
        "int8_shifted": lambda x, w: F.linear(x.double(), w.double()),
        "int4_packed": int4_packed,
    }


# --- writing a program ------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """Lines so far, and what they computed from zeros of float32, for its shapes."""

    draw: random.Random
    low: torch.dtype
    training: bool
    lines: list[str] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)

    def input(self, letter: str, *shape: int, **more: Any) -> str:
        """A new tensor from outside."""
        name = f"{letter}{len(self.inputs)}"
        made = Input(name, shape, **more)
        self.inputs.append(made)
        if made.fill.startswith("ids:"):
            self.values[name] = torch.zeros(shape, dtype=torch.int64)
        elif made.fill == "bool":
            self.values[name] = torch.ones(shape, dtype=torch.bool)
        else:
            self.values[name] = torch.zeros(shape)
        return name

    def weight(self, *shape: int, **more: Any) -> str:
        """A parameter, small enough for a product with it to keep the size of numbers."""
        rest = {"scale": max(1, shape[-1]) ** -0.5, **more}
        return self.input("w", *shape, weight=True, **rest)

    def add(self, text: str) -> str:
        """A line that makes a value; what eager refuses is not added."""
        name = f"v{len(self.lines)}"
        value = eval(text, {**_SHAPES, **self.values})
        if not 0 < value.numel() <= 1 << 19:
            raise ValueError("too large")
        self.lines.append(f"{name} = {text}")
        self.values[name] = value
        self.made.append(name)
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def one(self, dims: Sequence[int] = (1, 2, 3, 4), where: Callable[[str], bool] = lambda _: True) -> str:
        """A value with so many axes, the newest ones more often; if there is none, a new activation."""
        found = [n for n in self.made if self.values[n].dim() in dims and where(n)]
        if found and self.draw.random() < 0.9:
            return found[max(self.draw.randrange(len(found)), self.draw.randrange(len(found)))]
        rank = self.draw.choice([d for d in dims if d > 1] or list(dims))
        name = self.activation(rank)
        if not where(name):
            raise ValueError("no value like this")
        return name

    def activation(self, rank: int) -> str:
        """A new input with so many axes."""
        rows, features = self.draw.choice(_ROWS), self.draw.choice(_FEATURES)
        shapes = {
            1: (features,),
            2: (rows, features),
            3: (self.draw.randint(1, 3), rows, features),
            4: (
                self.draw.randint(1, 2),
                self.draw.choice((1, 3, 8, 16, 24, 32)),
                *self.draw.choices(range(3, 18), k=2),
            ),
        }
        layout = self.draw.choice(("plain",) * 5 + ("last", "turned", "cut", "offset"))
        fill = "normal" if self.draw.random() < 0.94 else self.draw.choice(("nan", "inf", "huge", "tiny"))
        name = self.input("x", *shapes[rank], layout=layout, fill=fill)
        self.made.append(name)
        return name


_SHAPES = exact_helpers() | {
    "int8_linear": lambda x, w, s: F.linear(x, w),
    "int8_packed": lambda x, w, s: F.linear(x, w),
    "int8_dynamic": lambda x, w, s: F.linear(x, w),
    "int8_shifted": F.linear,
    "int4_packed": lambda x, w, s, group: F.linear(x, w),
}


def _linear(w: Writer) -> None:
    x = w.one((2, 3))
    k, n = w.shape(x)[-1], w.draw.choice(_FEATURES)
    bias = w.input("b", n, weight=True) if w.draw.random() < 0.6 else None
    forms = [f"F.linear({x}, {w.weight(n, k)}, {bias})", f"{x} @ {w.weight(k, n, scale=k**-0.5)}"]
    if len(w.shape(x)) == 2 and bias:
        forms.append(f"torch.addmm({bias}, {x}, {w.weight(n, k)}.t())")
        forms.append(f"torch.addmm({w.input('x', w.shape(x)[0], n)}, {x}, {w.weight(k, n)}, beta=0.5, alpha=2.0)")
    w.add(w.draw.choice(forms))


def _shared_linears(w: Writer) -> None:
    """Several products of one value, as queries, keys and values are, or a gate beside what it opens."""
    x = w.one((2, 3))
    k, n = w.shape(x)[-1], w.draw.choice(_FEATURES)
    a, b = (w.add(f"F.linear({x}, {w.weight(n, k)})") for _ in range(2))
    w.add(w.draw.choice((f"F.silu({a}) * {b}", f"{a} + {b}", f"torch.cat([{a}, {b}], -1)", f"{a}.sigmoid() * {b}")))


def _product(w: Writer) -> None:
    """Of two values: rows with rows, rows with columns, with batches that are shared."""
    a = w.one((2, 3, 4))
    k = w.shape(a)[-1]
    forms = [f"{a} @ {a}.mT", f"({a}.mT @ {a}) * {1 / w.shape(a)[-2]}"]
    n = w.draw.choice(_FEATURES)
    b = w.input("x", *w.shape(a)[:-2], k, n, scale=k**-0.5, layout=w.draw.choice(("plain", "turned", "cut")))
    forms += [f"{a} @ {b}", f"torch.einsum('...ij,...jk->...ki', {a}, {b})"]
    if len(w.shape(a)) == 3:
        forms.append(f"torch.baddbmm({w.input('x', 1, 1, n)}, {a}, {b}, beta=0.5, alpha=-1.5)")
    if len(w.shape(a)) == 2:
        forms += [f"{a} @ {w.weight(k)}", f"torch.mv({a}, {w.weight(k)})", f"{b}.t() @ {a}.t()"]
    w.add(w.draw.choice(forms))


def _quantised_linear(w: Writer) -> None:
    if w.training:
        return
    x = w.one((2, 3))
    k, n = w.shape(x)[-1], w.draw.choice(_FEATURES)
    form = w.draw.choice(("linear", "packed", "dynamic", "int4"))
    if form == "int4":
        k, n, group = w.draw.choice((32, 64, 128, 256)), w.draw.choice((16, 32, 48, 64, 128)), 32
        x = w.input("x", w.draw.choice(_ROWS), k, half=True)
        packed = w.input("q", n, k, fill="int4", weight=True)
        scales = w.input("s", k // group, n, 2, half=True, scale=0.03, weight=True)
        w.add(f"int4_packed({x}, {packed}, {scales}, {group})")
        return
    if form == "dynamic":
        k, n = 8 * w.draw.randint(1, 24), 8 * w.draw.randint(1, 24)
        x = w.input("x", w.draw.choice((1, 2, 5, 8, 17, 18, 33, 64)), k)
        x = w.add(w.draw.choice((f"{x} * 2", f"F.gelu({x})", f"F.layer_norm({x}, ({k},))")))
    elif form == "packed" and len(w.shape(x)) != 2:
        form = "linear"
    scale = w.input("s", n, fill="positive", scale=0.02 * k**-0.5, weight=True)
    w.add(f"int8_{form}({x}, {w.input('q', n, k, fill='int8', weight=True)}, {scale})")


def _convolution(w: Writer) -> None:
    x = w.one((4,))
    c = w.shape(x)[1]
    groups = w.draw.choice([1, 1, 1, c, *[g for g in (2, 4, 8) if c % g == 0]])
    out = groups * w.draw.choice((1, 2, 3, 8) if groups == 1 else (1, 1, 2))
    out = w.draw.choice((8, 16, 24, 33)) if groups == 1 and w.draw.random() < 0.6 else out
    taps = w.draw.choice(((1, 1), (3, 3), (3, 3), (5, 5), (1, 3), (2, 2), (7, 7)))
    more = [f"stride={w.draw.choice((1, 1, 2, 3))}", f"padding={w.draw.choice((0, 1, 1, 2, 3))}", f"groups={groups}"]
    more += [f"dilation={w.draw.choice((1, 1, 1, 2))}"]
    bias = w.input("b", out, weight=True) if w.draw.random() < 0.5 else None
    fan = (c // groups * taps[0] * taps[1]) ** -0.5
    if w.draw.random() < 0.2:
        weight = w.weight(c, out // groups, *taps, scale=fan)
        w.add(f"F.conv_transpose2d({x}, {weight}, {bias}, {', '.join(more)})")
    elif w.draw.random() < 0.2:
        weight = w.weight(out, c // groups, taps[1], scale=fan)
        w.add(f"F.conv1d({x}.flatten(2), {weight}, {bias}, {', '.join(more)})")
    else:
        padded = w.draw.choice((x, x, x, f"F.pad({x}, (0, 1, 1, 0))", f"F.pad({x}, (1, 2, 0, 0), value=0.5)"))
        w.add(f"F.conv2d({padded}, {w.weight(out, c // groups, *taps, scale=fan)}, {bias}, {', '.join(more)})")


def _image(w: Writer) -> None:
    x = w.one((4,))
    c = w.shape(x)[1]
    norm = (
        f"F.batch_norm({x}, None, None, {w.input('b', c, weight=True)}, {w.input('b', c, weight=True)}, training=True)"
    )
    forms = (
        norm,
        norm,
        f"F.avg_pool2d({x}, 2)",
        f"F.max_pool2d({x}, 3, 2, 1)",
        f"F.interpolate({x}, scale_factor=2, mode='bilinear')",
        f"F.interpolate({x}, size=(7, 9), mode='nearest')",
        f"F.adaptive_avg_pool2d({x}, 1).flatten(1)",
        f"{x}.flatten(2).transpose(1, 2)",
        f"{x}.permute(0, 2, 3, 1)",
        f"F.group_norm({x}, 1)",
        f"F.pixel_unshuffle({x}[:, :, :2, :2], 2)",
        f"torch.cat([{x}, {x}.relu()], 1)",
    )
    w.add(w.draw.choice(forms))


def _heads(w: Writer, rows: int, heads: int, size: int, batch: int) -> str:
    if w.draw.random() < 0.5:
        return w.input("x", batch, heads, rows, size, layout=w.draw.choice(("plain", "cut", "offset")))
    flat = w.input("x", batch, rows, heads * size)
    source = w.add(f"F.linear({flat}, {w.weight(heads * size, heads * size)})") if heads * size < 260 else flat
    return w.add(f"{source}.view({batch}, {rows}, {heads}, {size}).transpose(1, 2)")


def _attention(w: Writer) -> None:
    size, heads, batch = w.draw.choice((8, 16, 24, 32, 40, 64, 80)), w.draw.choice((1, 2, 4, 6)), w.draw.randint(1, 2)
    rows = w.draw.choice(_ROWS)
    keys = rows if w.draw.random() < 0.6 else w.draw.choice(_ROWS)
    shared = w.draw.choice([1, 1, *[n for n in (2, 3) if heads % n == 0]])
    q, k, v = (
        _heads(w, n, h, size, batch) for n, h in ((rows, heads), (keys, heads // shared), (keys, heads // shared))
    )
    masks: list[str | None] = [None, None]
    masks.append(w.input("m", *w.draw.choice(((rows, keys), (batch, 1, rows, keys), (batch, 1, 1, keys))), fill="bool"))
    masks.append(w.input("m", *w.draw.choice(((rows, keys), (batch, heads, rows, keys), (1, heads, 1, keys)))))
    mask = w.draw.choice(masks)
    causal = mask is None and w.draw.random() < 0.4
    more = "" if shared == 1 else ", enable_gqa=True"
    if w.draw.random() < 0.6:
        scale = w.draw.choice(("", ", scale=0.3"))
        out = w.add(f"F.scaled_dot_product_attention({q}, {k}, {v}, {mask}, is_causal={causal}{scale}{more})")
    else:
        if shared > 1:
            k, v = (w.add(f"{each}.repeat_interleave({shared}, 1)") for each in (k, v))
        scores = w.add(f"({q} @ {k}.transpose(-1, -2)) * {size**-0.5}")
        if mask is not None and w.values[mask].dtype == torch.bool:
            scores = w.add(f"{scores}.masked_fill(~{mask}, float('-inf'))")
        elif mask is not None:
            scores = w.add(f"{scores} + {mask}")
        out = w.add(f"F.softmax({scores}, -1) @ {v}")
    if w.draw.random() < 0.7:
        w.add(f"{out}.transpose(1, 2).reshape({batch}, {rows}, {heads * size})")


def _around(w: Writer) -> None:
    """What models put between products."""
    x = w.one()
    shape = w.shape(x)
    n = shape[-1]
    peers = [name for name in w.made if w.shape(name) == shape]
    other = w.draw.choice(peers)
    forms = [
        *(f"F.{name}({x})" for name in ("gelu", "silu", "relu", "softplus", "sigmoid", "tanh", "relu6", "hardswish")),
        f"F.gelu({x}, approximate='tanh')",
        *[f"{x} + {other}"] * 3,
        f"{x} * {other}.sigmoid()",
        f"{x} * 0.5 + 1",
        *[f"F.layer_norm({x}, ({n},), {w.input('b', n, weight=True)}, {w.input('b', n, weight=True)})"] * 2,
        f"{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-5) * {w.input('b', n, weight=True)}",
        f"{x} - {x}.mean(-1, keepdim=True)",
        f"F.softmax({x}, -1)",
        f"{x}.sum(0)",
        f"{x}.mean(-1)",
        f"{x}.amax(-1, keepdim=True) - {x}",
        f"full({x})",
        f"half({x})",
        f"{x} / ({x}.abs().amax() + 1)",
    ]
    w.add(w.draw.choice(forms))


def _moved(w: Writer) -> None:
    """Views and copies."""
    x = w.one((2, 3, 4))
    shape = w.shape(x)
    forms = [
        f"{x}.transpose(-1, -2)",
        f"{x}.mT.contiguous()",
        f"{x}[..., {min(1, shape[-1] - 1)}:]",
        f"{x}[..., ::2]",
        f"{x}.flip(-1)",
        f"{x}.flatten(0, -2)",
        f"{x}[:, :1].expand{(shape[0], shape[1], *shape[2:])}",
        f"torch.cat([{x}, {x} * 2], 0)",
        f"F.pad({x}, (1, 2))",
        f"{x}.unsqueeze(0)[0]",
        f"{x}.roll(1, -1)",
        f"{x}.chunk(2, -1)[-1]",
        f"{x}.repeat(1, *{tuple([2] + [1] * (len(shape) - 2))})",
        f"torch.stack([{x}, -{x}], -1).flatten(-2)",
    ]
    w.add(w.draw.choice(forms))


def _loss(w: Writer) -> None:
    x = w.one((2,))
    rows, k = w.shape(x)
    vocabulary = w.draw.choice((5, 33, 100, 257))
    ids = w.input("t", rows, fill=f"ids:{vocabulary}")
    w.add(f"F.cross_entropy(F.linear({x}, {w.weight(vocabulary, k)}), {ids})")


def _embedding(w: Writer) -> None:
    count, n = w.draw.choice((5, 33, 100)), w.draw.choice(_FEATURES)
    ids = w.input("t", w.draw.randint(1, 2), w.draw.choice(_ROWS), fill=f"ids:{count}")
    w.add(f"F.embedding({ids}, {w.weight(count, n, scale=1.0)})")


#: What a line, or a few of them, may be, and how often.
KINDS: tuple[tuple[Callable[[Any], None], int], ...] = (
    (_linear, 5),
    (_shared_linears, 2),
    (_product, 3),
    (_quantised_linear, 3),
    (_convolution, 4),
    (_image, 3),
    (_attention, 3),
    (_around, 10),
    (_moved, 3),
    (_loss, 1),
    (_embedding, 1),
)


def make_program(
    number: int,
    kinds: Sequence[tuple[Callable[[Any], None], int]] = KINDS,
    writer: type[Writer] = Writer,
    most: int = 8,
) -> LayerProgram:
    """The program of this number, of these kinds of lines."""
    draw = random.Random(number)
    training = draw.random() < 0.6
    low = draw.choice((torch.float32,) * 6 + (torch.bfloat16,) * 3 + (torch.float16, torch.float64))
    w = writer(draw, low, training)
    steps, weights = zip(*kinds, strict=True)
    wanted = draw.randint(2, most)
    for _ in range(4 * wanted):
        if len(w.lines) >= wanted:
            break
        known = len(w.lines), len(w.inputs), len(w.made)
        try:
            draw.choices(steps, weights)[0](w)
        except (RuntimeError, ValueError, IndexError):
            for line in w.lines[known[0] :]:
                w.values.pop(line.partition(" ")[0])
            del w.lines[known[0] :], w.inputs[known[1] :], w.made[known[2] :]
    results = [n for n in w.made if n.startswith("v")]
    returned = dict.fromkeys([results[-1], *draw.sample(results, min(len(results), 2))])
    w.lines.append(f"return [{', '.join(returned)}]")
    inputs = w.inputs
    if any("conv" in line for line in w.lines):
        # Zeros around an image are multiplied by some kernels, also of eager's, and left out by others: 0 * nan.
        inputs = [replace(each, fill="normal") if each.fill in ("nan", "inf") else each for each in inputs]
    return without_unused(
        LayerProgram(
            tuple(w.lines),
            tuple(inputs),
            low,
            training,
            autocast=low == torch.float32 and draw.random() < 0.2,
            frozen=not training and draw.random() < 0.4,
            dynamic=draw.random() < 0.15,
        )
    )


def without_unused(program: LayerProgram) -> LayerProgram:
    """Inputs that no line names are left out."""
    words = set("".join(c if c.isalnum() else " " for c in "\n".join(program.lines)).split())
    return replace(program, inputs=tuple(each for each in program.inputs if each.name in words))
