"""The operations of a wrapper plan: small frozen records over named values, one module per kind.

See Note [A plan is a small register program] in :mod:`.operation`. A new operation is one class in one of the modules
below, named in the module's ``__all__``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import bases, checks, modes, mutations, storages, symbols, versions, views
from .operation import Operation, Value

__all__ = ["FUNCTIONS", "OPERATIONS", "Operation", "Value"]

OPERATIONS: Mapping[str, type[Operation]] = {
    name: getattr(module, name)
    for module in (checks, symbols, bases, storages, mutations, versions, views, modes)
    for name in module.__all__
}

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    name: function for operation in OPERATIONS.values() for name, function in operation.functions.items()
}
"""What emitted code calls for its operations, by its global names."""
