"""The name ``"aotkit"`` in Dynamo's registry, and our entries among torch's cache artifacts, without importing Dynamo.

Where the package is installed an entry point registers the name. With the sources on the path there is none: then the
name is registered when something imports the registry.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

__all__ = ["register_with_torch"]

_REGISTRY = "torch._dynamo.backends.registry"
_ARTIFACTS = "torch.compiler._cache"


def register_with_torch() -> None:
    """Register with what is imported of torch now, and with the rest when it is."""
    for name, register in ((_REGISTRY, _register), (_ARTIFACTS, _register_artifacts)):
        module = sys.modules.get(name)
        if module is not None:
            register(module)
        elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(name, register))


def _register_artifacts(module: Any) -> None:
    # A version of torch without this class has no such artifacts; a name that is taken is ours already.
    factory = getattr(module, "CacheArtifactFactory", None)
    if factory is not None and "aotkit" not in factory._artifact_types:
        from .artifact.torch_artifacts import make_artifact_class

        make_artifact_class(module)


def _register(registry: Any) -> None:
    # As an entry point, which Dynamo loads at the first compile: a process that never compiles imports no backend.
    registry._BACKENDS.setdefault("aotkit", EntryPoint("aotkit", "aotkit.entry_point:aotkit", "torch_dynamo_backends"))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module as others do, and registers when it has been executed; takes itself away first."""

    def __init__(self, name: str, register: Callable[[Any], None]) -> None:
        self.name, self._register = name, register

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_register(module: ModuleType) -> None:
                execute(module)
                register(module)

            register = self._register
            spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec
