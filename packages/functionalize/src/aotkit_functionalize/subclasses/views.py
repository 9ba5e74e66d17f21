"""Results that are views of a tensor subclass: can a view operation of the wrapper give them?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _torch_compat as compat
from ..aliases import view_spec
from ..records import TensorMeta, ViewSpec
from ..symbols import dims, tensor_meta
from ..view_methods import view_method
from ..wrap import below_functional_layer
from .meta import attributes_at_capture, is_subclass, tensors_inside

__all__ = ["view_of_wrapper"]


def view_of_wrapper(base: Any, view: Any, parts: Sequence[TensorMeta]) -> ViewSpec | None:
    """How to take ``view`` of the wrapper ``base``; ``None`` if no view operation is known to give it.

    Args:
        base: the base over plain (fake) tensors.
        view: the wrapper that the function made of it, over whatever tensors.
        parts: what the tensors inside the view look like.

    The operation is tried out on ``base``: it has to give the same class and context, and inside the same parts of
    the same memory.
    """
    if base.dtype != view.dtype or type(base) is not type(view):
        return None
    spec = view_spec(view, base, requires_grad=False)
    method, order = view_method(tensor_meta(base, requires_grad=False), spec)
    with below_functional_layer(), torch.no_grad():
        try:
            if method == "view":
                taken = base.view(view.shape)
            elif method == "expand":
                taken = base.expand(view.shape)
            elif method == "permute":
                taken = base.permute(order)
            else:
                taken = base.as_strided(view.shape, view.stride(), view.storage_offset())
            taken = taken.requires_grad_(view.requires_grad)  # a class may keep it in its context
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError, AttributeError, KeyError):
            return None  # the class does not know the operation; what it raises then is its own affair
    return spec if _same(taken, view) and _same_parts(taken, base, parts) else None


def _same(taken: Any, view: Any) -> bool:
    if (
        type(taken) is not type(view)
        or dims(taken.shape) != dims(view.shape)
        or dims(taken.stride()) != dims(view.stride())
    ):
        return False
    if not is_subclass(taken):
        return True
    (held, context), (other, expected) = attributes_at_capture(taken), attributes_at_capture(view)
    if context != expected or [name for name, _ in held] != [name for name, _ in other]:
        return False
    nested = [(a, b) for (_, a), (_, b) in zip(held, other, strict=True) if is_subclass(a) or is_subclass(b)]
    return all(_same(a, b) for a, b in nested)


def _same_parts(taken: Any, base: Any, parts: Sequence[TensorMeta]) -> bool:
    inside, sources = list(tensors_inside(taken)), list(tensors_inside(base))
    if len(inside) != len(parts) or len(sources) != len(parts):
        return False
    return all(
        compat.storage_identity(tensor) == compat.storage_identity(source)
        and _layout(tensor_meta(tensor)) == _layout(part)
        for tensor, source, part in zip(inside, sources, parts, strict=True)
    )


def _layout(meta: TensorMeta) -> tuple[Any, ...]:
    return meta.dtype, meta.sizes, meta.strides, meta.storage_offset
