"""The benchmark of fused chains: its chains are right, and its verdicts say what they should."""

from __future__ import annotations

import time

import pytest
import torch

from tools.bench.chains import CHAINS, Row, check, make_runners, missed, table
from tools.bench.image_chains import IMAGE_CHAINS

TINY = dict.fromkeys(IMAGE_CHAINS, (2, 3, 8, 6)) | {
    "rope": (1, 2, 8, 16),
    "rows of 16 sorted": (5, 16),
    "adam": (4, 40),
    "cross-entropy": (6, 33),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_compiled_by_us_is_as_exact_as_eager(name: str) -> None:
    torch._dynamo.reset()
    sizes = TINY.get(name, (5, 37))
    runners = make_runners(CHAINS[name], sizes, time.thread_time, ("eager", "aotkit"))
    row = Row(name, "tiny", sizes, 0.0, "memory")
    check(runners, row)
    assert row.exact
    assert all(runner.run() >= 0.0 for runner in runners.values())


def row(over_inductor: float, copy: float, error: float = 1e-7) -> Row:
    """One line of results."""
    times = {"eager": 2.0, "inductor": over_inductor, "aotkit": 1.0, "copy": copy}
    found = Row("softmax", "large", (8, 8), 1.0, "memory", times, 2.0, over_inductor, copy, {"aotkit": error})
    found.exact = error < 1e-6
    return found


def test_a_chain_is_fast_enough_by_either_measure() -> None:
    assert missed([row(1.3, 0.2)]) == []
    assert missed([row(1.3, 0.2), row(1.1, 0.95)]) == []
    assert missed([row(1.3, 0.2), row(1.19, 0.89)]) == ["softmax large: 1.19 of Inductor, 0.89 of a copy"]


def test_a_wrong_chain_or_a_low_mean_is_reported() -> None:
    assert missed([row(1.3, 0.2, error=0.5)]) == ["softmax large: error 5.0e-01"]
    assert missed([row(1.1, 0.95)]) == ["mean 1.10, promised is 1.15"]
    assert "| softmax | large |" in table([row(1.3, 0.2)])
