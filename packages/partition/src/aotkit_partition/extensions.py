"""What a caller may bring along: solvers and estimators of their own. Passed as an argument, never registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx

from .errors import InvalidOptionError
from .knapsack import SOLVERS, KnapsackSolver
from .options import PartitionOptions
from .runtime_estimate import RuntimeEstimator, estimator_named


@dataclass(frozen=True, slots=True)
class Extensions:
    """Replacements for built-in parts; None keeps the part that the options name.

    Attributes:
        name: identifies the set in cache keys; change it whenever a part's behaviour changes.
        knapsack: takes weights (bytes), gains (seconds) and a capacity, returns the positions to keep.
        runtime: gives the seconds that a node takes.
        joint_pass: rewrites a copy of the joint graph before anything else; returns a new module, or None after having
            changed its argument.
        group: a ``torch.distributed`` process group whose ranks partition the same graph and must decide alike; see
            :mod:`rank_sync`. All of them call :func:`partition`, which talks to the others through the group's store.
        own_budgets: the ranks of ``group`` may have other budgets (``memory_budget``, ``regather_budget``): each keeps
            within its own, as far as all start the same collectives; see Note [A budget for each rank].
        rank_timeout: seconds that a rank of ``group`` waits for what the others would save; then it raises.
    """

    name: str = ""
    knapsack: KnapsackSolver | None = None
    runtime: RuntimeEstimator | None = None
    joint_pass: Callable[[torch.fx.GraphModule], torch.fx.GraphModule | None] | None = None
    group: Any = None
    own_budgets: bool = False
    rank_timeout: float = 600.0

    def key(self) -> str:
        """Text for cache keys.

        Raises:
            InvalidOptionError: there are parts, but no name to tell them apart by.
        """
        parts = [part for part in ("knapsack", "runtime", "joint_pass") if getattr(self, part) is not None]
        if parts and not self.name:
            raise InvalidOptionError(
                f"the extensions bring their own {', '.join(parts)}, but have no name; a cache could not tell them "
                "from others. Give Extensions(name=...) and change it with their behaviour."
            )
        runtime = "" if self.runtime is None else self.runtime.name
        return f"{self.name}/{','.join(parts)}/{runtime}"

    def solver(self, options: PartitionOptions) -> KnapsackSolver:
        """The knapsack solver to use."""
        return self.knapsack if self.knapsack is not None else SOLVERS[options.knapsack]

    def estimator(self, options: PartitionOptions) -> RuntimeEstimator:
        """The runtime estimator to use."""
        return self.runtime if self.runtime is not None else estimator_named(options.runtime)
