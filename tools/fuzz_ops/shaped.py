"""Recipes of what makes, views, joins and normalizes tensors: sizes that have to fit."""

from __future__ import annotations

import math
from typing import Any

import torch

from .draw import Draw
from .program import Ref
from .recipes import recipe
from .tensors import FLOATS, HALVES, INTEGERS

# --- views --------------------------------------------------------------------------------------------------------


def factors(d: Draw, total: int) -> list[int]:
    """Sizes with this product, one of them perhaps left to be inferred."""
    if total == 0:
        found = [d.pick(1, 2, 3), 0]
        d.rng.shuffle(found)
        return found
    found = []
    rest = total
    while rest > 1 and len(found) < 4:
        divisors = [n for n in range(2, min(rest, 200) + 1) if rest % n == 0]
        chosen = d.rng.choice(divisors) if divisors and d.flag(0.7) else rest
        found.append(chosen)
        rest //= chosen
    if rest > 1:
        found.append(rest)
    if d.flag(0.3):
        found.insert(d.rng.randint(0, len(found)), 1)
    d.rng.shuffle(found)
    if found and d.flag(0.25):
        found[d.rng.randrange(len(found))] = -1
    return found


@recipe("view", "_unsafe_view", "reshape")
def _view(d: Draw, op: str) -> None:
    x = d.primary()
    shape = d.shape(x)
    if d.flag(0.3) and len(shape) > 1:  # two neighbours become one, which many strides allow
        at = d.rng.randrange(len(shape) - 1)
        size = [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]
    elif d.flag(0.3):
        size = list(shape)
        size.insert(d.rng.randint(0, len(size)), 1)
    else:
        size = factors(d, math.prod(shape))
    d.call(op, [x, size])


@recipe("_reshape_alias")
def _reshape_alias(d: Draw, op: str) -> None:
    x = d.primary()
    value = d.value(x)
    viewed = value.reshape(factors(d, math.prod(d.shape(x))))
    if viewed.numel() and viewed.untyped_storage()._cdata != value.untyped_storage()._cdata:
        viewed = value  # the reshape copies: the operator, which trusts its caller, would read beyond the tensor
    d.call(op, [x, list(viewed.shape), list(viewed.stride())])


@recipe("as_strided", "new_empty_strided", "empty_strided")
def _as_strided(d: Draw, op: str) -> None:
    made = "empty" in op
    x = None if op.endswith("empty_strided.default") and "new" not in op else d.primary()
    size = d.size(0, 3)
    stride = _strides(d, size)
    room = 0
    if x is not None and not made:
        value = d.value(x)
        room = value.untyped_storage().nbytes() // value.element_size()
        size = [min(n, 4) for n in size]
        stride = [d.rng.randint(0, 4) for _ in size]
        while 0 not in size and 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) > room and any(stride):
            stride[stride.index(max(stride))] -= 1
    args: list[Any] = ([] if x is None else [x]) + [size, stride]
    reach = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if op == "aten.as_strided.default" and d.flag() and reach <= room:
        args.append(d.rng.randint(0, room - reach))
    d.call(op, args, _factory(d) if op.startswith("aten.empty_strided") else None)


def _strides(d: Draw, size: list[int]) -> list[int]:
    stride, running = [0] * len(size), 1
    for dim in d.rng.sample(range(len(size)), len(size)):
        stride[dim] = running
        running *= max(size[dim], 1) + d.pick(0, 0, 1)
    return stride


@recipe("flatten.using_ints")
def _flatten(d: Draw, op: str) -> None:
    x = d.primary()
    first, last = sorted(d.rng.randint(0, max(d.dim(x) - 1, 0)) for _ in range(2))
    d.call(op, [x, first, d.pick(last, -1)])


@recipe("unflatten.int")
def _unflatten(d: Draw, op: str) -> None:
    x = d.primary(1)
    dim = d.a_dim(x)
    d.call(op, [x, dim, factors(d, d.value(x).size(dim))])


@recipe("permute")
def _permute(d: Draw, op: str) -> None:
    x = d.primary()
    order = d.rng.sample(range(d.dim(x)), d.dim(x))
    d.call(op, [x, [i - d.dim(x) if d.flag(0.3) else i for i in order]])


@recipe("unsqueeze")
def _unsqueeze(d: Draw, op: str) -> None:
    x = d.primary()
    d.call(op, [x, d.rng.randint(-d.dim(x) - 1, d.dim(x))])


@recipe("expand", "expand_as")
def _expand(d: Draw, op: str) -> None:
    shape = d.size(0, 4)
    own = [1 if d.flag(0.4) else n for n in shape]
    own = own[d.rng.randint(0, len(own)) :] if d.flag(0.4) else own
    x = d.tensor(own, layout=d.goal_layout())
    if op.startswith("aten.expand_as"):
        d.call(op, [x, d.tensor(shape)])
        return
    lead = len(shape) - len(own)
    d.call(op, [x, [-1 if i >= lead and d.flag(0.3) else n for i, n in enumerate(shape)]])


@recipe("view_as")
def _view_as(d: Draw, op: str) -> None:
    x = d.primary()
    size = [n for n in factors(d, math.prod(d.shape(x))) if n >= 0]
    d.call(op, [x, d.tensor(size if math.prod(size) == math.prod(d.shape(x)) else d.shape(x))])


@recipe("view.dtype")
def _view_dtype(d: Draw, op: str) -> None:
    d.call(op, [d.primary(1), getattr(torch, d.pick(*FLOATS, *INTEGERS))])


def bounds(d: Draw, n: int) -> tuple[Any, Any]:
    """A start and an end in, before and behind a dimension."""
    near = (0, 1, -1, n, n - 1, -n, n // 2, n + 3, -n - 2, 2**63 - 1, None)
    return d.integer_or_none(d.pick(*near)), d.integer_or_none(d.pick(*near, None))


@recipe("slice.Tensor")
def _slice(d: Draw, op: str) -> None:
    x = d.primary(1)
    dim = d.a_dim(x)
    d.call(op, [x, dim, *bounds(d, d.value(x).size(dim)), d.pick(1, 1, 2, 3, 7)])


@recipe("select.int")
def _select(d: Draw, op: str) -> None:
    x = d.primary(1, least=1)
    dim = d.a_dim(x)
    n = d.value(x).size(dim)
    index = d.rng.randint(-n, n - 1) if d.flag(0.95) else d.pick(n, -n - 1)
    d.call(op, [x, dim, d.integer(index)])


@recipe("diagonal")
def _diagonal(d: Draw, op: str) -> None:
    x = d.primary(2)
    first, second = d.rng.sample(range(d.dim(x)), 2)
    d.call(op, [x, d.integer(d.rng.randint(-4, 4)), first, d.pick(second, second - d.dim(x))])


@recipe("unfold")
def _unfold(d: Draw, op: str) -> None:
    x = d.primary(1)
    dim = d.a_dim(x)
    d.call(op, [x, dim, d.rng.randint(0, d.value(x).size(dim)), d.pick(1, 2, 3, 5)])


@recipe("split.Tensor", "chunk")
def _split(d: Draw, op: str) -> None:
    x = d.primary(1)
    d.call(op, [x, d.pick(1, 2, 3, 4, 5, 16), d.a_dim(x)])


@recipe("split_with_sizes")
def _split_with_sizes(d: Draw, op: str) -> None:
    x = d.primary(1)
    dim = d.a_dim(x)
    left = d.value(x).size(dim)
    sizes: list[int] = []
    while left and len(sizes) < 4:
        sizes.append(d.rng.randint(0, left))
        left -= sizes[-1]
    d.call(op, [x, [*sizes, left], dim])


@recipe("linalg_cross")
def _cross(d: Draw, op: str) -> None:
    d.dtype = d.pick(*FLOATS[:2], "complex64", "int64") if d.dtype == "bool" else d.dtype
    size = d.size(1, 4)
    dim = d.rng.randrange(len(size))
    size[dim] = 3 if d.flag(0.97) else size[dim]
    x = d.tensor(size, layout=d.goal_layout())
    other = [n if i == dim or d.flag(0.8) else 1 for i, n in enumerate(size)]
    dtype = d.dtype_of(x) if d.flag(0.95) else d.pick(*FLOATS, *INTEGERS)
    d.call(op, [x, d.tensor(other, dtype)], {"dim": d.pick(dim, dim - len(size))})


@recipe("repeat")
def _repeat(d: Draw, op: str) -> None:
    x = d.primary(0, 3)
    lead = [d.pick(1, 2, 0, 3)] if d.flag(0.3) else []
    d.call(op, [x, [*lead, *(d.pick(1, 1, 2, 3, 0) for _ in range(d.dim(x)))]])


@recipe("roll")
def _roll(d: Draw, op: str) -> None:
    x = d.primary(1)
    dims = [] if d.flag(0.3) else d.dims(x, 1)
    d.call(op, [x, [d.integer(d.rng.randint(-40, 40)) for _ in dims or [0]], dims])


# --- joins --------------------------------------------------------------------------------------------------------


@recipe("cat", "stack")
def _cat(d: Draw, op: str) -> None:
    x = d.primary(1)
    shape, dim = d.shape(x), d.rng.randrange(d.dim(x))
    parts = [x]
    for _ in range(d.pick(0, 1, 1, 2, 3)):
        size = list(shape)
        if "cat" in op:
            size[dim] = d.pick(0, 1, 2, 5, shape[dim])
        dtype = d.dtype_of(x) if d.flag(0.7) else d.pick(*FLOATS, *INTEGERS, "bool")
        parts.append(x if d.flag(0.1) else d.tensor([0] if "cat" in op and d.flag(0.05) else size, dtype))
    d.rng.shuffle(parts)
    d.call(op, [parts, d.pick(dim, dim - len(shape) - ("stack" in op))])


@recipe("constant_pad_nd")
def _constant_pad(d: Draw, op: str) -> None:
    x = d.primary(1)
    pad = [d.pick(0, 1, 2, 3, -1, 5) for _ in range(2 * d.rng.randint(1, d.dim(x)))]
    d.call(op, [x, pad, d.scalar()])


@recipe("slice_scatter", "slice_backward")
def _slice_scatter(d: Draw, op: str) -> None:
    x = d.primary(1)
    shape, dim, step = d.shape(x), d.rng.randrange(d.dim(x)), d.pick(1, 1, 2, 3)
    n = shape[dim]
    near = (0, 1, n, n - 1, n // 2, n + 3, -1, -n)
    start, end = d.pick(*near), d.pick(*near, 2**63 - 1)
    size = list(shape)
    size[dim] = len(range(n)[start:end:step])
    if "backward" in op:
        d.call(op, [d.tensor(size, d.dtype_of(x)), shape, dim, start, end, step])
    else:
        d.call(op, [x, d.tensor(size, d.dtype_of(x)), dim, d.integer(start), d.integer(end), step])


@recipe("select_scatter", "select_backward")
def _select_scatter(d: Draw, op: str) -> None:
    x = d.primary(1, least=1)
    shape, dim = d.shape(x), d.rng.randrange(d.dim(x))
    index = d.rng.randint(-shape[dim], shape[dim] - 1)
    source = d.tensor(shape[:dim] + shape[dim + 1 :], d.dtype_of(x))
    if "backward" in op:
        d.call(op, [source, shape, dim, index])
    else:
        d.call(op, [x, source, dim, d.integer(index)])


@recipe("diagonal_scatter")
def _diagonal_scatter(d: Draw, op: str) -> None:
    x = d.primary(2)
    first, second = d.rng.sample(range(d.dim(x)), 2)
    offset = d.rng.randint(-3, 3)
    shape = list(torch.diagonal(d.value(x), offset, first, second).shape)
    d.call(op, [x, d.tensor(shape, d.dtype_of(x)), offset, first, second])


# --- made of numbers ----------------------------------------------------------------------------------------------


def _factory(d: Draw) -> dict[str, Any]:
    return {} if d.flag(0.2) else {"dtype": getattr(torch, d.dtype)}


@recipe("full", "zeros", "ones", "empty.memory_format", "_efficientzerotensor", "rand", "randn", "rand.generator",
        "randn.generator")  # fmt: skip
def _full(d: Draw, op: str) -> None:
    if "rand" in op:
        d.floats()
    kwargs = _factory(d) | ({"generator": None} if op.endswith("generator") else {})
    d.call(op, [d.size(), *([d.scalar()] if "full" in op else [])], kwargs)


@recipe("new_full", "new_zeros", "new_ones", "new_empty")
def _new_full(d: Draw, op: str) -> None:
    kwargs = {} if d.flag() else {"dtype": getattr(torch, d.pick(*FLOATS, *INTEGERS, "bool"))}
    d.call(op, [d.primary(), d.size(), *([d.scalar()] if "full" in op else [])], kwargs)


@recipe("full_like")
def _full_like(d: Draw, op: str) -> None:
    kwargs = {} if d.flag() else {"dtype": getattr(torch, d.pick(*FLOATS, *INTEGERS, "bool"))}
    d.call(op, [d.primary(), d.scalar()], kwargs)


@recipe("fill.Tensor")
def _fill_tensor(d: Draw, op: str) -> None:
    d.call(op, [d.primary(), d.tensor([], d.pick(d.dtype, "float32", "int64"))])


@recipe("scalar_tensor")
def _scalar_tensor(d: Draw, op: str) -> None:
    d.call(op, [d.scalar()], _factory(d))


@recipe("empty_permuted")
def _empty_permuted(d: Draw, op: str) -> None:
    size = d.size()
    d.call(op, [size, d.rng.sample(range(len(size)), len(size))], _factory(d))


@recipe("arange", "arange.start", "arange.start_step", "linspace")
def _arange(d: Draw, op: str) -> None:
    start, end = d.pick(0, 1, -3, 0.5, -2.25, 5), d.pick(0, 1, 7, 40, 5.5, -8, -2.5, 1000)
    step = d.pick(1, 2, -1, 0.5, -0.25, 3, 0.3)
    args = {"arange.default": [end], "arange.start": [start, end]}.get(op.removeprefix("aten."), [start, end, step])
    if "linspace" in op:
        args = [d.pick(-1.5, 0, 3, 2.5), d.pick(7, -3, 0.25, 100), d.pick(0, 1, 2, 5, 17, 100)]
    d.call(op, args, _factory(d))


@recipe("prims.iota")
def _iota(d: Draw, op: str) -> None:
    keywords = {"start": d.pick(0, 1, -5, 100), "step": d.pick(1, 2, -1, 0, 7)}
    dtype = getattr(torch, d.pick(*INTEGERS[:2]))
    device = {"device": torch.device("cpu"), "requires_grad": False}
    d.call(op, [d.pick(0, 1, 5, 17, 300)], {**keywords, "dtype": dtype, **device})


@recipe("eye", "eye.m")
def _eye(d: Draw, op: str) -> None:
    d.call(op, [d.pick(0, 1, 3, 17) for _ in range(1 + op.endswith(".m"))], _factory(d))


# --- random numbers -----------------------------------------------------------------------------------------------


@recipe("uniform", "normal_functional", "exponential", "bernoulli.p", "native_dropout")
def _random(d: Draw, op: str) -> None:
    low = d.pick(0.0, -1.0, 2.0)
    args: dict[str, list[Any]] = {
        "uniform": [low, low + d.pick(0.0, 1.0, 3.5)],
        "normal_functional": [low, d.pick(1.0, 0.5, 0.0)],
        "exponential": [d.pick(1.0, 0.3, 4.0)],
        "bernoulli": [d.pick(0.0, 0.3, 0.5, 1.0)],
        "native_dropout": [d.pick(0.0, 0.3, 0.5, 1.0), d.pick(True, False)],
    }
    d.call(op, [d.primary(), *args[op.split(".")[1]]])


@recipe("rand_like", "randn_like", "rand_like.generator", "randn_like.generator")
def _rand_like(d: Draw, op: str) -> None:
    d.floats()
    kwargs: dict[str, Any] = {"generator": None} if op.endswith("generator") else {}
    d.call(op, [d.primary()], kwargs | ({"dtype": getattr(torch, d.pick(*FLOATS))} if d.flag(0.3) else {}))


@recipe("randint", "randint.low", "randint_like", "randint_like.low_dtype")
def _randint(d: Draw, op: str) -> None:
    high = d.pick(1, 2, 10, 100)
    args: list[Any] = [d.pick(0, -5, high - 1), high] if "low" in op else [high]
    if "like" in op:
        d.call(op, [d.primary(), *args])
    else:
        d.call(op, [*args, d.size()], {} if d.flag() else {"dtype": getattr(torch, d.dtype)})


@recipe("bernoulli")
def _bernoulli(d: Draw, op: str) -> None:
    d.call(op, [d.primary(fill=("unit",))])


@recipe("bernoulli.Tensor")
def _bernoulli_tensor(d: Draw, op: str) -> None:
    x = d.primary()
    d.call(op, [x, d.like(x, ("unit",), d.pick("float32", "float64"))])


# --- softmax and norms --------------------------------------------------------------------------------------------


@recipe("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
def _softmax(d: Draw, op: str) -> None:
    x = d.primary()
    dim, wide = d.a_dim(x), d.dtype_of(x) == "float16" and d.flag(0.05)
    forward = op.replace("_backward_data", "")
    result = d.call(forward if "backward" in op else op, [x, dim, wide])
    if "backward" in op:
        out = result.outputs[0]
        d.call(op, [d.like(out), out, dim, getattr(torch, d.dtype_of(x))])


@recipe("native_layer_norm", "native_layer_norm_backward")
def _layer_norm(d: Draw, op: str) -> None:
    d.floats()
    x = d.primary(1)
    normalized = d.shape(x)[d.rng.randrange(d.dim(x)) :]
    weight, bias = (d.tensor(normalized, d.dtype_of(x)) if d.flag(0.7) else None for _ in range(2))
    made = d.call("aten.native_layer_norm.default", [x, normalized, weight, bias, d.pick(1e-5, 1e-3, 1e-12)])
    if "backward" in op:
        out, mean, rstd = made.outputs
        mask = [True, weight is not None and d.flag(0.8), bias is not None and d.flag(0.8)]
        d.call(op, [d.like(out), x, normalized, mean, rstd, weight, bias, mask])


def _batch_norm_inputs(d: Draw) -> tuple[Ref, list[Ref | None], list[Ref]]:
    d.floats()
    x = d.primary(2, 5)
    channels, dtype = [d.shape(x)[1]], d.dtype_of(x)
    affine: list[Ref | None] = [d.tensor(channels, dtype) if d.flag(0.7) else None for _ in range(2)]
    if affine[1] is not None and affine[0] is None:
        affine[1] = None
    stats = [d.tensor(channels, dtype, ("normal",)), d.tensor(channels, dtype, ("unit",))]
    return x, affine, stats


@recipe("_native_batch_norm_legit_functional", "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_no_training", "native_batch_norm_backward")  # fmt: skip
def _batch_norm(d: Draw, op: str) -> None:
    x, affine, stats = _batch_norm_inputs(d)
    momentum, eps, training = d.pick(0.1, 0.0, 1.0, 0.5), d.pick(1e-5, 1e-3), d.flag(0.7)
    if op.endswith("no_stats"):
        d.call(op, [x, *affine, True, momentum, eps])
    elif op.startswith("aten._native_batch_norm_legit_no_training"):
        d.call(op, [x, *affine, *stats, momentum, eps])
    elif "backward" not in op:
        d.call(op, [x, *affine, *stats, training, momentum, eps])
    else:
        functional = "aten._native_batch_norm_legit_functional.default"
        made = d.call(functional, [x, *affine, *stats, training, momentum, eps])
        out, mean, rstd = made.outputs[:3]
        mask = [True, affine[0] is not None, affine[1] is not None]
        d.call(op, [d.like(out), x, affine[0], *stats, mean, rstd, training, eps, mask])


@recipe("native_group_norm")
def _group_norm(d: Draw, op: str) -> None:
    d.floats()
    groups = d.pick(1, 2, 3, 4)
    size = [d.pick(0, 1, 2, 3), groups * d.pick(1, 2, 3), *(d.pick(1, 2, 5, 7) for _ in range(d.pick(0, 1, 2)))]
    x = d.tensor(size, layout=d.goal_layout())
    dtype = d.dtype_of(x)
    layout = "contiguous" if dtype in HALVES else None  # eager reads weights of float16 as if they were
    affine = [d.tensor([size[1]], dtype, layout=layout) if d.flag(0.7) else None for _ in range(2)]
    d.call(op, [x, *affine, size[0], size[1], math.prod(size[2:]), groups, d.pick(1e-5, 1e-3)])
