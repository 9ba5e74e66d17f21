"""What every test of the repository starts from: the same random numbers, whatever ran before it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_configure() -> None:
    """Hypothesis draws the same examples in every run: what is found by chance belongs to `nox -s fuzz`."""
    torch.manual_seed(0)  # for the tensors that test files make while they are imported
    try:
        from hypothesis import settings
    except ImportError:
        return  # some packages' tests do without it
    settings.register_profile("same-examples", derandomize=True, deadline=None)
    settings.load_profile("same-examples")
