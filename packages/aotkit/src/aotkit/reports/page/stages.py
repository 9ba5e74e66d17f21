"""When the stages of a compile ran, and what the graph was after each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ...recorder import StageTiming
from .collect import Findings

__all__ = ["Form", "StageRow", "forms_of", "stage_rows"]


@dataclass
class StageRow:
    """A stage: its seconds with those nested in it, bars as (left, width) in percent of the whole, nested stages.

    ``failed``: what a compile raised, it raised here.
    """

    name: str
    seconds: float = 0.0
    bars: list[tuple[float, float]] = field(default_factory=list)
    nested: dict[str, float] = field(default_factory=dict)
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """The graph after one stage: ``counts`` say what it is made of."""

    title: str
    counts: tuple[tuple[int, str], ...]


def stage_rows(found: Findings) -> tuple[list[StageRow], float]:
    """The stages in the order in which they first ran, and the seconds from the first's begin to the last's end."""
    timings = sorted(found.watcher.stages, key=lambda timing: (timing.begin, timing.depth))
    if not timings:
        return [], 0.0
    begin = timings[0].begin
    span = max(timing.begin + timing.whole for timing in timings) - begin or 1e-9
    rows: dict[str, StageRow] = {}
    outer: StageTiming | None = None
    for timing in timings:
        if timing.depth == 0:
            outer = timing
            row = rows.setdefault(timing.name, StageRow(timing.name))
            row.seconds += timing.whole
            left = min(100 * (timing.begin - begin) / span, 99.5)
            row.bars.append((left, min(max(100 * timing.whole / span, 0.4), 100 - left)))
        elif outer is not None:
            nested = rows[outer.name].nested
            nested[timing.name] = nested.get(timing.name, 0.0) + timing.seconds
    stage = found.failure.stage if found.failure is not None else ""
    for row in rows.values():
        row.failed = bool(stage) and (row.name == stage or stage in row.nested)
    return list(rows.values()), span


def forms_of(found: Findings) -> list[tuple[str, list[Form]]]:
    """For each graph of Dynamo, what it is made of from stage to stage."""
    names = list(dict.fromkeys(name.partition("-")[0] for name in found.watcher.nodes))
    return [(name, forms) for name in names if (forms := _forms(name, found))]


def _forms(name: str, found: Findings) -> list[Form]:
    nodes, texts, forms = found.watcher.nodes, found.watcher.texts, []
    if f"{name}-captured" in nodes:
        forms.append(Form("Captured", ((len(nodes[f"{name}-captured"]), "operators"),)))
    kinds = [kind for kind in ("inference", "forward", "backward") if f"{name}-{kind}" in nodes]
    if len(kinds) > 1:
        forms.append(Form("Partitioned", tuple((len(nodes[f"{name}-{kind}"]), kind) for kind in kinds)))
    for title, stage in (("Lowered", "lowered"), ("Fused", "scheduled")):
        counts: dict[str, int] = {}
        for kind in kinds:
            for head in re.findall(
                r"^(loop|contraction|extern) ", texts.get(f"{name}-{kind}-{stage}", ""), re.MULTILINE
            ):
                words = {"loop": "loop nests", "contraction": "products", "extern": "ATen calls"}[head]
                counts[words] = counts.get(words, 0) + 1
        if counts:
            forms.append(Form(title, tuple((count, words) for words, count in counts.items())))
    functions = {
        (kind, record.function)
        for kind in kinds
        if (program := found.watcher.programs.get(f"{name}-{kind}")) is not None
        for record in program.kernels
    }
    if functions:
        forms.append(Form("Written", ((len(functions), "functions"),)))
    return forms
