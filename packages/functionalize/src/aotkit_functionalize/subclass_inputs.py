"""Arguments that are tensor subclasses: taken apart before a run, put together inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import Unsupported
from .inputs import FunctionInput, autograd_identity, function_input, note_entry, with_bits_of
from .metadata import SymbolBinding
from .nests import Nest, Opaque, describe, is_subclass, rebuild, tensors_inside
from .symbols import bind_symbols
from .wrap import to_functional

__all__ = ["SubclassArguments", "SubclassInput", "check_layer", "read_size", "subclass_arguments"]


@dataclass(slots=True)
class SubclassInput(FunctionInput):
    """An argument that is a tensor subclass, while it is captured. ``parts`` are the tensors inside it, in order."""

    nest: Nest | None = None
    parts: list[FunctionInput] = field(default_factory=list)


@dataclass(slots=True)
class SubclassArguments:
    """Flat arguments some of which are tensor subclasses, and the dense values that a graph takes instead.

    Attributes:
        plain: the arguments, fake and outside of autograd.
        nests: of each argument, ``None`` for what is no subclass.
        dense: what the graph takes: the tensors inside the arguments, in order, then ``sizes``.
        sizes: where the symbols that only sizes of a wrapper know are read.
    """

    plain: Sequence[Any]
    nests: tuple[Nest | None, ...]
    dense: list[Any]
    sizes: tuple[SymbolBinding, ...]

    def enter(self, placeholders: Sequence[Any], callers: Sequence[Any]) -> list[FunctionInput]:
        """Like :func:`.function_inputs`, over placeholders of ``dense``."""
        check_layer()
        position, inputs = 0, []
        for index, (plain, caller, nest) in enumerate(zip(self.plain, callers, self.nests, strict=True)):
            count = 1 if nest is None else len(nest.leaves)
            here = placeholders[position : position + count]
            if nest is None:
                inputs.append(function_input(index, here[0], caller))
            else:
                inputs.append(_subclass_input(index, plain, here, caller, nest))
            position += count
        return inputs


def check_layer() -> None:
    """Refuse subclasses where the dispatcher's layer is active."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is None:
        raise Unsupported(
            "a tensor subclass goes in or comes out, and the function is captured in the dispatcher's functional layer",
            "what the subclass does to the tensors inside it is not made functional there",
            "Capture with FunctionalLayer.MODE, and without set_ and resize_",
        )


def subclass_arguments(plain: Sequence[Any]) -> SubclassArguments | None:
    """Take fake arguments apart; ``None`` if none of them is a tensor subclass."""
    if not any(is_subclass(value) for value in plain):
        return None
    nests = [_nest(i, value) if is_subclass(value) else None for i, value in enumerate(plain)]
    dense: list[Any] = []
    for value, nest in zip(plain, nests, strict=True):
        dense += [value] if nest is None else tensors_inside(value)
    known = {binding.name for binding in bind_symbols(dense)}
    wrappers = [value if nest is not None else None for value, nest in zip(plain, nests, strict=True)]
    sizes = tuple(b for b in bind_symbols(wrappers) if b.name not in known)
    values = [read_size(plain[b.input_index], b) for b in sizes]
    return SubclassArguments(plain, tuple(nests), [*dense, *values], sizes)


def _nest(index: int, value: Any) -> Nest:
    return describe(value, f"input {index}", opaque=lambda _, path: Opaque(index, path))


def read_size(value: torch.Tensor, binding: SymbolBinding) -> Any:
    """The size, stride or offset of ``value`` that ``binding`` names."""
    read = getattr(value, binding.source)
    return read() if binding.dim is None else read(binding.dim)


def _subclass_input(index: int, plain: Any, leaves: Sequence[Any], caller: Any, nest: Nest) -> SubclassInput:
    leaves = [with_bits_of(theirs, leaf) for theirs, leaf in zip(tensors_inside(caller), leaves, strict=True)]

    def fresh() -> torch.Tensor:
        made: torch.Tensor = rebuild(plain, iter([to_functional(leaf) for leaf in leaves]))
        # A class may keep requires_grad in its context; what it puts together is a leaf then.
        return made.requires_grad_(False) if made.requires_grad else made

    value, leaf = fresh(), None
    if caller.requires_grad:
        leaf = value.requires_grad_(True)
        with torch.enable_grad():
            value = autograd_identity(leaf, fresh)
    inside = zip(leaves, tensors_inside(value), strict=True)
    parts = [note_entry(FunctionInput(-1, original, tensor)) for original, tensor in inside]
    return SubclassInput(
        index,
        plain,
        value,
        leaf,
        is_leaf=bool(caller.is_leaf),
        requires_grad=bool(caller.requires_grad),
        entry_grad_fn=value.grad_fn,
        entry_version=value._version,
        nest=nest,
        parts=parts,
    )
