"""The page, from what was found: a jinja2 template, its style inside, nothing loaded from elsewhere."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

from aotkit_inductor_lower.launch_plan.facts import KINDS, MemoryOverTime, UnknownSize, memory_of
from aotkit_inductor_lower.report import LoweringReport
from aotkit_partition import PartitionReport

from ...__about__ import __version__
from ..._amounts import format_bytes
from .collect import Findings
from .kernels import Card, cards_of, plain_name
from .layers import layers_of
from .pictures import memory_picture
from .stages import forms_of, stage_rows
from .texts import Budget, short_path

__all__ = ["html_of"]

_GRAPH_CHARACTERS = 500_000
_MOST_MEMORY, _MOST_ROWS = 6, 200


#: What the picture of memory tells apart, in words.
_HOLDERS = {
    "saved": "saved for the backward",
    "result": "results and gradients",
    "allocated": "temporaries",
    "call result": "results of ATen calls",
    "arena": "arena, where temporaries share memory",
}


@dataclass(frozen=True, slots=True)
class _Memory:
    graph: str
    over: MemoryOverTime
    picture: str
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Apart:
    """Fusions that were not made for one reason."""

    reason: str
    count: int
    example: str


def html_of(found: Findings) -> str:
    """The page as text."""
    import jinja2

    folder = files(__package__)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    environment.filters |= {
        "bytes": format_bytes,
        "count": _count,
        "ms": _ms,
        "number": _number,
        "percent": _percent,
        "place": _place,
        "plain": plain_name,
    }
    template = environment.from_string((folder / "page.html").read_text(encoding="utf-8"))
    return template.render(style=(folder / "page.css").read_text(encoding="utf-8"), **_facts(found))


def _facts(found: Findings) -> dict[str, Any]:
    cards, (stages, span) = cards_of(found), stage_rows(found)
    memory, unknown = _memories(found)
    return {
        "found": found,
        "about": _about(found),
        "cards": cards,
        "shares": _shares(found, cards),
        "slower": max(found.eager_ms or 0.0, found.step_ms or 0.0) or 1.0,
        "slowest": max((card.ms or 0.0 for card in cards), default=0.0) or 1.0,
        "whole": layers_of(found, cards),
        "stages": stages,
        "span": span,
        "forms": forms_of(found),
        "passes": Counter(name.split("-", 2)[2] for name in found.watcher.passes).most_common(),
        "memory": memory,
        "unknown": unknown,
        "holders": _HOLDERS,
        "partitions": list(found.watcher.partitions.items()),
        "apart": _apart(found),
        "graphs": _graphs(found),
        "most_rows": _MOST_ROWS,
        "ours": _kernels_ms(cards),
    }


def _about(found: Findings) -> str:
    threads = f"{torch.get_num_threads()} thread{'' if torch.get_num_threads() == 1 else 's'}"
    parts = [f"aotkit {__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}", threads]
    return " · ".join(parts)


def _kernels_ms(cards: list[Card]) -> float:
    return sum(card.ms or 0.0 for card in cards)


def _shares(found: Findings, cards: list[Card]) -> list[tuple[str, float, str]]:
    """The bar of one step: (words, percent of it, class)."""
    if found.profile is None:
        return []
    kernels = sum(card.ms or 0.0 for card in cards if card.is_kernel)
    calls = _kernels_ms(cards) - kernels
    whole = max(found.profile.watched_ms, kernels + calls)
    rest = whole - kernels - calls
    parts = (("kernels", kernels, "kernel"), ("ATen", calls, "aten"), ("Python, autograd, your code", rest, "rest"))
    return [(words, 100 * ms / whole, sort) for words, ms, sort in parts if ms > 0]


def _memories(found: Findings) -> tuple[list[_Memory], list[str]]:
    memories, unknown, programs = [], [], found.watcher.programs
    for name, program in programs.items():
        graph, _, kind = name.partition("-")
        if kind not in ("forward", "inference"):
            continue
        partition = found.watcher.partitions.get(f"{graph}-partition")
        try:
            over = memory_of(program, programs.get(f"{graph}-backward"), _saved(partition))
        except UnknownSize as reason:
            unknown.append(f"{graph}: {reason}")
            continue
        if over.moments:
            held = tuple(kind for kind in KINDS if any(moment.bytes[kind] for moment in over.moments))
            memories.append(_Memory(graph, over, memory_picture(over), held))
    memories.sort(key=lambda each: -each.over.peak.total)
    return memories[:_MOST_MEMORY], unknown


def _saved(partition: PartitionReport | None) -> list[str | None]:
    return [] if partition is None else [None if each.is_input else each.name for each in partition.saved]


def _apart(found: Findings) -> list[_Apart]:
    counts: dict[str, list[str]] = {}
    for graph in found.watcher.graphs:
        for record in graph.report.refused if isinstance(graph.report, LoweringReport) else ():
            counts.setdefault(record.reason, []).append(f"{record.first} and {record.second}")
    found_reasons = [_Apart(reason, len(pairs), pairs[0]) for reason, pairs in counts.items()]
    return sorted(found_reasons, key=lambda each: -each.count)


def _graphs(found: Findings) -> list[tuple[str, str]]:
    """The texts of graphs and of the code around them, as far as there is room."""
    budget, chosen = Budget(_GRAPH_CHARACTERS), []
    for name, text in found.watcher.texts.items():
        if name.endswith((".py", "-metadata")) and not name.endswith("-graph.py"):
            chosen.append((name, budget.take(text)))
    return chosen


def _count(number: float) -> str:
    for size, words in ((1e9, " billion"), (1e6, " million"), (1e3, " thousand")):
        if number >= size:
            return f"{number / size:.1f}{words}"
    return f"{number:.0f}"


def _ms(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f} ms"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.001 else "< 0.1 %"


def _place(line: str) -> str:
    """``file:line: code`` with a short file."""
    file, colon, rest = line.partition(":")
    return f"{short_path(file)}{colon}{rest.partition(':')[0]}" if file else ""
