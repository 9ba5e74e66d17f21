"""What every test of the repository starts from: the same random numbers, whatever ran before it."""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed-shift",
        type=int,
        default=0,
        help="added to every seed: with other numbers, a bound that holds by luck shows itself",
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws the same examples in every run: what is found by chance belongs to `nox -s fuzz`."""
    shift = config.getoption("--seed-shift", default=0)
    if shift:
        _shift_seeds(shift)
    torch.manual_seed(0)  # for the tensors that test files make while they are imported
    try:
        from hypothesis import settings
    except ImportError:
        return  # some packages' tests do without it
    settings.register_profile("same-examples", derandomize=True, deadline=None)
    settings.load_profile("same-examples")


def _shift_seeds(shift: int) -> None:
    seed = torch.manual_seed
    torch.manual_seed = lambda number: seed(int(number) + shift)
