"""The loop IR and its tools."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ops.dtypes import DType
    from .arguments import Arg, BufferRef, Literal, Origin, SymInput
    from .instructions import CheckedIndex, Compute, Const, Index, Instr, Load, Reduce, Store
    from .nodes import (
        CONTRACTIONS,
        Alias,
        Buffer,
        BufferKind,
        Contraction,
        ExternCall,
        LoopNest,
        Operand,
        Precision,
        Program,
        Range,
        Stage,
        Step,
    )

__all__ = [
    "CONTRACTIONS",
    "Alias",
    "Arg",
    "Buffer",
    "BufferKind",
    "BufferRef",
    "CheckedIndex",
    "Compute",
    "Const",
    "Contraction",
    "DType",
    "ExternCall",
    "Index",
    "Instr",
    "Literal",
    "Load",
    "LoopNest",
    "Operand",
    "Origin",
    "Precision",
    "Program",
    "Range",
    "Reduce",
    "Stage",
    "Step",
    "Store",
    "SymInput",
]

# Where names are defined, if not in nodes. A name is imported when it is asked for: a process that only loads what was
# compiled needs few of them.
_HOMES = {
    "DType": "..ops.dtypes",
    **dict.fromkeys(("Arg", "BufferRef", "Literal", "Origin", "SymInput"), ".arguments"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, ".nodes"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
