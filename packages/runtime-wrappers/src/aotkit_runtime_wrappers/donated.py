"""Saved tensors whose memory the compiled backward may use for something else.

Note [Donated buffers]
    A saved tensor that shares memory with no input and no forward output belongs to one call of the backward, which may
    overwrite it, if the graph is not needed again. The plan says which ones the backward was compiled to overwrite.
    It gets copies where a call is not like that: with ``retain_graph`` or ``create_graph``, under hooks for saved
    tensors (which may give out memory of the user's), and where the forward did return shared memory after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ._torch_compat import graph_is_kept, saving_hooks
from .errors import PlanError
from .overlap import storage_id
from .plan import WrapperPlan
from .runtime import clone_exact

__all__ = ["keep_donated", "own_memory", "plan_donated", "storages"]


def plan_donated(plan: WrapperPlan, saved: Sequence[int]) -> WrapperPlan:
    """``plan`` whose backward may overwrite the saved tensors at these positions; see Note [Donated buffers].

    Raises :class:`PlanError` for positions that there are not, and for graphs with tensor subclasses.
    """
    call = plan.call
    if saved and call.subclasses is not None:
        raise PlanError("saved tensors of a graph with tensor subclasses cannot be donated to its backward")
    if any(not 0 <= position < call.num_saved_tensors for position in saved):
        raise PlanError(f"saved tensors {sorted(saved)} are donated, but there are {call.num_saved_tensors} of them")
    return replace(plan, call=replace(call, donated=tuple(sorted(set(saved)))))


def storages(values: Sequence[Any]) -> set[int | None]:
    """The storages of the tensors among ``values``."""
    return {storage_id(value) for value in values if isinstance(value, Tensor)}


def own_memory(
    given: set[int | None], outputs: Sequence[Any], saved: Sequence[Tensor], donated: Sequence[int]
) -> tuple[int, ...]:
    """Which of the ``donated`` share no memory with the inputs (``given``), the outputs, or what else is saved."""
    if saving_hooks(False):
        return ()
    taken = given | storages(outputs) | storages([s for i, s in enumerate(saved) if i not in donated])
    found = [storage_id(saved[i]) for i in donated]
    alone = [i for i, storage in zip(donated, found, strict=True) if found.count(storage) == 1]
    return tuple(i for i in alone if storage_id(saved[i]) not in taken)


def keep_donated(box: list[Any], first: int, donated: Sequence[int], own: Sequence[int]) -> None:
    """Copies into ``box``, whose saved tensors start at ``first``, for what must outlive this backward."""
    kept = graph_is_kept()
    for position in donated:
        if kept or position not in own:
            box[first + position] = clone_exact(box[first + position])
