"""Arguments that eager refuses, or gives a meaning of its own: their calls are left to ATen, whose errors are eager's.

A rule computes something for any arguments of types it knows. Whether eager takes them at all is asked here, of the
node, before its rule; to ask in vain costs an ATen call and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .positions import at_hand, lies_in_order, same_number, same_sizes
from .sizes import sizes_misfit

__all__ = ["fits", "misfit", "refusal"]

_FILLS = (
    *("full", "full_like", "new_full", "fill", "scalar_tensor", "masked_fill", "scatter", "scatter_reduce"),
    *("index_fill", "constant_pad_nd", "clamp", "clamp_min", "clamp_max", "hardtanh", "elu", "threshold", "where"),
)
_OPERANDS = ("self", "other", "exponent")
_FACTORS = ("alpha", "beta", "value")
_SUMS = ("add", "sub", "rsub")
_POOLS = (
    *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"),
    *("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward"),
)
_BATCHES = (
    *("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit"),
    *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
)
_OVERLAPPING = ("copy", "copy_", "slice_scatter", "select_scatter", "diagonal_scatter")


def refusal(node: Node) -> str | None:
    """Why this call is ATen's, or ``None``."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    check = _CHECKS.get(target._schema.name.split("::")[1])
    reason = (check(node) if check else None) or _misfit(node, target._schema) or _no_dim(node, target._schema)
    return reason or sizes_misfit(node)


def _tensors(node: Node) -> list[torch.Tensor]:
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _value(argument: object) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


def _numbers(node: Node) -> Iterator[bool | int | float]:
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, bool | int | float):
            yield argument


def _whole(value: object) -> bool:
    """Whether a result is of integers or bools."""
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex


def _sum(node: Node) -> str | None:
    name, result = str(node.target).split(".")[1], node.meta["val"]
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    if name != "add" and (
        any(t.dtype is torch.bool for t in _tensors(node)) or any(isinstance(a, bool) for a in node.args[:2])
    ):
        return "eager subtracts no bools"
    if isinstance(alpha, bool) and result.dtype is not torch.bool:
        return "eager takes factors that are bools for bools only"
    return "eager takes no such factor of integers" if isinstance(alpha, float) and _whole(result) else None


def _filled(node: Node) -> str | None:
    result = node.meta["val"]
    if not isinstance(result, torch.Tensor):
        return None
    if not all(fits(number, result.dtype) for number in _numbers(node)):
        return f"a number that does not fit {result.dtype} is left to ATen, which refuses it"
    late = (_value(argument) for argument in (*node.args, *node.kwargs.values()))
    if not all(_surely_fits(number, result.dtype) for number in late):
        return f"whether a number fits {result.dtype} only a call tells"
    return None


def _misfit(node: Node, schema: torch.FunctionSchema) -> str | None:
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return None
    if misfit(schema, node.args, node.kwargs, result.dtype):
        return f"a number that does not fit {result.dtype} is left to ATen, which refuses it"
    given = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
    factors = (_value(given.get(name)) for name in _FACTORS)
    if _whole(result) and not all(_surely_fits(number, result.dtype) for number in factors):
        return f"whether a factor fits {result.dtype} only a call tells"
    return None


def _no_dim(node: Node, schema: torch.FunctionSchema) -> str | None:
    """Not every fake kernel looks whether there is the dimension that an argument names."""
    ranks = [value.dim() for value in (*_tensors(node), node.meta.get("val")) if isinstance(value, torch.Tensor)]
    most = max(ranks, default=0) or 1
    given = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
    dims = (given.get(a.name) for a in schema.arguments if a.name.startswith("dim"))
    missing = any(type(dim) is int and not -most <= dim < most for dim in dims)
    return "a dimension that is not there is refused by ATen" if missing else None


def misfit(
    schema: torch.FunctionSchema,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    dtype: torch.dtype,
    operands: bool = False,
) -> bool:
    """Whether a number among the arguments does not fit the type.

    Eager's kernels take factors, bounds and the like in the type of the result; ``operands``, which become tensors
    first, are looked at only if told.
    """
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    numbers = (a.name for a in schema.arguments if "number" in str(a.type) and (operands or a.name not in _OPERANDS))
    return any(isinstance(number, bool | int | float) and not fits(number, dtype) for number in map(given.get, numbers))


def _bounded(node: Node) -> str | None:
    """A bound that is no number lets nothing through."""
    return "a bound is nan" if any(number != number for number in _numbers(node)) else _filled(node)


def _total(node: Node) -> str | None:
    return "sums as bools are left to ATen" if node.meta["val"].dtype is torch.bool else None


def fits(number: bool | int | float, dtype: torch.dtype) -> bool:
    """Whether eager takes the number as an element of this type."""
    if dtype is torch.bool or dtype.is_complex:
        return True
    if dtype.is_floating_point:
        return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max
    return math.isfinite(number) and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def _surely_fits(number: object, dtype: torch.dtype) -> bool:
    """Whether that is so of a number that is known when the graph runs only. That a float overflows float32, where
    eager refuses it, is not looked at: most such numbers are small."""
    if not isinstance(number, torch.SymInt | torch.SymFloat) or dtype is torch.bool or dtype.is_complex:
        return True
    if dtype.is_floating_point and dtype is not torch.float16:
        return True
    if isinstance(number, torch.SymFloat):
        return False
    most = int(torch.finfo(dtype).max) if dtype.is_floating_point else torch.iinfo(dtype).max
    least = -most if dtype.is_floating_point else torch.iinfo(dtype).min
    return most >= torch.iinfo(torch.int64).max or statically_known_true((number >= least) & (number <= most))


def _quotient(node: Node) -> str | None:
    return "eager divides no integers here" if all(_whole(_value(operand)) for operand in node.args[1:3]) else None


def _place(node: Node) -> str | None:
    x = _tensors(node)[0]
    if x.dtype is torch.bool:
        return "eager looks for no extreme among bools"
    return _extreme(node)


def _extreme(node: Node) -> str | None:
    return "nothing has no extreme, which ATen says" if _empty(_tensors(node)[0]) else None


def _empty(x: torch.Tensor) -> bool:
    return any(type(size) is int and size == 0 for size in x.shape)


def _empty_rows(node: Node) -> str | None:
    shape = node.args[1] if isinstance(node.args[1], list | tuple) else ()
    return "statistics of nothing are ATen's" if 0 in shape else None


def _batch(node: Node) -> str | None:
    return "statistics of nothing are ATen's" if _empty(_tensors(node)[0]) else None


def _groups(node: Node) -> str | None:
    x, channels = _tensors(node)[0], node.args[4]
    parts = [part.meta["val"] for part in node.args[1:3] if isinstance(part, Node)]
    if _empty(x) or not all(part.dim() == 1 and same_number(part.shape[0], _value(channels)) for part in parts):
        return "weights of another size than the channels, and groups of nothing, are ATen's"
    return None if _is_dense(x) else "eager normalizes groups of contiguous tensors only"


def _is_dense(x: torch.Tensor) -> bool:
    """Whether a tensor is certainly contiguous in the order of its dimensions, or in the one of its strides."""
    if all(type(number) is int for number in (*x.shape, *x.stride())):
        return x.is_contiguous(memory_format=torch._prims_common.suggest_memory_format(x))
    images = [[0, *range(2, x.dim()), 1]] if x.dim() in (4, 5) else []
    return any(lies_in_order(x, order) for order in ([*range(x.dim())], *images))


def _certainly_apart(x: torch.Tensor) -> bool:
    """Whether the elements of a tensor of symbolic sizes lie in different places, or it is expanded."""
    if any(type(stride) is int and stride == 0 for stride in x.stride()):
        return True  # copied before it is written to
    least: int | torch.SymInt = 1
    for dim in sorted(range(x.dim()), key=lambda d: (at_hand(x.stride()[d]), at_hand(x.shape[d]))):
        if same_number(x.shape[dim], 1):
            continue
        if not statically_known_true(x.stride(dim) >= least):
            return False
        least = x.stride(dim) * x.shape[dim]
    return True


def _by_planes(node: Node) -> str | None:
    x = _tensors(node)[1]
    return None if torch._prims_common.is_contiguous_or_false(x) else "eager refuses inputs that are not contiguous"


def _as_indices(node: Node) -> str | None:
    """Fake kernels of pools do not compare the gradient with the indices."""
    grad, indices = _tensors(node)[0], _tensors(node)[-1]
    if volumes := _volumes(node):
        return volumes
    same = same_sizes(grad.shape, indices.shape)
    return None if same else "a gradient of other sizes than the result is refused by ATen"


def _slices(node: Node) -> str | None:
    """Eager looks at indices of slices that have no elements, too; a kernel has no iteration in which it would."""
    x, index = _tensors(node)[:2]
    return "indices of empty slices are looked at by ATen" if _empty(x) and not _empty(index) else None


def _volumes(node: Node) -> str | None:
    flat = "max_pool3d" in str(node.target) and any(map(_as_planes, _tensors(node)))
    return "eager takes volumes of two layouts only" if flat else None


def _as_planes(x: torch.Tensor) -> bool:
    return x.dim() == 4 and torch._prims_common.suggest_memory_format(x) is torch.channels_last


def _of_nothing(node: Node) -> str | None:
    """Which indices of nothing eager looks at is its own."""
    return "nothing is indexed" if _empty(_tensors(node)[0]) else None


def _places(node: Node) -> str | None:
    """Fake kernels count neither the indices nor the dimensions of what is put there."""
    masked = "masked" in str(node.target)
    if reason := _of_nothing(node) or (None if masked else _of_another_type(node, 2)):
        return reason
    x, indices, new = (_value(node.args[place]) for place in ((0, 2, 3) if masked else (0, 1, 2)))
    ranks = [_value(index).dim() for index in indices if index is not None]
    if len(indices) > x.dim():
        return "more indices than dimensions are refused by ATen"
    most = max(ranks, default=0) + x.dim() - len(ranks)
    return "values of more dimensions than their places are refused by ATen" if new.dim() > most else None


def _one_for_each(node: Node) -> str | None:
    index, source = _value(node.args[1]), _value(node.args[2])
    same = same_number(index.numel(), source.numel())
    return _of_another_type(node, 2) if same else "other numbers of indices than of values are refused by ATen"


def _of_another_type(node: Node, place: int) -> str | None:
    """Fake kernels do not compare the types, and a kernel would convert. ``place``: of what is written."""
    same = _value(node.args[0]).dtype is _value(node.args[place]).dtype
    return None if same else "values of another type than the tensor's are refused by ATen"


def _of_slices(node: Node) -> str | None:
    """Fake kernels do not compare the sizes, and eager repeats no slice of size one."""
    if reason := _of_another_type(node, 3):
        return reason
    x, index, source = (_value(node.args[place]) for place in (0, 2, 3))
    dim, rank = node.args[1], x.dim()
    if source.dim() != rank or rank == 0 or type(dim) is not int or not -rank <= dim < rank:
        return None
    sizes = [index.numel() if d == dim % rank else size for d, size in enumerate(x.shape)]
    same = all(map(same_number, sizes, source.shape))
    return None if same else "slices of other sizes than those of the tensor are refused by ATen"


def _cropped(node: Node) -> str | None:
    x, pads = _tensors(node)[0], node.args[1]
    assert isinstance(pads, list | tuple)
    for position in range(len(pads) // 2):
        crop = sum(max(-pad, 0) for pad in map(_value, pads[2 * position : 2 * position + 2]) if type(pad) is int)
        if crop and not statically_known_true(x.shape[-1 - position] >= crop):
            return "more is cropped than there is, maybe"
    return _filled(node)


def _viewed(node: Node) -> str | None:
    x, sizes = _tensors(node)[0], node.meta["val"].shape
    if isinstance(node.args[1], torch.dtype) or not all(type(n) is int for n in (*x.shape, *x.stride(), *sizes)):
        return None
    try:
        torch.empty_strided(x.shape, x.stride(), device="meta").view(sizes)
    except RuntimeError:
        return "ATen refuses a view of elements that do not lie as it needs them"
    return None


def _overlapping(node: Node) -> str | None:
    x = node.meta["val"] if not _tensors(node) else _tensors(node)[0]
    if any(type(number) is not int for number in (*x.shape, *x.stride())):
        return None if _certainly_apart(x) else "whether elements of this tensor overlap only a call tells"
    reach = 0
    for stride, size in sorted((t, s) for s, t in zip(x.shape, x.stride(), strict=True) if s > 1):
        if stride == 0:  # copied before it is written to; but before torch 2.12 not in fake values
            written = node.meta["val"]
            alike = "_scatter" in str(node.target) and written.stride() == x.stride()
            return "the fake value repeats elements, and eager's does not" if alike else None
        if stride <= reach:
            return "elements of a tensor that overlaps itself are written to in ATen's order"
        reach += (size - 1) * stride
    return None


_CHECKS: dict[str, Callable[[Node], str | None]] = {
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(_FILLS, _filled),
    **dict.fromkeys(_OVERLAPPING, _overlapping),
    "hardtanh": _bounded,
    **dict.fromkeys(_POOLS, _as_indices),
    "max_pool3d_with_indices": _volumes,
    "nll_loss2d_backward": _by_planes,
    **dict.fromkeys(("index_select", "embedding"), _slices),
    "index_reduce": lambda node: _slices(node) or _of_slices(node),
    "index_add": lambda node: _of_nothing(node) or _of_slices(node),
    **dict.fromkeys(_BATCHES, _batch),
    **dict.fromkeys(("view", "_unsafe_view", "view_as"), _viewed),
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate"), _places),
    **dict.fromkeys(("index", "_unsafe_index"), _of_nothing),
    **dict.fromkeys(("index_copy", "index_copy_"), lambda node: _of_another_type(node, 3)),
    "put": _one_for_each,
    "constant_pad_nd": _cropped,
    "native_layer_norm": _empty_rows,
    "native_group_norm": _groups,
    "sum": _total,
    "addcdiv": _quotient,
    "argmax": _place,
    "argmin": _place,
    "amax": _extreme,
    "amin": _extreme,
    "max": _extreme,
    "min": _extreme,
}
