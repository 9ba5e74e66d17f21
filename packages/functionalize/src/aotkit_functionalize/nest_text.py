"""The records of :mod:`.nests` as JSON values and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from .metadata import GraphMetadata, SymbolBinding, TensorMeta, ViewSpec
from .nest_context import decode_class, decode_context, encode_class, encode_context

__all__ = ["from_raw", "to_raw"]


def to_raw(record: Any) -> Any:
    """JSON values of one of the records, or of a tuple of them."""
    if isinstance(record, GraphMetadata):
        return {"record": "GraphMetadata", "raw": json.loads(record.to_json())}
    if isinstance(record, tuple):
        return [to_raw(item) for item in record]
    if not is_dataclass(record):
        return record
    raw: dict[str, Any] = {"record": type(record).__name__}
    values: Any = record
    if raw["record"] == "SubclassType":
        return {**raw, "cls": encode_class(values.cls), "context": encode_context(values.cls, values.context)}
    return raw | {f.name: to_raw(getattr(values, f.name)) for f in fields(record)}


def from_raw(raw: Any, own: Mapping[str, type[Any]]) -> Any:
    """The inverse of :func:`to_raw`; ``own`` are the record types of :mod:`.nests` by name."""
    if isinstance(raw, list):
        return tuple(from_raw(item, own) for item in raw)
    if not isinstance(raw, dict):
        return raw
    name = raw["record"]
    if name == "GraphMetadata":
        return GraphMetadata.from_json(json.dumps(raw["raw"]))
    if name == "SubclassType":
        cls = decode_class(raw["cls"])
        return own[name](cls, decode_context(cls, raw["context"]))
    known = {**own, **{cls.__name__: cls for cls in (TensorMeta, ViewSpec, SymbolBinding)}}
    if name not in known:
        raise ValueError(f"{name!r} is no record of a tensor subclass that this release knows")
    return known[name](**{key: from_raw(value, own) for key, value in raw.items() if key != "record"})
