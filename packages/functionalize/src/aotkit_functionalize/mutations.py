"""What the function did to one of its inputs: one question per function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _torch_compat as compat
from .errors import OverlappingWrite, Unsupported
from .events import StorageEvents
from .inputs import FunctionInput
from .layouts import before_reshapes
from .overlap import repeats_memory
from .records import MutationKind
from .symbols import dim, dims
from .wrap import eager_geometry, from_functional

__all__ = [
    "check_mutation",
    "has_data_mutation",
    "has_metadata_mutation",
    "is_hidden_from_autograd",
    "is_under_no_grad",
    "metadata_changed_under_no_grad",
    "mutation_kind",
    "version_steps",
]


def has_data_mutation(value: torch.Tensor) -> bool:
    """Whether elements of the functional tensor ``value`` were written to, through it or through a view."""
    return compat.has_data_mutation(compat.inner_wrapper(value))


def count_data_mutations(value: torch.Tensor) -> int:
    """How often elements of the functional tensor ``value`` were written to so far, through it or through a view."""
    return compat.count_data_mutations(compat.inner_wrapper(value))


def has_metadata_mutation(value: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether sizes, strides or offset differ from the original's, so ``x.t_().t_()`` is none."""
    return _geometry(eager_geometry(value, original)) != _geometry(original)


def _geometry(plain: torch.Tensor) -> tuple[Any, ...]:
    return dims(plain.shape), dims(plain.stride()), dim(plain.storage_offset())


def is_under_no_grad(entered: FunctionInput) -> bool:
    """Whether autograd did not see the writes but the version counter did.

    True under ``no_grad``, and for writes through ``detach()``, which shares the version counter. A custom autograd
    function writes with grad mode off too, and gives the tensor that it marks as dirty its own backward.
    """
    if not entered.value.requires_grad or is_hidden_from_autograd(entered):
        return compat.all_mutations_under_no_grad(compat.inner_wrapper(entered.value))
    return entered.entry_grad_fn in before_reshapes(entered.value.grad_fn)


def metadata_changed_under_no_grad(entered: FunctionInput, events: StorageEvents | None) -> bool:
    """Whether autograd did not see a change of sizes or strides of an input that requires grad."""
    if entered.requires_grad and entered.value.grad_fn is entered.entry_grad_fn:
        return True
    return events is not None and any(target is entered.value for target in events.layouts.unseen)


def is_hidden_from_autograd(entered: FunctionInput) -> bool:
    """Whether not even the version counter moved: the writes went through ``.data``."""
    return bool(entered.value._version == entered.entry_version)


def version_steps(entered: FunctionInput, events: StorageEvents | None) -> int:
    """By how much the version counter moves in eager mode."""
    reshapes = 0 if events is None else events.layouts.count_reshapes(entered.value)
    return int(entered.value._version - entered.entry_version) + reshapes


def mutation_kind(entered: FunctionInput) -> MutationKind:
    """What the caller will see of the mutation of a tensor input."""
    data = has_data_mutation(entered.value)
    metadata = has_metadata_mutation(entered.value, entered.original)
    if data:
        return MutationKind.DATA_AND_METADATA if metadata else MutationKind.DATA
    return MutationKind.METADATA if metadata else MutationKind.NONE


def _same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether sizes are equal; where only their texts differ, the one of these examples is guarded on.

    A write through ``view(2, -1)`` leaves ``2*(s//2)`` where there was ``s``.
    """
    if dims(one) == dims(other):
        return True
    return len(one) == len(other) and all(bool(a == b) for a, b in zip(one, other, strict=True))


def check_mutation(entered: FunctionInput, sets_requires_grad: bool | None = None) -> None:
    """Refuse what the records cannot express, and what eager refuses. ``sets_requires_grad``: see the records."""
    value, name = entered.value, f"input {entered.index}"
    now, geometry = from_functional(value), eager_geometry(value, entered.original)
    if not _same_sizes(now.shape, geometry.shape):
        raise Unsupported(
            f"{name} is resized",
            "its storage would have to change size after the call",
            "Return a new tensor of the wanted size instead",
        )
    if sets_requires_grad is not None:
        return
    # A write may give the input a history; a leaf that requires grad is the function's own.
    entered_autograd = bool(value.requires_grad) and (value.is_leaf or not has_data_mutation(value))
    if value.is_leaf if entered.requires_grad else entered_autograd:
        raise Unsupported(
            f"{name} has requires_grad changed (detach_, requires_grad_), and is changed otherwise",
            "the caller's tensor would have to leave or enter autograd after the call",
            "Do it outside of the compiled region, or use detach()",
        )
    if has_data_mutation(value) and repeats_memory(entered.original):
        how = "an expanded tensor" if 0 in entered.original.stride() else "a tensor that overlaps itself"
        raise OverlappingWrite(f"{name}, {how},")
    if entered.requires_grad and entered.is_leaf and value.grad_fn is not entered.entry_grad_fn:
        raise Unsupported(
            f"{name} is a leaf that requires grad and is changed in place",
            "autograd refuses this in eager mode as well",
            "Change it under torch.no_grad(), or change a copy",
        )
