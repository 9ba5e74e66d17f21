"""Benchmark of eager, Inductor and aotkit.

python -m tools.bench                          all five models, training and inference (about 25 minutes)
python -m tools.bench --quick --models bert    a short look
python -m tools.bench --models resnet mobilenet convnext segformer unet --modes train
python -m tools.bench --help
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tools.bench.models import MODELS, MORE
from tools.bench.run import Measurement, Settings, measure_all
from tools.bench.table import acceptance, table

MODES = ("infer", "train")
PRECISIONS = ("highest", "high", "medium", "autocast")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__.splitlines()[0])
    defaults = Settings()
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *MORE], default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--backends", nargs="+", default=list(defaults.backends), help="eager, inductor, aotkit, aotkit+OPTION, ..."
    )
    parser.add_argument("--rounds", type=int, default=defaults.rounds, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=defaults.round_seconds, help="per backend and round")
    parser.add_argument("--precision", choices=PRECISIONS, default=defaults.precision, help="of products, or autocast")
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--quick", action="store_true", help="short inputs, three rounds of 0.3 s")
    parser.add_argument("--check", action="store_true", help="fail where a figure of the acceptance list is missed")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder of the JSON and the plots")
    return parser.parse_args(arguments)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def processor_name() -> str:
    """The processor's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def write_results(rows: list[Measurement], settings: Settings, folder: Path) -> None:
    """`results.json`, `results.png` and `results.svg`."""
    from tools.bench.plot import plot

    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "machine": machine(),
        "settings": dataclasses.asdict(settings),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (folder / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    plot(rows, folder)
    print(f"written: {folder / 'results.json'}, {folder / 'results.png'}, {folder / 'results.svg'}")


def main(arguments: list[str]) -> int:
    """Measure, print the table, write the files."""
    chosen = parse(arguments)
    settings = Settings(
        backends=tuple(chosen.backends),
        rounds=min(chosen.rounds, 3) if chosen.quick else chosen.rounds,
        round_seconds=min(chosen.seconds, 0.3) if chosen.quick else chosen.seconds,
        threads=chosen.threads,
        quick=chosen.quick,
        precision=chosen.precision,
    )
    rows = measure_all(chosen.models, chosen.modes, settings)
    print(table(rows))
    write_results(rows, settings, chosen.out)
    failed = [row for row in rows if row.error is not None]
    for row in failed:
        print(f"FAILED {row.model} {row.mode} {row.backend}: {row.error}", file=sys.stderr)
    missed = acceptance(rows) if chosen.check else []
    for sentence in missed:
        print(f"MISSED {sentence}", file=sys.stderr)
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
