"""Whether arguments and results are what the graph was captured for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..checks import check_value
from ..contract import Dim, TensorMeta
from ..dims import evaluate_all, render_tuple
from ..overlap import AliasCheck, PlacedAliasCheck, refuse_new_aliases, refuse_place
from ..runtime import check_strides, wrong_duplicate
from ..source import Source, tuple_text
from .operation import Operation, Value, Values

__all__ = ["CheckAliases", "CheckDuplicate", "CheckPlace", "CheckStrides", "CheckValue"]


@dataclass(frozen=True, slots=True)
class CheckDuplicate(Operation):
    """``value`` was the same object as ``first`` while tracing, so it has to be now."""

    functions: ClassVar = {"_wrong_duplicate": wrong_duplicate}
    checks_memory: ClassVar = True

    value: Value
    first: Value

    @property
    def reads(self) -> tuple[Value, ...]:
        """Both."""
        return (self.value, self.first)

    def emit(self, source: Source, indent: int) -> None:
        """A comparison in line."""
        source.add(f"if {self.value} is not {self.first}:", indent)
        source.add(f'_wrong_duplicate("{self.value}", "{self.first}")', indent + 1)

    def run(self, values: Values) -> None:
        """Compare."""
        if values[self.value] is not values[self.first]:
            wrong_duplicate(self.value, self.first)

    def __str__(self) -> str:
        return f"check {self.value} is {self.first}"


@dataclass(frozen=True, slots=True)
class CheckPlace(Operation):
    """``value`` begins at ``offset`` of a storage of ``nbytes`` or more: the graph counts from the storage's start."""

    functions: ClassVar = {"_refuse_place": refuse_place}
    checks_memory: ClassVar = True

    value: Value
    offset: int
    nbytes: int

    @property
    def reads(self) -> tuple[Value, ...]:
        """The argument."""
        return (self.value,)

    def emit(self, source: Source, indent: int) -> None:
        """One call."""
        source.add(f'_refuse_place({self.value}, "{self.value}", {self.offset}, {self.nbytes})', indent)

    def run(self, values: Values) -> None:
        """Look."""
        refuse_place(values[self.value], self.value, self.offset, self.nbytes)

    def __str__(self) -> str:
        return f"check {self.value} begins at {self.offset} of {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class CheckAliases(Operation):
    """No tensor of ``mutated`` may share memory with one of ``others``, nor with another of its own.
    ``fixed``: their sizes and strides are the same in all calls."""

    functions: ClassVar = {"_refuse_new_aliases": refuse_new_aliases}
    checks_memory: ClassVar = True

    mutated: tuple[Value, ...]
    others: tuple[Value, ...]
    fixed: bool = False

    @property
    def reads(self) -> tuple[Value, ...]:
        """All of them."""
        return (*self.mutated, *self.others)

    def emit(self, source: Source, indent: int) -> None:
        """One call."""
        if self.fixed and source.placed:
            mutated, others = ([int(name[2:]) for name in names] for names in (self.mutated, self.others))
            check = source.own("_refuse_new_aliases", PlacedAliasCheck(mutated, others))
            source.add(f"{check}({source.placed})", indent)
            return
        names = f'"{" ".join(self.mutated)}", "{" ".join(self.others)}"'
        check = source.own("_refuse_new_aliases", AliasCheck()) if self.fixed else "_refuse_new_aliases"
        source.add(f"{check}({tuple_text(self.mutated)}, {tuple_text(self.others)}, {names})", indent)

    def run(self, values: Values) -> None:
        """Look."""
        mutated, others = ([values[name] for name in names] for names in (self.mutated, self.others))
        refuse_new_aliases(mutated, others, " ".join(self.mutated), " ".join(self.others))

    def __str__(self) -> str:
        against = [*self.others, "each other"]
        return f"check no overlap of {', '.join(self.mutated)} with {', '.join(against)}"


@dataclass(frozen=True, slots=True)
class CheckValue(Operation):
    """Debug mode: ``value`` agrees with ``meta``. ``what`` names it in the error. Strides are compared on demand."""

    functions: ClassVar = {"_check_value": check_value}

    value: Value
    what: str
    meta: TensorMeta
    check_strides: bool = True
    check_requires_grad: bool = False

    @property
    def reads(self) -> tuple[Value, ...]:
        """The value."""
        return (self.value,)

    @property
    def dims_read(self) -> tuple[Dim, ...]:
        """What is compared."""
        return (*self.meta.sizes, *(self.meta.strides if self.check_strides else ()))

    def emit(self, source: Source, indent: int) -> None:
        """One call."""
        meta = self.meta
        strides = render_tuple(meta.strides) if self.check_strides else "None"
        requires_grad = meta.requires_grad if self.check_requires_grad else None
        known = f"{render_tuple(meta.sizes)}, {strides}, {meta.dtype!r}, {meta.device!r}, {requires_grad}"
        source.add(f"_check_value({self.value}, {self.what!r}, {known})", indent)

    def run(self, values: Values) -> None:
        """Compare."""
        meta = self.meta
        sizes = evaluate_all(meta.sizes, values)
        strides = evaluate_all(meta.strides, values) if self.check_strides else None
        requires_grad = meta.requires_grad if self.check_requires_grad else None
        check_value(values[self.value], self.what, sizes, strides, meta.dtype, meta.device, requires_grad)

    def __str__(self) -> str:
        return f"check {self.value} against {self.meta}"


@dataclass(frozen=True, slots=True)
class CheckStrides(Operation):
    """``value``, computed by the compiled graph, has the strides that views of it are going to be taken by."""

    functions: ClassVar = {"_check_strides": check_strides}

    value: Value
    strides: tuple[Dim, ...]

    @property
    def reads(self) -> tuple[Value, ...]:
        """The value."""
        return (self.value,)

    @property
    def dims_read(self) -> tuple[Dim, ...]:
        """The strides."""
        return self.strides

    def emit(self, source: Source, indent: int) -> None:
        """A comparison in line; a closer look only where they differ."""
        source.add(f"if {self.value}.stride() != {render_tuple(self.strides)}:", indent)
        source.add(f'_check_strides({self.value}, "{self.value}", {render_tuple(self.strides)})', indent + 1)

    def run(self, values: Values) -> None:
        """Compare."""
        check_strides(values[self.value], self.value, evaluate_all(self.strides, values))

    def __str__(self) -> str:
        return f"check {self.value} has strides ({', '.join(map(str, self.strides))})"
