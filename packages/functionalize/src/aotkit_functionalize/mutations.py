"""What the function did to one of its inputs: one question per function."""

from __future__ import annotations

import torch

from . import _torch_compat as compat
from .errors import Unsupported
from .inputs import FunctionInput
from .metadata import MutationKind
from .symbols import dim, dims
from .wrap import from_functional

__all__ = [
    "check_mutation",
    "has_data_mutation",
    "has_metadata_mutation",
    "is_hidden_from_autograd",
    "is_under_no_grad",
    "mutation_kind",
]


def has_data_mutation(value: torch.Tensor) -> bool:
    """Whether elements of the functional tensor ``value`` were written to, through it or through a view."""
    return compat.has_data_mutation(compat.inner_wrapper(value))


def has_metadata_mutation(value: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether sizes, strides or offset differ from the original's, so ``x.t_().t_()`` is none."""
    now = from_functional(value)
    before = (dims(original.shape), dims(original.stride()), dim(original.storage_offset()))
    return before != (dims(now.shape), dims(now.stride()), dim(now.storage_offset()))


def is_under_no_grad(entered: FunctionInput) -> bool:
    """Whether autograd did not see the writes but the version counter did.

    True under ``no_grad``, and for writes through ``detach()``, which shares the version counter.
    """
    if compat.all_mutations_under_no_grad(compat.inner_wrapper(entered.value)):
        return True
    if is_hidden_from_autograd(entered) or not entered.value.requires_grad:
        return False
    return entered.value.grad_fn is entered.entry_grad_fn


def is_hidden_from_autograd(entered: FunctionInput) -> bool:
    """Whether not even the version counter moved: the writes went through ``.data``."""
    return bool(entered.value._version == entered.entry_version)


def mutation_kind(entered: FunctionInput) -> MutationKind:
    """What the caller will see of the mutation of a tensor input."""
    data = has_data_mutation(entered.value)
    metadata = has_metadata_mutation(entered.value, entered.original)
    if data:
        return MutationKind.DATA_AND_METADATA if metadata else MutationKind.DATA
    return MutationKind.METADATA if metadata else MutationKind.NONE


def check_mutation(entered: FunctionInput) -> None:
    """Refuse what the records cannot express, and what eager refuses."""
    value, name = entered.value, f"input {entered.index}"
    wrapper = compat.inner_wrapper(value)
    if (
        compat.storage_was_replaced(wrapper)
        or compat.storage_identity(value) != entered.entry_storage
        or (compat.outer_storage_identity(value) != entered.entry_outer_storage)
    ):
        raise Unsupported(
            f"{name} is given another storage (set_, or assignment to .data)",
            "the caller's tensor would have to change its memory after the call",
            "Write into it with copy_ instead",
        )
    if compat.storage_was_resized(wrapper) or not _fits(from_functional(value), entered.original):
        raise Unsupported(
            f"{name} is resized",
            "its storage would have to change size after the call",
            "Return a new tensor of the wanted size instead",
        )
    if entered.requires_grad and entered.is_leaf and value.grad_fn is not entered.entry_grad_fn:
        raise Unsupported(
            f"{name} is a leaf that requires grad and is changed in place",
            "autograd refuses this in eager mode as well",
            "Change it under torch.no_grad(), or change a copy",
        )


def _fits(now: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether the sizes and strides of ``now`` stay within the original's storage."""
    if now.shape == original.shape and now.stride() == original.stride():
        return True
    last = now.storage_offset() + sum((n - 1) * s for n, s in zip(now.shape, now.stride(), strict=True))
    return bool((last + 1) * now.element_size() <= original.untyped_storage().nbytes())
