"""The records of the contract with capture, imported in one place."""

from __future__ import annotations

from aotkit_functionalize.metadata import (
    Dim,
    EffectInfo,
    GraphMetadata,
    InputInfo,
    InputKind,
    MutationKind,
    OutputInfo,
    OutputKind,
    SymbolBinding,
    TangentInfo,
    TensorMeta,
    ViewSpec,
)

__all__ = [
    "Dim",
    "EffectInfo",
    "GraphMetadata",
    "InputInfo",
    "InputKind",
    "MutationKind",
    "OutputInfo",
    "OutputKind",
    "SymbolBinding",
    "TangentInfo",
    "TensorMeta",
    "ViewSpec",
]
