"""Where a call's inputs are: used in place, in memory of the path, or to be copied into a buffer."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from .liveness import Layout, Slot


@enum.unique
class Place(enum.Enum):
    """How a recording reads an input."""

    VALUE = "not a tensor; part of the key"
    STATIC = "at its own address, which must not change"
    PATH = "where an earlier recording of the path left it"
    COPIED = "from a buffer in the pool, into which it is copied first"


@dataclass(frozen=True, slots=True)
class PathTensor:
    """A tensor on a slot, remembered without holding it.

    Attributes:
        slot: whose memory it is in.
        layout: its layout there.
    """

    slot: Slot
    layout: Layout

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        return self.layout.on(self.slot.storage)


@dataclass(frozen=True, slots=True)
class Placement:
    """What is known about the inputs of one call.

    Attributes:
        key: equal for calls that can share a recording, addresses of static inputs aside.
        places: one per input.
        addresses: of the static inputs, in order.
        path_inputs: those in memory of the path, by index.
        sizes: the integers among the inputs.
    """

    key: tuple[object, ...]
    places: tuple[Place, ...]
    addresses: tuple[int, ...]
    path_inputs: Mapping[int, PathTensor]
    sizes: tuple[int, ...]

    def layouts(self) -> tuple[object, ...]:
        """The key without regard to which inputs are in memory of the path."""
        parts = list(self.key)
        for index, known in self.path_inputs.items():
            part: Any = parts[index + 1]
            parts[index + 1] = (known.layout.dtype, known.layout.shape, known.layout.stride, *part[1:])
        return tuple(parts)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def place_inputs(
    inputs: Sequence[Any], static: AbstractSet[int], path_slots: Mapping[int, Slot], alignment: int, check_static: bool
) -> Placement:
    """Say for each input where it is.

    Args:
        inputs: of the call.
        static: indices whose tensors are used in place if they are aligned.
        path_slots: slots of the path's recordings by the identity (`_cdata`) of their storage.
        alignment: bytes.
        check_static: put layouts of static inputs into the key.
    """
    grad = torch.is_grad_enabled()
    key: list[object] = [grad]
    places: list[Place] = []
    addresses: list[int] = []
    path_inputs: dict[int, PathTensor] = {}
    for index, value in enumerate(inputs):  # a hot loop: once per input and call
        kind = type(value)
        if kind not in _PLAIN:
            # Only integers tell recordings apart; whatever else can't be recorded need not be hashable.
            key.append((kind, value if kind is int or kind is bool else None))
            places.append(Place.COPIED if isinstance(value, torch.Tensor) else Place.VALUE)
        elif value.layout is not torch.strided:
            key.append((kind, value.layout))
            places.append(Place.COPIED)
        elif index in static and (address := value.data_ptr()) % alignment == 0:
            key.append(("static", *_layout(value, grad)) if check_static else None)
            places.append(Place.STATIC)
            addresses.append(address)
        elif (slot := path_slots.get(value.untyped_storage()._cdata)) is not None:
            path_inputs[index] = PathTensor(slot, Layout.of(value))
            key.append((path_inputs[index], value.device, grad and value.requires_grad))
            places.append(Place.PATH)
        else:
            key.append(_layout(value, grad))
            places.append(Place.COPIED)
    sizes = tuple(value for value in inputs if type(value) is int)
    return Placement(tuple(key), tuple(places), tuple(addresses), path_inputs, sizes)


def _layout(value: torch.Tensor, grad: bool) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride(), value.device, grad and value.requires_grad


def describe(inputs: Sequence[Any], placement: Placement) -> str:
    """Readable layouts, for reports."""
    parts = []
    for index, (value, place) in enumerate(zip(inputs, placement.places, strict=True)):
        if place is Place.PATH:
            layout = placement.path_inputs[index].layout
            parts.append(f"{_name(layout.dtype)}{list(layout.shape)} in path")
        elif isinstance(value, torch.Tensor):
            parts.append(f"{_name(value.dtype)}{list(value.shape)}{' static' if place is Place.STATIC else ''}")
        else:
            parts.append(str(value))
    return f"({', '.join(parts)})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
