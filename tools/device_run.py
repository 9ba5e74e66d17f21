"""The first run on a CUDA device: correctness, then times, in stages that can be taken up again. Needs no network.

    python tools/device_run.py OUT [--stages machine tests ...] [--only REGEX] [--jobs 8] [--seconds 480] [--again]
                                   [--dry-run]

Needs python, torch, triton, llvmlite, scipy, sympy, filelock, pytest, hypothesis and transformers; the packages are
found beside this file. Each item runs in a process of its own and leaves one file in OUT; items that are there and did
not fail are not run again. A stage that takes longer than ``--seconds`` leaves the rest for the next call. With
``--jobs`` several items of a stage run at once, but nothing compiles or uses the device while one takes its times.
OUT/report.md says what there is, and what is to be fixed. ``--dry-run`` goes the same way without a device: the
simulated driver, Triton's interpreter, tiny models. The exit status is 1 if an item of these stages failed or is left.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: its folder is on the path, not the one above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tools.gpu_tests import environment, files_with_gpu_tests
from tools.workspace import PACKAGES, ROOT

STAGES = ("machine", "flex", "tests", "sanitizer", "kernels", "operators", "models")
KERNELS = ("gelu", "softmax", "layer norm", "transpose", "column sum")
FLEX = ("documents", "slopes", "relative", "prefix", "causal", "window", "capped")
MODEL_NAMES = ("bert", "gpt2", "qwen2", "convnext", "t5")
BACKENDS = ("eager", "inductor", "inductor graphs", "aotkit", "aotkit graphs")
LEAST_SHARE = 0.85  # of a copy's bandwidth
OPERATOR_PARTS = 12  # torch's table of operators is run in so many processes


@dataclass(frozen=True, slots=True)
class Item:
    """One process: ``command`` leaves figures as the last line of its output if ``figures``, or just ends with 0."""

    stage: str
    name: str
    command: tuple[str, ...]
    figures: bool
    seconds: float = 240

    @property
    def file(self) -> str:
        """Where its outcome is kept."""
        return "".join(c if c.isalnum() else "-" for c in f"{self.stage}-{self.name}") + ".json"


def items(dry_run: bool) -> Iterator[Item]:
    """All there is to do, in order."""
    device = "cpu" if dry_run else "cuda"

    def measured(stage: str, path: str, seconds: float = 240) -> Item:
        command = (sys.executable, __file__, "--item", path, "--device", device)
        return Item(stage, path, command, figures=True, seconds=seconds)

    yield measured("machine", "versions")
    yield Item("machine", "doctor", (sys.executable, "-m", "aotkit", "doctor"), figures=False)
    for name in FLEX if not dry_run else FLEX[:1]:
        for backend in ("aotkit", "inductor") if not dry_run else ("aotkit",):
            yield measured("flex", f"flex/{name}/{backend}")
    yield measured("tests", "recording")
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    for path in files_with_gpu_tests():
        yield Item("tests", path.stem, (sys.executable, *pytest, str(path)), figures=False)
    tool = shutil.which("compute-sanitizer")
    for name in ("test_cudagraphs_gpu.py", "test_cudagraphs_gpu_trees.py"):
        (path,) = (path for path in files_with_gpu_tests() if path.name == name)
        if tool or dry_run:
            before = () if tool is None or dry_run else (tool, "--error-exitcode", "9")
            command = (*before, sys.executable, *pytest, str(path))
            yield Item("sanitizer", path.stem, command, figures=False, seconds=480)
    for kernel in KERNELS:
        yield measured("kernels", f"kernel/{kernel}")
    yield Item("kernels", "tiles", (sys.executable, "-m", "tools.bench.triton_tiles"), figures=False)
    for part in range(OPERATOR_PARTS if not dry_run else 1):
        yield Item("operators", f"part {part}", _operators(part, dry_run), figures=False, seconds=480)
    for name in MODEL_NAMES:
        for task in _tasks(name, dry_run):
            for backend in BACKENDS if not dry_run else ("aotkit",):
                yield measured("models", f"model/{name}/{task}/{backend}", seconds=480)


def _operators(part: int, dry_run: bool) -> tuple[str, ...]:
    """Part of torch's table of operators, against eager; what it found before is in a journal."""
    table: tuple[str, ...] = (sys.executable, "-m", "tools.conformance", "kernels")
    table += (
        "--part",
        str(part),
        str(OPERATOR_PARTS),
        "--journal",
        "{out}/" + f"operators-{part}.jsonl",
        "--dtypes",
        "float32",
    )
    if dry_run:
        return (*table, "--processor", "triton-interpreter", "--limit", "3")
    return (*table, "bfloat16", "int64", "--device", "cuda")


def _tasks(name: str, dry_run: bool) -> tuple[str, ...]:
    if dry_run:
        return {"bert": ("training",), "gpt2": ("one token",)}.get(name, ())  # the others differ in the model only
    return ("inference", "training", "one token") if name in ("gpt2", "qwen2") else ("inference", "training")


def run(item: Item, out: Path) -> dict[str, Any]:
    """The outcome of an item; it may write to ``out``."""
    begin = time.monotonic()
    command = [argument.replace("{out}", str(out.resolve())) for argument in item.command]
    env = environment() | {"DEVICE_RUN_LOCK": str(out.resolve() / "device.lock")}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=item.seconds, check=False
        )
        status, said, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        status, said, err = 124, _text(error.stdout), _text(error.stderr)
    figures = {}
    if item.figures and status == 0:
        figures = json.loads(said.splitlines()[-1])
    tail = (said[-4000:] + err[-4000:]) if status else said[-4000:]
    return {"status": status, "seconds": time.monotonic() - begin, "figures": figures, "output": tail}


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def run_stages(
    out: Path, stages: Sequence[str], seconds: float, again: bool, dry_run: bool, only: str = "", jobs: int = 1
) -> list[Item]:
    """Run what is not there yet, ``jobs`` items of a stage at once; what is left for want of time."""
    left: list[Item] = []
    for stage in stages:
        chosen = [item for item in items(dry_run) if item.stage == stage and re.search(only, item.name)]
        waiting = [item for item in chosen if again or _outcome(out, item).get("status") != 0]
        begun = time.monotonic()

        def attempt(item: Item, begun: float = begun) -> None:
            if time.monotonic() - begun > seconds:
                left.append(item)
                return
            outcome = run(item, out)
            (out / item.file).write_text(json.dumps(outcome, indent=1), encoding="utf-8")
            print(f"{item.stage} {item.name}: {outcome['status'] or 'ok'}, {outcome['seconds']:.0f} s", flush=True)

        for batch in batches(waiting, jobs):
            with ThreadPoolExecutor(jobs) as pool:
                for _ in pool.map(attempt, batch):
                    pass
    return left


def batches(waiting: Sequence[Item], jobs: int) -> list[Sequence[Item]]:
    """Models are begun ``jobs`` at once: all of them compile, then each takes its times while the others wait."""
    if not waiting or waiting[0].stage != "models":
        return [waiting]
    return [waiting[i : i + jobs] for i in range(0, len(waiting), jobs)]


def _outcome(out: Path, item: Item) -> dict[str, Any]:
    path = out / item.file
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def report(out: Path, stages: Sequence[str], dry_run: bool) -> tuple[str, bool]:
    """The report, and whether all items of these stages are there and ended well."""
    outcomes = {item: _outcome(out, item) for item in items(dry_run)}
    fix = [text for item, outcome in outcomes.items() for text in _faults(item, outcome)]
    figures = {item.name: outcome["figures"] for item, outcome in outcomes.items() if outcome.get("figures")}
    fix += [*_inexact(figures), *_slow(figures)]
    lines = ["# Run on a device" + " (dry run: none)" * dry_run, "", "## To fix", ""]
    lines += [f"- {text}" for text in fix] or ["Nothing."]
    if not dry_run and shutil.which("compute-sanitizer") is None:
        lines.append("- compute-sanitizer is not installed: that stage was left out")
    for stage in STAGES:
        lines += ["", f"## {stage}", "", "| item | outcome | seconds | figures |", "|---|---|---:|---|"]
        lines += [_line(item, outcome) for item, outcome in outcomes.items() if item.stage == stage]
    for item, outcome in outcomes.items():
        if outcome.get("figures", {}).get("largest_kernels"):
            lines += ["", f"### {item.name}", "", "| kernel | calls | us |", "|---|---:|---:|"]
            largest = outcome["figures"]["largest_kernels"][:10]
            lines += [f"| {name} | {calls} | {us:.1f} |" for name, calls, us in largest]
    wanted = [outcome for item, outcome in outcomes.items() if item.stage in stages]
    return "\n".join(lines) + "\n", all(outcome.get("status") == 0 for outcome in wanted)


def _line(item: Item, outcome: dict[str, Any]) -> str:
    if not outcome:
        return f"| {item.name} | left | | |"
    figures = {name: value for name, value in outcome["figures"].items() if name != "largest_kernels"}
    shown = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    status = "ok" if outcome["status"] == 0 else f"failed ({outcome['status']})"
    return f"| {item.name} | {status} | {outcome['seconds']:.0f} | {shown} |"


def _faults(item: Item, outcome: dict[str, Any]) -> Iterator[str]:
    figures = outcome.get("figures", {})
    if outcome and outcome["status"]:
        yield f"{item.stage} {item.name} failed ({outcome['status']}): {outcome['output'].strip()[-300:]!r}"
    if figures.get("share_of_copy", 1) < LEAST_SHARE:
        yield f"{item.name} has {figures['share_of_copy']:.0%} of a copy's bandwidth, less than {LEAST_SHARE:.0%}"


def _inexact(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Where we are farther from float32 than three times eager's distance."""
    for name, ours in figures.items():
        model, _, backend = name.rpartition("/")
        eager = figures.get(f"{model}/eager", {}).get("error", 0.01)  # of bfloat16, about, where it was not measured
        if backend.startswith("aotkit") and not ours.get("error", 0) <= 3 * (eager + 2e-6):
            yield f"{name} is {ours['error']:.2e} from float32, eager {eager:.2e}"


def _slow(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Where we are slower than the incumbent, or compile longer than a third of its time."""
    for name, ours in figures.items():
        if "/aotkit" not in name or "milliseconds" not in ours:
            continue
        theirs = figures.get(name.replace("/aotkit", "/inductor"))
        if theirs is None:
            continue
        if theirs["milliseconds"] < ours["milliseconds"]:
            yield f"{name}: {ours['milliseconds']:.3f} ms, the incumbent {theirs['milliseconds']:.3f} ms"
        if theirs["first_call_seconds"] < 3 * ours["first_call_seconds"]:
            first = [f"{figures['first_call_seconds']:.1f} s" for figures in (ours, theirs)]
            yield f"{name}: first call {first[0]}, the incumbent {first[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run stages, or one item (as the stages do)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "build" / "device_run")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--only", default="", help="items whose name this regular expression is found in")
    parser.add_argument("--jobs", type=int, default=1, help="items of a stage at once")
    parser.add_argument("--seconds", type=float, default=480, help="for each stage")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--item", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.item:
        from tools.device_items import run_item

        print(json.dumps(run_item(options.item, options.device)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:  # as pip does: a first call is not to be one of Python's compiler's
        compileall.compile_dir(ROOT / "packages" / name / "src", quiet=2)
    shared = max(2, (os.cpu_count() or 2) // options.jobs)  # of the processors, by models that compile at once
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(shared))
    chosen = (options.stages, options.seconds, options.again, options.dry_run, options.only, options.jobs)
    left = run_stages(options.out, *chosen)
    text, complete = report(options.out, options.stages, options.dry_run)
    (options.out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"{len(left)} items left for want of time" if left else f"report: {options.out / 'report.md'}")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
