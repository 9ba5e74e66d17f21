"""Peak memory as the objective: a front of plans, from the lowest simulated peak to the least recomputation (F3.55).

Fewer saved bytes do not mean a lower peak: with nothing saved, the backward first recomputes the whole forward, and
holds it at once. What lowers the peak is recomputing in segments. So plans are built from *checkpoint sets*: what
crosses a few narrow positions of the forward is saved, spread evenly over the bytes that the default cut would save;
then, step by step, the values that save most recomputation per byte are added. Every plan is simulated to the byte
(see :mod:`timeline`), and those that are worse than another in both peak and time are dropped. With ``n`` nodes this
takes at most some 100 simulations, fewer on large graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from .budget import activation_bytes, floor_problem, recompute_seconds
from .cost import is_free, is_view_like
from .default import default_saved_values
from .joint import JointGraph
from .min_cut import CutProblem, CutResult, solve_min_cut
from .plan import Plan, joint_steps, make_plan, simulate_plan
from .policies import has_policies
from .runtime_estimate import RuntimeEstimator, estimate_seconds

NUM_CHECKPOINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
# Nodes that may be visited in all simulations together; about two seconds of work.
WORK_LIMIT = 200_000


@dataclass(frozen=True, slots=True)
class Choice:
    """One plan: what it saves, its simulated peak, the seconds of its recomputation, and how it came about."""

    label: str
    saved: tuple[int, ...]
    peak_bytes: int
    saved_bytes: int
    seconds: float


class PeakSearch:
    """Builds and measures plans for one joint graph."""

    def __init__(self, joint: JointGraph, default: CutProblem, cut: CutResult, estimator: RuntimeEstimator) -> None:
        self._joint = joint
        self._cut = cut
        self._estimator = estimator
        self._free = floor_problem(joint, default)
        self._floor = set(solve_min_cut(self._free).saved)
        self._left = max(12, WORK_LIMIT // len(joint.nodes))
        self.choices: list[Choice] = []

    def run(self) -> list[Choice]:
        """The front, by rising peak and falling time; the default cut is among what it was chosen from."""
        self._try("default cut", self._cut.saved)
        if not has_policies(self._joint):
            self._try("no recomputation", default_saved_values(self._joint))
        bases = [("floor", frozenset(self._floor)), *self._checkpoint_sets()]
        measured = []
        for label, saved in bases:
            choice = self._try(label, saved)
            if choice is not None:
                measured.append((choice.peak_bytes, choice.seconds, label, saved))
        measured.sort(key=lambda row: row[:3])
        for _, _, label, saved in measured[:5]:
            self._enrich(label, saved)
        return front(self.choices)

    def _try(self, label: str, saved: Iterable[int]) -> Choice | None:
        if self._left <= 0:
            return None
        self._left -= 1
        joint, kept = self._joint, tuple(sorted(saved))
        plan = make_plan(joint, kept)
        timeline = simulate_plan(joint, plan)
        choice = Choice(
            label, kept, timeline.peak_bytes, plan_bytes(joint, plan), plan_seconds(joint, plan, self._estimator)
        )
        self.choices.append(choice)
        return choice

    def _enrich(self, label: str, base: frozenset[int]) -> None:
        """Add the values that the default cut saves, those first that spare most seconds per byte."""
        joint = self._joint
        extra = [index for index in self._cut.saved if index not in base and activation_bytes(joint, index) > 0]
        if not extra:
            return
        seconds = recompute_seconds(self._free, extra, base | set(self._cut.saved), self._estimator)
        order = sorted(
            range(len(extra)), key=lambda item: (-seconds[item] / activation_bytes(joint, extra[item]), extra[item])
        )
        total = sum(activation_bytes(joint, index) for index in extra)
        added, taken, level = set(base), 0, 1
        steps = 12
        for item in order:
            added.add(extra[item])
            taken += activation_bytes(joint, extra[item])
            if taken * steps >= total * level:
                level = taken * steps // total + 1
                if self._try(f"{label} + {taken * 100 // total} %", added) is None:
                    return

    def _checkpoint_sets(self) -> list[tuple[str, frozenset[int]]]:
        """For several counts the values that cross as many narrow positions of the forward."""
        crossing, weight = self._widths()
        total = weight[-1] if weight else 0
        if total == 0:
            return []
        found: list[tuple[str, frozenset[int]]] = []
        seen: set[frozenset[int]] = set()
        for count in NUM_CHECKPOINTS:
            positions = []
            for step in range(1, count + 1):
                low = bisect_left(weight, total * (step - 0.5) / (count + 1))
                high = bisect_left(weight, total * (step + 0.5) / (count + 1))
                window = range(low, max(high, low + 1))
                positions.append(min(window, key=lambda at: (crossing[at], at)))
            saved = frozenset(self._floor | self._live_across(set(positions)))
            if saved not in seen:
                seen.add(saved)
                found.append((f"{count} checkpoint{'s' if count > 1 else ''}", saved))
        return found

    def _spans(self) -> list[tuple[int, int, int]]:
        """(value, made at, last used at) for what could be a checkpoint; views stretch the span of their base."""
        joint = self._joint
        last: dict[int, int] = {}
        for index in range(len(joint.nodes)):
            if not joint.in_forward[index]:
                continue
            for used in joint.inputs_of[index]:
                last[_base(joint, used)] = index
        spans = []
        for index, end in last.items():
            usable = joint.nodes[index].op != "placeholder" and not is_free(joint, index)
            if usable and joint.bytes_of[index] > 0 and self._free.costs[index].cost != float("inf"):
                spans.append((index, index, end))
        return sorted(spans)

    def _widths(self) -> tuple[list[int], list[float]]:
        """For each position the bytes that cross it, and the default cut's bytes made up to it."""
        joint = self._joint
        change = [0] * (len(joint.nodes) + 1)
        for index, begin, end in self._spans():
            change[begin] += joint.bytes_of[index]
            change[end] -= joint.bytes_of[index]
        saved = set(self._cut.saved)
        crossing, weight, width, total = [], [], 0, 0.0
        for index in range(len(joint.nodes)):
            width += change[index]
            total += activation_bytes(joint, index) if index in saved else 0
            crossing.append(width if joint.in_forward[index] else 1 << 62)
            weight.append(total)
        return crossing, weight

    def _live_across(self, positions: set[int]) -> set[int]:
        ordered = sorted(positions)
        live = set()
        for index, begin, end in self._spans():
            after = bisect_left(ordered, begin)
            if after < len(ordered) and ordered[after] < end:
                live.add(index)
        return live


def _base(joint: JointGraph, index: int) -> int:
    while is_view_like(joint, index) and joint.inputs_of[index]:
        index = joint.inputs_of[index][0]
    return index


def plan_bytes(joint: JointGraph, plan: Plan) -> int:
    """Bytes of the saved activations of a plan; what several share, or an input owns, counts once or not at all."""
    steps = joint_steps(joint)
    owned = {key for i in joint.forward_inputs if i not in joint.mutated_inputs for key, _ in steps[i].storages}
    kept: dict[Hashable, int] = {}
    for index in plan.tensors:
        if joint.nodes[index].op == "placeholder":
            kept[index] = activation_bytes(joint, index)
        else:
            kept.update((key, size) for key, size in steps[index].storages if key not in owned)
    return sum(kept.values())


def plan_seconds(joint: JointGraph, plan: Plan, estimator: RuntimeEstimator) -> float:
    """Estimated seconds of what runs twice."""
    return sum(estimate_seconds(joint, index, estimator) for index in plan.recomputed())


def front(choices: Iterable[Choice]) -> list[Choice]:
    """The choices that no other beats in both peak and seconds, by rising peak."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.peak_bytes, c.seconds, c.saved_bytes, c.label)):
        if not kept or choice.seconds < kept[-1].seconds:
            kept.append(choice)
    return kept


def within(choices: list[Choice], peak_bytes: float) -> Choice:
    """The least recomputation of a front whose peak is at most ``peak_bytes``, else the lowest peak."""
    allowed = [choice for choice in choices if choice.peak_bytes <= peak_bytes]
    return allowed[-1] if allowed else choices[0]
