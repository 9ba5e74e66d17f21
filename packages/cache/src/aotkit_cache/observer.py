"""How a caller watches the cache: one optional argument, no global logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Observer(Protocol):
    """Receives one call per thing that happened."""

    def event(self, name: str, fields: Mapping[str, object], /) -> None:
        """Take notice.

        Args:
            name: `cache.hit`, `cache.miss`, `cache.put` or `cache.skip`.
            fields: `key` (digest), `seconds`, and `bytes` or `reason`.
        """
