"""Global state that the function leaves changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .._torch_compat import set_grad_enabled
from ..source import Source
from .operation import Operation, Value, Values

__all__ = ["SetGradMode"]


@dataclass(frozen=True, slots=True)
class SetGradMode(Operation):
    """The traced function leaves grad mode like this."""

    functions: ClassVar = {"_set_grad_enabled": set_grad_enabled}

    enabled: bool

    @property
    def reads(self) -> tuple[Value, ...]:
        """Nothing."""
        return ()

    def emit(self, source: Source, indent: int) -> None:
        """One call."""
        source.add(f"_set_grad_enabled({self.enabled})", indent)

    def run(self, values: Values) -> None:
        """Set it."""
        torch.set_grad_enabled(self.enabled)

    def __str__(self) -> str:
        return f"grad mode = {self.enabled}"
