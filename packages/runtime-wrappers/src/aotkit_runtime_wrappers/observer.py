"""How a caller watches this package: one optional argument, no global logger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Observer(Protocol):
    """Receives one call per thing that happened."""

    def event(self, name: str, fields: Mapping[str, object], /) -> None:
        """Take notice.

        Args:
            name: ``wrappers.bind`` (``source``, ``seconds``) or ``wrappers.lazy_backward`` (``seconds``).
            fields: what is known about it.
        """
