"""The records of the contract with capture, under their own names, in one place."""

from __future__ import annotations

from aotkit_functionalize import GraphMetadata, SubclassBoundary, SymbolicDim, lazy_bits, metadata, nests, symbols

Assembled = nests.Assembled
Nest = nests.Nest
Opaque = nests.Opaque
Part = nests.Part

Dim = metadata.Dim
EffectInfo = metadata.EffectInfo
InputInfo = metadata.InputInfo
InputKind = metadata.InputKind
MutationKind = metadata.MutationKind
OutputInfo = metadata.OutputInfo
OutputKind = metadata.OutputKind
StorageChange = metadata.StorageChange
SymbolBinding = metadata.SymbolBinding
TangentInfo = metadata.TangentInfo
TensorMeta = metadata.TensorMeta
ViewSpec = metadata.ViewSpec
bind_symbols = symbols.bind_symbols
dims = symbols.dims
bits_of = lazy_bits.lazy_bits
same_with_bits = lazy_bits.same_with_bits
with_lazy_bits = lazy_bits.with_lazy_bits
without_lazy_bits = lazy_bits.without_lazy_bits

__all__ = [
    "Assembled",
    "Dim",
    "EffectInfo",
    "GraphMetadata",
    "InputInfo",
    "InputKind",
    "MutationKind",
    "Nest",
    "Opaque",
    "OutputInfo",
    "OutputKind",
    "Part",
    "StorageChange",
    "SubclassBoundary",
    "SymbolBinding",
    "SymbolicDim",
    "TangentInfo",
    "TensorMeta",
    "ViewSpec",
    "bind_symbols",
    "bits_of",
    "dims",
    "same_with_bits",
    "with_lazy_bits",
    "without_lazy_bits",
]
