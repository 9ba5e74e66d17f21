"""Where a call's inputs are: used in place, in memory of the path, or to be copied into a buffer."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .liveness import Layout, Slot, is_lazy


@enum.unique
class Place(enum.Enum):
    """How a recording reads an input."""

    VALUE = "not a tensor; part of the key"
    STATIC = "at its own address, which must not change"
    PATH = "where an earlier recording of the path left it"
    COPIED = "from a buffer in the pool, into which it is copied first"


class PathTensor(NamedTuple):  # see `Layout`
    """A tensor on a slot, remembered without holding it.

    Attributes:
        slot: whose memory it is in.
        layout: its layout there.
    """

    slot: Slot
    layout: Layout

    def tensor(self) -> torch.Tensor:
        """The tensor, with the version of the results there."""
        return self.layout.beside(next(iter(self.slot.bases.values())))


class Key:
    """Parts of a key, whose hash is computed once: a key of hundreds of inputs is looked up several times a call."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: Iterable[object]) -> None:
        self._parts = tuple(parts)
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._hash == other._hash and self._parts == other._parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)


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

    key: Key
    places: tuple[Place, ...]
    addresses: tuple[int, ...]
    path_inputs: Mapping[int, PathTensor]
    sizes: tuple[int, ...]

    def layouts(self) -> tuple[object, ...]:
        """The key without regard to which inputs are in memory of the path."""
        return tuple(_without_path(part) for part in self.key)


def _without_path(part: Any) -> object:
    if isinstance(part, tuple) and isinstance(part[0], PathTensor):
        layout = part[0].layout
        return (layout.dtype, layout.shape, layout.stride, *part[1:])
    return part


class StaticInputs:
    """Which inputs are used in place, and quick answers about them."""

    def __init__(self, indices: Iterable[int]) -> None:
        self.indices = tuple(sorted(set(indices)))
        self._members = frozenset(self.indices)
        self._others: dict[int, tuple[int, ...]] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._members

    def without(self, indices: Iterable[int]) -> StaticInputs:
        """These but some."""
        return StaticInputs(self._members.difference(indices))

    def others(self, count: int) -> tuple[int, ...]:
        """The rest of `count` inputs."""
        found = self._others.get(count)
        if found is None:
            found = self._others[count] = tuple(index for index in range(count) if index not in self._members)
        return found

    def aligned_addresses(self, inputs: Sequence[Any], alignment: int) -> tuple[int, ...] | None:
        """All their addresses, if all are tensors whose addresses are multiples of `alignment`."""
        try:
            addresses = tuple([inputs[index].data_ptr() for index in self.indices])
        except (AttributeError, RuntimeError):  # no tensor, or one without an address
            return None
        return addresses if functools.reduce(operator.or_, addresses, 0) % alignment == 0 else None


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # classes whose tensors are nothing but that


def calling_state() -> tuple[object, ...]:
    """What of torch's state decides which operators a call runs: grad mode, and autocast with its types.

    A recording has the casts, or none, of the call that it was made in.
    """
    grad = torch.is_grad_enabled()
    if not torch._C._is_any_autocast_enabled():
        return (grad,)
    return (grad, *(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "cuda")))


def place_inputs(
    inputs: Sequence[Any], static: StaticInputs, path_slots: Mapping[int, Slot], alignment: int, check_static: bool
) -> Placement:
    """Say for each input where it is.

    Args:
        inputs: of the call.
        static: those whose tensors are used in place if they are aligned.
        path_slots: slots of the path's recordings by the identity (`_cdata`) of their storage.
        alignment: bytes, a power of two.
        check_static: put layouts of static inputs into the key. Without, they cost little more than their addresses.
    """
    grad = torch.is_grad_enabled()
    key: list[object] = [calling_state()]
    places = [Place.STATIC] * len(inputs)
    path_inputs: dict[int, PathTensor] = {}
    trusted = None if check_static else static.aligned_addresses(inputs, alignment)
    addresses = list(trusted or ())
    for index in range(len(inputs)) if trusted is None else static.others(len(inputs)):
        value = inputs[index]
        kind = type(value)
        if kind not in PLAIN:
            # Only integers tell recordings apart; whatever else can't be recorded need not be hashable.
            key.append((kind, value if kind is int or kind is bool else None))
            places[index] = Place.COPIED if isinstance(value, torch.Tensor) else Place.VALUE
        elif value.layout is not torch.strided:
            key.append((kind, value.layout))
            places[index] = Place.COPIED
        elif index in static and (address := value.data_ptr()) % alignment == 0:
            key.append(("static", *_layout(value, grad)))
            addresses.append(address)
        elif (slot := path_slots.get(value.untyped_storage()._cdata)) is not None:
            known = path_inputs[index] = PathTensor(slot, Layout.of(value))
            key.append((known, value.device, grad and value.requires_grad, is_lazy(value)))
            places[index] = Place.PATH
        else:
            key.append(_layout(value, grad))
            places[index] = Place.COPIED
    sizes = tuple(value for value in inputs if type(value) is int)
    return Placement(Key(key), tuple(places), tuple(addresses), path_inputs, sizes)


def _layout(value: torch.Tensor, grad: bool) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride(), value.device, grad and value.requires_grad, is_lazy(value)


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
