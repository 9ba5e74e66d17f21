"""The memory timeline: what fills memory at each step, stacked by kind, with the peak marked."""

from __future__ import annotations

from collections.abc import Sequence

from ..report import PartitionReport, format_bytes
from ..timeline import MemoryTimeline
from .svg import Frame, hinted, line, number, path, plot, text

KINDS = {
    "output": "outputs",
    "saved": "saved",
    "activation": "forward only",
    "tangent": "tangents",
    "gradient": "gradients",
    "temporary": "temporaries",
}
WIDE = Frame(960.0, 384.0, left=78.0, right=20.0, top=68.0, bottom=46.0)
NARROW = Frame(340.0, 360.0, left=74.0, right=6.0, top=120.0, bottom=46.0)
WORD = 6.6  # about what a letter of a label is wide
COLUMNS = 400  # more steps than this are drawn by the maximum of several


def memory_svg(report: PartitionReport, narrow: bool = False) -> str:
    """Memory over forward, loss and backward, against the peak without recomputation. ``narrow``: as wide as a phone.

    Raises:
        ValueError: the report holds no timeline (``details="decisions"``).
    """
    timeline, frame = report.timeline, NARROW if narrow else WIDE
    if timeline is None:
        raise ValueError('the report holds no memory timeline; partition with details="memory".')
    highest = max(timeline.peak_bytes, report.peak_bytes_before or 0, 1)

    def height(count: float) -> float:
        return frame.floor - (frame.floor - frame.top) * count / highest

    parts = _axes(timeline, highest, frame)
    below = [0] * len(timeline.steps)
    for kind, words in KINDS.items():
        amounts = _bytes_of_kind(timeline, kind)
        if not any(amounts):
            continue
        above = [one + other for one, other in zip(below, amounts, strict=True)]
        outline = [*_staircase(timeline, above, height, frame), *reversed(_staircase(timeline, below, height, frame))]
        shape = path(outline, f'fill="var(--{kind})" stroke="none"', close=True)
        parts.append(hinted(shape, f"{words}: at most {format_bytes(max(amounts))}"))
        below = above
    if report.before is not None:
        earlier = _staircase(report.before, report.before.live_bytes, height, frame)
        shape = path(earlier, 'fill="none" stroke="var(--before)" stroke-width="1.5" stroke-dasharray="5 3"')
        parts.append(hinted(shape, f"without recomputation: peak {format_bytes(report.before.peak_bytes)}"))
    parts += _peak_mark(timeline, height(timeline.peak_bytes), frame)
    parts += _legend([kind for kind in KINDS if any(_bytes_of_kind(timeline, kind))], report.before is not None, frame)
    return plot(frame.width, frame.height, f"memory over time, peak {format_bytes(timeline.peak_bytes)}", parts)


def _axes(timeline: MemoryTimeline, highest: int, frame: Frame) -> list[str]:
    parts = []
    for share in range(5):
        y = frame.floor - (frame.floor - frame.top) * share / 4
        parts += [
            line(frame.left, y, frame.end, y),
            text(frame.left - 8, y + 4, format_bytes(highest * share / 4), "end", faint=True),
        ]
    loss = _across(timeline, timeline.loss, frame)
    parts.append(line(loss, frame.top, loss, frame.floor, 'class="axis" stroke-dasharray="2 3"'))
    parts.append(text((frame.left + loss) / 2, frame.height - 24, "forward", "middle"))
    parts.append(text(loss, frame.height - 8, "loss", "middle", faint=True))
    parts.append(text((loss + frame.end) / 2, frame.height - 24, "backward", "middle"))
    return parts


def _across(timeline: MemoryTimeline, step: float, frame: Frame) -> float:
    """Horizontal place of a step; forward and backward get widths of their own, so that two timelines compare."""
    room, backward = frame.end - frame.left, len(timeline.steps) - timeline.loss
    middle = frame.left + room * 0.4
    if step <= timeline.loss:
        return frame.left + (middle - frame.left) * step / max(timeline.loss, 1)
    return middle + (frame.end - middle) * (step - timeline.loss) / max(backward, 1)


def _staircase(
    timeline: MemoryTimeline, amounts: Sequence[int], height: object, frame: Frame
) -> list[tuple[float, float]]:
    assert callable(height)
    group = max(1, len(amounts) // COLUMNS)
    points: list[tuple[float, float]] = []
    for start in range(0, len(amounts), group):
        y = height(max(amounts[start : start + group]))
        end = min(start + group, len(amounts))
        points += [(_across(timeline, start, frame), y), (_across(timeline, end, frame), y)]
    return points


def _bytes_of_kind(timeline: MemoryTimeline, kind: str) -> list[int]:
    pieces = tuple(piece for piece in timeline.allocations if piece.kind == kind)
    return list(MemoryTimeline(timeline.steps, timeline.loss, pieces).live_bytes)


def _peak_mark(timeline: MemoryTimeline, y: float, frame: Frame) -> list[str]:
    step = timeline.peak_step
    x = _across(timeline, step + 0.5, frame)
    largest = ", ".join(f"{piece.name} ({format_bytes(piece.bytes)})" for piece in timeline.live_at(step)[:6])
    dot = f'<circle cx="{number(x)}" cy="{number(y)}" r="4" fill="var(--before)" stroke="var(--paper)"/>'
    words = f"peak {format_bytes(timeline.peak_bytes)} at {timeline.steps[step]}"
    shown = words if WORD * len(words) <= frame.width else words.partition(" at ")[0]
    # Above the plot, where no line is; a thin line leads down to the dot.
    half = WORD * len(shown) / 2
    label = text(min(max(x, half), frame.end - half), frame.top - 12, shown, "middle")
    lead = line(x, frame.top - 6, x, y - 4, 'stroke="var(--before)" stroke-width="1" opacity="0.6"')
    return [lead, hinted(dot, f"{words}; alive: {largest}"), label]


def _legend(kinds: Sequence[str], before: bool, frame: Frame) -> list[str]:
    """Keys beside each other, in as many rows as the width needs."""
    keys = [(KINDS[kind], f'rx="2" fill="var(--{kind})"') for kind in kinds]
    begin = frame.left if frame is WIDE else 4.0
    parts, x, y = [], begin, 8.0
    for words, look in keys + [("without recomputation", "")] * before:
        if x + 23 + 6.8 * len(words) > frame.end and x > begin:
            x, y = begin, y + 20
        if look:
            parts.append(f'<rect x="{number(x)}" y="{number(y)}" width="12" height="12" {look}/>')
            parts.append(text(x + 17, y + 10, words))
        else:
            dashes = 'stroke="var(--before)" stroke-width="1.5" stroke-dasharray="5 3"'
            parts += [line(x, y + 6, x + 18, y + 6, dashes), text(x + 23, y + 10, words)]
        x += 34 + 6.8 * len(words)
    return parts
