"""The name of a pair of the conformance table, without the table: that takes seconds to import."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Pair"]


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """``operator`` is the name with the variant of the test, as in ``norm(nuc)``."""

    operator: str
    dtype: str
    direction: str

    @property
    def key(self) -> str:
        """The name in files."""
        return f"{self.operator} {self.dtype} {self.direction}"
