"""Operators without a rule of their own, which are captured as others that have one, or stay library calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .draw import Draw
from .program import Ref, overload
from .recipes import RECIPES, recipe
from .tensors import FLOATS, HALVES, LAYOUTS
from .windowed import image

__all__ = ["public"]

#: What the schema says is enough.
_PLAIN = """
aminmax celu count_nonzero count_nonzero.dim_IntList deg2rad frac heaviside log_sigmoid logit nan_to_num rad2deg
selu sgn sinc special_entr special_erfcx special_log_ndtr special_xlog1py special_xlog1py.other_scalar
special_xlog1py.self_scalar threshold xlogy.Tensor xlogy.Scalar_Other xlogy.Scalar_Self relu6 isneginf isposinf
ldexp.Tensor logaddexp2 nansum _safe_softmax isin.Tensor_Tensor isin.Tensor_Scalar softmax.int log_softmax.int
positive negative absolute mvlgamma hardshrink softshrink dist norm.Scalar norm.ScalarOpt_dim logcumsumexp
var.dim std.dim nanmean diff var std float_power.Tensor_Scalar float_power.Tensor_Tensor
true_divide.Scalar floor_divide.Scalar multiply.Scalar multiply.Tensor subtract.Scalar greater.Scalar msort
clip special_expit special_sinc rrelu swapaxes
"""

_LOSSES = """
mse_loss l1_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
cosine_similarity pairwise_distance
"""


@cache
def public() -> tuple[str, ...]:
    """All of them."""
    plain = [name if "." in name else f"{name}.default" for name in _PLAIN.split()]
    found = [f"aten.{name}" for name in plain]
    return tuple(dict.fromkeys([*(n for n in found if _exists(n)), *_OWN]))


def _exists(name: str) -> bool:
    try:
        overload(name)
    except AttributeError:
        return False
    return True


_OWN: list[str] = []


def own(*ops: str) -> Any:
    """A recipe of operators that are targets because they have it."""

    def register(function: Any) -> Any:
        before = set(RECIPES)
        made = recipe(*ops)(function)
        _OWN.extend(sorted(set(RECIPES) - before))
        return made

    return register


@own(*_LOSSES.split())
def _loss(d: Draw, op: str) -> None:
    x = d.primary(fill=("unit",) if "binary_cross_entropy." in op else None)
    y = d.like(x, ("unit",)) if d.flag(0.9) else d.partner(x)
    if "cosine" in op or "pairwise" in op:
        d.call(op, [x, y])
        return
    kwargs = {} if d.flag(0.3) else {"reduction": d.pick(0, 1, 2)}
    if "with_logits" not in op and "binary" in op and d.flag(0.3):
        kwargs["weight"] = d.like(x, ("unit",))
    d.call(op, [x, y], kwargs)


@own("mm", "bmm", "mv", "dot", "matmul", "addmm", "baddbmm", "linear")
def _product(d: Draw, op: str) -> None:
    n, k, m, batch = (d.pick(0, 1, 2, 2, 3, 5, 17) for _ in range(4))
    kind = op.split(".")[1]
    shapes: dict[str, list[list[int]]] = {
        "mm": [[n, k], [k, m]], "bmm": [[batch, n, k], [batch, k, m]], "mv": [[n, k], [k]], "dot": [[k], [k]],
        "matmul": d.pick([[n, k], [k, m]], [[batch, n, k], [k, m]], [[k], [k, m]], [[batch, 1, n, k], [2, k, m]]),
        "addmm": [d.pick([n, m], [m], [1, m], []), [n, k], [k, m]],
        "baddbmm": [d.pick([batch, n, m], [n, m]), [batch, n, k], [batch, k, m]],
        "linear": [d.pick([n, k], [batch, n, k], [k]), [m, k], *d.pick([], [[m]])],
    }  # fmt: skip
    kwargs = {"alpha": d.pick(1, 2, 0.5), "beta": d.pick(1, 0, 0.5)} if kind in ("addmm", "baddbmm") else {}
    layouts = [d.goal_layout() for _ in shapes[kind]]
    given = [d.tensor(size, layout=layout) for size, layout in zip(shapes[kind], layouts, strict=True)]
    d.call(op, given, kwargs if d.flag(0.4) else None)


@own("convolution")
def _convolution(d: Draw, op: str) -> None:
    dims, groups = d.pick(1, 2, 2), d.pick(1, 1, 2)
    channels, out = groups * d.pick(1, 2), groups * d.pick(1, 2, 3)
    x = d.tensor([d.pick(1, 2), channels, *(d.rng.randint(3, 8) for _ in range(dims))], layout=d.goal_layout())
    weight = d.tensor([out, channels // groups, *(d.pick(1, 2, 3) for _ in range(dims))])
    bias = d.tensor([out]) if d.flag() else None
    window = [[d.pick(1, 2)], [d.pick(0, 1)], [d.pick(1, 1, 2)]]
    d.call(op, [x, weight, bias, *window, False, [0] * dims, groups])


@own("layer_norm", "group_norm", "instance_norm", "batch_norm", "rms_norm")
def _norm(d: Draw, op: str) -> None:
    d.floats()
    kind, channels = op.split(".")[1], d.pick(1, 2, 4, 6)
    space = [d.pick(1, 2, 5, 7) for _ in range(d.pick(1, 2))]
    x = d.tensor([d.pick(1, 2, 3), channels, *space], layout=d.goal_layout())
    normalized = d.shape(x)[d.pick(1, 2) :] if kind in ("layer_norm", "rms_norm") else [channels]
    dtype = d.dtype_of(x)
    layout = "contiguous" if kind == "group_norm" and dtype in HALVES else None  # eager reads those as if they were
    affine: list[Ref | None] = [d.tensor(normalized, dtype, layout=layout) if d.flag(0.7) else None for _ in range(2)]
    eps = d.pick(1e-5, 1e-3, 0.1)
    if kind == "layer_norm":
        d.call(op, [x, normalized, *affine, eps, False])
    elif kind == "rms_norm":
        d.call(op, [x, normalized, affine[0], d.pick(None, eps)])
    elif kind == "group_norm":
        d.call(op, [x, d.pick(*(g for g in (1, 2, 3) if channels % g == 0)), *affine, eps, False])
    else:
        training = d.flag(0.7)
        stats = [d.tensor([channels], dtype), d.tensor([channels], dtype, ("unit",))]
        given = stats if not training or d.flag() else [None, None]
        d.call(op, [x, *affine, *given, training, d.pick(0.1, 0.5), eps, False])


@own("cross_entropy_loss", "nll_loss_nd")
def _cross_entropy(d: Draw, op: str) -> None:
    classes, rest = d.pick(1, 2, 5, 11), [d.pick(1, 3)] * d.pick(0, 0, 1, 2)
    lead = [] if not rest and d.flag(0.2) else [d.pick(1, 2, 5, 0)]
    x = d.tensor([*lead, classes, *rest], layout=d.goal_layout())
    shares = op.startswith("aten.cross") and d.flag(0.2)
    target = d.like(x, ("unit",)) if shares else d.index_into(classes, [*lead, *rest], negative=False)
    weight = d.tensor([classes], d.dtype_of(x), ("unit",)) if d.flag(0.3) else None
    smoothing = [d.pick(0.0, 0.1)] if op.startswith("aten.cross") else []
    d.call(op, [x, target, weight, d.pick(0, 1, 2), d.pick(-100, 0, 1), *smoothing])


@own("avg_pool1d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool1d", "max_pool2d", "max_pool1d")
def _pool(d: Draw, op: str) -> None:
    dims = int(op[op.index("pool") + 4])
    x = image(d, dims)
    n = d.shape(x)[-1]
    if "adaptive" in op:
        d.call(op, [x, [d.pick(1, 2, 3, 5, n) for _ in range(dims)]])
        return
    kernel = d.pick(1, 2, 3, n, max(n - 1, 1))
    args: list[Any] = [[kernel], [d.pick(1, 2, kernel)], [d.rng.randint(0, kernel // 2)]]
    d.call(op, [x, *args, *([d.flag(), d.flag()] if "avg" in op else [[1], d.flag()])])


@own("dropout", "feature_dropout", "alpha_dropout")
def _dropout(d: Draw, op: str) -> None:
    d.call(op, [d.primary(2), d.pick(0.0, 0.3, 0.5, 1.0), d.pick(True, True, False)])


@own("poisson", "bernoulli")
def _poisson(d: Draw, op: str) -> None:
    d.call(op, [d.primary(fill=("unit",))])


@own("polar", "complex")
def _polar(d: Draw, op: str) -> None:
    d.dtype = d.dtype if d.dtype in FLOATS[:2] or d.flag(0.07) else d.pick(*FLOATS[:2])
    x = d.primary()
    d.call(op, [x, d.like(x)])


@own("median", "median.dim", "nanmedian", "nanmedian.dim")
def _median(d: Draw, op: str) -> None:
    """Of tensors that do not share memory: of others eager sorts the shared elements, and gives any."""
    x = d.primary()
    if LAYOUTS[d.layout] == "expanded":
        x = d.call("aten.clone.default", [x], {"memory_format": torch.contiguous_format}).outputs[0]
    d.call(op, [x, d.a_dim(x), d.flag()] if op.endswith("dim") else [x])


@own("trace", "matrix_exp", "glu", "prelu")
def _shaped(d: Draw, op: str) -> None:
    kind = op.split(".")[1]
    if kind == "trace":
        d.call(op, [d.primary(2, 2)])
        return
    d.floats()
    if kind == "matrix_exp":
        n = d.pick(0, 1, 2, 3, 5)
        d.call(op, [d.tensor([*d.size(0, 1)[:1], n, n], fill=("unit",), layout=d.goal_layout())])
    elif kind == "glu":
        size = d.size(1, 4, least=1)
        dim = d.rng.randrange(len(size))
        size[dim] = 2 * d.pick(1, 2, 4, 5, 16) if d.flag(0.97) else size[dim]
        d.call(op, [d.tensor(size, layout=d.goal_layout()), d.pick(dim, dim - len(size))])
    else:
        x = d.primary(1)
        channels = d.shape(x)[1] if d.dim(x) > 1 else 1
        d.call(op, [x, d.tensor([d.pick(1, channels)], d.dtype_of(x))])


@own("linspace", "logspace")
def _linspace(d: Draw, op: str) -> None:
    kwargs = {} if d.flag(0.2) else {"dtype": getattr(torch, d.dtype)}
    d.call(op, [d.pick(-1.5, 0, 3, 2.5), d.pick(7, -3, 0.25, 2), d.pick(0, 1, 2, 5, 17)], kwargs)


@own("bucketize.Tensor", "searchsorted.Tensor")
def _bucketize(d: Draw, op: str) -> None:
    x = d.primary()
    edges = d.tensor([d.pick(0, 1, 2, 7, 20)], d.dtype_of(x), ("increasing",))
    given = [x, edges] if "bucketize" in op else [edges, x]
    d.call(op, given, {"right": d.flag(), "out_int32": d.flag(0.2)})


@own("channel_shuffle", "native_channel_shuffle", "pixel_shuffle", "pixel_unshuffle")
def _shuffle(d: Draw, op: str) -> None:
    times, space = d.pick(1, 2, 3), d.pick(1, 2)
    size = [d.pick(1, 2), d.pick(1, 2) * times**2, space * times, d.pick(1, 3) * times]
    d.call(op, [d.tensor(size, layout=d.goal_layout()), times])


@own("narrow", "narrow_copy", "movedim.int", "tile", "repeat_interleave.self_int", "tensor_split.sections",
     "diag_embed", "diagonal_copy", "rot90", "cumulative_trapezoid.dx", "moveaxis.int", "diag")  # fmt: skip
def _rearranged(d: Draw, op: str) -> None:
    kind = op.split(".")[1]
    x = d.primary(2, 3)
    dim = d.rng.randrange(d.dim(x))
    n = d.shape(x)[dim]
    start = d.rng.randint(0, n)
    args: dict[str, list[Any]] = {
        "narrow": [dim, d.integer(d.pick(start, start - n)), d.rng.randint(0, n - start)],
        "narrow_copy": [dim, start, d.rng.randint(0, n - start)],
        "movedim": [dim, d.a_dim(x)], "moveaxis": [dim, d.a_dim(x)], "tile": [[d.pick(1, 2, 3), d.pick(1, 2)]],
        "repeat_interleave": [d.pick(0, 1, 2, 3), d.pick(None, dim)], "tensor_split": [d.pick(1, 2, 3, 5), dim],
        "diag_embed": [d.rng.randint(-2, 2)], "diagonal_copy": [d.rng.randint(-2, 2)],
        "rot90": [d.pick(1, 2, 3, -1, 0), [0, 1]], "cumulative_trapezoid": [], "diag": [d.rng.randint(-2, 2)],
    }  # fmt: skip
    d.call(op, [x, *args[kind]], {"dim": dim} if kind == "cumulative_trapezoid" else None)


@own("scaled_dot_product_attention")
def _attention(d: Draw, op: str) -> None:
    batch, heads, queries, keys, width = (d.pick(1, 2, 3, 5) for _ in range(5))
    q = d.tensor([batch, heads, queries, width], layout=d.goal_layout())
    k, v = (d.tensor([batch, heads, keys, width]) for _ in range(2))
    kwargs: dict[str, Any] = {"attn_mask": d.tensor([queries, keys], d.pick("bool", d.dtype))} if d.flag(0.4) else {}
    if not kwargs and d.flag(0.4):
        kwargs["is_causal"] = True
    d.call(op, [q, k, v], kwargs)


@own("im2col", "max_unpool2d", "renorm", "block_diag", "addr", "grid_sampler_2d")
def _rare(d: Draw, op: str) -> None:
    kind = op.split(".")[1]
    if kind == "im2col":
        d.call(op, [image(d, 2, least=3), [d.pick(1, 2, 3)] * 2, [1, 1], [d.pick(0, 1)] * 2, [d.pick(1, 2)] * 2])
    elif kind == "max_unpool2d":
        x = image(d, 2, least=2)
        out, indices = d.call("aten.max_pool2d_with_indices.default", [x, [2, 2]]).outputs
        d.call(op, [out, indices, d.shape(x)[-2:]])
    elif kind == "renorm":
        d.call(op, [d.primary(2, 3), d.pick(1, 2, 0.5), d.pick(0, 1, -1), d.pick(0.5, 2.0, 1)])
    elif kind == "block_diag":
        d.call(op, [[d.primary(0, 2), *(d.tensor(d.size(0, 2)[:2]) for _ in range(d.pick(0, 1, 2)))]])
    elif kind == "addr":
        n, m = d.pick(0, 1, 3, 7), d.pick(1, 2, 5)
        d.call(op, [d.tensor([n, m], layout=d.goal_layout()), d.tensor([n]), d.tensor([m])], {"beta": d.pick(1, 0, 2)})
    else:
        x = image(d, 2, least=2)
        shape = d.shape(x)
        grid = d.tensor([shape[0], d.pick(1, 3), d.pick(1, 2, 5), 2], d.dtype_of(x))
        d.call(op, [x, grid, d.pick(0, 1, 2), d.pick(0, 1, 2), d.flag()])
