"""Pictures of the documentation: the pipeline, and charts of the tables in docs/benchmarks.md.

    python -m tools.site_pictures [--check]

They are SVG files in docs/assets, light or dark as the reader's system is. The site takes them into its pages, where
the colours are those of its own scheme (docs/assets/site.css). Nothing is measured here: a chart shows its table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tools.workspace import ROOT

__all__ = ["STYLE", "chart", "main", "pictures", "pipeline", "read_table"]

ASSETS = ROOT / "docs" / "assets"

#: Of a file by itself; on the site the same classes have the colours of the scheme.
STYLE = """<style>
.ink{fill:#1f2430}.soft{fill:#5b6472}.line{stroke:#8a93a3;fill:none}.card{fill:#f3f5f9;stroke:#c6ccd8}
.ours{fill:#3f51b5}.other{fill:#a4adbd}.base{fill:#d9dee7}.mark{fill:#3f51b5}
@media (prefers-color-scheme:dark){.ink{fill:#e6e9f0}.soft{fill:#a9b2c3}.line{stroke:#6f7a8d}
.card{fill:#262b36;stroke:#464e5e}.ours{fill:#8c9eff}.other{fill:#6f7a8d}.base{fill:#3d4452}.mark{fill:#8c9eff}}
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
</style>"""

#: What comes out of each stage of a compile, and the package that it is in.
STEPS = (
    ("Python function", "or module", ""),
    ("functional graph", "forward and backward", "functionalize, aot-trace"),
    ("two graphs", "saved or recomputed", "partition"),
    ("fused loops", "loop IR", "inductor-lower"),
    ("kernels", "LLVM or Triton", "inductor-lower"),
    ("callable", "as eager would", "runtime-wrappers"),
)


@dataclass(frozen=True, slots=True)
class Series:
    """Bars of one colour: ``kind`` is a CSS class, ``values`` one for each row of the chart."""

    name: str
    kind: str
    values: tuple[float, ...]


def _svg(width: int, height: int, label: str, body: Sequence[str]) -> str:
    place = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {place}>'
    return "\n".join([head, STYLE, *body, "</svg>"]) + "\n"


def _text(
    x: float, y: float, words: str, kind: str = "ink", size: int = 14, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}{weight}>{escape(words)}</text>'


def pipeline(tall: bool) -> str:
    """The stages of a compile, side by side or one below the other."""
    label = "From a Python function through graphs and loops to kernels and a callable; a cache beside all stages"
    if tall:
        return _tall_pipeline(label)
    width, box, gap, top = 1080, 160, 24, 14
    body = []
    for number, (name, detail, package) in enumerate(STEPS):
        x = number * (box + gap)
        body.append(f'<rect class="card" x="{x + 1}" y="{top}" width="{box - 2}" height="70" rx="10"/>')
        body.append(_text(x + box / 2, top + 31, name, size=15, anchor="middle", bold=True))
        body.append(_text(x + box / 2, top + 52, detail, "soft", 13, "middle"))
        body += [_text(x + box / 2, top + 92, part, "mark", 12, "middle") for part in [package] if part]
        if number:
            body.append(
                f'<path class="line" stroke-width="2" d="M{x - gap + 4} {top + 35}h{gap - 12}m-6 -5l6 5l-6 5"/>'
            )
    y = top + 112
    body.append(f'<rect class="card" x="1" y="{y}" width="{width - 2}" height="40" rx="10"/>')
    words = "cache: signed, no pickle. What was compiled once is loaded, with no stage run"
    body.append(_text(width / 2, y + 25, words, "soft", 14, "middle"))
    return _svg(width, y + 52, label, body)


def _tall_pipeline(label: str) -> str:
    width, height, gap, body = 360, 58, 24, []
    for number, (name, detail, package) in enumerate(STEPS):
        y = 2 + number * (height + gap)
        body.append(f'<rect class="card" x="1" y="{y}" width="{width - 2}" height="{height}" rx="10"/>')
        body.append(_text(16, y + 25, name, size=16, bold=True))
        body.append(_text(16, y + 45, detail, "soft", 14))
        body.append(_text(width - 16, y + 25, package, "mark", 12, "end"))
        if number:
            body.append(
                f'<path class="line" stroke-width="2" d="M{width / 2:g} {y - gap + 3}v{gap - 8}m-5 -6l5 6l5 -6"/>'
            )
    y = 2 + len(STEPS) * (height + gap)
    body.append(f'<rect class="card" x="1" y="{y}" width="{width - 2}" height="{height}" rx="10"/>')
    body.append(_text(16, y + 25, "cache beside all stages", size=15, bold=True))
    body.append(_text(16, y + 45, "signed, no pickle; a hit runs no stage", "soft", 14))
    return _svg(width, y + height + 2, label, body)


def chart(
    title: str, unit: str, rows: Sequence[str], series: Sequence[Series], digits: int, mark: float | None = None
) -> str:
    """Horizontal bars, a group for each row. ``mark``: a line at this value."""
    width, left, bar, pad = 440, 64, 15, 12
    span = width - left - 58
    most = max(value for each in series for value in each.values) or 1.0
    top, group = 74, bar * len(series) + pad
    body = [_text(0, 18, title, size=16, bold=True), _text(0, 38, unit, "soft", 13)]
    x = 0.0
    for each in series:
        body.append(f'<rect class="{each.kind}" x="{x:g}" y="48" width="12" height="12" rx="2"/>')
        body.append(_text(x + 17, 59, each.name, "soft", 13))
        x += 34 + 7.2 * len(each.name)
    for number, row in enumerate(rows):
        y = top + number * group
        body.append(_text(left - 8, y + bar * len(series) / 2 + 5, row, size=14, anchor="end"))
        for place, each in enumerate(series):
            size = span * each.values[number] / most
            at = y + place * bar
            body.append(f'<rect class="{each.kind}" x="{left}" y="{at}" width="{size:.1f}" height="{bar - 3}" rx="2"/>')
            body.append(_text(left + size + 6, at + bar - 4, f"{each.values[number]:.{digits}f}", "soft", 12))
    height = top + len(rows) * group
    if mark is not None:
        middle = left + span * mark / most
        body.append(f'<path class="line" stroke-dasharray="3 3" d="M{middle:.1f} {top - 6}V{height - pad + 4}"/>')
    label = f"{title}, {unit}: " + "; ".join(
        f"{row} " + ", ".join(f"{each.name} {each.values[number]:.{digits}f}" for each in series)
        for number, row in enumerate(rows)
    )
    return _svg(width, height, label, body)


def read_table(page: str, heading: str) -> list[dict[str, str]]:
    """The first table under a heading of a page. Raises ``ValueError`` if there is none."""
    _, found, rest = page.partition(f"\n## {heading}\n")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    if not found or len(lines) < 3:
        raise ValueError(f"there is no table under {heading!r}")
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    count = next((n for n, line in enumerate(lines[2:], 2) if re.fullmatch(r"[|:\- ]+", line)), len(lines) + 1) - 1
    return [dict(zip(split[0], row, strict=True)) for row in split[2:count]]


def _figures(page: str, mode: str, column: str) -> tuple[list[str], Mapping[str, tuple[float, ...]]]:
    """Of the five models, by backend."""
    rows = [row for row in read_table(page, "Figures") if row["mode"] == mode]
    models = list(dict.fromkeys(row["model"] for row in rows))
    backends = dict.fromkeys(row["backend"] for row in rows)
    values = {(row["model"], row["backend"]): float(row[column]) for row in rows}
    return models, {name: tuple(values[model, name] for model in models) for name in backends}


def _chart_of(
    page: str, mode: str, column: str, words: tuple[str, str], digits: int, eager: bool, mark: float | None
) -> str:
    models, found = _figures(page, mode, column)
    series = [Series("aotkit", "ours", found["aotkit"]), Series("Inductor", "other", found["inductor"])]
    if eager:
        series.append(Series("eager", "base", found["eager"]))
    return chart(*words, models, series, digits, mark)


def pictures(page: str) -> dict[str, str]:
    """Every picture by the name of its file, from the text of docs/benchmarks.md."""
    speed = "steps in the time of one of eager's; longer is better"
    return {
        "pipeline.svg": pipeline(tall=False),
        "pipeline-tall.svg": pipeline(tall=True),
        "inference.svg": _chart_of(page, "infer", "× eager", ("Inference", speed), 2, False, 1.0),
        "training.svg": _chart_of(page, "train", "× eager", ("Training", speed), 2, False, 1.0),
        "first-call.svg": _chart_of(
            page,
            "train",
            "first call s",
            ("First training step", "seconds, caches empty; shorter is better"),
            1,
            False,
            None,
        ),
        "memory.svg": _chart_of(
            page,
            "train",
            "peak MB",
            ("Peak memory in training", "MB, weights left out; shorter is better"),
            0,
            True,
            None,
        ),
    }


def main(arguments: Sequence[str] | None = None, assets: Path = ASSETS) -> int:
    """Write the pictures, or with ``--check`` say which are not those of the tables."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    wrong = []
    for name, text in pictures(page).items():
        path = assets / name
        if "--check" in (sys.argv[1:] if arguments is None else arguments):
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                wrong.append(name)
        else:
            path.write_text(text, encoding="utf-8")
    if wrong:
        print(f"docs/assets: {', '.join(wrong)} not up to date; run python -m tools.site_pictures")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
