"""The Pareto front: peak memory against the time of recomputation, one point per plan."""

from __future__ import annotations

from itertools import pairwise

from ..report import FrontPoint, PartitionReport, format_bytes
from .svg import hinted, line, number, path, plot, text

WIDTH, HEIGHT = 960.0, 380.0
LEFT, RIGHT, TOP, BOTTOM = 78.0, 40.0, 28.0, 52.0


def format_seconds(seconds: float) -> str:
    """0.00012 -> '120 us'."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError("unreachable")


def front_svg(report: PartitionReport) -> str:
    """Plans worth choosing from; the plan of this partition is filled.

    Raises:
        ValueError: the report holds no front (``details`` other than ``front``).
    """
    points = report.front
    if not points:
        raise ValueError('the report holds no front; partition with details="front".')
    most_bytes = max(max(point.peak_bytes for point in points), report.peak_bytes_before or 0, 1)
    most_seconds = max(max(point.seconds for point in points), 1e-12)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(peak: float, seconds: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * peak / most_bytes, bottom - (bottom - TOP) * seconds / most_seconds

    parts = []
    for share in range(5):
        x, y = place(most_bytes * share / 4, most_seconds * share / 4)
        parts += [line(LEFT, y, right, y), line(x, TOP, x, bottom)]
        parts.append(text(x, bottom + 18, format_bytes(most_bytes * share / 4), "middle", faint=True))
        parts.append(text(LEFT - 8, y + 4, format_seconds(most_seconds * share / 4), "end", faint=True))
    parts.append(text((LEFT + right) / 2, HEIGHT - 10, "peak memory", "middle"))
    parts.append(text(LEFT, TOP - 12, "estimated time of recomputation"))
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
    return plot(WIDTH, HEIGHT, f"front of {len(points)} plans: peak memory against recomputation", parts)


def _dot(point: FrontPoint, x: float, y: float) -> str:
    radius, fill = (6, "var(--saved)") if point.chosen else (4, "var(--paper)")
    place = f'cx="{number(x)}" cy="{number(y)}" r="{radius}"'
    shape = f'<circle {place} fill="{fill}" stroke="var(--saved)" stroke-width="1.5"/>'
    words = f"{point.label}: peak {format_bytes(point.peak_bytes)}, saved {format_bytes(point.saved_bytes)}, "
    return hinted(shape, words + f"recomputation {format_seconds(point.seconds)}")
