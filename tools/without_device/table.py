"""The page of Triton kernels: ours beside the incumbent's, of all models."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .facts import BANDWIDTH, GraphFacts, KernelFacts

__all__ = ["Facts", "complaints", "gather", "page", "sizes_of"]

Facts = Mapping[str, Sequence[GraphFacts]]  # by side, "ours" and "incumbent": the forward and the backward

_COLUMNS = "| graph | launches | ATen calls | MB | MB of calls | registers (most) | spilling | narrow | µs expected |"
_RANKED = "| graph | kernel | launches | MB read | MB written | MB needed | registers | widths of loads | µs lost |"


def gather(
    models: Iterable[str], folder: Path | None = None, processes: int = 2, *, again: bool = True
) -> dict[str, Facts]:
    """The facts of models, each in a process of its own, which leaves them in ``folder``; unless ``again``, those that
    are there are taken as they are. Raises ``CalledProcessError`` where one fails."""

    def one(model: str) -> Facts:
        with tempfile.TemporaryDirectory() as own:
            file = (folder or Path(own)) / f"{model}.json"
            if again or not file.exists():
                subprocess.run([sys.executable, "-m", "tools.without_device", model, str(file)], check=True)
            found = json.loads(file.read_text())
        return {side: [GraphFacts.of(graph) for graph in graphs] for side, graphs in found.items()}

    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    models = list(models)
    with ThreadPoolExecutor(processes) as pool:
        return dict(zip(models, pool.map(one, models), strict=True))


def page(facts: Mapping[str, Facts], sizes: Mapping[str, str], command: str, version: str) -> str:
    """docs/triton-kernels.md."""
    lines = [HEAD.format(command=command, version=version)]
    lines += ["| model | sizes |", "|---|---|", *(f"| {model} | {sizes[model]} |" for model in facts), ""]
    lines += ["## Totals", "", "Ours / the incumbent's.", "", _COLUMNS, "|---|" + "---:|" * 8]
    lines += [_row(f"{model} {ours.part}", ours, other) for model, ours, other in _pairs(facts)]
    lines += ["", _ratios(facts), "", "## Narrow loads", "", NARROW, "", *_narrow_table(facts)]
    lines += ["", "## Where time is expected to be lost", "", RANKING, "", _RANKED]
    lines += ["|---|---|" + "---:|" * 7]
    ranked = sorted(_kernels(facts), key=lambda pair: -pair[1].lost)[:40]
    lines += [_ranked(graph, kernel) for graph, kernel in ranked]
    return "\n".join(lines) + "\n"


def complaints(facts: Mapping[str, Facts]) -> list[str]:
    """What is worse than the incumbent's, or than it has to be."""
    found = []
    for model, ours, other in _pairs(facts):
        graph = f"{model} {ours.part}"
        if _asked(ours) > _asked(other):
            found.append(f"{graph}: {_asked(ours)} launches and calls, the incumbent has {_asked(other)}")
        if ours.moved > other.moved:
            found.append(f"{graph}: {_mb(ours.moved)} MB, the incumbent moves {_mb(other.moved)}")
        for kernel in ours.kernels:
            found += [f"{graph}: {kernel.name} spills {kernel.spills} bytes"] if kernel.spills else []
            found += [f"{graph}: {kernel.name} loads {line}" for line in kernel.narrow]
    return found


def sizes_of(models: Iterable[str]) -> dict[str, str]:
    """What is built of each model, and on how much it is trained."""
    from .models import MODELS

    return {model: MODELS[model].sizes for model in models}


def _pairs(facts: Mapping[str, Facts]) -> Iterable[tuple[str, GraphFacts, GraphFacts]]:
    for model, sides in facts.items():
        for ours, other in zip(sides["ours"], sides["incumbent"], strict=True):
            yield model, ours, other


def _kernels(facts: Mapping[str, Facts]) -> Iterable[tuple[str, KernelFacts]]:
    for model, ours, _ in _pairs(facts):
        for kernel in ours.kernels:
            yield f"{model} {ours.part}", kernel


def _asked(graph: GraphFacts) -> int:
    return graph.launches + len(graph.calls)


def _row(name: str, ours: GraphFacts, other: GraphFacts) -> str:
    cells = [_cells(graph) for graph in (ours, other)]
    return f"| {name} | " + " | ".join(f"{a} / {b}" for a, b in zip(*cells, strict=True)) + " |"


def _cells(graph: GraphFacts) -> tuple[str, ...]:
    moved = _mb(graph.moved), _mb(graph.called)
    expected = f"{graph.total('seconds') * 1e6:.0f}"
    return str(graph.launches), str(len(graph.calls)), *moved, *_of_compiler(graph), expected


def _of_compiler(graph: GraphFacts) -> tuple[str, str, str]:
    spilling = sum(bool(k.spills) for k in graph.kernels)
    narrow = sum(len(k.narrow) for k in graph.kernels)
    return str(max(k.registers for k in graph.kernels)), str(spilling), str(narrow)


def _ranked(graph: str, kernel: KernelFacts) -> str:
    widths = ", ".join(f"{kernel.widths.count(w)} x {w}" for w in sorted(set(kernel.widths)))
    moved = f"{_mb(kernel.read)} | {_mb(kernel.written)} | {_mb(kernel.needed)}"
    lost = f"{kernel.lost * 1e6:.0f}"
    return f"| {graph} | {kernel.name} | {kernel.launches} | {moved} | {kernel.registers} | {widths} | {lost} |"


def _ratios(facts: Mapping[str, Facts]) -> str:
    pairs = [(ours, other) for _, ours, other in _pairs(facts)]

    def mean(of: Iterable[tuple[float, float]]) -> float:
        logs = [math.log(max(a, 1e-9) / max(b, 1e-9)) for a, b in of]
        return math.exp(sum(logs) / max(1, len(logs)))

    launches = mean((a.launches, b.launches) for a, b in pairs)
    moved = mean((a.moved, b.moved) for a, b in pairs)
    own = mean((a.moved - a.called, b.moved - b.called) for a, b in pairs)
    seconds = mean((a.total("seconds"), b.total("seconds")) for a, b in pairs)
    return (
        f"Geometric means of ours over the incumbent's: launches {launches:.2f}, bytes {moved:.2f}, without those of "
        f"calls {own:.2f}, expected time {seconds:.2f}."
    )


def _narrow_table(facts: Mapping[str, Facts]) -> list[str]:
    found = ["| graph | kernel | bytes a thread |", "|---|---|---:|"]
    odd = 0
    for graph, kernel in _kernels(facts):
        odd += len(kernel.odd)
        found += [f"| {graph} | {kernel.name} | {line.split()[0]} |" for line in kernel.narrow]
    return [f"Ours have {odd} odd loads, and these narrow ones:", "", *found]


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f}" if count < 1e8 else f"{count / 1e6:.0f}"


HEAD = """\
---
hide:
  - toc
---

# Triton kernels

What a training step of these models becomes on a CUDA device, ours and Inductor's in the same run, without a device:
both pipelines see fake CUDA tensors under autocast to bfloat16, and kernels are compiled for sm_90 by Triton {version}.
Written by `{command}`.

Bytes are those of whole sectors of 32 bytes that loads and stores ask for, found by running each kernel's text over
its addresses (Note [What counts as traffic] in `tools/without_device/traffic.py`). Products, attention and convolutions
are calls of ATen on one side and may be kernels on the other, so both count what goes in and what comes out once: *MB
of calls*, which *MB* has too (Note [What calls count] in `tools/without_device/kernels.py`). Where Inductor would
measure several tiles on the device, it has the one that moves least. *Narrow* is defined [below](#narrow-loads).
Times are a model (Note [Expected times] in `tools/without_device/facts.py`), no measurements.

Logits of an odd vocabulary (bert, gpt2, whisper) come back from ours with eager's strides, as a product of ours writes
them; Inductor gives them the padded rows of its product.
"""

NARROW = """\
A load counts here if its widest instruction moves less than eight bytes a thread, though an instance asks for eight
bytes a thread and at least 32 of them lie side by side. It is *odd* if these runs of neighbours begin at multiples of
fewer bytes than eight, and it moves as many as that allows: rows of 30522 halves begin at multiples of four, those of
49 or 51865 at multiples of two, and a load that is not aligned is an error on the device. All others are *narrow*: that
includes rows of which several, one behind the other, make a run that begins well, though each alone does not (49 or 150
halves in a tile of several rows), and pools whose windows overlap: there the neighbours in a window are one axis of the
tile and the windows another, and Triton gives a thread neighbours along one axis. (Of windows that lie side by side
whole rows are loaded.)"""

RANKING = f"""\
The kernels of ours that lose most, by that model: all launches' time beyond what their different elements need at
{BANDWIDTH / 1e12:.0f} TB/s."""
