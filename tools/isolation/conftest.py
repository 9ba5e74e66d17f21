"""The option that says which package's environment the tests run in."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--package", required=True, help="folder below packages/ whose isolated environment this is")
