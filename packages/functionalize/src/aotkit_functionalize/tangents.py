"""Which results have a gradient, and the layout it is traced for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _torch_compat as compat
from .aliases import carries_gradient
from .errors import Unsupported
from .inputs import FunctionInput
from .records import InputInfo, OutputInfo, OutputKind, TensorMeta
from .symbols import dims, tensor_meta

__all__ = ["check_shapes_that_autograd_knows", "is_differentiable", "is_training_graph", "tangent_meta"]


def is_differentiable(value: Any) -> bool:
    """Whether a gradient can be given to a forward value."""
    if not isinstance(value, torch.Tensor) or not carries_gradient(value):
        return False
    return value.is_floating_point() or value.is_complex()


def is_training_graph(
    differentiable: Sequence[bool], inputs: Sequence[FunctionInput], training: bool | None, grad_mode: bool
) -> bool:
    """Whether a joint graph is captured. Raises :class:`Unsupported` if one is insisted on that has no gradient."""
    is_training = any(differentiable) and any(i.leaf is not None for i in inputs)
    if training and not is_training:
        raise Unsupported(
            "a joint graph was asked for, but nothing that the function computes requires grad",
            "there is no gradient to trace" if grad_mode else "grad mode is off",
            "Pass inputs that require grad, or capture an inference graph",
        )
    return is_training


def tangent_meta(plain: torch.Tensor) -> TensorMeta:
    """The layout a gradient of ``plain`` is traced for: its own if it is dense, else contiguous."""
    meta = tensor_meta(plain, requires_grad=False)
    dense = compat.is_dense(plain)
    strides = meta.strides if dense else dims(torch._prims_common.make_contiguous_strides_for(plain.shape))
    return TensorMeta(meta.dtype, meta.device, meta.sizes, strides, 0, False)


def check_shapes_that_autograd_knows(
    inputs: Sequence[InputInfo], outputs: Sequence[OutputInfo], is_training: bool
) -> None:
    """Refuse a change of shape of which autograd learns nothing, where a gradient would have to know of it.

    Without a joint graph those are the leaves of which views are returned: the gradient of a leaf has the shape that
    the leaf had when it was first used, and which use was the first, the records do not tell.
    """
    viewed = {
        output.base
        for output in outputs
        if output.kind is OutputKind.ALIAS_OF_INPUT
        and output.view is not None
        and output.view.requires_grad
        and not output.view.under_no_grad
    }
    for info in inputs:
        if info.new_view is None or not info.new_view.under_no_grad:
            continue
        if is_training or (info.is_leaf and info.index in viewed):
            raise Unsupported(
                f"input {info.index} requires grad and changes its sizes or strides in place where grad mode is off",
                "its gradient keeps the old ones",
                "Use the operation that returns a new tensor (t(), unsqueeze(), ..)",
            )
