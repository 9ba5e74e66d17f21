"""Recipes of operators that read or write at places which tensors name."""

from __future__ import annotations

from typing import Any

from .draw import Draw
from .program import Ref
from .recipes import recipe
from .tensors import FLOATS

_REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


def _amount(d: Draw) -> int:
    return int(d.pick(0, 1, 2, 3, 5, 7, 17))


@recipe("embedding", "embedding_dense_backward")
def _embedding(d: Draw, op: str) -> None:
    rows, width = d.pick(1, 2, 5, 17), d.pick(0, 1, 3, 8, 17)
    index = d.index_into(rows, d.size(0, 2), d.pick("int64", "int64", "int32"), negative=False)
    padding, by_frequency = d.pick(-1, 0, rows - 1), d.flag(0.3)
    if "backward" in op:
        by_frequency = by_frequency and bool((d.value(index) < rows).all())  # eager counts beyond its memory
        given = d.tensor([*d.shape(index), width], layout=d.goal_layout())
        d.call(op, [given, index, rows, padding, by_frequency])
    else:
        d.call(op, [d.tensor([rows, width], layout=d.goal_layout()), index, padding, by_frequency, False])


@recipe("gather", "scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_add",
        "scatter_reduce.two")  # fmt: skip
def _scatter(d: Draw, op: str) -> None:
    x = d.primary(1, 3)
    shape, dim = d.shape(x), d.rng.randrange(d.dim(x))
    size = [n if d.flag(0.6) else d.rng.randint(0, n) for n in shape]
    size[dim] = _amount(d)
    index = d.index_into(shape[dim], size, negative=False)
    if shape[dim] == 0:
        index = d.tensor([0 if i == dim else n for i, n in enumerate(size)], "int64", ("index", 0, 1))
    args: list[Any] = [x, d.pick(dim, dim - len(shape)), index]
    kwargs: dict[str, Any] = {}
    if op.endswith((".src", ".reduce", "scatter_add.default", ".two")):
        wider = [n + d.pick(0, 0, 1) for n in d.shape(index)]
        args.append(d.tensor(wider, d.dtype_of(x)))
    elif "value" in op:
        args.append(d.scalar())
    if op.endswith("reduce"):
        kwargs["reduce"] = d.pick("add", "multiply")
    elif op.endswith(".two"):
        args.append(d.pick(*_REDUCTIONS))
        kwargs["include_self"] = d.flag()
    d.call(op, args, kwargs)


@recipe("index_select", "index_fill.int_Scalar", "index_fill.int_Tensor", "index_copy", "index_add", "index_reduce")
def _index_along(d: Draw, op: str) -> None:
    x = d.primary(1, 4)
    shape, dim = d.shape(x), d.rng.randrange(d.dim(x))
    size = [_amount(d) if shape[dim] else 0]
    index = d.index_into(shape[dim], size, d.pick("int64", "int64", "int32"), negative="fill" in op)
    if "copy" in op:  # places that occur twice leave it to chance who writes last
        index = d.tensor([min(size[0], shape[dim], 1)], "int64", ("index", 0, max(shape[dim], 1)))
    args: list[Any] = [x, d.pick(dim, dim - len(shape)), index]
    source = list(shape)
    source[dim] = d.shape(index)[0]
    if op.endswith("int_Scalar"):
        args.append(d.scalar())
    elif op.endswith("int_Tensor"):
        args.append(d.tensor([], d.dtype_of(x) if d.flag(0.7) else d.pick("float32", "int64", "bool")))
    elif "select" not in op:
        args.append(d.tensor(source, d.dtype_of(x)))
    kwargs: dict[str, Any] = {}
    if "reduce" in op:
        args.append(d.pick("prod", "mean", "amax", "amin"))
        kwargs["include_self"] = d.flag()
    elif "index_add" in op and d.flag():
        kwargs["alpha"] = d.pick(2, 0.5, -1, 1.0)
    d.call(op, args, kwargs)


def _indices(d: Draw, x: Ref, masks: bool = True, distinct: bool = False) -> list[Any]:
    """Indices of some dimensions that broadcast with each other; a mask stands for as many as it has."""
    shape = d.shape(x)
    found: list[Ref | None] = []
    common = d.size(0, 2)
    common = [min(n, 7) for n in common]
    if distinct:
        common = [1 for _ in common]
    dim, given = 0, False
    while dim < len(shape):
        kind = d.rng.random()
        if kind < 0.35 and not (dim == len(shape) - 1 and not given):
            found.append(None)
        elif kind < 0.45 and masks and not given:
            found.append(d.tensor([shape[dim]], "bool"))
            common, given = [1], True
        else:
            own = [1 if d.flag(0.2) else n for n in common][d.pick(0, 0, 1) if len(common) > 1 else 0 :]
            own = own if shape[dim] else [0 for _ in own] or [0]
            found.append(d.index_into(shape[dim], own, d.pick("int64", "int64", "int32")))
            given = True
        dim += 1
    while found and found[-1] is None and d.flag():
        found.pop()
    return found


@recipe("index.Tensor", "_unsafe_index.Tensor")
def _index(d: Draw, op: str) -> None:
    x = d.primary(1, 4)
    d.call(op, [x, _indices(d, x, masks=False)])


@recipe("index_put", "_unsafe_index_put")
def _index_put(d: Draw, op: str) -> None:
    x = d.primary(1, 3)
    accumulate = d.flag()
    indices = _indices(d, x, masks=False, distinct=not accumulate)
    result = list(d.value(x)[tuple(slice(None) if i is None else d.value(i).long() for i in indices)].shape)
    size = [1 if d.flag(0.2) else n for n in result][d.rng.randint(0, len(result)) if d.flag(0.3) else 0 :]
    d.call(op, [x, indices, d.tensor(size, d.dtype_of(x)), accumulate])


@recipe("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate")
def _masked_index(d: Draw, op: str) -> None:
    shape = d.size(1, 2, least=1)
    x = d.tensor(shape, layout=d.goal_layout())
    common = [d.pick(1, 3, 8)]
    indices = [d.tensor(common, "int64", ("index", 0, n)) for n in shape]
    mask = d.tensor(common, "bool")
    last = d.tensor(common, d.dtype_of(x)) if "put" in op else d.scalar()
    d.call(op, [x, mask, indices, last])


@recipe("take", "put")
def _take(d: Draw, op: str) -> None:
    x = d.primary()
    total = d.value(x).numel()
    size = [0] if not total else [min(n, 9) for n in d.size(0, 2)]
    if op.startswith("aten.take"):
        d.call(op, [x, d.index_into(total, size)])
        return
    accumulate = d.flag(0.7)
    size = size if accumulate else [1 if total else 0]
    index = d.index_into(total, size)
    d.call(op, [x, index, d.tensor(size, d.dtype_of(x)), accumulate])


@recipe("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward")
def _nll(d: Draw, op: str) -> None:
    batch, classes = d.pick(1, 2, 5, 0), d.pick(1, 2, 3, 11)
    rest = [d.pick(1, 2, 5), d.pick(1, 3, 4)] if "2d" in op else []
    one = not rest and d.flag(0.2)
    x = d.tensor([classes] if one else [batch, classes, *rest], layout=d.goal_layout())
    target = d.index_into(classes, [] if one else [batch, *rest], negative=False)
    weight = d.tensor([classes], d.dtype_of(x), ("unit",)) if d.flag(0.4) else None
    reduction, ignored = d.pick(0, 1, 2), d.pick(-100, 0, classes - 1)
    forward = op.replace("backward", "forward")
    made = d.call(forward, [x, target, weight, reduction, ignored])
    if "backward" in op:
        out, total = made.outputs
        d.call(op, [d.like(out), x, target, weight, reduction, ignored, total])


@recipe("tril", "triu")
def _triangle(d: Draw, op: str) -> None:
    d.call(op, [d.primary(2), d.integer(d.rng.randint(-5, 5))])


@recipe("topk", "kthvalue")
def _topk(d: Draw, op: str) -> None:
    x = d.primary(0, 3, fill=d.pick(None, ("normal",), ("ties",)))
    dim = d.a_dim(x)
    n = d.value(x).size(dim) if d.dim(x) else 1
    k = d.rng.randint(1 if "kth" in op else 0, n) if n else 0
    d.call(op, [x, k, dim, d.flag(), *([d.flag()] if "topk" in op else [])])


@recipe("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(d: Draw, op: str) -> None:
    if op.endswith(".Scalar"):
        d.call(op, [d.primary(dtype="bool" if d.flag(0.97) else "uint8"), d.scalar(), d.scalar()])
        return
    x = d.primary()
    condition = d.partner(x, "bool" if d.flag(0.97) else "uint8")
    other = {"self": [x, d.partner(x)], "ScalarSelf": [d.scalar(), x], "ScalarOther": [x, d.scalar()]}
    d.call(op, [condition, *other[op.split(".")[2]]])


@recipe("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(d: Draw, op: str) -> None:
    x = d.primary()
    dtype = d.dtype_of(x)
    mask = d.partner(x, "bool" if d.flag(0.97) else "uint8")
    if op.endswith("Tensor"):
        d.call(op, [x, mask, d.tensor([], dtype if d.flag(0.8) else d.pick("float32", "int64", "bool"))])
    else:
        d.call(op, [x, mask, d.scalar() if dtype in FLOATS else d.pick(0, 1, -1, 7, True, d.scalar())])
