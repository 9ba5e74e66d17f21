"""The tensors of a module as they are now, without walking the module at each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from aotkit_aot_trace.callables import named_tensors

__all__ = ["LiveModule"]


class LiveModule:
    """Reads parameters, buffers and training flags of ``module`` from where they are stored.

    Where they are stored is looked up again when a submodule, a parameter or a buffer was added, removed or replaced by
    ``None``; one that was replaced by another is seen anyway.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._look_up()

    def read(self) -> tuple[tuple[str, ...], list[torch.Tensor], tuple[bool, ...]]:
        """Names and values, parameters first, then buffers, and whether each submodule is training."""
        if self._is_changed():
            self._look_up()
        values = [store[key] for store, key in self._places]
        return self._names, values, tuple([m.training for m in self._modules])

    def _look_up(self) -> None:
        self._names = tuple(named_tensors(self.module))
        self._modules = list(self.module.modules())
        self._children = [(m._modules, list(m._modules.values())) for m in self._modules if m._modules]
        stores: list[dict[str, Any]] = [s for m in self._modules for s in (m._parameters, m._buffers) if s]
        self._keys = [(s, [key for key, value in s.items() if value is not None]) for s in stores]
        self._empty = [s for m in self._modules for s in (m._parameters, m._buffers, m._modules) if not s]
        owners = dict(self.module.named_modules(remove_duplicate=False))
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        self._places: list[tuple[dict[str, Any], str]] = []
        for name in self._names:
            path, _, key = name.rpartition(".")
            owner = owners[path]
            self._places.append((owner._parameters if name in parameters else owner._buffers, key))

    def _is_changed(self) -> bool:
        return (
            any(list(store.values()) != children for store, children in self._children)
            or any(self._empty)
            or any([k for k, v in store.items() if v is not None] != keys for store, keys in self._keys)
        )
