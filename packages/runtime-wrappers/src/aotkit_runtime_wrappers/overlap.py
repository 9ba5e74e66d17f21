"""Which memory a tensor covers, and whether two tensors share some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import AliasingChangedError

__all__ = ["AliasCheck", "byte_range", "refuse_new_aliases", "refuse_place", "storage_id", "tensors_overlap"]

_REAL = (Tensor, torch.nn.Parameter)
_EXACT_LIMIT = 1 << 22  # elements that the exact comparison of interleaved tensors may enumerate


def storage_id(tensor: Tensor) -> int | None:
    """A number that tensors over the same storage share; ``None`` where there is no one storage (sparse, ...)."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # wrapper subclasses and the like own no memory themselves
        return None


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that the elements of ``tensor`` cover, from the start of its storage."""
    if tensor.numel() == 0:
        return (0, 0)
    low: Any = tensor.storage_offset()
    high: Any = low + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (low * tensor.element_size(), (high + 1) * tensor.element_size())


def tensors_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` have a byte in common. Exact up to a few million elements, else conservative."""
    if storage_id(a) is None or storage_id(a) != storage_id(b):
        return False
    (low_a, high_a), (low_b, high_b) = byte_range(a), byte_range(b)
    if max(low_a, low_b) >= min(high_a, high_b):
        return False
    if a.element_size() != b.element_size() or a.numel() + b.numel() > _EXACT_LIMIT:
        return True
    return bool(torch.isin(_element_offsets(a), _element_offsets(b)).any())


def _element_offsets(tensor: Tensor) -> Tensor:
    offsets = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
    return offsets


def refuse_place(tensor: Tensor, name: str, offset: int, nbytes: int) -> None:
    """Raise :class:`AliasingChangedError` if a graph that counts elements from the start of the tensor's storage was
    captured for a tensor that begins elsewhere in it; ``RuntimeError``, as in eager, if the storage is too short."""
    held = tensor.untyped_storage().nbytes()
    if held < nbytes:
        raise RuntimeError(
            f"as_strided() of input {name} is out of bounds: the view ends at byte {nbytes} of a storage of {held}"
        )
    if tensor.storage_offset() != offset:
        raise AliasingChangedError(
            f"as_strided() counts from the start of the storage of input {name}, which begins at element "
            f"{tensor.storage_offset()} of it and began at {offset} when the graph was captured. Capture the function "
            "again with these inputs"
        )


def refuse_new_aliases(
    mutated: Sequence[Tensor], others: Sequence[Tensor], among: bool, mutated_names: str, other_names: str
) -> None:
    """Raise :class:`AliasingChangedError` if a tensor of ``mutated`` overlaps one of ``others`` (or of its own).

    The common case, no common storage at all, is one pass over storages.
    """
    small, large = (mutated, others) if among or len(mutated) <= len(others) else (others, mutated)
    # A storage is one Python object for as long as it lives, so sets of them compare storages.
    storages = set(map(Tensor.untyped_storage, small))
    if not (among and len(storages) < len(mutated)) and storages.isdisjoint(map(Tensor.untyped_storage, large)):
        return
    _compare_in_detail(mutated, others, among, mutated_names.split(), other_names.split())


class AliasCheck:
    """:func:`refuse_new_aliases` for tensors whose sizes and strides are the same in all calls: where all of them lie
    where they lay in the last call that passed, they share no more memory than they did.

    A step of a language model has hundreds of weights and caches, and comparing addresses takes a tenth of the time of
    comparing storages. Safe under threads: what is kept is replaced as a whole.
    """

    __slots__ = ("_passed",)

    def __init__(self) -> None:
        self._passed: tuple[int, ...] = ()

    def __call__(
        self, mutated: Sequence[Tensor], others: Sequence[Tensor], among: bool, mutated_names: str, other_names: str
    ) -> None:
        """Raises what :func:`refuse_new_aliases` raises."""
        if type(mutated[0]) not in _REAL:  # fake ones, in a call of torch's own tracers
            refuse_new_aliases(mutated, others, among, mutated_names, other_names)
            return
        addresses = (*map(Tensor.data_ptr, mutated), *map(Tensor.data_ptr, others))
        if addresses != self._passed:
            refuse_new_aliases(mutated, others, among, mutated_names, other_names)
            if 0 not in addresses:  # of tensors without elements, or without memory
                self._passed = addresses


def _compare_in_detail(
    mutated: Sequence[Tensor], others: Sequence[Tensor], among: bool, mutated_names: list[str], other_names: list[str]
) -> None:
    for i, a in enumerate(mutated):
        candidates = list(zip(other_names, others, strict=True))
        if among:
            candidates += list(zip(mutated_names[i + 1 :], mutated[i + 1 :], strict=True))
        for name, b in candidates:
            if tensors_overlap(a, b):
                raise AliasingChangedError(
                    f"input {mutated_names[i]} is mutated by this graph and now shares memory with input {name}, which "
                    "it did not when the graph was captured; results would be wrong. Capture the function again with "
                    "these inputs, or pass a clone of one of them"
                )
