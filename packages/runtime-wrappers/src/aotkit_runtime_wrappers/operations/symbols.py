"""Where the values of symbols come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..source import Source
from .operation import Operation, Value, Values

__all__ = ["BindSymbol"]


@dataclass(frozen=True, slots=True)
class BindSymbol(Operation):
    """``symbol`` is a SymInt input or a size, stride or the offset of a tensor input."""

    symbol: Value
    value: Value
    source: str
    dim: int | None = None

    @property
    def of_output(self) -> bool:
        """Whether the value is a forward output, so that it can be read only after the call."""
        return self.value.startswith("fw")

    @property
    def reads(self) -> tuple[Value, ...]:
        """The argument or output."""
        return (self.value,)

    @property
    def writes(self) -> tuple[Value, ...]:
        """The symbol."""
        return (self.symbol,)

    def expression(self, value: str) -> str:
        """Python that reads the symbol from the expression ``value``."""
        if self.source == "int":
            return value
        return f"{value}.{self.source}({'' if self.dim is None else self.dim})"

    def read(self, value: Any) -> Any:
        """The symbol's value in ``value``, symbolic itself if that of a fake is."""
        if self.source == "int":
            return value
        read = getattr(value, self.source)
        return read() if self.dim is None else read(self.dim)

    def emit(self, source: Source, indent: int) -> None:
        """An assignment."""
        source.add(f"{self.symbol} = {self.expression(self.value)}", indent)

    def run(self, values: Values) -> None:
        """Read it."""
        values[self.symbol] = self.read(values[self.value])

    def __str__(self) -> str:
        dim = "" if self.dim is None else self.dim
        return f"{self.symbol} = {self.value}" + ("" if self.source == "int" else f".{self.source}({dim})")
