"""The operations of a wrapper plan: small frozen records over named values, one module per kind.

See Note [A plan is a small register program] in :mod:`.operation`. A new operation is one class in one of the modules
below, named in the module's ``__all__`` and here. A module is imported when a plan has one of its operations: most
plans have none, and a process that loads what was compiled before waits for each import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from .operation import Operation, Value

__all__ = ["OPERATIONS", "Operation", "Value", "functions_of"]

_MODULES = {
    "bases": ("BuildBase",),
    "checks": ("CheckAliases", "CheckDuplicate", "CheckPlace", "CheckStrides", "CheckValue"),
    "modes": ("SetGradMode",),
    "mutations": ("CopyBack", "SetRequiresGrad", "SetStrides"),
    "storages": ("Resize", "ResizeStorage", "SetStorage"),
    "symbols": ("BindSymbol",),
    "versions": ("BumpVersion", "BumpVersions", "ReadVersion", "SetVersion"),
    "views": ("MarkDynamic", "ReplayView", "SetLazyBits"),
}


class _ByName(Mapping[str, type[Operation]]):
    """The classes by their names."""

    def __init__(self) -> None:
        self._homes = {name: module for module, names in _MODULES.items() for name in names}

    def __getitem__(self, name: str) -> type[Operation]:
        found: type[Operation] = getattr(import_module(f".{self._homes[name]}", __name__), name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


OPERATIONS: Mapping[str, type[Operation]] = _ByName()


def functions_of(operations: Iterable[Operation]) -> dict[str, Callable[..., Any]]:
    """What the emitted code of these operations calls, by its global names."""
    one_of_each = {type(operation): operation for operation in operations}.values()
    return {name: function for operation in one_of_each for name, function in operation.functions.items()}
