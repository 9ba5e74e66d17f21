"""What every operation of a wrapper plan can do, and how it is written down.

Note [A plan is a small register program]
    Values have names: ``in3`` is the caller's argument 3, ``base0`` a synthetic base, ``fw2`` forward
    output 2 of the compiled graph, ``out1`` the caller's output 1, and symbols keep their own names. Each
    operation reads and writes such names, so a plan prints as a program, :mod:`.emit` lets each operation
    write a line or two of Python with the same names as local variables, and :mod:`.interpret` lets them
    run one by one over a dictionary. Everything about an operation stands in its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

from ..contract import Dim, SubclassBoundary, TensorMeta, ViewSpec
from ..errors import PlanError
from ..source import Source

__all__ = ["Operation", "Value", "Values", "decode_record", "encode", "geometry"]

Value = str
"""Name of a value; see Note [A plan is a small register program]."""

Values = MutableMapping[str, Any]
"""What the names stand for while a plan is interpreted."""


class Operation:
    """One step around the call of a compiled graph; its subclasses are frozen records.

    Attributes:
        functions: what the emitted code of such operations calls, by the global names that it has there.
        checks_memory: the plan relies on which arguments share memory, and this refuses a call where others do.
    """

    __slots__ = ()

    functions: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    checks_memory: ClassVar[bool] = False

    @property
    def reads(self) -> tuple[Value, ...]:
        """Names that have to stand for something before."""
        raise NotImplementedError

    @property
    def writes(self) -> tuple[Value, ...]:
        """Names that stand for something, or for something else, afterwards."""
        return ()

    @property
    def dims_read(self) -> tuple[Dim, ...]:
        """Sizes whose symbols have to be bound before."""
        return ()

    @property
    def needs_no_grad(self) -> bool:
        """Whether it runs with grad mode off."""
        return False

    def emit(self, source: Source, indent: int) -> None:
        """Write it as Python."""
        raise NotImplementedError

    @classmethod
    def emit_all(cls, group: Sequence[Any], source: Source, indent: int) -> None:
        """Write operations of this class that follow each other."""
        for operation in group:
            operation.emit(source, indent)

    def run(self, values: Values) -> None:
        """Do it."""
        raise NotImplementedError


def geometry(view: ViewSpec) -> str:
    """Sizes, strides and offset of a view, for people."""
    sizes = ", ".join(map(str, view.sizes))
    strides = ", ".join(map(str, view.strides))
    return f"sizes=({sizes}), strides=({strides}), offset+{view.offset_delta}"


def encode(record: Any) -> Any:
    """Plain JSON values of a record, a tuple of records, or a scalar."""
    if isinstance(record, SubclassBoundary):
        return {"record": "SubclassBoundary", "raw": record.to_raw()}
    if is_dataclass(record) and not isinstance(record, type):
        return {"record": type(record).__name__, **{f.name: encode(getattr(record, f.name)) for f in fields(record)}}
    if isinstance(record, tuple):
        return [encode(item) for item in record]
    if record is None or isinstance(record, bool | int | float | str):
        return record
    raise PlanError(f"{type(record).__name__} has no JSON form in a wrapper plan")


def decode_record(raw: Any, known: Mapping[str, type[Any]]) -> Any:
    """The inverse of :func:`encode`; ``known`` are the record types by name, beside those of the metadata."""
    if isinstance(raw, list):
        return tuple(decode_record(item, known) for item in raw)
    if not isinstance(raw, dict):
        return raw
    name = raw.get("record")
    if name == "SubclassBoundary":
        return SubclassBoundary.from_raw(raw["raw"])
    record = known.get(name, _RECORDS.get(name)) if isinstance(name, str) else None
    if record is None:
        raise PlanError(f"a stored wrapper plan names the record {name!r}, which this release does not know")
    values = {key: decode_record(value, known) for key, value in raw.items() if key != "record"}
    try:
        return record(**values)
    except TypeError as error:
        raise PlanError(f"a stored {name} does not have the fields of this release: {error}") from error


_RECORDS: dict[str, type[Any]] = {"ViewSpec": ViewSpec, "TensorMeta": TensorMeta}
