"""The records of the contract with capture, under their own names, in one place."""

from __future__ import annotations

from aotkit_functionalize import GraphMetadata, metadata, symbols

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

__all__ = [
    "Dim",
    "EffectInfo",
    "GraphMetadata",
    "InputInfo",
    "InputKind",
    "MutationKind",
    "OutputInfo",
    "OutputKind",
    "StorageChange",
    "SymbolBinding",
    "TangentInfo",
    "TensorMeta",
    "ViewSpec",
    "bind_symbols",
    "dims",
]
