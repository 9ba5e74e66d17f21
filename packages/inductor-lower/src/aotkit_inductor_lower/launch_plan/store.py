"""Where compiled programs are kept, and under which digest."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Protocol

from ..__about__ import __version__

__all__ = ["ObjectStore", "generator_digest"]


class ObjectStore(Protocol):
    """Keeps compiled programs by digest."""

    def get(self, digest: str) -> bytes | None:
        """What was put, or ``None``."""

    def put(self, digest: str, data: bytes) -> None:
        """Keep."""


@cache
def generator_digest() -> str:
    """Digest of this package's own sources, so that no object outlives the code that generated it.

    A version number would do for releases; in a checkout it would serve yesterday's bug today.
    """
    sources = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        sources.update(path.read_bytes())
    return sources.hexdigest()
