"""Arguments of a call together with where they lie, for a caller who has looked already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["PlacedArguments", "placed"]

_REAL = (Tensor, torch.nn.Parameter)


class PlacedArguments(list[Any]):
    """A boxed list of tensors that tells the addresses of all of them, so that compiled code need not ask once more.

    Attributes:
        addresses: in order; ``None`` where they are not known.
        before: addresses of an earlier call, or nothing.
        moved: where the two differ, if there are earlier ones.
    """

    __slots__ = ("addresses", "before", "moved")

    addresses: tuple[int, ...] | None
    before: tuple[int, ...]
    moved: tuple[int, ...]

    @staticmethod
    def at(
        args: Sequence[Any],
        addresses: tuple[int, ...] | None,
        before: tuple[int, ...] = (),
        moved: tuple[int, ...] = (),
    ) -> PlacedArguments:
        """The list of these arguments, which lie there."""
        result = PlacedArguments(args)
        result.addresses, result.before, result.moved = addresses, before, moved
        return result


def placed(args: Sequence[Any]) -> PlacedArguments:
    """A list of the same arguments with their addresses, or the same list, if it has them. Fake tensors have none."""
    if type(args) is PlacedArguments and args.addresses is not None:
        return args
    return PlacedArguments.at(args, tuple(map(Tensor.data_ptr, args)) if type(args[0]) in _REAL else None)
