"""Which results are still in use: asked of their storages, whoever holds those."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Layout(NamedTuple):  # hundreds are made and compared in each call: a dataclass takes several times as long
    """A tensor without its memory.

    Attributes:
        dtype: as of the tensor.
        shape: as of the tensor.
        stride: as of the tensor.
        offset: elements from the start of the storage.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """The layout of `tensor`."""
        return Layout(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def describes(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has this layout, and its elements are what its memory holds."""
        return self == Layout.of(tensor) and not is_lazy(tensor)

    def on(self, storage: torch.UntypedStorage, offset: int | None = None) -> torch.Tensor:
        """A tensor of this layout on `storage`; never an inference tensor, since it may outlive the mode."""
        start = self.offset if offset is None else offset
        with torch.inference_mode(False):
            return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, start, self.shape, self.stride)

    def beside(self, tensor: torch.Tensor, offset: int | None = None) -> torch.Tensor:
        """A tensor of this layout on the memory of `tensor`, and with its version: where autograd saved one of them, it
        notices a write through the other. Inference tensors have no versions, and lazy ones are not what is there."""
        start = self.offset if offset is None else offset
        if tensor.is_inference() or is_lazy(tensor):
            return self.on(tensor.untyped_storage(), start)
        with torch.inference_mode(False), torch.no_grad():
            lying = tensor.detach()
            if lying.dtype != self.dtype:
                width = max(lying.dtype.itemsize, self.dtype.itemsize)
                count = lying.untyped_storage().nbytes() // width * width // lying.dtype.itemsize
                lying = lying.as_strided((count,), (1,), 0).view(self.dtype)
            return lying.as_strided(self.shape, self.stride, start).detach()


def tensors_on(storage: torch.UntypedStorage, layouts: Mapping[int, Layout]) -> dict[int, torch.Tensor]:
    """Tensors of these layouts on a storage, all with one version, as views of each other have it."""
    made: dict[int, torch.Tensor] = {}
    for key, layout in layouts.items():
        made[key] = layout.beside(next(iter(made.values()))) if made else layout.on(storage)
    return made


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its elements are what its memory holds only when they are negated or conjugated."""
    return tensor.is_neg() or tensor.is_conj()


@dataclass(slots=True, eq=False, repr=False)
class Slot:
    """Memory of a pool in which one recording leaves one or more of its results.

    Note [Liveness]
    A slot keeps one storage on its memory and a tensor per result (`bases`), and hands out aliases of those. Whatever
    can read the result later (the alias, a view of it, a tensor that autograd saved) holds a reference to the storage,
    and someone who holds the storage itself holds its Python object. So the slot is in use as long as either count
    is above what the slot's own references account for. Nothing needs to be told when a result dies.

    Attributes:
        owner: names the callable, for reports and errors.
        address: of the first byte.
        nbytes: as asked for.
        leaves: which results of the recording live here.
        copied: the results are handed out as copies, because earlier ones were kept.
        blocked: how often it was in the way of a replay.
        handed: zero-copy results of the last replay, held weakly.
    """

    owner: Any
    address: int
    nbytes: int
    leaves: tuple[int, ...]
    storage: torch.UntypedStorage
    bases: dict[int, torch.Tensor]
    copied: bool = False
    blocked: int = 0
    handed: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    _uses: int = field(default=0, init=False)
    _references: int = field(default=0, init=False)

    def __repr__(self) -> str:
        return f"Slot({self.owner.name} results {list(self.leaves)}: {self.nbytes} bytes at {self.address:#x})"

    def settle(self) -> None:
        """Take the references of this moment as the slot's own; before, the slot counts as in use."""
        self._uses, self._references = self._count()

    def is_live(self) -> bool:
        """Whether anyone but the slot can still read its memory."""
        uses, references = self._count()
        return uses > self._uses or references > self._references

    def renew(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Go on with a new storage on the same memory; returns the old one. To be settled afterwards."""
        old, self.storage = self.storage, storage
        self.bases = tensors_on(storage, {leaf: Layout.of(base) for leaf, base in self.bases.items()})
        return old

    def _count(self) -> tuple[int, int]:
        return torch._C._storage_Use_Count(self.storage._cdata), sys.getrefcount(self.storage)


class LiveSlots:
    """Slots that were handed out and may still be in use."""

    def __init__(self) -> None:
        self._handed: dict[Slot, None] = {}

    def hand_out(self, slots: Mapping[Slot, None]) -> None:
        """These slots' results go to the caller."""
        self._handed.update(slots)

    def find(self) -> list[Slot]:
        """Those still in use, oldest first."""
        # What `Slot.is_live` says, without a call for each of hundreds of slots.
        uses, references = torch._C._storage_Use_Count, sys.getrefcount
        live = [
            slot
            for slot in self._handed
            if uses(slot.storage._cdata) > slot._uses or references(slot.storage) > slot._references
        ]
        if len(live) < len(self._handed):
            self._handed = dict.fromkeys(live)
        return live

    def forget(self, slots: Iterable[Slot]) -> None:
        """Stop looking at these."""
        for slot in slots:
            self._handed.pop(slot, None)
