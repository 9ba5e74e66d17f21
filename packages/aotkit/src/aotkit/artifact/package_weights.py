"""Weights that share memory with others, or of which several elements are one number: as a package holds them.

Note [Weights over one memory]
    A module's weights may be views of one tensor, and the call may write to one of them. So the file has the bytes of
    what they lie in once, under a name that no weight can have, and where in it each of them lies. Weights whose bytes
    do not meet are written one by one, even if they have one storage: a slice should not bring all of its storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import PackageError

__all__ = ["Views", "overlaps_itself", "shared_memory", "views_in", "writable_part"]

Views = Mapping[str, Sequence[Any]]
"""By the name of a weight: the name of its memory, dtype, sizes, strides, and the element where it begins."""
_WIDEST = 16  # bytes of an element


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of a tensor may be one number: it is expanded, or its strides are shorter than what they step
    over. Never ``False`` for one that does."""
    if 0 in sizes:
        return False
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def shared_memory(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """``weights`` with memories in place of those that share one, and where these are in them; see
    Note [Weights over one memory]."""
    written: dict[str, torch.Tensor] = {}
    views: dict[str, list[Any]] = {}
    for group in _groups(weights):
        first = weights[group[0]]
        if len(group) == 1 and not overlaps_itself(first.shape, first.stride()):
            written[group[0]] = first
            continue
        ranges = [_bytes_of(weights[name]) for name in group]
        low, top = min(begin for begin, _ in ranges), max(end for _, end in ranges)
        memory, name = _memory(first, low, top), f".memory{len(written)}"
        written[name] = memory
        for weight, (begin, _) in zip(group, ranges, strict=True):
            value = weights[weight]
            if (begin - low) % value.element_size():
                raise PackageError(f"the weight {weight} shares memory with others at a place that is no element's")
            offset = (begin - low) // value.element_size()
            views[weight] = [name, str(value.dtype), list(value.shape), list(value.stride()), offset]
    return written, views


def views_in(weights: Mapping[str, torch.Tensor], views: Views) -> dict[str, torch.Tensor]:
    """``weights`` of a file with the weights that lie in memories in place of these."""
    found = {name: value for name, value in weights.items() if not name.startswith(".memory")}
    for weight, (name, dtype, sizes, strides, offset) in views.items():
        flat = weights[name].view(getattr(torch, dtype.removeprefix("torch.")))
        found[weight] = flat.as_strided(sizes, strides, offset)
    return found


def writable_part(weight: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What to copy for ``weight`` to become ``value``, and whereto: of an expanded weight one of the elements that are
    one number. ``None`` if it can't become that."""
    if not overlaps_itself(weight.shape, weight.stride()):
        return weight, value
    one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in weight.stride())
    part, new = weight[one], value[one]
    fits = not overlaps_itself(part.shape, part.stride()) and _same_numbers(new.expand_as(value), value)
    return (part, new) if fits else None


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _bytes_of(value: torch.Tensor) -> tuple[int, int]:
    """Where in its storage the elements begin and end."""
    low = int(value.storage_offset())
    high = low + sum(int((size - 1) * stride) for size, stride in zip(value.shape, value.stride(), strict=True))
    return low * value.element_size(), (high + 1) * value.element_size()


def _groups(weights: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of weights whose bytes meet, from the first to the last byte of each."""
    groups: list[list[str]] = [[name] for name, value in weights.items() if value.numel() == 0]
    storages: dict[int, list[str]] = {}
    for name, value in weights.items():
        if value.numel():
            storages.setdefault(value.untyped_storage()._cdata, []).append(name)
    for names in storages.values():
        reach = -1
        for name in sorted(names, key=lambda name: _bytes_of(weights[name])):
            low, top = _bytes_of(weights[name])
            if low < reach:
                groups[-1].append(name)
            else:
                groups.append([name])
            reach = max(reach, top)
    return groups


def _memory(value: torch.Tensor, low: int, top: int) -> torch.Tensor:
    """Those bytes of the storage of ``value``, and zeros up to a whole number of elements of any type."""
    held = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage(), low, (top - low,), (1,))
    return torch.nn.functional.pad(held, (0, -(top - low) % _WIDEST))
