"""Views by ``as_strided``, whose elements are named by their places in memory and not by those in a tensor.

Note [Views by strides]
    Two things are true of them alone. A new value need not lie where the old one did: it has no gaps between its
    elements and begins where its own memory does, so that the same strides and offset show other elements of it. And
    autograd: the gradient of elements outside of the tensor that the view was taken of is lost at first, but when the
    version counter moves, the view is taken anew of the whole tensor that its memory began with, and no gradient is
    lost from then on. What is traced does neither, so writes are refused where one of them matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from . import _torch_compat as compat
from .errors import Unsupported
from .overlap import covers

__all__ = ["Place", "StridedViews", "other_elements"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies: its strides, the number of its first element, and whether its elements have no gaps."""

    strides: tuple[Any, ...]
    offset: Any
    dense: bool

    @classmethod
    def of(cls, plain: torch.Tensor) -> Place:
        """The place of a plain tensor."""
        return cls(plain.stride(), plain.storage_offset(), compat.is_dense(plain))


@dataclass(slots=True)
class StridedViews:
    """What is known of such views in one run; keys are storage identities.

    Attributes:
        fixed: storages of which a view was taken that shows other elements where the new values lie elsewhere.
        moved: storages whose new values begin elsewhere than the memory does.
        beyond: views that lead beyond the elements of what they were taken of.
    """

    fixed: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    beyond: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def check(self, identity: int) -> None:
        """Refuse to take a view of a storage whose values lie elsewhere by now."""
        if identity in self.moved:
            raise other_elements()

    def note(self, identity: int, target: torch.Tensor, root: torch.Tensor, result: torch.Tensor) -> None:
        """``result`` is a view of ``target``, whose base is ``root``; of the last two the plain tensors count."""
        place = Place.of(_plain(root))
        if not place.dense or not compat.is_known(place.offset == 0):
            self.fixed.add(identity)
        if not _contains(_plain(target), _plain(result)):
            self.beyond.setdefault(identity, []).append(result)

    def check_write(self, identity: int, target: torch.Tensor) -> None:
        """Refuse what moves the version counter of a view that leads beyond its tensor and wants a gradient."""
        for view in self.beyond.get(identity, ()):
            involved = (view, target, *(() if target._base is None else (target._base,)))
            if any(value.requires_grad for value in involved) and compat.share_version_counter(view, target):
                raise _of_the_whole()

    def check_place(self, identity: int, wrapper: torch.Tensor, before: Place) -> None:
        """Refuse a write that gave the tensor of ``wrapper`` another beginning than ``before``, if a view needs it."""
        now = compat.unwrap_inner(wrapper)
        if compat.is_known(now.storage_offset() == before.offset) or _is_part(wrapper):
            return
        if identity in self.fixed:
            raise other_elements()
        self.moved.add(identity)


_PARTS = ("slice", "select", "diagonal", "as_strided", "split", "split_with_sizes", "unbind")


def _is_part(wrapper: torch.Tensor) -> bool:
    """Whether a write to the wrapper is a write to a part of another value, which stays where it is."""
    return any(compat.is_view_through(wrapper, view) for view in _PARTS)


def _contains(outer: torch.Tensor, inner: torch.Tensor) -> bool:
    """Whether every element of ``inner`` certainly is one of ``outer``."""
    if compat.is_dense(outer):
        return covers(outer, inner)
    numbers = (*outer.shape, *outer.stride(), outer.storage_offset(), *inner.shape, *inner.stride(),
               inner.storage_offset())  # fmt: skip
    if outer.dtype != inner.dtype or not all(isinstance(n, int) for n in numbers):
        return False
    if inner.numel() == 0:
        return True
    left = sorted(zip(outer.stride(), outer.shape, strict=True), reverse=True)
    steps = [(stride, size) for stride, size in zip(inner.stride(), inner.shape, strict=True) if size != 1]
    wanted = dict(steps)
    start = inner.storage_offset() - outer.storage_offset()
    if start < 0 or len(wanted) < len(steps):
        return False
    for stride, size in left:
        first = min(start // stride, size - 1) if stride else 0
        start -= first * stride
        if first + wanted.pop(stride, 1) > size:
            return False
    return start == 0 and not wanted


def _plain(value: torch.Tensor) -> torch.Tensor:
    compat.sync(value)
    return compat.unwrap_inner(compat.inner_wrapper(value))


def other_elements() -> Unsupported:
    """The error where a view would show other elements of a new value."""
    return Unsupported(
        "a tensor with gaps between its elements, or one that does not begin where its storage does, is written to "
        "and viewed by as_strided()",
        "the new values lie elsewhere, so that the view would show other elements",
        "Make it contiguous first, or use indexing",
    )


def _of_the_whole() -> Unsupported:
    return Unsupported(
        "a tensor is written to of which as_strided() took a view beyond the elements of another view",
        "from then on autograd takes it of the whole tensor in eager mode",
        "Use indexing, or as_strided() of the whole tensor",
    )
