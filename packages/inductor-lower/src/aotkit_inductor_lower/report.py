"""What became of a graph: kernels, fusion groups, ATen calls and why, as data that prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

import torch
from torch.fx import GraphModule, Node

from .analysis.costs import arithmetic, traffic
from .ir import ExternCall, LoopNest, Program
from .ir.walk import buffers_of
from .launch_plan.records import Binary
from .ops.aten import is_creation, is_view, library_reason
from .ops.fixups import FIX_UPS
from .passes import Decision

__all__ = [
    "ExternCount",
    "FusionGroup",
    "LoweringReport",
    "ProductChoice",
    "make_report",
    "merge_reports",
    "with_regions",
]


_NOT_FUSIONS = ("inline", "contraction", "overlap", "gather", "pack", "layout")


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """A generated kernel and the graph nodes it computes.

    ``bytes`` of the buffers that it reads and writes, and operations on floats (``flops``), each ``None`` where a size
    is not known before the call.
    """

    kernel: str
    nodes: tuple[str, ...]
    line: str
    bytes: int | None = None
    flops: int | None = None


@dataclass(frozen=True, slots=True)
class ExternCount:
    """An ATen call, how often it is made, and why no kernel was generated."""

    target: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """Who computes a matrix product, convolution or attention: a kernel of ``ours`` or ATen. ``what``: the call with
    types, sizes and strides, and why; ``count``: how many there are."""

    ours: bool
    count: int
    what: str


@dataclass(frozen=True, slots=True)
class LoweringReport:
    """What became of one graph.

    ``generated_nodes`` of ``eligible_nodes`` run in kernels; eligible are the calls that are not views, creations,
    matrix products, convolutions, attention or pooling. ``refused`` are fusions that were considered and not made.
    ``overlaps``: what runs beside each collective. ``products``: who computes products, as far as there was a choice.
    ``packed``: constant matrices that products read, packed once or not. ``regions``: which kernels share a parallel
    region.
    """

    kernel_count: int
    groups: tuple[FusionGroup, ...]
    externs: tuple[ExternCount, ...]
    eligible_nodes: int
    generated_nodes: int
    refused: tuple[Decision, ...]
    overlaps: tuple[Decision, ...] = ()
    products: tuple[ProductChoice, ...] = ()
    packed: tuple[Decision, ...] = ()
    regions: tuple[str, ...] = ()

    @property
    def generated_share(self) -> float:
        """``generated_nodes / eligible_nodes``; 1 where there are none."""
        return self.generated_nodes / self.eligible_nodes if self.eligible_nodes else 1.0

    def to_json(self) -> dict[str, object]:
        """Plain data for ``json.dumps``."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            (
                f"{counted(self.kernel_count, 'kernel')}; {self.generated_nodes} of {self.eligible_nodes} eligible "
                f"nodes generated ({100 * self.generated_share:.0f} %)"
            )
        ]
        for group in self.groups:
            where = f"  # {group.line}" if group.line else ""
            lines.append(f"  kernel {group.kernel}: {' '.join(group.nodes)}{where}")
        for choice in self.products:
            lines.append(f"  {'our own' if choice.ours else 'left to ATen'} {choice.count}x {choice.what}")
        lines += [f"  one parallel region: {region}" for region in self.regions]
        lines += [f"  matrix of {record.first}: {record.reason}" for record in self.packed]
        for extern in self.externs:
            lines.append(f"  ATen {extern.count}x {extern.target}: {extern.reason}")
        for record in self.refused:
            lines.append(f"  not fused: {record.first} and {record.second}: {record.reason}")
        lines += [f"  collective {record.first}: {record.reason}" for record in self.overlaps]
        return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """``1 kernel``, ``2 kernels``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def make_report(gm: GraphModule, lowered: Program, scheduled: Program, records: Sequence[Decision]) -> LoweringReport:
    """The report on one graph."""
    made = {step.name for step in scheduled.steps if isinstance(step, LoopNest)}  # of calls, too: see generate-sorts
    calls = (step for step in lowered.steps if isinstance(step, ExternCall) and step.target not in FIX_UPS)
    calls = (step for step in calls if step.name not in made)
    externs = {step.origin.nodes[0] for step in calls if step.origin.nodes}
    eligible = [node for node in gm.graph.nodes if _is_eligible(node)]
    counts = Counter((step.target, step.reason) for step in scheduled.steps if isinstance(step, ExternCall))
    nests, buffers = [step for step in scheduled.steps if isinstance(step, LoopNest)], buffers_of(scheduled)
    return LoweringReport(
        len(nests),
        tuple(
            FusionGroup(nest.name, nest.origin.nodes, nest.origin.line, traffic(nest, buffers), arithmetic(nest))
            for nest in nests
        ),
        tuple(ExternCount(target, count, reason) for (target, reason), count in counts.most_common()),
        len(eligible),
        sum(node.name not in externs for node in eligible),
        tuple(r for r in records if not r.fused and r.kind not in _NOT_FUSIONS),
        tuple(record for record in records if record.kind == "overlap"),
        _products(records),
        tuple(record for record in records if record.kind == "pack"),
    )


def merge_reports(reports: Sequence[LoweringReport], calls: Sequence[ExternCount]) -> LoweringReport:
    """The report on a graph compiled in parts, with the ``calls`` that are in none of them."""
    counts = Counter({(c.target, c.reason): c.count for c in calls})
    for report in reports:
        counts.update({(c.target, c.reason): c.count for c in report.externs})
    return LoweringReport(
        sum(r.kernel_count for r in reports),
        tuple(group for r in reports for group in r.groups),
        tuple(ExternCount(target, count, reason) for (target, reason), count in counts.most_common()),
        sum(r.eligible_nodes for r in reports) + sum(c.count for c in calls),
        sum(r.generated_nodes for r in reports),
        tuple(record for r in reports for record in r.refused),
        tuple(record for r in reports for record in r.overlaps),
        _counted((choice.ours, choice.what, choice.count) for r in reports for choice in r.products),
        tuple(record for r in reports for record in r.packed),
        tuple(region for r in reports for region in r.regions),
    )


def with_regions(report: LoweringReport, binary: Binary) -> LoweringReport:
    """The report with the parallel regions of the code that was made."""
    found = cast("list[tuple[str, str, int, int]]", binary.facts.get("regions", []))
    texts = (
        f"{first} to {last}, {counted(n, 'kernel')}; threads wait {waits} times" for first, last, n, waits in found
    )
    return replace(report, regions=tuple(texts))


def _products(records: Sequence[Decision]) -> tuple[ProductChoice, ...]:
    """The last decision on each product: what was to be ours can be given back to ATen."""
    last = {record.first: record for record in records if record.kind == "contraction"}
    return _counted((record.fused, record.reason, 1) for record in last.values())


def _counted(choices: Iterable[tuple[bool, str, int]]) -> tuple[ProductChoice, ...]:
    counts: Counter[tuple[bool, str]] = Counter()
    for ours, what, count in choices:
        counts[ours, what] += count
    return tuple(ProductChoice(ours, count, what) for (ours, what), count in counts.most_common())


def _is_eligible(node: Node) -> bool:
    if node.op != "call_function" or is_view(node) or is_creation(node) or library_reason(node):
        return False
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor | tuple | list)
