"""Arguments that are tensor subclasses: taken apart before a run, put together inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import Unsupported
from ..inputs import FunctionInput, autograd_identity, function_input, note_entry, with_bits_of
from ..records import SymbolBinding
from ..symbols import bind_symbols
from ..wrap import to_functional
from .meta import Opaque, SubclassMeta, describe, is_subclass, rebuild, tensors_inside

__all__ = ["SubclassArguments", "SubclassInput", "check_layer", "read_size", "subclass_arguments"]


@dataclass(slots=True)
class SubclassInput(FunctionInput):
    """An argument that is a tensor subclass, while it is captured. ``parts`` are the tensors inside it, in order."""

    subclass: SubclassMeta | None = None
    parts: list[FunctionInput] = field(default_factory=list)


@dataclass(slots=True)
class SubclassArguments:
    """Flat arguments some of which are tensor subclasses, and the dense values that a graph takes instead.

    Attributes:
        plain: the arguments, fake and outside of autograd.
        subclasses: of each argument, ``None`` for what is no subclass.
        dense: what the graph takes: the tensors inside the arguments, in order, then ``sizes``.
        sizes: where the symbols that only sizes of a wrapper know are read.
    """

    plain: Sequence[Any]
    subclasses: tuple[SubclassMeta | None, ...]
    dense: list[Any]
    sizes: tuple[SymbolBinding, ...]

    def enter(self, placeholders: Sequence[Any], callers: Sequence[Any]) -> list[FunctionInput]:
        """Like :func:`.function_inputs`, over placeholders of ``dense``."""
        check_layer()
        position, inputs = 0, []
        for index, (plain, caller, subclass) in enumerate(zip(self.plain, callers, self.subclasses, strict=True)):
            count = 1 if subclass is None else len(subclass.leaves)
            here = placeholders[position : position + count]
            if subclass is None:
                inputs.append(function_input(index, here[0], caller))
            else:
                inputs.append(_subclass_input(index, plain, here, caller, subclass))
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
    subclasses = [_subclass(i, value) if is_subclass(value) else None for i, value in enumerate(plain)]
    dense: list[Any] = []
    for value, subclass in zip(plain, subclasses, strict=True):
        dense += [value] if subclass is None else tensors_inside(value)
    known = {binding.name for binding in bind_symbols(dense)}
    wrappers = [value if subclass is not None else None for value, subclass in zip(plain, subclasses, strict=True)]
    sizes = tuple(b for b in bind_symbols(wrappers) if b.name not in known)
    values = [read_size(plain[b.input_index], b) for b in sizes]
    return SubclassArguments(plain, tuple(subclasses), [*dense, *values], sizes)


def _subclass(index: int, value: Any) -> SubclassMeta:
    return describe(value, f"input {index}", opaque=lambda _, path: Opaque(index, path))


def read_size(value: torch.Tensor, binding: SymbolBinding) -> Any:
    """The size, stride or offset of ``value`` that ``binding`` names."""
    read = getattr(value, binding.source)
    return read() if binding.dim is None else read(binding.dim)


def _subclass_input(
    index: int, plain: Any, leaves: Sequence[Any], caller: Any, subclass: SubclassMeta
) -> SubclassInput:
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
        subclass=subclass,
        parts=parts,
    )
