"""What a partition decided and why, as data, text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from ._records import Format
from .cost import is_free, is_view_like
from .decide import Decision
from .default import default_saved_values
from .errors import GraphFormatError, InfeasiblePartitionError
from .gathered_parameters import GatherDecision
from .joint import JointGraph, value_bytes
from .peak import Choice, plan_bytes, plan_seconds
from .plan import Plan, make_plan, simulate_plan
from .runtime_estimate import RuntimeEstimator, estimate_seconds
from .timeline import MemoryTimeline, simulate_modules, storages_of


@dataclass(frozen=True, slots=True)
class SavedValue:
    """One value that the forward hands to the backward. ``kind`` is tensor, symint or other; sizes in bytes."""

    name: str
    kind: str
    bytes: int
    op: str
    is_input: bool
    source: str


@dataclass(frozen=True, slots=True)
class RecomputedOp:
    """One op that the backward runs again. ``bytes`` is the size of its result; views cost nothing.

    ``seconds`` are those of the runtime estimator: to compare, not to believe.
    """

    name: str
    op: str
    bytes: int
    seconds: float
    is_view: bool
    source: str


@dataclass(frozen=True, slots=True)
class Ban:
    """A value that must not be recomputed, and why."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One plan on the front between memory and recomputation; ``chosen`` marks the plan of the partition."""

    label: str
    peak_bytes: int
    saved_bytes: int
    seconds: float
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The decisions of one partition.

    Attributes:
        gathers: what becomes of each parameter that the forward gathers from all ranks.
        timeline: memory over forward, loss and backward (``details="memory"`` and above).
        before: the same without recomputation: the default partition.
        front: the plans worth choosing from, by rising peak (``details="front"``, or strategy ``min-peak``).
    """

    strategy: str
    saved: tuple[SavedValue, ...]
    recomputed: tuple[RecomputedOp, ...]
    bans: tuple[Ban, ...]
    cut_cost: float
    num_forward_ops: int
    num_backward_ops: int
    gathers: tuple[GatherDecision, ...] = ()
    timeline: MemoryTimeline | None = None
    before: MemoryTimeline | None = None
    front: tuple[FrontPoint, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """The most memory in use at once in forward, loss and backward, inputs left out; None if not simulated."""
        return None if self.timeline is None else self.timeline.peak_bytes

    @property
    def peak_bytes_before(self) -> int | None:
        """The same without recomputation."""
        return None if self.before is None else self.before.peak_bytes

    @property
    def recompute_seconds(self) -> float:
        """Estimated time of everything that the backward runs again."""
        return sum(op.seconds for op in self.recomputed)

    @property
    def activation_bytes(self) -> int:
        """Bytes kept alive for the backward beyond the inputs; memory shared by several saved values counts once."""
        return sum(value.bytes for value in self.saved if not value.is_input)

    def to_json(self) -> str:
        """The report as JSON text."""
        return _FORMAT.to_text(self)

    @staticmethod
    def from_json(text: str) -> PartitionReport:
        """The report that :meth:`to_json` wrote. Raises :class:`GraphFormatError` for another text."""
        return _FORMAT.from_text(text)

    def __str__(self) -> str:
        tensors = [value for value in self.saved if value.kind != "symint" and not value.is_input]
        inputs = [value for value in self.saved if value.kind != "symint" and value.is_input]
        work = [op for op in self.recomputed if not op.is_view]
        headline = (
            f"partition by {self.strategy}: {len(tensors)} activations ({format_bytes(self.activation_bytes)}), "
            f"{len(inputs)} inputs and {sum(v.kind == 'symint' for v in self.saved)} sizes saved; "
            f"{len(work)} ops recomputed; forward {self.num_forward_ops} ops, backward {self.num_backward_ops} ops"
        )
        lines = [
            headline,
            *_memory_lines(self),
            "saved:",
            *(
                f"  {value.name:<28} {format_bytes(value.bytes):>10}  {value.op:<28} {value.source}"
                for value in tensors
            ),
            "recomputed:",
            *(
                f"  {op.name:<28} {format_bytes(op.bytes):>10}  {op.op:<28} {op.seconds * 1e6:8.1f} us  {op.source}"
                for op in work
            ),
            *_gather_lines(self),
            "not recomputed because:",
            *(f"  {ban.name:<28} {ban.op:<28} {ban.reason}" for ban in self.bans),
        ]
        return "\n".join(lines)


def _gather_lines(report: PartitionReport) -> list[str]:
    rows = [
        f"  {', '.join(one.inputs):<28} {format_bytes(one.bytes):>10}  {one.seconds * 1e6:8.1f} us  {one.reason}"
        for one in report.gathers
    ]
    return ["gathered from all ranks:", *rows] if rows else []


def _memory_lines(report: PartitionReport) -> list[str]:
    if report.timeline is None:
        return []
    steps, peak = report.timeline.steps, report.timeline.peak_step
    phase = "forward" if peak < report.timeline.loss else "backward" if peak > report.timeline.loss else "loss"
    before = ""
    if report.before is not None:
        before = f"; without recomputation {format_bytes(report.before.peak_bytes)}"
    lines = [
        f"peak memory {format_bytes(report.timeline.peak_bytes)} at '{steps[peak]}' ({phase}), inputs left out{before}"
    ]
    if report.front:
        lines.append("plans (peak, seconds of recomputation):")
        for point in report.front:
            mark = "*" if point.chosen else " "
            lines.append(f" {mark}{format_bytes(point.peak_bytes):>10} {point.seconds * 1e6:10.1f} us  {point.label}")
    return lines


_FORMAT = Format(PartitionReport, "aotkit partition report", 3, error=GraphFormatError)


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def source_line(node: torch.fx.Node) -> str:
    """The user's innermost line that made a node ("file:line: code"), or ""."""
    trace = node.meta.get("stack_trace")
    if not isinstance(trace, str):
        return ""
    lines = [line.strip() for line in trace.strip().splitlines()]
    for position in range(len(lines) - 1, -1, -1):
        if lines[position].startswith("File "):
            parts = lines[position].split(", ")
            where = f"{parts[0][5:].strip(chr(34))}:{parts[1].removeprefix('line ')}" if len(parts) > 1 else parts[0]
            code = lines[position + 1] if position + 1 < len(lines) else ""
            return f"{where}: {code}" if code else where
    return ""


def make_report(joint: JointGraph, plan: Plan, decision: Decision, estimator: RuntimeEstimator) -> PartitionReport:
    """Describe a finished plan: the decisions. See :func:`add_memory` and :func:`add_front` for the rest."""
    return PartitionReport(
        strategy=decision.strategy,
        saved=_saved_values(joint, plan),
        recomputed=tuple(
            RecomputedOp(
                joint.nodes[index].name,
                joint.facts[index].name,
                joint.bytes_of[index],
                estimate_seconds(joint, index, estimator),
                is_view_like(joint, index) or joint.facts[index].is_getitem or joint.facts[index].is_symbolic,
                source_line(joint.nodes[index]),
            )
            for index in plan.recomputed()
            if not is_free(joint, index)
        ),
        bans=tuple(
            Ban(joint.nodes[index].name, joint.facts[index].name, reason)
            for index, reason in enumerate(decision.bans)
            if reason is not None and joint.nodes[index].op != "placeholder"
        ),
        cut_cost=decision.cost,
        num_forward_ops=sum(joint.nodes[index].op not in ("placeholder", "get_attr") for index in plan.forward),
        num_backward_ops=sum(joint.nodes[index].op != "get_attr" for index in plan.backward),
    )


def add_memory(report: PartitionReport, joint: JointGraph, plan: Plan, recompute_late: bool) -> PartitionReport:
    """The report with the plan's memory over time, and that of the partition without recomputation."""
    before = None
    with suppress(InfeasiblePartitionError):  # there may be no partition without recomputation to compare with
        before = simulate_plan(joint, make_plan(joint, default_saved_values(joint), recompute_late))
    return replace(report, timeline=simulate_plan(joint, plan), before=before)


def add_front(
    report: PartitionReport, joint: JointGraph, plan: Plan, choices: Sequence[Choice], estimator: RuntimeEstimator
) -> PartitionReport:
    """The report with the plans that were, or could have been, weighed; the plan in use is always among them."""
    peak, seconds = simulate_plan(joint, plan).peak_bytes, plan_seconds(joint, plan, estimator)
    mine = FrontPoint("this partition", peak, plan_bytes(joint, plan), seconds, True)
    points = [
        FrontPoint(choice.label, choice.peak_bytes, choice.saved_bytes, choice.seconds)
        for choice in choices
        if (choice.peak_bytes, choice.seconds) != (mine.peak_bytes, mine.seconds)
    ]
    return replace(report, front=tuple(sorted([*points, mine], key=lambda point: (point.peak_bytes, point.seconds))))


def add_states(
    report: PartitionReport,
    forward: torch.fx.GraphModule,
    backward: torch.fx.GraphModule,
    num_fwd_outputs: int,
    states: Sequence[str],
) -> PartitionReport:
    """The report with the saved generator states among the saved values, and its memory simulated again."""
    sizes = {node.name: value_bytes(node.meta["val"]) for node in forward.graph.nodes if node.name in states}
    rows = tuple(SavedValue(name, "tensor", sizes[name], "generator state", False, "") for name in states)
    report = replace(report, saved=(*rows, *report.saved))
    if report.timeline is None:
        return report
    return replace(report, timeline=simulate_modules(forward, backward, num_fwd_outputs))


def _saved_values(joint: JointGraph, plan: Plan) -> tuple[SavedValue, ...]:
    storages: set[Any] = set()
    for index in joint.forward_inputs:
        if index not in joint.mutated_inputs:
            storages.update(storage for storage, _ in storages_of(joint.value(index)))
    rows = []
    for index in (*plan.tensors, *plan.symints):
        node, value = joint.nodes[index], joint.value(index)
        is_input = node.op == "placeholder" and index not in joint.mutated_inputs
        counted = joint.bytes_of[index]
        if isinstance(value, torch.Tensor) and not is_input:
            # A view keeps all of its storage alive.
            fresh = {storage: size for storage, size in storages_of(value) if storage not in storages}
            counted = joint.bytes_of[index] if node.op == "placeholder" else sum(fresh.values())
            storages.update(fresh)
        kind = "tensor" if isinstance(value, torch.Tensor) else "symint" if isinstance(value, torch.SymInt) else "other"
        rows.append(
            SavedValue(node.name, kind, counted, joint.facts[index].name or node.op, is_input, source_line(node))
        )
    return tuple(rows)
