"""Storages of inputs that are another one, or of another size, at the end of a run; Note [Changes of storage]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _torch_compat as compat
from .aliases import view_spec
from .errors import NeedsDispatcherLayer, Unsupported
from .events import StorageEvents
from .inputs import FunctionInput
from .lazy_bits import lazy_bits
from .records import StorageChange
from .symbols import dim, dims
from .wrap import eager_geometry, from_functional

__all__ = ["storage_change", "was_replaced"]


def was_replaced(entered: FunctionInput) -> bool:
    """Whether the input ends up with another storage than it came with."""
    value = entered.value
    return (
        compat.storage_identity(value) != entered.entry_storage
        or compat.outer_storage_identity(value) != entered.entry_outer_storage
    )


def storage_change(
    entered: FunctionInput, inputs: Sequence[FunctionInput], events: StorageEvents | None
) -> StorageChange | None:
    """What became of the storage of a tensor input; ``None`` if nothing did.

    ``output`` is left open. Raises :class:`Unsupported` for what cannot be carried out on the caller's tensor.
    """
    resized = None if events is None else events.num_bytes.get(compat.storage_identity(entered.value))
    num_bytes = None if resized is None else dim(resized)
    if not was_replaced(entered):
        return None if num_bytes is None else _resized_storage(entered, num_bytes)
    _check_history(entered)
    if events is not None and id(entered.value) in events.enlarged:
        view = view_spec(from_functional(entered.value), entered.original, requires_grad=False)
        return StorageChange(resized=True, view=view, num_bytes=num_bytes)
    if events is not None and entered.entry_storage in events.num_bytes:
        raise Unsupported(
            f"the storage of input {entered.index} is resized, and then the input is given another one (set_)",
            "the storage that was resized belongs to no argument any more after the call",
            "Call set_ first",
        )
    _check_reachable(entered)
    identity = compat.storage_identity(entered.value)
    source = next((i for i in inputs if i.is_tensor and i.entry_storage == identity), None)
    if source is None:
        if not compat.is_base(entered.value):
            raise Unsupported(
                f"input {entered.index} is given a part of the storage of a value that the function computes",
                "only the part would leave the captured graph",
                "Give it a tensor that is no view",
            )
        return StorageChange(num_bytes=num_bytes)
    if was_replaced(source):
        raise Unsupported(
            f"inputs {entered.index} and {source.index} are both given other storages, one of them that of the other",
            "after the call, each would have to be changed before the other",
            "Do this outside of the compiled region",
        )
    if lazy_bits(entered.value) != lazy_bits(source.original):
        raise Unsupported(
            f"input {entered.index} is given the storage of input {source.index}, lazily conjugated or negated",
            "a storage has no such bits",
            "Call resolve_conj() or resolve_neg() first",
        )
    geometry = eager_geometry(entered.value, source.original)
    view = view_spec(geometry, source.original, requires_grad=entered.requires_grad)
    return StorageChange(input=source.index, view=view, num_bytes=num_bytes)


def _resized_storage(entered: FunctionInput, num_bytes: Any) -> StorageChange:
    if not compat.is_base(compat.inner_wrapper(entered.value)):
        raise Unsupported(
            f"the storage of input {entered.index} is resized, and its sizes or strides are changed in place",
            "the caller's tensor could not be given both",
            "Do one of them outside of the compiled region",
        )
    return StorageChange(num_bytes=num_bytes)


def _check_reachable(entered: FunctionInput) -> None:
    value = entered.value
    if compat.inner_wrapper(value) is not value:
        raise NeedsDispatcherLayer(f"input {entered.index} is given another storage (set_, or assignment to .data)")


def _check_history(entered: FunctionInput) -> None:
    value = entered.value
    if value.grad_fn is not entered.entry_grad_fn or bool(value.requires_grad) != entered.requires_grad:
        raise Unsupported(
            f"input {entered.index} is given another storage (set_, resize_) and then written to under autograd",
            "the caller's tensor would need a history that begins in the function",
            "Write to the new value before it becomes that of the input",
        )
    if entered.requires_grad and dims(value.shape) != dims(entered.original.shape):
        raise Unsupported(
            f"input {entered.index} requires grad and is given a storage with other sizes",
            "its gradient keeps the old ones",
            "Keep the sizes, or return a new tensor",
        )
