"""The name ``"aotkit"`` in Dynamo's registry, without importing Dynamo.

Where the package is installed an entry point registers the name. With the sources on the path there is none: then the
name is registered when something imports the registry.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["register_with_dynamo"]

_REGISTRY = "torch._dynamo.backends.registry"


def register_with_dynamo() -> None:
    """Register now if Dynamo is imported, else when it is."""
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:
        _register(registry)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(registry: Any) -> None:
    from .backend import aotkit

    # While the entry point is loaded, the name is there already and Dynamo registers what it gives.
    if "aotkit" not in registry._BACKENDS:
        registry.register_backend(aotkit, name="aotkit")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the registry as others do, and registers when it has been executed; takes itself away first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec
