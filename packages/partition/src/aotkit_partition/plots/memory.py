"""The memory timeline: what fills memory at each step, stacked by kind, with the peak marked."""

from __future__ import annotations

from collections.abc import Sequence

from ..report import PartitionReport, format_bytes
from ..timeline import MemoryTimeline
from .svg import hinted, line, number, path, plot, text

KINDS = {
    "output": "outputs",
    "saved": "saved",
    "activation": "forward only",
    "tangent": "tangents",
    "gradient": "gradients",
    "temporary": "temporaries",
}
WIDTH, HEIGHT = 960.0, 384.0
LEFT, RIGHT, TOP, BOTTOM = 78.0, 20.0, 68.0, 46.0
WORD = 6.6  # about what a letter of a label is wide
COLUMNS = 400  # more steps than this are drawn by the maximum of several


def memory_svg(report: PartitionReport) -> str:
    """Memory over forward, loss and backward, against the peak without recomputation.

    Raises:
        ValueError: the report holds no timeline (``details="decisions"``).
    """
    timeline = report.timeline
    if timeline is None:
        raise ValueError('the report holds no memory timeline; partition with details="memory".')
    highest = max(timeline.peak_bytes, report.peak_bytes_before or 0, 1)
    bottom = HEIGHT - BOTTOM

    def height(count: float) -> float:
        return bottom - (bottom - TOP) * count / highest

    parts = _axes(timeline, highest)
    below = [0] * len(timeline.steps)
    for kind, words in KINDS.items():
        amounts = _bytes_of_kind(timeline, kind)
        if not any(amounts):
            continue
        above = [one + other for one, other in zip(below, amounts, strict=True)]
        outline = [*_staircase(timeline, above, height), *reversed(_staircase(timeline, below, height))]
        shape = path(outline, f'fill="var(--{kind})" stroke="none"', close=True)
        parts.append(hinted(shape, f"{words}: at most {format_bytes(max(amounts))}"))
        below = above
    if report.before is not None:
        earlier = _staircase(report.before, report.before.live_bytes, height)
        shape = path(earlier, 'fill="none" stroke="var(--before)" stroke-width="1.5" stroke-dasharray="5 3"')
        parts.append(hinted(shape, f"without recomputation: peak {format_bytes(report.before.peak_bytes)}"))
    parts += _peak_mark(timeline, height(timeline.peak_bytes))
    parts += _legend([kind for kind in KINDS if any(_bytes_of_kind(timeline, kind))], report.before is not None)
    return plot(WIDTH, HEIGHT, f"memory over time, peak {format_bytes(timeline.peak_bytes)}", parts)


def _axes(timeline: MemoryTimeline, highest: int) -> list[str]:
    bottom, parts = HEIGHT - BOTTOM, []
    for share in range(5):
        y = bottom - (bottom - TOP) * share / 4
        parts += [
            line(LEFT, y, WIDTH - RIGHT, y),
            text(LEFT - 8, y + 4, format_bytes(highest * share / 4), "end", faint=True),
        ]
    loss = _across(timeline, timeline.loss)
    parts.append(line(loss, TOP, loss, bottom, 'class="axis" stroke-dasharray="2 3"'))
    parts.append(text((LEFT + loss) / 2, HEIGHT - 24, "forward", "middle"))
    parts.append(text(loss, HEIGHT - 8, "loss", "middle", faint=True))
    parts.append(text((loss + WIDTH - RIGHT) / 2, HEIGHT - 24, "backward", "middle"))
    return parts


def _across(timeline: MemoryTimeline, step: float) -> float:
    """Horizontal place of a step; forward and backward get widths of their own, so that two timelines compare."""
    room, backward = WIDTH - LEFT - RIGHT, len(timeline.steps) - timeline.loss
    middle = LEFT + room * 0.4
    if step <= timeline.loss:
        return LEFT + (middle - LEFT) * step / max(timeline.loss, 1)
    return middle + (WIDTH - RIGHT - middle) * (step - timeline.loss) / max(backward, 1)


def _staircase(timeline: MemoryTimeline, amounts: Sequence[int], height: object) -> list[tuple[float, float]]:
    assert callable(height)
    group = max(1, len(amounts) // COLUMNS)
    points: list[tuple[float, float]] = []
    for start in range(0, len(amounts), group):
        y = height(max(amounts[start : start + group]))
        end = min(start + group, len(amounts))
        points += [(_across(timeline, start), y), (_across(timeline, end), y)]
    return points


def _bytes_of_kind(timeline: MemoryTimeline, kind: str) -> list[int]:
    pieces = tuple(piece for piece in timeline.allocations if piece.kind == kind)
    return list(MemoryTimeline(timeline.steps, timeline.loss, pieces).live_bytes)


def _peak_mark(timeline: MemoryTimeline, y: float) -> list[str]:
    step = timeline.peak_step
    x = _across(timeline, step + 0.5)
    largest = ", ".join(f"{piece.name} ({format_bytes(piece.bytes)})" for piece in timeline.live_at(step)[:6])
    dot = f'<circle cx="{number(x)}" cy="{number(y)}" r="4" fill="var(--before)" stroke="var(--paper)"/>'
    words = f"peak {format_bytes(timeline.peak_bytes)} at {timeline.steps[step]}"
    # Above the plot, where no line is; a thin line leads down to the dot.
    half = WORD * len(words) / 2
    label = text(min(max(x, LEFT + half), WIDTH - RIGHT - half), TOP - 12, words, "middle")
    lead = line(x, TOP - 6, x, y - 4, 'stroke="var(--before)" stroke-width="1" opacity="0.6"')
    return [lead, hinted(dot, f"{words}; alive: {largest}"), label]


def _legend(kinds: Sequence[str], before: bool) -> list[str]:
    parts, x = [], LEFT
    for kind in kinds:
        parts.append(f'<rect x="{number(x)}" y="8" width="12" height="12" rx="2" fill="var(--{kind})"/>')
        parts.append(text(x + 17, 18, KINDS[kind]))
        x += 34 + 6.8 * len(KINDS[kind])
    if before:
        parts.append(line(x, 14, x + 18, 14, 'stroke="var(--before)" stroke-width="1.5" stroke-dasharray="5 3"'))
        parts.append(text(x + 23, 18, "without recomputation"))
    return parts
