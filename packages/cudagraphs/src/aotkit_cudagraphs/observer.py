"""How a caller watches recordings: one optional argument, no global logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Observer(Protocol):
    """Receives one call per thing that happened."""

    def event(self, name: str, fields: Mapping[str, object], /) -> None:
        """Take notice.

        Args:
            name: `cudagraphs.record` (`seconds`, `pool_bytes`, `recordings`) or `cudagraphs.skip` (`kind`, `reason`).
            fields: what is known about it.
        """
