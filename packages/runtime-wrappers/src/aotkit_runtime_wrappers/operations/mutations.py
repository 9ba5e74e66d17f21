"""What the function did to its arguments, done to the caller's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..contract import Dim, ViewSpec
from ..dims import evaluate, evaluate_all, render_tuple
from ..source import Source, offset_text
from .operation import Operation, Value, Values, geometry

__all__ = ["CopyBack", "SetRequiresGrad", "SetStrides"]

CopyMode = Literal["autograd", "no_grad", "hidden"]


@dataclass(frozen=True, slots=True)
class SetStrides(Operation):
    """Metadata mutation: the caller's tensor takes the sizes and strides of ``view``, in place."""

    value: Value
    view: ViewSpec
    no_grad: bool = False

    @property
    def reads(self) -> tuple[Value, ...]:
        """The caller's tensor."""
        return (self.value,)

    @property
    def dims_read(self) -> tuple[Dim, ...]:
        """Those of the view."""
        return (*self.view.sizes, *self.view.strides, self.view.offset_delta)

    @property
    def needs_no_grad(self) -> bool:
        """As the function did it."""
        return self.no_grad

    def emit(self, source: Source, indent: int) -> None:
        """``as_strided_``."""
        sizes, strides = render_tuple(self.view.sizes), render_tuple(self.view.strides)
        offset = offset_text(self.value, self.view.offset_delta)
        source.add(f"{self.value}.as_strided_({sizes}, {strides}, {offset})", indent)

    def run(self, values: Values) -> None:
        """``as_strided_``."""
        target, view = values[self.value], self.view
        offset = target.storage_offset() + evaluate(view.offset_delta, values)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
            target.as_strided_(evaluate_all(view.sizes, values), evaluate_all(view.strides, values), offset)

    def __str__(self) -> str:
        suffix = " under no_grad" if self.no_grad else ""
        return f"{self.value}.as_strided_({geometry(self.view)}){suffix}"


@dataclass(frozen=True, slots=True)
class CopyBack(Operation):
    """Data mutation: ``source`` is the new value of the caller's tensor ``value``.

    ``autograd``: recorded as in eager. ``no_grad``: the version counter moves but no history is recorded.
    ``hidden``: through ``.data``, so that neither happens.
    """

    value: Value
    source: Value
    mode: CopyMode = "autograd"

    @property
    def reads(self) -> tuple[Value, ...]:
        """The caller's tensor and its new value."""
        return (self.value, self.source)

    @property
    def needs_no_grad(self) -> bool:
        """As the function did it."""
        return self.mode == "no_grad"

    def emit(self, source: Source, indent: int) -> None:
        """``copy_``."""
        source.add(f"{self.value}{'.data' if self.mode == 'hidden' else ''}.copy_({self.source})", indent)

    def run(self, values: Values) -> None:
        """``copy_``."""
        target = values[self.value].data if self.mode == "hidden" else values[self.value]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.mode != "no_grad"):
            target.copy_(values[self.source])

    def __str__(self) -> str:
        target = f"{self.value}.data" if self.mode == "hidden" else self.value
        return f"{target}.copy_({self.source})" + (" under no_grad" if self.mode == "no_grad" else "")


@dataclass(frozen=True, slots=True)
class SetRequiresGrad(Operation):
    """``value`` becomes a leaf of autograd that requires grad, or leaves autograd's graph (``detach_``)."""

    value: Value
    required: bool

    @property
    def reads(self) -> tuple[Value, ...]:
        """The tensor."""
        return (self.value,)

    def emit(self, source: Source, indent: int) -> None:
        """The same method."""
        source.add(str(self), indent)

    def run(self, values: Values) -> None:
        """The same method."""
        values[self.value].requires_grad_() if self.required else values[self.value].detach_()

    def __str__(self) -> str:
        return f"{self.value}.{'requires_grad_' if self.required else 'detach_'}()"
