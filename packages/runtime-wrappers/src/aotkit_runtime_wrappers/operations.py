"""The operations of a wrapper plan: small frozen records over named values.

Note [A plan is a small register program]
    Values have names: ``in3`` is the caller's argument 3, ``base0`` a synthetic base, ``fw2`` forward
    output 2 of the compiled graph, ``out1`` the caller's output 1, and symbols keep their own names. Each
    operation reads and writes such names, so a plan prints as a program, :mod:`.emit` turns each operation
    into a line or two of Python with the same names as local variables, and :mod:`.interpret` runs the
    operations one by one over a dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from .contract import Dim, SubclassBoundary, TensorMeta, ViewSpec
from .errors import PlanError

__all__ = [
    "AnnounceWrites",
    "BindSymbol",
    "BuildBase",
    "BumpVersion",
    "CheckAliases",
    "CheckDuplicate",
    "CheckPlace",
    "CheckStrides",
    "CheckValue",
    "CopyBack",
    "MarkDynamic",
    "NoteVersion",
    "Operation",
    "Regenerate",
    "Resize",
    "ResizeStorage",
    "Restride",
    "SetGradMode",
    "SetLazyBits",
    "SetRequiresGrad",
    "SetStorage",
    "SetVersion",
    "decode",
    "encode",
]

Value = str
"""Name of a value; see Note [A plan is a small register program]."""

CopyMode = Literal["autograd", "no_grad", "hidden"]
ViewMethod = Literal["as_strided", "view", "permute", "expand"]


@dataclass(frozen=True, slots=True)
class CheckDuplicate:
    """``value`` was the same object as ``first`` while tracing, so it has to be now."""

    value: Value
    first: Value

    def __str__(self) -> str:
        return f"check {self.value} is {self.first}"


@dataclass(frozen=True, slots=True)
class CheckPlace:
    """``value`` begins at ``offset`` of a storage of ``nbytes`` or more: the graph counts from the storage's start."""

    value: Value
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"check {self.value} begins at {self.offset} of {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class CheckAliases:
    """No tensor of ``mutated`` may share memory with one of ``others``, nor, if ``among``, with another of its own."""

    mutated: tuple[Value, ...]
    others: tuple[Value, ...]
    among: bool = True

    def __str__(self) -> str:
        against = [*self.others, *(["each other"] if self.among else [])]
        return f"check no overlap of {', '.join(self.mutated)} with {', '.join(against)}"


@dataclass(frozen=True, slots=True)
class CheckValue:
    """Debug mode: ``value`` agrees with ``meta``. ``what`` names it in the error. Strides are compared on demand."""

    value: Value
    what: str
    meta: TensorMeta
    check_strides: bool = True
    check_requires_grad: bool = False

    def __str__(self) -> str:
        return f"check {self.value} against {self.meta}"


@dataclass(frozen=True, slots=True)
class BindSymbol:
    """``symbol`` is a SymInt input or a size, stride or the offset of a tensor input."""

    symbol: Value
    value: Value
    source: str
    dim: int | None = None

    @property
    def of_output(self) -> bool:
        """Whether the value is a forward output, so that it can be read only after the call."""
        return self.value.startswith("fw")

    def __str__(self) -> str:
        dim = "" if self.dim is None else self.dim
        return f"{self.symbol} = {self.value}" + ("" if self.source == "int" else f".{self.source}({dim})")


@dataclass(frozen=True, slots=True)
class BuildBase:
    """``base`` covers the storage that ``members`` share: their common ``_base``, or (``flat``) a tensor over it.

    ``views`` say, per member, which part of the base it was when the graph was captured, over ``symbols``; checked at
    each call.
    """

    base: Value
    members: tuple[Value, ...]
    views: tuple[ViewSpec, ...]
    flat: bool = False
    symbols: tuple[Value, ...] = ()

    def __str__(self) -> str:
        return f"{self.base} = base of {', '.join(self.members)}"


@dataclass(frozen=True, slots=True)
class CheckStrides:
    """``value``, computed by the compiled graph, has the strides that views of it are going to be taken by."""

    value: Value
    strides: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"check {self.value} has strides ({', '.join(map(str, self.strides))})"


@dataclass(frozen=True, slots=True)
class Restride:
    """Metadata mutation: the caller's tensor takes the sizes and strides of ``view``, in place."""

    value: Value
    view: ViewSpec
    no_grad: bool = False

    def __str__(self) -> str:
        suffix = " under no_grad" if self.no_grad else ""
        return f"{self.value}.as_strided_({_geometry(self.view)}){suffix}"


@dataclass(frozen=True, slots=True)
class SetStorage:
    """The caller's tensor looks at the storage of ``source`` from now on, as ``view`` of it says (default: all of it).

    Its version counter stays.
    """

    value: Value
    source: Value
    view: ViewSpec | None = None

    def __str__(self) -> str:
        shown = "" if self.view is None else f".as_strided({_geometry(self.view)})"
        return f"{self.value}.data = {self.source}{shown}"


@dataclass(frozen=True, slots=True)
class Resize:
    """``resize_`` of the caller's tensor to ``sizes``."""

    value: Value
    sizes: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.value}.resize_({', '.join(map(str, self.sizes))})"


@dataclass(frozen=True, slots=True)
class ResizeStorage:
    """The storage of the caller's tensor gets another size."""

    value: Value
    num_bytes: Dim

    def __str__(self) -> str:
        return f"{self.value}.untyped_storage().resize_({self.num_bytes})"


@dataclass(frozen=True, slots=True)
class CopyBack:
    """Data mutation: ``source`` is the new value of the caller's tensor ``value``.

    ``autograd``: recorded as in eager. ``no_grad``: the version counter moves but no history is recorded.
    ``hidden``: through ``.data``, so that neither happens.
    """

    value: Value
    source: Value
    mode: CopyMode = "autograd"

    def __str__(self) -> str:
        target = f"{self.value}.data" if self.mode == "hidden" else self.value
        return f"{target}.copy_({self.source})" + (" under no_grad" if self.mode == "no_grad" else "")


@dataclass(frozen=True, slots=True)
class BumpVersion:
    """Autograd has to know of ``times`` writes to ``value`` beside those of the epilogue."""

    value: Value
    times: int = 1

    def __str__(self) -> str:
        return f"increment version of {self.value}" + (f" by {self.times}" if self.times > 1 else "")


@dataclass(frozen=True, slots=True)
class NoteVersion:
    """``result`` is the version counter of ``value`` before the call; ``None`` for an inference tensor."""

    result: Value
    value: Value

    def __str__(self) -> str:
        return f"{self.result} = version of {self.value}"


@dataclass(frozen=True, slots=True)
class SetVersion:
    """The graph itself wrote to ``value``, whose version counter is to be ``steps`` beyond ``before``."""

    value: Value
    before: Value
    steps: int

    def __str__(self) -> str:
        return f"version of {self.value} = {self.before} + {self.steps}"


@dataclass(frozen=True, slots=True)
class AnnounceWrites:
    """Autograd has to know of ``times`` writes to the memory of ``values``, which may share version counters."""

    values: tuple[Value, ...]
    times: int

    def __str__(self) -> str:
        return f"increment versions of {', '.join(self.values)}" + (f" by {self.times}" if self.times > 1 else "")


@dataclass(frozen=True, slots=True)
class Regenerate:
    """``result`` is a view of ``base`` as ``view`` says, made by ``method``.

    ``permutation`` belongs to ``permute``. ``detach``: the result takes no part in autograd though the base
    does. ``set_requires_grad``: the other way round. If ``view.under_no_grad``, it is taken with grad mode off.
    ``history``: the memory is that of the view, the gradient that of this value. ``lazy``: the view or its base is
    lazily conjugated or negated.
    """

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

    def __str__(self) -> str:
        base = f"{self.base}.detach()" if self.detach else self.base
        if self.base_dtype != self.view.dtype:
            base += f" as {self.view.dtype}"
        sizes = str(self.view.sizes)
        shown = {"view": sizes, "expand": sizes, "permute": str(self.permutation)}.get(
            self.method, _geometry(self.view)
        )
        return f"{self.result} = {base}.{self.method}({shown})" + _suffix(self)


@dataclass(frozen=True, slots=True)
class SetLazyBits:
    """``value``, a result of the compiled graph, becomes the view of itself that has these bits."""

    value: Value
    conj: bool
    neg: bool

    def __str__(self) -> str:
        return f"{self.value} = {self.value}{_bits(self)}"


@dataclass(frozen=True, slots=True)
class SetRequiresGrad:
    """``value`` becomes a leaf of autograd that requires grad, or leaves autograd's graph (``detach_``)."""

    value: Value
    required: bool

    def __str__(self) -> str:
        return f"{self.value}.{'requires_grad_' if self.required else 'detach_'}()"


@dataclass(frozen=True, slots=True)
class MarkDynamic:
    """Tell the frontend which dimensions of an output vary, as it was told about the inputs."""

    value: Value
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return f"mark dims {self.dims} of {self.value} dynamic"


@dataclass(frozen=True, slots=True)
class SetGradMode:
    """The traced function leaves grad mode like this."""

    enabled: bool

    def __str__(self) -> str:
        return f"grad mode = {self.enabled}"


Operation = (
    CheckDuplicate
    | CheckPlace
    | CheckAliases
    | CheckValue
    | BindSymbol
    | BuildBase
    | CheckStrides
    | Restride
    | SetStorage
    | Resize
    | ResizeStorage
    | CopyBack
    | BumpVersion
    | NoteVersion
    | SetVersion
    | AnnounceWrites
    | Regenerate
    | SetLazyBits
    | MarkDynamic
    | SetRequiresGrad
    | SetGradMode
)

_OPERATIONS: tuple[type[Any], ...] = Operation.__args__


def _bits(record: SetLazyBits | ViewSpec) -> str:
    return (", conjugated" if record.conj else "") + (", negated" if record.neg else "")


def _suffix(operation: Regenerate) -> str:
    grad = _bits(operation.view) + (", detached" if operation.view.detached else "")
    grad += ", requires grad" if operation.set_requires_grad else ""
    grad += f", history of {operation.history}" if operation.history else ""
    return grad + (" under no_grad" if operation.view.under_no_grad else "")


def _geometry(view: ViewSpec) -> str:
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


def decode(raw: Any, extra: Mapping[str, type[Any]] | None = None) -> Any:
    """The inverse of :func:`encode`; ``extra`` are record types beside the operations."""
    known = {cls.__name__: cls for cls in (*_OPERATIONS, ViewSpec, TensorMeta)} | dict(extra or {})
    return _decode(raw, known)


def _decode(raw: Any, known: Mapping[str, type[Any]]) -> Any:
    if isinstance(raw, list):
        return tuple(_decode(item, known) for item in raw)
    if not isinstance(raw, dict):
        return raw
    name = raw.get("record")
    if name == "SubclassBoundary":
        return SubclassBoundary.from_raw(raw["raw"])
    if not isinstance(name, str) or name not in known:
        raise PlanError(f"a stored wrapper plan names the record {name!r}, which this release does not know")
    values = {key: _decode(value, known) for key, value in raw.items() if key != "record"}
    try:
        return known[name](**values)
    except TypeError as error:
        raise PlanError(f"a stored {name} does not have the fields of this release: {error}") from error


def dims_read(operation: Operation) -> tuple[Dim, ...]:
    """Dimensions whose symbols have to be bound before ``operation`` runs."""
    match operation:
        case Restride(view=view) | Regenerate(view=view):
            return (*view.sizes, *view.strides, view.offset_delta)
        case SetStorage(view=view):
            return () if view is None else (*view.sizes, *view.strides, view.offset_delta)
        case Resize(sizes=sizes):
            return sizes
        case ResizeStorage(num_bytes=num_bytes):
            return (num_bytes,)
        case CheckStrides(strides=strides):
            return strides
        case CheckValue(meta=meta):
            return (*meta.sizes, *(meta.strides if operation.check_strides else ()))
    return ()
