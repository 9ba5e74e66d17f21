"""Strategies: each makes, of an analysed joint graph, the choice of what to save."""

from __future__ import annotations

from dataclasses import dataclass

from ._notices import warn_user
from .budget import solve_with_budget
from .default import default_saved_values
from .exact import solve_exactly
from .extensions import Extensions
from .joint import JointGraph
from .min_cut import make_cut_problem, solve_min_cut
from .options import PartitionOptions
from .peak import Choice, PeakSearch, within
from .policies import check_regions, has_policies


@dataclass(frozen=True, slots=True)
class Decision:
    """What to save and how it was found.

    Attributes:
        saved: positions in the joint graph.
        strategy: the strategy that was really used, in words.
        bans: per position why the value must not be recomputed; empty where no cut was made.
        cost: of the cut.
        front: the plans that were weighed against each other, if the strategy weighs several.
    """

    saved: tuple[int, ...]
    strategy: str
    bans: list[str | None]
    cost: float = 0.0
    front: tuple[Choice, ...] = ()


def decide(joint: JointGraph, options: PartitionOptions, extensions: Extensions) -> Decision:
    """Choose by ``options.strategy``.

    Raises:
        InfeasiblePartitionError: the constraints contradict each other.
    """
    checkpointed = has_policies(joint)
    if checkpointed:
        check_regions(joint)
    if options.strategy == "default" and not checkpointed:
        return Decision(tuple(default_saved_values(joint)), "default", [])
    if options.strategy == "min-peak":
        return _decide_by_peak(joint, options, extensions)
    if options.strategy == "exact":
        problem = make_cut_problem(joint, options)
        solved = solve_exactly(problem)
        return Decision(solved.saved, "exact", problem.bans, solved.cost)
    if options.strategy == "default" and joint.first_write:
        warn_user(
            "the joint graph has checkpoint policies and writes to its inputs, so the default strategy can't split it; "
            "it is split by minimum cut.",
            UserWarning,
        )
    # Recompute policies ask for a decision per value, which only the cut makes (F3.6).
    cut = solve_with_budget(joint, options, extensions.solver(options), extensions.estimator(options))
    name = "min-cut" if options.budget == 1.0 else f"min-cut within budget {options.budget}"
    return Decision(cut.result.saved, name, cut.problem.bans, cut.result.cost)


def peak_front(joint: JointGraph, options: PartitionOptions, extensions: Extensions) -> tuple[list[Choice], Choice]:
    """The front of plans between the lowest peak and the least recomputation, and the plan of the default cut."""
    default = make_cut_problem(joint, options)
    cut = solve_min_cut(default)
    search = PeakSearch(joint, default, cut, extensions.estimator(options))
    front = search.run()
    return front, search.choices[0]


def _decide_by_peak(joint: JointGraph, options: PartitionOptions, extensions: Extensions) -> Decision:
    front, default = peak_front(joint, options, extensions)
    chosen = within(front, options.budget * default.peak_bytes)
    kept = set(chosen.saved)
    bans = ["saved to lower the peak" if index in kept else None for index in range(len(joint.nodes))]
    name = "min-peak" if options.budget == 0.0 else f"min-peak within {options.budget} of the default cut's"
    return Decision(chosen.saved, f"{name} ({chosen.label})", bans, 0.0, tuple(front))
