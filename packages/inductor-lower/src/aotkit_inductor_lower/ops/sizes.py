"""Sizes of arguments that do not go together: eager compares them in its kernels, torch's fake kernels often do not.

A rule that is given them would read beyond the end of a tensor. Where two sizes are not certainly what they must be,
the call is left to ATen, which says so, or knows what is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .positions import same_number, same_sizes

__all__ = ["sizes_misfit"]

Sizes = Sequence[int | torch.SymInt]


def sizes_misfit(node: Node) -> str | None:
    """Why the sizes of a call's arguments are looked at by ATen, or ``None``."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    check = _CHECKS.get(target._schema.name.split("::")[1])
    if check is None:
        return None
    given = dict(zip((argument.name for argument in target._schema.arguments), node.args, strict=False))
    given.update(node.kwargs)
    fits = check({name: _value(argument) for name, argument in given.items()})
    return None if fits else "arguments whose sizes may not go together are looked at by ATen"


def _value(argument: Any) -> Any:
    if isinstance(argument, Node):
        return argument.meta["val"]
    return type(argument)(map(_value, argument)) if isinstance(argument, list | tuple) else argument


def _of_one_size(first: str, second: str) -> Callable[[dict[str, Any]], bool]:
    return lambda given: same_sizes(given[first].shape, given[second].shape)


def _padded(given: dict[str, Any]) -> bool:
    """The gradient has the sizes of what was padded."""
    sizes, pads = list(given["self"].shape), given["padding"]
    count = len(pads) // 2
    if not count < len(sizes) <= count + 2:
        return False
    for place in range(count):
        sizes[-1 - place] = sizes[-1 - place] + pads[2 * place] + pads[2 * place + 1]
    return same_sizes(given["grad_output"].shape, sizes)


def _pooled(spatial: int) -> Callable[[dict[str, Any]], bool]:
    """The gradient has the batch and the channels of the input; the windows follow from both."""

    def fits(given: dict[str, Any]) -> bool:
        grad, x = given["grad_output"].shape, given["self"].shape
        return len(grad) == len(x) and same_sizes(grad[:-spatial], x[:-spatial])

    return fits


def _classified(given: dict[str, Any]) -> bool:
    """A class for each row or pixel, a weight for each class, a gradient for each loss. Of no classes eager
    looks at no target."""
    x, target, weight = given["self"].shape, given["target"].shape, given.get("weight")
    classes = 0 if len(x) == 1 else 1
    if not statically_known_true(x[classes] > 0):
        return False
    rows = [*x[:classes], *x[classes + 1 :]]
    if not (same_sizes(target, rows) or (len(x) == 1 and len(target) <= 1 and same_number(given["target"].numel(), 1))):
        return False
    if weight is not None and not same_sizes(weight.shape, x[classes : classes + 1]):
        return False
    grad, total = given.get("grad_output"), given.get("total_weight")
    if total is not None and total.dim() != 0:
        return False
    return grad is None or same_sizes(grad.shape, rows if given["reduction"] == 0 else ())


def _by_channels(given: dict[str, Any]) -> bool:
    """All statistics and weights of a batch norm are a number for each channel; without training none are saved."""
    x, grad = given["input"].shape, given.get("grad_out")
    names = ["weight", "bias", "running_mean", "running_var"]
    if given.get("train", True):
        names += ["save_mean", "save_invstd"]
    parts = [given[name] for name in names if given.get(name) is not None]
    return (
        len(x) >= 2
        and (grad is None or same_sizes(grad.shape, x))
        and all(same_sizes(part.shape, x[1:2]) for part in parts)
    )


def _by_rows(given: dict[str, Any]) -> bool:
    """What the backward of a layer norm is given: the gradient as the input, statistics of rows, weights as a row."""
    x, row = given["input"].shape, given["normalized_shape"]
    rows = x[: len(x) - len(row)]
    statistics = [*rows, *(1 for _ in row)]
    parts = [given[name] for name in ("weight", "bias") if given.get(name) is not None]
    return (
        same_sizes(given["grad_out"].shape, x)
        and same_sizes(x[len(rows) :], row)
        and all(same_sizes(part.shape, row) for part in parts)
        and all(same_sizes(given[name].shape, statistics) for name in ("mean", "rstd"))
    )


def _along(given: dict[str, Any]) -> bool:
    """Indices have the dimensions of what they lead into, and of what is taken from there or put there."""
    x, index, source = given["self"], given["index"], given.get("src")
    return x.dim() == index.dim() and (not isinstance(source, torch.Tensor) or source.dim() == x.dim())


def _indexed(given: dict[str, Any]) -> bool:
    """Indices have common sizes, and a mask no more dimensions than what they lead to."""
    sizes = [index.shape for index in given["indices"] if index is not None]
    rank, mask = max(map(len, sizes), default=0), given.get("mask")
    if mask is not None and mask.dim() > rank + given["self"].dim() - len(sizes):
        return False
    columns = zip(*([1] * (rank - len(size)) + list(size) for size in sizes), strict=True)
    wide = ([size for size in column if not same_number(size, 1)] for column in columns)
    return all(same_number(size, column[0]) for column in wide for size in column)


_CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _of_one_size("grad_output", "output")),
    **{f"{kind}_pad{n}d_backward": _padded for kind in ("reflection", "replication") for n in (1, 2, 3)},
    **dict.fromkeys(("_adaptive_avg_pool2d_backward", "avg_pool2d_backward"), _pooled(2)),
    **dict.fromkeys(("_adaptive_avg_pool3d_backward", "avg_pool3d_backward"), _pooled(3)),
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward"), _classified
    ),
    **dict.fromkeys(
        (
            *("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit"),
            *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
        ),
        _by_channels,
    ),
    "native_layer_norm_backward": _by_rows,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _along),
    **dict.fromkeys(("index", "index_put", "_unsafe_index", "_unsafe_index_put"), _indexed),
    **dict.fromkeys(("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"), _indexed),
}
