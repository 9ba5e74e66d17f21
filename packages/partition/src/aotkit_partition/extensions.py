"""What a caller may bring along: solvers and estimators of their own. Passed as an argument, never registered."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    name: str = ""
    knapsack: KnapsackSolver | None = None
    runtime: RuntimeEstimator | None = None

    def solver(self, options: PartitionOptions) -> KnapsackSolver:
        """The knapsack solver to use."""
        return self.knapsack if self.knapsack is not None else SOLVERS[options.knapsack]

    def estimator(self, options: PartitionOptions) -> RuntimeEstimator:
        """The runtime estimator to use."""
        return self.runtime if self.runtime is not None else estimator_named(options.runtime)
