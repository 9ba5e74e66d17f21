"""When this process began to import us, and which file it was: see Note [Sources that are replaced]."""

from __future__ import annotations

import os
import time

__all__ = ["FIRST_FILE", "IMPORTED_AT", "identity", "identity_of"]


def identity(path: str) -> tuple[int, ...]:
    """What changes where a file is replaced, whatever clocks say; ``()`` where there is none (in an archive)."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return identity_of(found)


def identity_of(found: os.stat_result) -> tuple[int, ...]:
    """The same of a file that was looked at."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


IMPORTED_AT = time.time_ns()
FIRST_FILE = identity(__file__)
