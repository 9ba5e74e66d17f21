"""Calls that are as the last one was, known without working out where each input is.

Note [Expected calls]
A training step calls its backward with hundreds of tensors, and a key made of all their layouts takes longer than the
launch of the replay. So a call that replayed is remembered with the recording before it: what each argument was (for
tensors by torch's own native check of guards, which compares all of them at once) and where those were that are used in
place. A call that is the same in all this would get the same key and the same recording. For inputs in memory of the
path the address stands for the slot: no one but the pool owns that memory, and a result in it that is not the path's
keeps every recording of the pool from being replayed while it is in use. Which results are in use is asked anew in each
call. Whatever differs, or can't be compared, takes the long way, which decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._tensors_alike import tensors_alike
from .placement import PLAIN, PathTensor, Place, Placement, calling_state
from .tree import Node


@dataclass(frozen=True, slots=True, eq=False)
class CallPattern:
    """One call's inputs, to be compared with those of others.

    Attributes:
        state: see `calling_state`.
        others: inputs that are no tensors: index, class, and the value of a number.
        tensors: indices of the tensors.
        alike: says whether tensors are what these were, addresses aside.
        placed: indices of the tensors that are used where they are.
        addresses: theirs.
        path_inputs: those of them in memory of the path.
    """

    state: tuple[object, ...]
    others: tuple[tuple[int, type, object], ...]
    tensors: tuple[int, ...]
    alike: Callable[..., bool]
    placed: tuple[int, ...]
    addresses: tuple[int, ...]
    path_inputs: Mapping[int, PathTensor]

    def matches(self, given: Sequence[Any]) -> bool:
        """Whether a call with these inputs has the same key, addresses and slots."""
        if len(given) != len(self.tensors) + len(self.others) or calling_state() != self.state:
            return False
        for index, kind, value in self.others:
            if type(given[index]) is not kind or (value is not None and given[index] != value):
                return False
        try:
            return (
                self.alike(*[given[index] for index in self.tensors])
                and tuple([given[index].data_ptr() for index in self.placed]) == self.addresses
            )
        except (TypeError, RuntimeError):  # no tensor, or one without an address
            return False


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedCall:
    """A call that would be replayed by ``node``."""

    pattern: CallPattern
    node: Node


def pattern_of(given: Sequence[Any], placement: Placement) -> CallPattern | None:
    """The pattern of a call whose inputs are placed so; None if torch can't compare them natively."""
    tensors = tuple(index for index, value in enumerate(given) if type(value) in PLAIN)
    others = tuple((index, type(value), value) for index, value in enumerate(given) if type(value) not in PLAIN)
    if any(isinstance(value, torch.Tensor) for _, _, value in others):
        return None
    alike = tensors_alike([given[index] for index in tensors])
    if alike is None:
        return None
    placed = tuple(i for i, place in enumerate(placement.places) if place in (Place.STATIC, Place.PATH))
    return CallPattern(
        state=calling_state(),
        others=tuple((i, kind, value if kind in (int, bool) else None) for i, kind, value in others),
        tensors=tensors,
        alike=alike,
        placed=placed,
        addresses=tuple(given[index].data_ptr() for index in placed),
        path_inputs=placement.path_inputs,
    )
