"""The benchmark of deep models: one small compile and one small step."""

from __future__ import annotations

from typing import Any

import pytest

from tools.bench import layers


@pytest.mark.nightly("test_tools_bench.py takes a small function's first call apart; this is another table's row")
@pytest.mark.parametrize("collect", [False, True])
def test_a_compile_tells_its_seconds_and_its_memory(collect: bool, fork_in: Any) -> None:
    fork_in(layers)
    found = layers.stages(2, "once", collect)
    assert 0 < found["own"] < found["first"] and found["resident"] > 100


@pytest.mark.nightly("test_aotkit_repeated_layers.py compares steps of both ways")
@pytest.mark.parametrize("training", [True, False])
def test_both_ways_run_the_same_step(training: bool) -> None:
    found = layers.steps("bert", 7, 64, 8, training, 2)
    assert set(found) == {*layers.WAYS, "ratio"} and all(value > 0 for value in found.values())
