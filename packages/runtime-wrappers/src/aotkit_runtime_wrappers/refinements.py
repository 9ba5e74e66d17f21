"""What a plan may be told beyond what the metadata says, and asked."""

from __future__ import annotations

from .donated import plan_donated
from .forward_adapters import RandomSource, plan_fake_results, plan_random_state
from .overlap import refuse_memory_of_several_storages
from .plan import RandomState, checks_aliases

__all__ = [
    "RandomSource",
    "RandomState",
    "checks_aliases",
    "plan_donated",
    "plan_fake_results",
    "plan_random_state",
    "refuse_memory_of_several_storages",
]
