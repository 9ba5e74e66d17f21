"""The caller's flat arguments -> the distinct values that a graph is captured over.

Note [Duplicates are recognised by identity]
    ``f(x, x)`` is captured over one ``x``. Otherwise the graph would write to two functional copies of one
    tensor, and autograd would see two inputs where there is one. What counts is the Python object: two
    tensor objects over the same memory are different inputs with different autograd histories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._records import Format
from .contract import Dim, ViewSpec
from .errors import CallingConventionError, PlanError
from .operations import Value
from .operations.symbols import BindSymbol
from .overlap import storage_id

__all__ = ["BaseSpec", "InputPlan", "MemberView", "prepare_inputs"]


@dataclass(frozen=True, slots=True)
class MemberView:
    """Argument ``index`` is the view ``view`` of its synthetic base."""

    index: int
    view: ViewSpec


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """A synthetic base: the arguments that it stands for, and its dtype and element count.

    ``flat``: it is a tensor over their storage, not the tensor that autograd knows as their base, and so it has a
    version counter of its own.
    """

    views: tuple[MemberView, ...]
    dtype: str
    numel: Dim
    flat: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """Argument indices of the views of this base."""
        return tuple(v.index for v in self.views)


@dataclass(frozen=True, slots=True)
class InputPlan:
    """How ``num_inputs`` flat arguments become graph inputs.

    Attributes:
        num_inputs: number of the caller's flat arguments.
        duplicate_of: per argument, the earlier argument that is the same tensor, or ``None``.
        overlaps: groups of (kept) arguments that share a storage.
        bases: synthetic bases; they come first among the graph inputs, in this order.
        returned_inputs: (output, argument) pairs where the function returns one of a base's members itself.
        symbols: where sizes are read by which members are parts of their bases. Those that are not arguments themselves
            are graph inputs after the bases.
        restrided: members whose sizes or strides are changed in place, as they are after the call, counted from where
            they began.
    """

    num_inputs: int
    duplicate_of: tuple[int | None, ...]
    overlaps: tuple[tuple[int, ...], ...] = ()
    bases: tuple[BaseSpec, ...] = ()
    returned_inputs: tuple[tuple[int, int], ...] = ()
    symbols: tuple[BindSymbol, ...] = ()
    restrided: tuple[MemberView, ...] = ()

    @staticmethod
    def one_to_one(num_inputs: int) -> InputPlan:
        """Every argument is a graph input."""
        return InputPlan(num_inputs, (None,) * num_inputs)

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the arguments that duplicate no earlier one."""
        return tuple(i for i, first in enumerate(self.duplicate_of) if first is None)

    @property
    def keep_mask(self) -> tuple[bool, ...]:
        """Per argument: is it kept."""
        return tuple(first is None for first in self.duplicate_of)

    @property
    def others(self) -> tuple[int, ...]:
        """Kept arguments that no synthetic base stands for."""
        covered = {member for base in self.bases for member in base.members}
        return tuple(i for i in self.kept if i not in covered)

    @property
    def extra_symbols(self) -> tuple[BindSymbol, ...]:
        """Symbols that are graph inputs beside the arguments."""
        return tuple(s for s in self.symbols if s.source != "int")

    def duplicates(self) -> tuple[tuple[int, int], ...]:
        """(argument, earlier argument) of every duplicate."""
        return tuple((i, first) for i, first in enumerate(self.duplicate_of) if first is not None)

    def graph_input_names(self) -> tuple[Value, ...]:
        """Names of the graph inputs in order; see Note [A plan is a small register program]."""
        bases = (f"base{i}" for i in range(len(self.bases)))
        return (*bases, *(s.symbol for s in self.extra_symbols), *(f"in{i}" for i in self.others))

    def select(self, flat_args: Sequence[Any]) -> list[Any]:
        """The distinct arguments, not yet replaced by synthetic bases (:func:`.graph_inputs` does that too)."""
        if len(flat_args) != self.num_inputs:
            raise CallingConventionError(
                f"{len(flat_args)} flat arguments were passed where the input plan was made for {self.num_inputs}"
            )
        return [flat_args[i] for i in self.kept]

    def expand(self, distinct: Sequence[Any]) -> list[Any]:
        """The inverse of :meth:`select`: arguments with duplicates put back, e.g. to call the traced function."""
        values = dict(zip(self.kept, distinct, strict=True))
        return [values[i if first is None else first] for i, first in enumerate(self.duplicate_of)]

    def to_json(self) -> str:
        """Canonical JSON text; ``InputPlan.from_json(p.to_json()) == p``."""
        return _FORMAT.to_text(self)

    @staticmethod
    def from_json(text: str) -> InputPlan:
        """Rebuild from :meth:`to_json`. Raises :class:`PlanError` if the text is no input plan."""
        return _FORMAT.from_text(text)

    def __str__(self) -> str:
        lines = [f"InputPlan({self.num_inputs} arguments -> {', '.join(self.graph_input_names())})"]
        lines += [f"  in{i} is in{first}" for i, first in self.duplicates()]
        lines += [f"  share a storage: {', '.join(f'in{i}' for i in group)}" for group in self.overlaps]
        lines += [f"  base{i}: {b.numel} x {b.dtype} for {b.members}" for i, b in enumerate(self.bases)]
        return "\n".join(lines)


_FORMAT = Format(InputPlan, "aotkit input plan", 2, error=PlanError)


def prepare_inputs(flat_args: Sequence[Any]) -> InputPlan:
    """Find duplicates (see Note [Duplicates are recognised by identity]) and tensors that share a storage.

    Sharing a storage is necessary but not sufficient for overlapping memory; it only matters if one of the
    tensors is mutated, which capture finds out. Then see :func:`.plan_synthetic_bases`.
    """
    first_seen: dict[int, int] = {}
    by_storage: dict[object, list[int]] = {}
    duplicate_of: list[int | None] = []
    for index, value in enumerate(flat_args):
        if not isinstance(value, torch.Tensor):
            duplicate_of.append(None)
            continue
        first = first_seen.setdefault(id(value), index)
        duplicate_of.append(None if first == index else first)
        storage = storage_id(value) if first == index else None
        if storage is not None:
            by_storage.setdefault(storage, []).append(index)
    overlaps = tuple(tuple(group) for group in by_storage.values() if len(group) > 1)
    return InputPlan(len(flat_args), tuple(duplicate_of), overlaps)
