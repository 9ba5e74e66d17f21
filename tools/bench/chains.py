"""Fused chains: eager, Inductor and aotkit, interleaved, beside the copy bandwidth of the same minutes.

python -m tools.bench.chains                        every chain, in a second-level cache and beyond all caches
python -m tools.bench.chains --only softmax rope    some of them
python -m tools.bench.chains --threads 2            wall time of two threads (else processor time of one)

One turn of every backend and of a copy follow each other at once, many times; ratios are taken within such a round and
their median is reported, so that what else the machine does hits all alike. Freed memory stays with the process:
without that, the first touch of every large result costs more than computing it, on all sides alike.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import aotkit  # noqa: F401  (registers the backend where no entry point is installed)
from tools.bench.__main__ import machine
from tools.bench.chain_cases import BACKWARD, FORWARD, STEP, UPDATE, Chain, Tensors
from tools.bench.chain_cases import CHAINS as ROWS
from tools.bench.image_chains import IMAGE_CHAINS
from tools.bench.numerics import FACTOR, SLACK

BACKENDS = ("eager", "inductor", "aotkit")
LEAST_SHARE, LEAST_COPY, LEAST_MEAN = 1.2, 0.9, 1.15
CHAINS = {**ROWS, **IMAGE_CHAINS}


@dataclass(slots=True)
class Row:
    """One chain at one size. ``ms`` per backend, ``ratios`` of Inductor's time over ours, ``copy`` the share of
    the copy bandwidth that ours reaches, ``errors`` against float64 relative to the largest value."""

    chain: str
    size: str
    sizes: tuple[int, ...]
    megabytes: float
    bound: str
    ms: dict[str, float] = field(default_factory=dict)
    over_eager: float | None = None
    over_inductor: float | None = None
    copy: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    exact: bool = True

    @property
    def reached(self) -> bool:
        """1.2 times Inductor's speed, or nine tenths of a copy's."""
        return (self.over_inductor or 0.0) >= LEAST_SHARE or (self.copy or 0.0) >= LEAST_COPY


# -- one backend's function ------------------------------------------------------------------------------


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own: Dynamo keeps what it compiled by code object."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """``function`` through a backend of ``torch.compile``."""
    if backend == "eager":
        return function
    return torch.compile(own_code(function), backend=backend, dynamic=False)


@dataclass(slots=True)
class Runner:
    """A chain through one backend. ``run`` is one timed repetition: it gives seconds."""

    chain: Chain
    call: Callable[..., Any]
    inputs: Tensors
    upstream: Tensors
    clock: Callable[[], float]

    def run(self) -> float:
        """Seconds of one repetition of what the chain times."""
        if self.chain.timed in (FORWARD, UPDATE):
            with torch.no_grad():
                start = self.clock()
                self.call(*self.inputs)
                return self.clock() - start
        start = self.clock()
        result = self.call(*self.inputs)
        if self.chain.timed == BACKWARD:
            start = self.clock()
        self.gradients(result)
        return self.clock() - start

    def gradients(self, result: Any) -> Sequence[torch.Tensor]:
        """Gradients of all inputs that want one."""
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        return torch.autograd.grad(results, [x for x in self.inputs if x.requires_grad], self.upstream)

    def values(self) -> Tensors:
        """Everything the chain gives, on inputs of its own."""
        inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in self.inputs]
        if self.chain.timed in (FORWARD, UPDATE):
            with torch.no_grad():
                result = self.call(*inputs)
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            return results if self.chain.timed == FORWARD else inputs
        other = dataclasses.replace(self, inputs=inputs)
        result = self.call(*inputs)
        return [result.detach(), *other.gradients(result)]


def make_runners(
    chain: Chain, sizes: tuple[int, ...], clock: Callable[[], float], backends: Sequence[str] = BACKENDS
) -> dict[str, Runner]:
    """The chain on equal inputs through every backend; each compiles at its first call."""
    generator = torch.Generator().manual_seed(0)
    inputs = chain.inputs(sizes, generator)
    trains = chain.timed in (BACKWARD, STEP)
    for tensor in inputs:
        tensor.requires_grad_(trains and tensor.is_floating_point())
    upstream: Tensors = []
    if trains:
        with torch.no_grad():
            result = chain.function(*inputs)
        assert isinstance(result, torch.Tensor)
        upstream = [torch.randn(result.shape, generator=generator)]
    return {b: Runner(chain, compiled(chain.function, b), inputs, upstream, clock) for b in backends}


def check(runners: dict[str, Runner], row: Row) -> None:
    """Largest error over largest value of every result against float64; ours may be 3 * (eager's + 2e-6)."""
    eager = runners["eager"]
    wide = [x.detach().double() if x.is_floating_point() else x for x in eager.inputs]
    for tensor, source in zip(wide, eager.inputs, strict=True):
        tensor.requires_grad_(source.requires_grad)
    reference = dataclasses.replace(eager, inputs=wide, upstream=[g.double() for g in eager.upstream]).values()
    for backend, runner in runners.items():
        pairs = zip(runner.values(), reference, strict=True)
        row.errors[backend] = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
    row.exact = row.errors["aotkit"] <= FACTOR * (row.errors["eager"] + SLACK)


# -- timing ----------------------------------------------------------------------------------------------


def copier(megabytes: float, clock: Callable[[], float]) -> Callable[[], float]:
    """Seconds of a copy that moves (reads plus writes) that many megabytes."""
    count = max(1, int(megabytes * 1e6 / 8))
    source, target = torch.ones(count), torch.zeros(count)

    def run() -> float:
        start = clock()
        target.copy_(source)
        return clock() - start

    return run


def turn(run: Callable[[], float], repetitions: int) -> float:
    """The least of some repetitions, the first of which is not counted."""
    run()
    return min(run() for _ in range(repetitions))


def measure(name: str, size: str, rounds: int, clock: Callable[[], float]) -> Row:
    """All backends and the copy in interleaved turns."""
    chain = CHAINS[name]
    sizes = chain.small if size == "small" else chain.large
    torch._dynamo.reset()
    runners = make_runners(chain, sizes, clock)
    inputs = runners["eager"].inputs
    if chain.timed == UPDATE:
        megabytes = chain.moved / 4 * sum(x.nbytes for x in inputs) / 1e6
    else:
        megabytes = chain.moved * max(x.nbytes for x in inputs) / 1e6
    row = Row(name, size, sizes, megabytes, chain.bound)
    check(runners, row)
    runs = {backend: runner.run for backend, runner in runners.items()}
    runs["copy"] = copier(megabytes, clock)
    once = {label: turn(run, 2) for label, run in runs.items()}
    repetitions = {label: min(50, max(2, int(0.004 / seconds))) for label, seconds in once.items()}
    times: dict[str, list[float]] = {label: [] for label in runs}
    order = list(runs)
    for _ in range(rounds):
        for label in order:
            times[label].append(turn(runs[label], repetitions[label]))
        order = order[1:] + order[:1]
    row.ms = {label: 1e3 * statistics.median(values) for label, values in times.items()}
    row.over_eager = median_ratio(times["eager"], times["aotkit"])
    row.over_inductor = median_ratio(times["inductor"], times["aotkit"])
    row.copy = median_ratio(times["copy"], times["aotkit"])
    return row


def median_ratio(over: Sequence[float], own: Sequence[float]) -> float:
    """The median of the ratios within rounds."""
    return statistics.median(a / b for a, b in zip(over, own, strict=True))


def keep_freed_memory() -> bool:
    """Tell the C library not to give freed memory back, so that large results reuse pages; false where it has none."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    trim_threshold, mmap_max = -1, -4
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))


# -- results ---------------------------------------------------------------------------------------------

HEADER = (
    "chain",
    "size",
    "MB",
    *(f"{b} ms" for b in (*BACKENDS, "copy")),
    "x eager",
    "x inductor",
    "x copy",
    "err",
    "ok",
)


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table."""
    ok = "NO" if not row.exact else "yes" if row.reached or row.bound == "math" else "slow"
    return (
        row.chain,
        row.size,
        f"{row.megabytes:.2f}",
        *(f"{row.ms[label]:.3f}" for label in (*BACKENDS, "copy")),
        f"{row.over_eager:.2f}",
        f"{row.over_inductor:.2f}",
        f"{row.copy:.2f}",
        f"{row.errors['aotkit']:.1e}",
        ok,
    )


def mean_over_inductor(rows: Sequence[Row], bound: str) -> float:
    """Geometric mean of the speed over Inductor's."""
    logs = [math.log(row.over_inductor) for row in rows if row.bound == bound and row.over_inductor]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, and the means."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---|---|" + "---:|" * (len(HEADER) - 3) + "---|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    means = [f"{bound}: {mean_over_inductor(rows, bound):.2f}" for bound in ("memory", "math")]
    return "\n".join(lines) + "\n\ngeometric mean over Inductor, bound by " + ", ".join(means)


def missed(rows: Sequence[Row]) -> list[str]:
    """A sentence for each figure that misses what is promised."""
    found = [f"{r.chain} {r.size}: error {r.errors['aotkit']:.1e}" for r in rows if not r.exact]
    slow = (r for r in rows if r.bound == "memory" and not r.reached)
    found += [f"{r.chain} {r.size}: {r.over_inductor:.2f} of Inductor, {r.copy:.2f} of a copy" for r in slow]
    mean = mean_over_inductor(rows, "memory")
    return found + ([f"mean {mean:.2f}, promised is {LEAST_MEAN}"] if mean < LEAST_MEAN else [])


def main(arguments: list[str]) -> int:
    """Measure, print the table, write `chains.json`."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.chains", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CHAINS), default=list(CHAINS))
    parser.add_argument("--sizes", nargs="+", choices=("small", "large"), default=["small", "large"])
    parser.add_argument("--rounds", type=int, default=31, help="interleaved rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="fail where a promised figure is missed")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder of the JSON")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    kept = keep_freed_memory()
    clock = time.thread_time if chosen.threads == 1 else time.perf_counter
    rows = []
    for name in chosen.only:
        for size in chosen.sizes:
            rows.append(measure(name, size, chosen.rounds, clock))
            print("  ".join(cells(rows[-1])), flush=True)
    print(table(rows))
    chosen.out.mkdir(parents=True, exist_ok=True)
    data = {
        "machine": machine(),
        "threads": chosen.threads,
        "kept_memory": kept,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (chosen.out / "chains.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    sentences = missed(rows) if chosen.check else []
    for sentence in sentences:
        print(f"MISSED {sentence}", file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
