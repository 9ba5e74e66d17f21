"""Inputs that a user's backward may write to: as they are when the backward runs.

Only the backward of a user's ``torch.autograd.Function`` can write in place. Where there is one, every input that needs
no gradient stands, from the end of the forward on, for a placeholder of its own, so that the backward (and the views
that it takes, or took in the forward) reads what the memory holds by then. Of inputs that it did not write to, the
placeholder is replaced by the value that they had. See Note [Inputs that the backward writes to] of
:mod:`aotkit_functionalize.records`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotkit_functionalize import FunctionInput, GraphMetadata, OverlappingMutation, records
from aotkit_functionalize.tracing import (
    count_data_mutations,
    from_functional,
    is_autograd_identity,
    is_functional,
    overlapping_groups,
    renew,
)

__all__ = ["BackwardMutatedInput", "backward_mutated_inputs", "settle"]


@dataclass(frozen=True, slots=True)
class BackwardMutatedInput:
    """An input behind the forward.

    Attributes:
        entered: the input.
        placeholder: what it is in the backward.
        plain: the same as a tensor.
        value: what it was at the end of the forward.
        writes: how often it was written to by then.
        version: its version counter then.
    """

    entered: FunctionInput
    placeholder: torch.fx.Node
    plain: torch.Tensor
    value: torch.fx.Node
    writes: int
    version: int


def backward_mutated_inputs(
    inputs: Sequence[FunctionInput],
    metadata: GraphMetadata,
    functions: Iterable[Any],
    tracer: Any,
    placeholder: Callable[[int, torch.Tensor], torch.Tensor],
    repeated: Collection[int],
) -> list[BackwardMutatedInput]:
    """Give the inputs that the backward ``functions`` may write to placeholders, by ``placeholder(number, like)``.

    So also the inputs ``repeated``, given by their indices, to which checkpointed regions write again.
    """
    users = any(_is_users(f) for f in functions)
    if not users and not repeated:
        return []
    found: list[BackwardMutatedInput] = []
    for entered, info in zip(inputs, metadata.inputs, strict=True):
        if not users and entered.index not in repeated:
            continue
        same_memory = info.mutation in (records.MutationKind.NONE, records.MutationKind.DATA)
        if entered.requires_grad or not is_functional(entered.value) or not same_memory:
            continue
        if info.meta is None or info.meta.conj or info.meta.neg:
            continue  # refused if it is written to
        now = from_functional(entered.value)
        if now.stride() != entered.original.stride():
            continue  # views of it could not stand for views of the memory; a backward that writes to it is refused
        before = tracer.unwrap_proxy(now).node
        # Laid out like the value, storage and offset too: where that takes its place, views of it stay as they are.
        plain = placeholder(len(metadata.tangents) + len(found) + 1, now)
        renew(entered.value, plain)
        writes, version = count_data_mutations(entered.value), entered.value._version
        node = tracer.unwrap_proxy(plain).node
        found.append(BackwardMutatedInput(entered, node, plain, before, writes, version))
    return found


def _is_users(function: Any) -> bool:
    """Whether it is the backward of an ``autograd.Function``, other than those through which inputs enter."""
    return isinstance(function, torch.autograd.function.BackwardCFunction) and not is_autograd_identity(function)


def settle(
    mutated: Sequence[BackwardMutatedInput],
    inputs: Sequence[FunctionInput],
    repeated: Mapping[int, records.BackwardWrite],
) -> tuple[tuple[records.BackwardWrite, ...], list[tuple[torch.fx.Node, torch.fx.Node]]]:
    """After the backward: what it wrote to, and the placeholders that are not needed with what they stand for.

    ``repeated``: what checkpointed regions write again, by the index of the input. Raises
    :class:`OverlappingMutation` where it wrote to memory that another input shares.
    """
    written: list[records.BackwardWrite] = []
    needless: list[tuple[torch.fx.Node, torch.fx.Node]] = []
    for one in mutated:
        if one.entered.index in repeated:
            written.append(repeated[one.entered.index])
        elif count_data_mutations(one.entered.value) == one.writes:
            needless.append((one.placeholder, one.value))
        else:
            written.append(records.BackwardWrite(one.entered.index, one.entered.value._version - one.version))
    indices = tuple(w.input for w in written)
    groups = overlapping_groups(inputs, indices) if written else ()
    if groups:
        raise OverlappingMutation(groups, indices)
    return tuple(written), needless
