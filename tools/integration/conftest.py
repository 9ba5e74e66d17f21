"""What all tests of the wheels share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _guards_are_not_timed(guards_are_not_timed: None) -> None:
    """Compiles of this process are quicker; what other processes do is what a user sees."""
