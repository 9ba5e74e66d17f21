"""The results as a text table, and what they miss."""

from __future__ import annotations

from collections.abc import Sequence

from tools.bench.run import Measurement

HEADER = ("model", "mode", "backend", "first s", "step ms", "x eager", "peak MB", "RSS MB", "err", "err eager", "exact")

#: A training step runs at least at this speed against eager; a cold first call takes at most this share of the
#: Inductor's.
LEAST_SPEEDUP = 0.97
FIRST_CALL_SHARE = 1 / 3


def number(value: float | None, pattern: str) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else format(value, pattern)


def cells(row: Measurement) -> tuple[str, ...]:
    """One line of the table."""
    accuracy = row.accuracy or {}
    largest = max(accuracy.get("largest", {}).values(), default=None)
    eager = max(accuracy.get("largest_eager", {}).values(), default=None)
    exact = "failed" if row.error else ("-" if not accuracy else ("yes" if accuracy["ok"] else "NO"))
    ties = accuracy.get("ties", 0)
    if exact != "failed" and ties:
        exact += f", {ties} {'tie' if ties == 1 else 'ties'}"
    return (
        row.model,
        row.mode,
        row.backend,
        number(row.first_call_s, ".2f"),
        number(row.steady_ms, ".2f"),
        number(row.speedup, ".2f"),
        number(row.peak_tensor_mb, ".1f"),
        number(row.peak_resident_mb, ".0f"),
        number(largest, ".1e"),
        number(eager, ".1e"),
        exact,
    )


def table(rows: Sequence[Measurement]) -> str:
    """Columns of equal width; text to the left, figures to the right."""
    lines = [HEADER, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column < 3 else cell.rjust(width) for column, (cell, width) in enumerate(zipped))
        for line in lines
        for zipped in [list(zip(line, widths, strict=True))]
    )


def acceptance(rows: Sequence[Measurement]) -> list[str]:
    """A sentence for each figure of aotkit that misses what is promised."""
    missed = []
    inductor = {(row.model, row.mode): row for row in rows if row.backend == "inductor"}
    for row in rows:
        if row.backend != "aotkit" or row.error is not None:
            continue
        where = f"{row.model} {row.mode}"
        if row.accuracy is not None and not row.accuracy["ok"]:
            missed.append(f"{where}: less exact than allowed: {', '.join(row.accuracy['out_of_bounds'][:5])}")
        if row.mode == "train" and row.speedup is not None and row.speedup < LEAST_SPEEDUP:
            missed.append(f"{where}: {row.speedup:.3f}x eager, promised is {LEAST_SPEEDUP}")
        other = inductor.get((row.model, row.mode))
        if other is not None and other.first_call_s is not None and row.first_call_s is not None:
            share = row.first_call_s / other.first_call_s
            if share > FIRST_CALL_SHARE:
                missed.append(f"{where}: the first call takes {share:.2f} of Inductor's, promised is a third")
    return missed
