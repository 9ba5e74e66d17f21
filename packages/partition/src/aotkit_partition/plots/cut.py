"""The cut drawn on the graph: the forward runs down on the left, the backward up on the right, saved values cross.

An op stands at the height of its place in its graph, so values saved early cross high and values saved late cross low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log2

import torch.fx

from ..partition import Partition
from ..report import format_bytes
from .svg import hinted, line, number, plot, text

NAMED_ROW, PLAIN_ROW = 20.0, 5.0
MOST_NAMED = 400  # ops on a side up to which every op has a row of NAMED_ROW
SMALL_ROW = 11.0  # the least height of a name: on a side whose rows are lower only some ops are named


@dataclass(frozen=True, slots=True)
class _Columns:
    """Two columns of boxes with a gap between them. ``letters``: of a name, at most."""

    box: float
    gap: float
    margin: float
    top: float
    letters: int

    @property
    def right(self) -> float:
        """Where the boxes of the backward begin."""
        return self.margin + self.box + self.gap

    @property
    def width(self) -> float:
        """Of the whole picture."""
        return 2 * (self.box + self.margin) + self.gap


WIDE = _Columns(box=300.0, gap=328.0, margin=16.0, top=64.0, letters=40)
NARROW = _Columns(box=122.0, gap=88.0, margin=4.0, top=82.0, letters=16)


def cut_svg(result: Partition, narrow: bool = False) -> str:
    """Both graphs, the values that cross from one to the other, and what runs twice. ``narrow``: as wide as a phone."""
    columns = NARROW if narrow else WIDE
    forward = [node for node in result.forward.graph.nodes if node.op not in ("placeholder", "output")]
    backward = [node for node in result.backward.graph.nodes if node.op not in ("placeholder", "output")]
    longest = max(len(forward), len(backward), 1)
    tall = (NAMED_ROW if longest <= MOST_NAMED else PLAIN_ROW) * longest
    rows = tall / max(len(forward), 1), tall / max(len(backward), 1)
    top, bottom, middle = columns.top, columns.top + tall, columns.width / 2
    left_of = {node.name: top + rows[0] * place for place, node in enumerate(forward)}
    right_of = {node.name: top + rows[1] * (len(backward) - 1 - place) for place, node in enumerate(backward)}
    again = {op.name for op in result.report.recomputed}
    parts = [
        *_headings(result, columns),
        line(middle, top - 10, middle, bottom, 'class="axis" stroke-dasharray="4 4"'),
        *_crossings(result, left_of, right_of, rows, columns),
        *(_box(node, columns.margin, columns.box, left_of[node.name], rows[0], "forward") for node in forward),
        *(
            _box(
                node,
                columns.right,
                columns.box,
                right_of[node.name],
                rows[1],
                "again" if node.name in again else "backward",
            )
            for node in backward
        ),
        *_names(columns.margin, left_of, rows[0], set(result.saved_names), columns.letters),
        *_names(columns.right, right_of, rows[1], again, columns.letters),
    ]
    title = f"the cut: {len(result.saved_names)} values cross, {len(again)} ops run twice"
    return plot(columns.width, bottom + 16, title, parts)


def _headings(result: Partition, columns: _Columns) -> list[str]:
    saved, right = format_bytes(result.report.activation_bytes), columns.right
    return [
        text(columns.margin, 22, "forward, downwards"),
        text(right, 22, "backward, upwards"),
        text(columns.width / 2, 22 if columns is WIDE else columns.top - 18, f"{saved} cross", "middle"),
        f'<rect x="{number(right)}" y="34" width="12" height="12" rx="2" fill="var(--again)"/>',
        text(right + 17, 44, "recomputed"),
    ]


def _box(node: torch.fx.Node, x: float, width: float, y: float, row: float, colour: str) -> str:
    named = row >= NAMED_ROW
    height = min(row, NAMED_ROW) - 4 if named else row * 0.8
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    shape = f'<rect {place} rx="3" fill="var(--{colour})"/>'
    return hinted(shape, f"{node.name} = {node.target}{_described(node)}")


def _names(x: float, places: dict[str, float], row: float, first: set[str], letters: int) -> list[str]:
    """The names of ops, over their boxes. Where rows are low, as many as there is room for: ``first`` those that cross
    or are recomputed, then others in the gaps between them."""
    taken: dict[int, list[float]] = {}
    parts = []
    for name, y in sorted(places.items(), key=lambda item: (item[0] not in first, item[1])):
        slot = int(y // SMALL_ROW)
        near = [other for each in (slot - 1, slot, slot + 1) for other in taken.get(each, ())]
        if any(abs(y - other) < SMALL_ROW for other in near):
            continue
        taken.setdefault(slot, []).append(y)
        size = 12 if row >= NAMED_ROW else 9
        middle = y + (min(row, NAMED_ROW) - 4 if row >= NAMED_ROW else row * 0.8) / 2
        words = f'<text x="{number(x + 8)}" y="{number(middle + size * 0.35)}" text-anchor="start" font-size="{size}">'
        parts.append(f"{words}{escape(_shortened(name, letters))}</text>")
    return parts


def _shortened(name: str, letters: int) -> str:
    """With its end, whose number tells it from others."""
    half = letters // 2
    return name if len(name) <= letters else f"{name[: half - 1]}…{name[half - letters :]}"


def _described(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f" {str(value.dtype).removeprefix('torch.')}[{', '.join(str(size) for size in value.shape)}]"


def _crossings(
    result: Partition,
    left_of: dict[str, float],
    right_of: dict[str, float],
    rows: tuple[float, float],
    columns: _Columns,
) -> list[str]:
    """One curve per saved value, from where it is made to where the backward first uses it."""
    entering = result.backward.graph.find_nodes(op="placeholder")[: len(result.saved_names)]
    above = columns.top - 14
    first_use = {node.name: _first_use(node, right_of, above) for node in entering}
    described = {value.name: value for value in result.report.saved}
    parts = []
    inputs = sum(value.is_input for value in described.values())
    start, end, bend = columns.right - columns.gap, columns.right, columns.gap / 2
    for name in result.saved_names:
        value = described[name]
        y1, y2 = left_of.get(name, above) + min(rows[0], 16) / 2, first_use[name] + min(rows[1], 16) / 2
        thickness = 1.0 if value.is_input or value.bytes == 0 else 1 + log2(1 + value.bytes / 1024) / 4
        colour = "var(--faint)" if value.is_input else "var(--saved)"
        dash = ' stroke-dasharray="3 3"' if value.is_input else ""
        opacity = min(0.75, 15 / inputs) if value.is_input else 0.75  # many lines from one place would be a black spot
        curve = (
            f'<path d="M{number(start)} {number(y1)}C{number(start + bend)} {number(y1)} {number(end - bend)} '
            f'{number(y2)} {number(end)} {number(y2)}" fill="none" stroke="{colour}" '
            f'stroke-width="{number(thickness)}" opacity="{opacity:.2g}"{dash}/>'
        )
        what = "an input" if value.is_input else format_bytes(value.bytes)
        parts.append(hinted(curve, f"{name}: {what}, {value.op} {value.source}"))
    return parts


def _first_use(node: torch.fx.Node, right_of: dict[str, float], above: float) -> float:
    """The lowest user; saved gradients, which nothing in the backward uses, leave at the top."""
    heights: Sequence[float] = [right_of[user.name] for user in node.users if user.name in right_of]
    return max(heights, default=above)
