"""Version counters, by which autograd notices writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .._torch_compat import advance_version, move_versions
from ..runtime import bump_versions, set_versions, versions_of
from ..source import Source, tuple_text
from .operation import Operation, Value, Values

__all__ = ["BumpVersion", "BumpVersions", "ReadVersion", "SetVersion"]


@dataclass(frozen=True, slots=True)
class BumpVersion(Operation):
    """Autograd has to know of ``times`` writes to ``value`` beside those of the epilogue."""

    functions: ClassVar = {"_advance_version": advance_version}

    value: Value
    times: int = 1

    @property
    def reads(self) -> tuple[Value, ...]:
        """The tensor."""
        return (self.value,)

    def emit(self, source: Source, indent: int) -> None:
        """One call."""
        source.add(f"_advance_version({self.value}, {self.times})", indent)

    def run(self, values: Values) -> None:
        """Move it."""
        advance_version(values[self.value], self.times)

    def __str__(self) -> str:
        return f"increment version of {self.value}" + (f" by {self.times}" if self.times > 1 else "")


@dataclass(frozen=True, slots=True)
class BumpVersions(Operation):
    """Autograd has to know of ``times`` writes to the memory of ``values``, which may share version counters; it knows
    of them already by the counter of ``moved``."""

    functions: ClassVar = {"_bump_versions": bump_versions}

    values: tuple[Value, ...]
    times: int
    moved: Value | None = None

    @property
    def reads(self) -> tuple[Value, ...]:
        """The tensors."""
        return self.values if self.moved is None else (*self.values, self.moved)

    def emit(self, source: Source, indent: int) -> None:
        """One call."""
        moved = "" if self.moved is None else f", {self.moved}"
        source.add(f"_bump_versions({tuple_text(self.values)}, {self.times}{moved})", indent)

    def run(self, values: Values) -> None:
        """Move each counter once."""
        moved = None if self.moved is None else values[self.moved]
        bump_versions([values[name] for name in self.values], self.times, moved)

    def __str__(self) -> str:
        which = "" if self.moved is None else f" but for that of {self.moved}"
        times = f" by {self.times}" if self.times > 1 else ""
        return f"increment versions of {', '.join(self.values)}{which}{times}"


@dataclass(frozen=True, slots=True)
class ReadVersion(Operation):
    """``result`` is the version counter of ``value`` before the call; ``None`` for an inference tensor."""

    functions: ClassVar = {"_versions_of": versions_of}

    result: Value
    value: Value

    @property
    def reads(self) -> tuple[Value, ...]:
        """The tensor."""
        return (self.value,)

    @property
    def writes(self) -> tuple[Value, ...]:
        """The number."""
        return (self.result,)

    @classmethod
    def emit_all(cls, group: Sequence[Any], source: Source, indent: int) -> None:
        """One call for all (an optimizer has hundreds), into one list that is taken apart only where it has to be."""
        if source.counts_writes:
            return
        values, results = tuple_text([read.value for read in group]), tuple_text([read.result for read in group])
        source.versions[results] = f"versions{len(source.versions)}"
        source.add(f"{source.versions[results]} = _versions_of({values})", indent)

    def run(self, values: Values) -> None:
        """Read it."""
        [values[self.result]] = versions_of([values[self.value]])

    def __str__(self) -> str:
        return f"{self.result} = version of {self.value}"


@dataclass(frozen=True, slots=True)
class SetVersion(Operation):
    """The graph itself wrote to ``value``, whose version counter is to be ``steps`` beyond ``before``."""

    functions: ClassVar = {"_move_versions": move_versions, "_set_versions": set_versions}

    value: Value
    before: Value
    steps: int

    @property
    def reads(self) -> tuple[Value, ...]:
        """The tensor and its counter before the call."""
        return (self.value, self.before)

    @classmethod
    def emit_all(cls, group: Sequence[Any], source: Source, indent: int) -> None:
        """One call for all; the list of counters is taken apart where other ones were read together. Where compiled
        code moves no counters itself, they are moved on, one step a call."""
        if source.counts_writes:
            for step in range(max(one.steps for one in group)):
                moved = [one.value for one in group if one.steps > step]
                source.add(f"_move_versions({tuple_text(moved)})", indent)
            return
        values, before = tuple_text([one.value for one in group]), tuple_text([one.before for one in group])
        if before not in source.versions:
            for results, name in source.versions.items():
                source.add(f"{results} = {name}", indent)
        steps = tuple(one.steps for one in group)
        source.add(f"_set_versions({values}, {source.versions.get(before, before)}, {steps})", indent)

    def run(self, values: Values) -> None:
        """Set it."""
        set_versions([values[self.value]], [values[self.before]], [self.steps])

    def __str__(self) -> str:
        return f"version of {self.value} = {self.before} + {self.steps}"
