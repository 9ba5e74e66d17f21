"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from aotkit_partition import _torch_compat

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_memory_budgets_of_regions_are_there_from_torch_2_13_on() -> None:
    assert _torch_compat.region_memory_budget_supported() == (RELEASE >= (2, 13))


def test_a_profiler_of_one_cycle_warns_of_others_before_torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.profiler.profiler._WARNINGS_SHOWN", set())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with profile(activities=[ProfilerActivity.CPU]):
            pass
    assert bool(warned) == (RELEASE < (2, 13))
    monkeypatch.setattr("torch.profiler.profiler._WARNINGS_SHOWN", set())
    with _torch_compat.memory_profile() as recorded:
        torch.ones(1000)
    assert [event.bytes for event in _torch_compat.allocation_events(recorded, "") if event.bytes > 0] == [4000]


def test_checks_are_no_dead_code_which_torch_does_not_know_of_all_before_2_13() -> None:
    _torch_compat.keep_checks()  # again: nothing changes
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten._linalg_check_errors.default, (x, "inv"), {"is_matrix": True})
    graph.output(x)
    graph.eliminate_dead_code()
    assert len(graph.nodes) == 3
