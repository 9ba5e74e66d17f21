"""Flat arguments as the captured function sees them: functional tensors with an autograd identity in front.

Note [Inputs enter through an autograd identity]
    A differentiable input enters the function as the output of :class:`_Enter`, whose forward returns a new
    functional wrapper around the same plain tensor. So the input is not a leaf (in-place operations are
    allowed, as they are on most tensors a graph is called with), its strides are kept, no node is recorded,
    and gradients are taken with respect to the wrapper *behind* the identity, which no in-place operation
    ever touches. Taking them with respect to the very tensor that the function mutates gives the gradient
    of the value after the mutation: ``x.mul_(y); x.sin()`` would get ``cos(x*y)`` for ``x``, without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _torch_compat as compat
from .errors import Unsupported
from .lazy_bits import lazy_bits, with_lazy_bits
from .overlap import definitely_disjoint
from .records import InputInfo
from .wrap import below_functional_layer, from_functional, to_functional

__all__ = [
    "FunctionInput",
    "autograd_identity",
    "function_input",
    "function_inputs",
    "is_autograd_identity",
    "overlapping_groups",
]
__all__ += ["note_entry", "reentered_inputs", "with_bits_of"]


@dataclass(slots=True)
class FunctionInput:
    """One flat argument while it is captured.

    Attributes:
        index: position among the flat arguments.
        original: the plain (fake) tensor or other value that the graph takes, with the bits of the caller's tensor.
        value: what the function is given: a functional tensor for a tensor, else ``original``.
        leaf: the functional tensor that gradients are taken with respect to, if the input is differentiable.
        is_leaf: whether the caller's tensor is a leaf.
        requires_grad: whether the caller's tensor requires grad.
        entry_grad_fn: the history of ``value`` before the function ran.
        entry_version: its version counter then.
        entry_storage: its storage then.
        entry_outer_storage: the storage of the wrapper around it then.
        storages: its storages then, kept alive so that no other one gets the same identity.
    """

    index: int
    original: Any
    value: Any
    leaf: torch.Tensor | None = None
    is_leaf: bool = True
    requires_grad: bool = False
    entry_grad_fn: Any = field(default=None, repr=False)
    entry_version: int = 0
    entry_storage: int = 0
    entry_outer_storage: int = 0
    storages: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def is_tensor(self) -> bool:
        """Whether the input is a tensor."""
        return isinstance(self.value, torch.Tensor)


class _Enter(torch.autograd.Function):
    """See Note [Inputs enter through an autograd identity]."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, fresh: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # where autograd has no gradient there is none, and not zeros
        return fresh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grad, None


def autograd_identity(leaf: torch.Tensor, fresh: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What ``fresh`` makes, with ``leaf`` as its history; see Note [Inputs enter through an autograd identity]."""
    value: torch.Tensor = _Enter.apply(leaf, fresh)
    return value


def is_autograd_identity(function: Any) -> bool:
    """Whether a node of autograd's graph is one through which an input enters the function."""
    return getattr(function, "_forward_cls", None) is _Enter


def function_inputs(plain: Sequence[Any], callers: Sequence[Any]) -> list[FunctionInput]:
    """Wrap flat arguments for a run in the active functional layer.

    Args:
        plain: the arguments as the graph takes them: fake tensors outside of autograd, SymInts, other values.
        callers: the arguments as the caller passed them, for ``requires_grad`` and ``is_leaf``.
    """
    with compat.unwatched():
        return [function_input(i, p, c) for i, (p, c) in enumerate(zip(plain, callers, strict=True))]


def reentered_inputs(values: Sequence[Any], infos: Sequence[InputInfo]) -> list[FunctionInput]:
    """Functional tensors of a run in progress as the inputs of a function that it calls.

    What the inner function does to its inputs in place does not reach ``values``; gradients do.

    Args:
        values: functional tensors and other values, as an outer captured function got them.
        infos: records of the inner function's inputs, for ``is_leaf``.
    """
    return [_reentered(info, value) for info, value in zip(infos, values, strict=True)]


def _reentered(info: InputInfo, outer: Any) -> FunctionInput:
    if not isinstance(outer, torch.Tensor):
        return FunctionInput(info.index, outer, outer)
    plain = from_functional(outer)
    differentiable = bool(outer.requires_grad)
    with torch.enable_grad():
        value = autograd_identity(outer, lambda: to_functional(plain)) if differentiable else to_functional(plain)
    leaf = outer if differentiable else None
    return note_entry(FunctionInput(info.index, plain, value, leaf, info.is_leaf, differentiable))


def function_input(index: int, plain: Any, caller: Any) -> FunctionInput:
    """One of :func:`function_inputs`."""
    if not isinstance(plain, torch.Tensor):
        return FunctionInput(index, plain, plain)
    if plain.layout is not torch.strided:
        raise Unsupported(
            f"input {index} has layout {plain.layout}",
            "only strided tensors can be captured",
            "Convert it with .to_dense() before the compiled region",
        )
    plain = with_bits_of(caller, plain)
    value = to_functional(plain)
    leaf = None
    if caller.requires_grad:
        leaf = value.requires_grad_(True)
        with torch.enable_grad():
            value = autograd_identity(leaf, lambda: to_functional(plain))
    return note_entry(FunctionInput(index, plain, value, leaf, bool(caller.is_leaf), bool(caller.requires_grad)))


def with_bits_of(caller: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """``plain``, an argument as the graph takes it, with the bits of the caller's tensor; see Note [Lazy bits]."""
    if lazy_bits(caller) == lazy_bits(plain):
        return plain
    with below_functional_layer(), torch.no_grad():
        return with_lazy_bits(plain, *lazy_bits(caller))


def note_entry(entered: FunctionInput) -> FunctionInput:
    """``entered`` with the state of its value noted."""
    value = entered.value
    entered.entry_grad_fn, entered.entry_version = value.grad_fn, value._version
    entered.entry_storage = compat.storage_identity(value)
    entered.entry_outer_storage = compat.outer_storage_identity(value)
    entered.storages = (compat.inner_wrapper(value).untyped_storage(), value.untyped_storage())
    return entered


def overlapping_groups(inputs: Sequence[FunctionInput], mutated: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of inputs of one storage in which a mutated input may overlap another one."""
    by_storage: dict[int, list[FunctionInput]] = {}
    for entered in inputs:
        if entered.is_tensor:
            by_storage.setdefault(entered.original.untyped_storage()._cdata, []).append(entered)
    written = set(mutated)
    found = []
    for members in by_storage.values():
        names = {
            name
            for a in members
            for b in members
            if a.index in written and a is not b and not definitely_disjoint(a.original, b.original)
            for name in (a.index, b.index)
        }
        if names:
            found.append(tuple(sorted(names)))
    return tuple(found)
