"""Training on several ranks, compiled, compared with eager mode, with a journal.

python -m tools.ranks                                 what the journal does not have yet
python -m tools.ranks --only llama/simple-fsdp        cases whose name has this in it
python -m tools.ranks --again                         all of it anew
python -m tools.ranks --table                         what the journal has, as a table

A case is a model (BERT, Llama and ResNet of `transformers`, tiny, float64), a way to spread it over processes on this
machine (gloo), and a variant. It holds if the losses of all steps and all parameters and buffers after them are those
of eager's own run on the same ranks, to 1e-12 of their size; under autocast, in float32, if they are no further from
those of float64 than 1.5 of eager mode's. A graph that aotkit leaves to eager mode is named in the row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .models import MODELS
from .processes import run_ranks
from .train import VARIANTS, Case, compare
from .wraps import WRAPS

__all__ = ["main", "run_case"]


def run_case(case: Case, steps: int, timeout: float, options: dict[str, Any]) -> dict[str, Any]:
    """A row of the journal. One process a rank, forked from this one, which has imported what they need."""
    began = time.monotonic()
    answers, ended = run_ranks(case.ranks, lambda _, folder: asdict(compare(case, steps, folder, options)), timeout)
    verdict, detail = _verdict(answers, ended, case.tolerance)
    return {"case": str(case), "verdict": verdict, **detail, "seconds": round(time.monotonic() - began, 1)}


def _verdict(answers: Sequence[dict[str, Any] | None], ended: bool, tolerance: float) -> tuple[str, dict[str, Any]]:
    raised = {rank: answer for rank, answer in enumerate(answers) if answer is not None and "error" in answer}
    if raised:
        rank, first = next(iter(raised.items()))
        return "raised", {**first, "rank": rank, "ranks": len(raised), "all_ended": ended}
    if not ended or None in answers:
        return "hangs" if not ended else "died", {}
    found = [answer for answer in answers if answer is not None]
    difference = max(answer["difference"] for answer in found)
    detail = {"difference": difference, **{name: found[0][name] for name in ("graphs", "collectives", "eager")}}
    return "equal" if difference <= tolerance else "differs", detail


def _cases(only: str) -> list[Case]:
    every = [Case(model, wrap, variant) for wrap in WRAPS for model in MODELS for variant in VARIANTS]
    return [case for case in every if case.possible() and only in str(case)]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| model and ranks | " + " | ".join(VARIANTS) + " |", "|---" * (len(VARIANTS) + 1) + "|"]
    found = {row["case"]: row for row in rows}
    for wrap in WRAPS:
        for model in MODELS:
            cells = []
            for variant in VARIANTS:
                row = found.get(f"{model}/{wrap}/{variant}")
                cells.append("" if row is None else _cell(row))
            lines.append(f"| {model}, {wrap} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if "difference" not in row:
        return str(row["verdict"])
    shown = f"{row['difference']:.2f}" if row["case"].endswith("/autocast") else f"{row['difference']:.0e}"
    return shown + (" (eager)" if row["eager"] else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.ranks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=240, help="seconds of a case")
    parser.add_argument("--journal", type=Path, default=Path("build/ranks.jsonl"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    chosen = parser.parse_args(arguments)
    chosen.journal.parent.mkdir(parents=True, exist_ok=True)
    if chosen.again and not chosen.only:
        chosen.journal.unlink(missing_ok=True)
    rows = [json.loads(line) for line in chosen.journal.read_text().splitlines()] if chosen.journal.exists() else []
    if chosen.table:
        print(_table(rows))
        return 0
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "aotkit.backend", "torch.distributed.fsdp", "torch.distributed.checkpoint"):
        importlib.import_module(name)
    for name in ("torch.distributed.tensor.parallel", "transformers"):
        importlib.import_module(name)
    options = {name: json.loads(value) for name, _, value in (text.partition("=") for text in chosen.option)}
    had = set() if chosen.again else {row["case"] for row in rows}
    wrong = 0
    for case in _cases(chosen.only):
        if str(case) in had:
            continue
        row = run_case(case, chosen.steps, chosen.timeout, options)
        wrong += row["verdict"] != "equal"
        print(json.dumps(row), flush=True)
        with chosen.journal.open("a") as journal:
            journal.write(json.dumps(row) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
