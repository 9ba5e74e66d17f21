"""Views that the caller gets, taken anew of what they are views of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ..contract import Dim, ViewSpec, with_lazy_bits
from ..dims import evaluate, evaluate_all, render, render_tuple
from ..runtime import mark_dynamic, replay_view, with_history
from ..source import Source, offset_text
from .operation import Operation, Value, Values, geometry

__all__ = ["MarkDynamic", "ReplayView", "SetLazyBits"]

ViewMethod = Literal["as_strided", "view", "permute", "expand"]


@dataclass(frozen=True, slots=True)
class ReplayView(Operation):
    """``result`` is a view of ``base`` as ``view`` says, made by ``method``.

    ``permutation`` belongs to ``permute``. ``detach``: the result takes no part in autograd though the base
    does. ``set_requires_grad``: the other way round. If ``view.under_no_grad``, it is taken with grad mode off.
    ``history``: the memory is that of the view, the gradient that of this value. ``lazy``: the view or its base is
    lazily conjugated or negated.
    """

    functions: ClassVar = {
        "_replay_view": replay_view,
        "_with_history": with_history,
        "_with_lazy_bits": with_lazy_bits,
    }

    result: Value
    base: Value
    view: ViewSpec
    base_dtype: str
    method: ViewMethod = "as_strided"
    permutation: tuple[int, ...] = ()
    detach: bool = False
    set_requires_grad: bool = False
    history: Value | None = None
    lazy: bool = False

    @property
    def reads(self) -> tuple[Value, ...]:
        """The base, and where the gradient goes."""
        return (self.base,) if self.history is None else (self.base, self.history)

    @property
    def writes(self) -> tuple[Value, ...]:
        """The view."""
        return (self.result,)

    @property
    def dims_read(self) -> tuple[Dim, ...]:
        """Those of the view."""
        return (*self.view.sizes, *self.view.strides, self.view.offset_delta)

    @property
    def needs_no_grad(self) -> bool:
        """As the function did it."""
        return self.view.under_no_grad

    def emit(self, source: Source, indent: int) -> None:
        """The method in line, where it is one."""
        view = self.view
        base = f"{self.base}.detach()" if self.detach and not view.detached else self.base
        sizes, strides = render_tuple(view.sizes), render_tuple(view.strides)
        if self.base_dtype != view.dtype:
            made = f"_replay_view({base}, {source.constant(view)}, {sizes}, {strides}, {render(view.offset_delta)})"
        elif self.method in ("view", "expand"):
            made = f"{base}.{self.method}({sizes})"
        elif self.method == "permute":
            made = f"{base}.permute({self.permutation})"
        else:
            made = f"{base}.as_strided({sizes}, {strides}, {offset_text(self.base, view.offset_delta)})"
        if self.lazy and self.base_dtype == view.dtype:
            made = f"_with_lazy_bits({made}, {view.conj}, {view.neg})"
        last = (".data" if view.own_version else ".detach()") if view.detached else ""
        source.add(f"{self.result} = {made}{last}", indent)
        if self.history is not None:
            source.add(f"{self.result} = _with_history({self.history}, {self.result})", indent)
        if self.set_requires_grad:
            source.add(f"{self.result}.requires_grad_(True)", indent)

    def run(self, values: Values) -> None:
        """Take it."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.view.under_no_grad):
            result, view = self._taken(values), self.view
            result = with_lazy_bits(result, view.conj, view.neg)
            if view.detached:
                result = result.data if view.own_version else result.detach()
            if self.history is not None:
                result = with_history(values[self.history], result)
            values[self.result] = result.requires_grad_(True) if self.set_requires_grad else result

    def _taken(self, values: Values) -> Any:
        base, view = values[self.base], self.view
        if self.detach and not view.detached:
            base = base.detach()
        sizes, strides = evaluate_all(view.sizes, values), evaluate_all(view.strides, values)
        delta = evaluate(view.offset_delta, values)
        if self.base_dtype != view.dtype:
            return replay_view(base, view, sizes, strides, delta)
        if self.method == "view":
            return base.view(sizes)
        if self.method == "expand":
            return base.expand(sizes)
        if self.method == "permute":
            return base.permute(self.permutation)
        return base.as_strided(sizes, strides, base.storage_offset() + delta)

    def __str__(self) -> str:
        base = f"{self.base}.detach()" if self.detach else self.base
        if self.base_dtype != self.view.dtype:
            base += f" as {self.view.dtype}"
        sizes = str(self.view.sizes)
        shown = {"view": sizes, "expand": sizes, "permute": str(self.permutation)}.get(self.method, geometry(self.view))
        grad = _bits(self.view) + (", detached" if self.view.detached else "")
        grad += ", requires grad" if self.set_requires_grad else ""
        grad += f", history of {self.history}" if self.history else ""
        grad += " under no_grad" if self.view.under_no_grad else ""
        return f"{self.result} = {base}.{self.method}({shown}){grad}"


@dataclass(frozen=True, slots=True)
class SetLazyBits(Operation):
    """``value``, a result of the compiled graph, becomes the view of itself that has these bits."""

    functions: ClassVar = {"_with_lazy_bits": with_lazy_bits}

    value: Value
    conj: bool
    neg: bool

    @property
    def reads(self) -> tuple[Value, ...]:
        """The result."""
        return (self.value,)

    @property
    def writes(self) -> tuple[Value, ...]:
        """The same name."""
        return (self.value,)

    def emit(self, source: Source, indent: int) -> None:
        """One call."""
        source.add(f"{self.value} = _with_lazy_bits({self.value}, {self.conj}, {self.neg})", indent)

    def run(self, values: Values) -> None:
        """Take the view."""
        values[self.value] = with_lazy_bits(values[self.value], self.conj, self.neg)

    def __str__(self) -> str:
        return f"{self.value} = {self.value}{_bits(self)}"


@dataclass(frozen=True, slots=True)
class MarkDynamic(Operation):
    """Tell Dynamo which dimensions of an output vary, as it was told about the inputs."""

    functions: ClassVar = {"_mark_dynamic": mark_dynamic}

    value: Value
    dims: tuple[int, ...]

    @property
    def reads(self) -> tuple[Value, ...]:
        """The output."""
        return (self.value,)

    def emit(self, source: Source, indent: int) -> None:
        """One call."""
        source.add(f"_mark_dynamic({self.value}, {self.dims})", indent)

    def run(self, values: Values) -> None:
        """Mark them."""
        mark_dynamic(values[self.value], self.dims)

    def __str__(self) -> str:
        return f"mark dims {self.dims} of {self.value} dynamic"


def _bits(record: SetLazyBits | ViewSpec) -> str:
    return (", conjugated" if record.conj else "") + (", negated" if record.neg else "")
