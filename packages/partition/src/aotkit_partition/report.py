"""What a partition decided and why, as data, text and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.fx

from .cost import is_view_like
from .decide import Decision
from .joint import JointGraph
from .plan import Plan
from .timeline import storages_of


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
    """One op that the backward runs again. ``bytes`` is the size of its result; views cost nothing."""

    name: str
    op: str
    bytes: int
    is_view: bool
    source: str


@dataclass(frozen=True, slots=True)
class Ban:
    """A value that must not be recomputed, and why."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The decisions of one partition."""

    strategy: str
    saved: tuple[SavedValue, ...]
    recomputed: tuple[RecomputedOp, ...]
    bans: tuple[Ban, ...]
    cut_cost: float
    num_forward_ops: int
    num_backward_ops: int

    @property
    def activation_bytes(self) -> int:
        """Bytes kept alive for the backward beyond the inputs; memory shared by several saved values counts once."""
        return sum(value.bytes for value in self.saved if not value.is_input)

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PartitionReport:
        """The report that :meth:`to_json` wrote."""
        data = json.loads(text)
        return cls(
            **{
                **data,
                "saved": tuple(SavedValue(**row) for row in data["saved"]),
                "recomputed": tuple(RecomputedOp(**row) for row in data["recomputed"]),
                "bans": tuple(Ban(**row) for row in data["bans"]),
            }
        )

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
            "saved:",
            *(
                f"  {value.name:<28} {format_bytes(value.bytes):>10}  {value.op:<28} {value.source}"
                for value in tensors
            ),
            "recomputed:",
            *(f"  {op.name:<28} {format_bytes(op.bytes):>10}  {op.op:<28} {op.source}" for op in work),
            "not recomputed because:",
            *(f"  {ban.name:<28} {ban.op:<28} {ban.reason}" for ban in self.bans),
        ]
        return "\n".join(lines)


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


def make_report(joint: JointGraph, plan: Plan, decision: Decision) -> PartitionReport:
    """Describe a finished plan."""
    return PartitionReport(
        strategy=decision.strategy,
        saved=_saved_values(joint, plan),
        recomputed=tuple(
            RecomputedOp(
                joint.nodes[index].name,
                joint.facts[index].name,
                joint.bytes_of[index],
                is_view_like(joint, index) or joint.facts[index].is_getitem or joint.facts[index].is_symbolic,
                source_line(joint.nodes[index]),
            )
            for index in plan.recomputed(joint)
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
