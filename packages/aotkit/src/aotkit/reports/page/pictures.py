"""The picture of memory over time: an SVG without words, so that it may be stretched to any width."""

from __future__ import annotations

from aotkit_inductor_lower.launch_plan.facts import KINDS, MemoryOverTime

__all__ = ["memory_picture"]

_WIDTH, _HEIGHT = 1000.0, 240.0
_COLUMNS = 500  # more moments than this are drawn by the maximum of several


def memory_picture(memory: MemoryOverTime) -> str:
    """Stacked areas by kind; the backward's begin is a line, the peak another."""
    moments = memory.moments
    group = max(1, -(-len(moments) // _COLUMNS))
    chosen = [
        max(moments[first : first + group], key=lambda moment: moment.total) for first in range(0, len(moments), group)
    ]
    most, step = max(memory.peak.total, 1), _WIDTH / len(chosen)
    below, parts = [0.0] * len(chosen), []
    for kind in KINDS:
        above = [low + moment.bytes[kind] for low, moment in zip(below, chosen, strict=True)]
        if above != below:
            upper = _stairs(above, most, step)
            lower = " ".join(reversed(_stairs(below, most, step)))
            parts.append(f'<polygon class="m-{kind.replace(" ", "-")}" points="{" ".join(upper)} {lower}"/>')
        below = above
    at = memory.moments.index(memory.peak) / len(moments) * _WIDTH
    lines = [f'<line class="peak" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{_HEIGHT:g}"/>']
    if memory.backward < len(moments):
        begin = memory.backward / len(moments) * _WIDTH
        lines.append(f'<line class="turn" x1="{begin:.1f}" x2="{begin:.1f}" y1="0" y2="{_HEIGHT:g}"/>')
    inner = "".join([*parts, *lines])
    label = "Memory over one step, by kind"
    box = f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" aria-label="{label}"'
    return f"<svg {box}>{inner}</svg>"


def _stairs(amounts: list[float], most: float, step: float) -> list[str]:
    points = []
    for place, amount in enumerate(amounts):
        y = _HEIGHT * (1 - amount / most)
        points += [f"{place * step:.1f},{y:.1f}", f"{(place + 1) * step:.1f},{y:.1f}"]
    return points
