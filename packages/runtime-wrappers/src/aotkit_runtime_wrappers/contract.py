"""The records of the contract with capture, under their own names, in one place."""

from __future__ import annotations

from aotkit_functionalize import GraphMetadata, lazy_bits, records, subclasses, symbols

Opaque = subclasses.Opaque
SubclassBoundary = subclasses.SubclassBoundary
SubclassMeta = subclasses.SubclassMeta
SubclassValue = subclasses.SubclassValue
SymbolicDim = subclasses.SymbolicDim
TensorSource = subclasses.TensorSource

CallContract = records.CallContract
Dim = records.Dim
EffectInfo = records.EffectInfo
InputInfo = records.InputInfo
InputKind = records.InputKind
MutationKind = records.MutationKind
OutputInfo = records.OutputInfo
OutputKind = records.OutputKind
StorageChange = records.StorageChange
SymbolBinding = records.SymbolBinding
TangentInfo = records.TangentInfo
TensorMeta = records.TensorMeta
ViewSpec = records.ViewSpec
bind_symbols = symbols.bind_symbols
dims = symbols.dims
bits_of = lazy_bits.lazy_bits
same_with_bits = lazy_bits.same_with_bits
with_lazy_bits = lazy_bits.with_lazy_bits
without_lazy_bits = lazy_bits.without_lazy_bits

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
