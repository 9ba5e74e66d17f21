"""The records of the contract with capture, in one place."""

from __future__ import annotations

from aotkit_functionalize import GraphMetadata
from aotkit_functionalize.lazy_bits import lazy_bits as bits_of
from aotkit_functionalize.lazy_bits import same_with_bits, with_lazy_bits, without_lazy_bits
from aotkit_functionalize.records import (
    CallContract,
    Dim,
    EffectInfo,
    InputInfo,
    InputKind,
    MutationKind,
    OutputInfo,
    OutputKind,
    StorageChange,
    SymbolBinding,
    TangentInfo,
    TensorMeta,
    ViewSpec,
)
from aotkit_functionalize.subclasses import (
    Opaque,
    SubclassBoundary,
    SubclassMeta,
    SubclassValue,
    SymbolicDim,
    TensorSource,
)
from aotkit_functionalize.symbols import bind_symbols, dims

__all__ = [
    "CallContract",
    "Dim",
    "EffectInfo",
    "GraphMetadata",
    "InputInfo",
    "InputKind",
    "MutationKind",
    "Opaque",
    "OutputInfo",
    "OutputKind",
    "StorageChange",
    "SubclassBoundary",
    "SubclassMeta",
    "SubclassValue",
    "SymbolBinding",
    "SymbolicDim",
    "TangentInfo",
    "TensorMeta",
    "TensorSource",
    "ViewSpec",
    "bind_symbols",
    "bits_of",
    "dims",
    "same_with_bits",
    "with_lazy_bits",
    "without_lazy_bits",
]
