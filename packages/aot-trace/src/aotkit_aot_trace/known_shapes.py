"""Operators whose fake results torch does not know or gets wrong, though sizes follow from their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["recorded_with_known_shapes"]

aten = torch.ops.aten


def recorded_with_known_shapes() -> Mapping[Any, Callable[..., Any]]:
    """A table for the recorder: each entry records its operator as it is and makes the fake results itself."""
    return {
        aten._ctc_loss.default: _ctc_loss,
        aten.convolution.default: _convolution,
        aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss_forward,
        aten._dirichlet_grad.default: _as_large_as(0, aten._dirichlet_grad.default),
        aten._standard_gamma_grad.default: _as_large_as(0, aten._standard_gamma_grad.default),
        aten.multilabel_margin_loss_backward.default: _as_large_as(1, aten.multilabel_margin_loss_backward.default),
    }


def _as_large_as(position: int, op: Any) -> Callable[..., torch.Tensor]:
    """For an operator without a fake kernel that gives a new tensor, contiguous, of the sizes of an argument."""

    def record(*args: Any) -> torch.Tensor:
        like = args[position]
        recorded: torch.Tensor = compat.record_operator(op, args, lambda: like.new_empty(like.shape))
        return recorded

    return record


def _convolution(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> Any:
    """Of a number of images that is a symbol: a condition on it (16 or more) would be relied on though it decides
    nothing but which of ATen's kernels runs. So the strides are those for the example's number."""
    op = aten.convolution.default
    images = image.shape[0]
    if not isinstance(images, torch.SymInt) or not images.node.has_hint() or image.dim() <= 3:
        return NotImplemented
    if not images.node.expr.is_symbol or images.node.expr in compat.symbols_of((*image.shape[1:], *image.stride())):
        return NotImplemented

    def fake_result() -> torch.Tensor:
        example = image.new_empty_strided((images.node.hint, *image.shape[1:]), image.stride())
        like = op(example, weight, bias, *how)
        return like.new_empty_strided((images, *like.shape[1:]), like.stride())

    return compat.record_operator(op, (image, weight, bias, *how), fake_result)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss per sequence ``[N]``, and ``[N, T, 2 * longest target + 1]`` for the backward."""
    op = aten._ctc_loss.default
    steps, batch = log_probs.shape[0], log_probs.shape[1]
    longest = max(target_lengths, default=0)
    args = (log_probs, targets, list(input_lengths), list(target_lengths), blank, zero_infinity)
    loss, alpha = compat.record_operator(
        op, args, lambda: (log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1))
    )
    return loss, alpha


def _multilabel_margin_loss_forward(
    value: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss per row, a scalar if there are no rows (torch's decomposition makes one row of it) or it is reduced."""
    sizes = value.shape[:-1] if reduction == 0 else ()
    loss, is_target = compat.record_operator(
        aten.multilabel_margin_loss_forward.default,
        (value, target, reduction),
        lambda: (value.new_empty(sizes), value.new_empty(target.shape)),
    )
    return loss, is_target
