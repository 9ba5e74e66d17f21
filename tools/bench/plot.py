"""The results as one figure: first call, speed against eager, memory, error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from tools.bench.run import Measurement

COLOURS = {"eager": "#8c8c8c", "inductor": "#d98c3f", "aotkit": "#2f7ebc"}
SPARE_COLOURS = ("#5a9e5a", "#a05a9e", "#b04a4a")


def largest_error(row: Measurement) -> float | None:
    """The largest error of any output or gradient."""
    values = (row.accuracy or {}).get("largest", {}).values()
    return max(values, default=None)


PANELS: tuple[tuple[str, Callable[[Measurement], float | None], bool], ...] = (
    ("first call, cold cache [s]", lambda row: row.first_call_s, True),
    ("speed against eager (higher is faster)", lambda row: row.speedup, False),
    ("peak tensor memory of a step [MiB]", lambda row: row.peak_tensor_mb, False),
    ("largest error against float64", largest_error, True),
)


def plot(rows: Sequence[Measurement], folder: Path) -> None:
    """Write `results.png` and `results.svg`."""
    figure, axes = pyplot.subplots(2, 2, figsize=(14, 9))
    for axis, (title, figure_of, logarithmic) in zip(axes.flat, PANELS, strict=True):
        draw(axis, rows, title, figure_of, logarithmic)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=max(len(labels), 1))
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    for ending in ("png", "svg"):
        figure.savefig(folder / f"results.{ending}", dpi=110)
    pyplot.close(figure)


def draw(
    axis: Axes,
    rows: Sequence[Measurement],
    title: str,
    figure_of: Callable[[Measurement], float | None],
    logarithmic: bool,
) -> None:
    """One panel: a group of bars per (model, mode), a bar per backend; a missing figure leaves a gap."""
    groups = list(dict.fromkeys((row.model, row.mode) for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    spare = iter(SPARE_COLOURS * len(backends))
    width = 0.8 / max(len(backends), 1)
    for number, backend in enumerate(backends):
        colour = COLOURS.get(backend) or next(spare)
        values = {(row.model, row.mode): figure_of(row) for row in rows if row.backend == backend}
        heights = [values.get(group) or 0.0 for group in groups]
        axis.bar([i + number * width for i in range(len(groups))], heights, width, label=backend, color=colour)
    axis.set_title(title, fontsize=10)
    axis.set_xticks(
        [i + 0.4 - width / 2 for i in range(len(groups))], [f"{m}\n{mode}" for m, mode in groups], fontsize=8
    )
    positive = [figure for row in rows if (figure := figure_of(row)) is not None and figure > 0.0]
    if logarithmic and positive:
        axis.set_yscale("log")
        axis.set_ylim(bottom=10.0 ** math.floor(math.log10(min(positive)) - 0.3))
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
