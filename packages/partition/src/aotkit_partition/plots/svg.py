"""The little of SVG that the plots need. Colours follow the reader's light or dark scheme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
.pic{font:12px system-ui,sans-serif;--ink:#1c2430;--faint:#8a94a3;--grid:#e3e7ec;--paper:#fff;--saved:#2f6fdf;
--output:#6b7a90;--activation:#9cc3f5;--tangent:#c9a2e8;--gradient:#34a373;--temporary:#f0a63a;--before:#d1495b;
--forward:#d7e6fb;--again:#fbd9a5;--backward:#d3eee0}
@media(prefers-color-scheme:dark){.pic{--ink:#e6eaf0;--faint:#8a94a3;--grid:#333b47;--paper:#171c24;--forward:#23416b;
--again:#7a5415;--backward:#1f5a43;--activation:#3f6aa3;--output:#93a1b5}}
.pic text{fill:var(--ink)}.pic .faint{fill:var(--faint)}.pic .grid{stroke:var(--grid)}.pic .axis{stroke:var(--faint)}
"""


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of a plot, and the margins around what is drawn to scale."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    @property
    def end(self) -> float:
        """Where the scale ends on the right."""
        return self.width - self.right

    @property
    def floor(self) -> float:
        """Where the scale begins at the bottom."""
        return self.height - self.bottom


def plot(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole SVG document. ``title`` is read out in place of the plot."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pic" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(width)}" height="{number(height)}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def number(value: float) -> str:
    """At most two decimals, none where there are none."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value != int(value) else str(int(value))


def text(x: float, y: float, words: str, anchor: str = "start", faint: bool = False) -> str:
    """A line of words."""
    kind = ' class="faint"' if faint else ""
    return f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, attributes: str = 'class="grid"') -> str:
    """A straight line."""
    return f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" {attributes}/>'


def path(points: Sequence[tuple[float, float]], attributes: str, close: bool = False) -> str:
    """A line through points."""
    steps = " L".join(f"{number(x)} {number(y)}" for x, y in points)
    return f'<path d="M{steps}{"Z" if close else ""}" {attributes}/>'


def hinted(shape: str, hint: str) -> str:
    """A shape that tells more when the pointer rests on it."""
    return f"<g>{shape}<title>{escape(hint)}</title></g>"
