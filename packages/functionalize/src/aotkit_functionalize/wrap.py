"""Functional tensors: what the user's function sees while it is captured.

Note [Two functional layers]
    torch offers functionalization in the dispatcher (C++ wrappers, nothing Python per op) and as a dispatch
    mode with a tensor subclass. The mode also handles higher-order operators and custom operators that
    mutate; it costs about a third more tracing time. Both hold the same C++ wrapper, so every question of
    this package can be asked of either.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import _torch_compat as compat
from .effects import TokenChain
from .errors import Unsupported
from .events import StorageEvents
from .functional_fast_path import fast_functional_mode
from .symbols import dims, used_symbols
from .writes import RefuseWrongWrites

__all__ = [
    "FunctionalLayer",
    "below_functional_layer",
    "eager_geometry",
    "from_functional",
    "functional_layer",
    "is_functional",
    "renew",
    "to_functional",
]


class FunctionalLayer(enum.Enum):
    """Which of torch's two implementations removes mutations; see Note [Two functional layers]."""

    DISPATCHER = "dispatcher"
    MODE = "mode"


@contextmanager
def functional_layer(layer: FunctionalLayer) -> Iterator[StorageEvents]:
    """Context in which operations on functional tensors are functionalized and factories give functional tensors.

    What it gives is for :func:`.collect_metadata`: the changes of storage that it sees.
    """
    events = StorageEvents()
    if layer is FunctionalLayer.MODE:
        mode = fast_functional_mode()
        mode._tokens = TokenChain()
        with compat.below_functionalization(), mode, RefuseWrongWrites(events):
            yield events
        return
    compat.enter_dispatcher_functionalization()
    try:
        with RefuseWrongWrites(events):
            yield events
    finally:
        compat.leave_dispatcher_functionalization()


below_functional_layer = compat.below_functional_modes
"""Context in which plain (fake) tensors are made and computed with, whichever layer is active."""


def to_functional(value: torch.Tensor) -> torch.Tensor:
    """A functional tensor over ``value``, in the active layer. A leaf that does not require grad."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    if mode is None:
        return compat.wrap_inner(value)
    return compat.FunctionalTensor(compat.wrap_inner(value), mode)


def from_functional(value: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a functional tensor stands for now, pending writes applied."""
    compat.sync(value)
    return compat.unwrap_inner(compat.inner_wrapper(value))


def renew(value: torch.Tensor, plain: torch.Tensor) -> None:
    """From now on ``value``, a functional tensor, and its views stand for the elements of ``plain``; it is no write.

    ``plain`` has the sizes of ``value``.
    """
    compat.replace_value(compat.inner_wrapper(value), plain)
    compat.sync(value)


def eager_geometry(value: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """A plain tensor with the sizes, strides and offset that ``value``, made of input ``original``, has in eager.

    Note [Geometry of mutated tensors]
        Functionalization replaces a write by a new tensor, which need not have the strides of the old one
        (``masked_fill`` of a transposed tensor is contiguous, ``masked_fill_`` stays transposed). What the caller
        sees has the old strides. So views of an input are measured on the input as it came in.

    Raises:
        Unsupported: a view was taken of new memory which the old strides do not allow.
    """
    if not compat.is_viewed(compat.inner_wrapper(value)):
        return original
    with compat.untraced(), below_functional_layer(), torch.no_grad():
        try:
            replayed = compat.replay_views(compat.inner_wrapper(value), original)
        except (RuntimeError, ValueError) as error:
            raise Unsupported(
                "a tensor that is not contiguous is written to in place and then viewed in another shape",
                f"the view exists of the new values only ({str(error).splitlines()[0]})",
                "Make the tensor contiguous first",
            ) from error
    return _with_known_sizes(replayed, value, original)


def _with_known_sizes(replayed: torch.Tensor, value: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """``replayed``, or ``value`` itself where taking the views once more gave sizes that depend on data new names.

    A slice from ``n`` on, where ``n`` is read of a tensor, has a size and an offset that torch gives a name each
    time: the names that the graph knows are those of ``value``.
    """
    needed = used_symbols(_geometry(replayed)) - used_symbols(_geometry(original))
    plain = from_functional(value) if needed else replayed
    if needed <= used_symbols(_geometry(plain)):
        return replayed
    moved = compat.has_data_mutation(compat.inner_wrapper(value)) and dims([original.storage_offset()]) != (0,)
    if moved or dims(plain.stride()) != dims(replayed.stride()):
        raise Unsupported(
            "a view whose size depends on data is returned of a tensor that is written to",
            "its place in the caller's memory is known of the new values only",
            "Return a clone of the view",
        )
    return plain


def _geometry(value: torch.Tensor) -> tuple[int | torch.SymInt, ...]:
    return (*value.shape, *value.stride(), value.storage_offset())


def is_functional(value: object) -> bool:
    """Whether ``value`` is a functional tensor of either layer."""
    return isinstance(value, torch.Tensor) and compat.is_inner_wrapper(compat.inner_wrapper(value))
