"""Changes of the storage of an argument."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import Dim, ViewSpec
from ..dims import evaluate, evaluate_all, render, render_tuple
from ..source import Source, offset_text
from .operation import Operation, Value, Values, geometry

__all__ = ["Resize", "ResizeStorage", "SetStorage"]


@dataclass(frozen=True, slots=True)
class SetStorage(Operation):
    """The caller's tensor looks at the storage of ``source`` from now on, as ``view`` of it says (default: all of it).

    Its version counter stays.
    """

    value: Value
    source: Value
    view: ViewSpec | None = None

    @property
    def reads(self) -> tuple[Value, ...]:
        """The caller's tensor and the other one."""
        return (self.value, self.source)

    @property
    def dims_read(self) -> tuple[Dim, ...]:
        """Those of the view."""
        view = self.view
        return () if view is None else (*view.sizes, *view.strides, view.offset_delta)

    def emit(self, source: Source, indent: int) -> None:
        """An assignment to ``.data``."""
        stored, view = f"{self.source}.detach()", self.view
        if view is not None:
            offset = offset_text(self.source, view.offset_delta)
            stored += f".as_strided({render_tuple(view.sizes)}, {render_tuple(view.strides)}, {offset})"
        source.add(f"{self.value}.data = {stored}", indent)

    def run(self, values: Values) -> None:
        """Set ``.data``."""
        source, view = values[self.source].detach(), self.view
        if view is not None:
            offset = source.storage_offset() + evaluate(view.offset_delta, values)
            source = source.as_strided(evaluate_all(view.sizes, values), evaluate_all(view.strides, values), offset)
        values[self.value].data = source

    def __str__(self) -> str:
        shown = "" if self.view is None else f".as_strided({geometry(self.view)})"
        return f"{self.value}.data = {self.source}{shown}"


@dataclass(frozen=True, slots=True)
class Resize(Operation):
    """``resize_`` of the caller's tensor to ``sizes``."""

    value: Value
    sizes: tuple[Dim, ...]

    @property
    def reads(self) -> tuple[Value, ...]:
        """The caller's tensor."""
        return (self.value,)

    @property
    def dims_read(self) -> tuple[Dim, ...]:
        """The sizes."""
        return self.sizes

    def emit(self, source: Source, indent: int) -> None:
        """The same method."""
        source.add(f"{self.value}.resize_({render_tuple(self.sizes)})", indent)

    def run(self, values: Values) -> None:
        """The same method."""
        values[self.value].resize_(evaluate_all(self.sizes, values))

    def __str__(self) -> str:
        return f"{self.value}.resize_({', '.join(map(str, self.sizes))})"


@dataclass(frozen=True, slots=True)
class ResizeStorage(Operation):
    """The storage of the caller's tensor gets another size."""

    value: Value
    num_bytes: Dim

    @property
    def reads(self) -> tuple[Value, ...]:
        """The caller's tensor."""
        return (self.value,)

    @property
    def dims_read(self) -> tuple[Dim, ...]:
        """The size."""
        return (self.num_bytes,)

    def emit(self, source: Source, indent: int) -> None:
        """The same method."""
        source.add(f"{self.value}.untyped_storage().resize_({render(self.num_bytes)})", indent)

    def run(self, values: Values) -> None:
        """The same method."""
        values[self.value].untyped_storage().resize_(evaluate(self.num_bytes, values))

    def __str__(self) -> str:
        return f"{self.value}.untyped_storage().resize_({self.num_bytes})"
