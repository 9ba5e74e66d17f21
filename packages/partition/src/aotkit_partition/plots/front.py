"""The Pareto front: peak memory against the time of recomputation, one point per plan."""

from __future__ import annotations

from itertools import pairwise

from ..report import FrontPoint, PartitionReport, format_bytes
from .svg import Frame, hinted, line, number, path, plot, text

WIDE = Frame(960.0, 380.0, left=78.0, right=40.0, top=28.0, bottom=52.0)
NARROW = Frame(340.0, 300.0, left=66.0, right=34.0, top=28.0, bottom=52.0)


def format_seconds(seconds: float) -> str:
    """0.00012 -> '120 us'."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError("unreachable")


def front_svg(report: PartitionReport, narrow: bool = False) -> str:
    """Plans worth choosing from; the plan of this partition is filled. ``narrow``: as wide as a phone.

    Raises:
        ValueError: the report holds no front (``details`` other than ``front``).
    """
    points, frame = report.front, NARROW if narrow else WIDE
    if not points:
        raise ValueError('the report holds no front; partition with details="front".')
    least_bytes, most_bytes = _bytes_shown(report)
    most_seconds = max(max(point.seconds for point in points), 1e-12)

    def place(peak: float, seconds: float) -> tuple[float, float]:
        across, up = (peak - least_bytes) / (most_bytes - least_bytes), seconds / most_seconds
        return frame.left + (frame.end - frame.left) * across, frame.floor - (frame.floor - frame.top) * up

    parts, marks = [], 2 if narrow else 4
    for share in (mark / marks for mark in range(marks + 1)):
        peak, seconds = least_bytes + (most_bytes - least_bytes) * share, most_seconds * share
        x, y = place(peak, seconds)
        parts += [line(frame.left, y, frame.end, y), line(x, frame.top, x, frame.floor)]
        parts.append(text(x, frame.floor + 18, format_bytes(peak), "middle", faint=True))
        parts.append(text(frame.left - 8, y + 4, format_seconds(seconds), "end", faint=True))
    parts.append(text((frame.left + frame.end) / 2, frame.height - 10, "peak memory", "middle"))
    parts.append(text(frame.left, frame.top - 12, "estimated time of recomputation"))
    others = [place(point.peak_bytes, point.seconds) for point in points if not point.chosen]
    stairs = [corner for (x1, y1), (x2, _) in pairwise(others) for corner in ((x1, y1), (x2, y1))]
    if others:
        parts.append(path([*stairs, others[-1]], 'fill="none" stroke="var(--saved)" stroke-width="1.2"'))
    parts += [_dot(point, *place(point.peak_bytes, point.seconds)) for point in points]
    if report.peak_bytes_before is not None:
        x, y = place(report.peak_bytes_before, 0)
        cross = (
            f'<path d="M{number(x - 5)} {number(y - 5)}l10 10m0 -10l-10 10" stroke="var(--before)" stroke-width="2"/>'
        )
        parts.append(hinted(cross, f"without recomputation: peak {format_bytes(report.peak_bytes_before)}"))
    return plot(frame.width, frame.height, f"front of {len(points)} plans: peak memory against recomputation", parts)


def _bytes_shown(report: PartitionReport) -> tuple[float, float]:
    """From where to where: from 0, unless that leaves more than a third of the width without a point."""
    peaks = [point.peak_bytes for point in report.front]
    least, most = min(peaks), max(*peaks, report.peak_bytes_before or 0, 1)
    if least == most or least <= most / 3:
        return 0.0, float(most)
    return least - 0.1 * (most - least), float(most)


def _dot(point: FrontPoint, x: float, y: float) -> str:
    radius, fill = (6, "var(--saved)") if point.chosen else (4, "var(--paper)")
    place = f'cx="{number(x)}" cy="{number(y)}" r="{radius}"'
    shape = f'<circle {place} fill="{fill}" stroke="var(--saved)" stroke-width="1.5"/>'
    words = f"{point.label}: peak {format_bytes(point.peak_bytes)}, saved {format_bytes(point.saved_bytes)}, "
    return hinted(shape, words + f"recomputation {format_seconds(point.seconds)}")
