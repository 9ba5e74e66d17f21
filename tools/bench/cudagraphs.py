"""Time and memory of recorded graphs on a GPU: eager, Inductor, and aotkit, on a small-batch transformer.

    python -m tools.bench.cudagraphs [--steps 200]

Each backend runs in a process of its own. `torch graphs` is torch's tree of recordings over plain ATen calls, and
`aotkit graphs` is ours; `inductor` is its reduce-overhead mode with its own kernels, and `aotkit` has our kernels.
Reported per backend and task: the median time of a step, the peak of reserved memory, and whether the gradients of four
accumulated micro-steps agree with eager.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import aotkit  # noqa: F401  # registers the backend, which no entry point does where it is not installed

BACKENDS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "torch graphs": {"backend": "cudagraphs"},
    "inductor": {"mode": "reduce-overhead"},
    "aotkit graphs": {"backend": "aotkit", "options": {"cudagraphs": True, "lowering": "none", "fallback": "error"}},
    "aotkit": {"backend": "aotkit", "options": {"cudagraphs": True, "fallback": "error"}},
}
TASKS = ("inference", "training", "accumulation")
MICRO_STEPS = 4


def make_model() -> nn.Module:
    """A transformer whose kernels are too small to keep a GPU busy one by one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()


def batch(number: int) -> torch.Tensor:
    """Two sequences of 64 tokens, the same for every backend."""
    generator = torch.Generator("cuda").manual_seed(number)
    return torch.randn(2, 64, 256, device="cuda", generator=generator)


Run = Callable[[torch.Tensor], torch.Tensor]


def make_step(task: str, model: nn.Module, run: Run) -> Callable[[int], torch.Tensor]:
    """One step of a task, as a function of its number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def infer(number: int) -> torch.Tensor:
        with torch.no_grad():
            return run(batch(number))

    def train(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        for micro in range(MICRO_STEPS if task == "accumulation" else 1):
            run(batch(number * MICRO_STEPS + micro)).square().mean().backward()
        optimizer.step()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    return infer if task == "inference" else train


def compiled(model: nn.Module, backend: str) -> Run:
    """The model as the backend runs it."""
    settings = BACKENDS[backend]
    return model if settings is None else torch.compile(model, **settings)


def worker(backend: str, task: str, steps: int) -> dict[str, Any]:
    """Measure one backend on one task."""
    reference = make_model().train(task != "inference")
    model = make_model().train(task != "inference")
    torch.cuda.reset_peak_memory_stats()
    step, plain = make_step(task, model, compiled(model, backend)), make_step(task, reference, reference)
    try:
        error = max(float((step(n) - plain(n)).abs().max()) for n in range(8))
    except RuntimeError as failure:  # Inductor refuses to accumulate gradients that a later step took back
        return {"failed": str(failure).strip().splitlines()[0][:120]}
    del reference, plain
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for number in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step(number)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    reserved = torch.cuda.max_memory_reserved() / 2**20
    return {"milliseconds": statistics.median(times), "reserved_mib": reserved, "largest_difference": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--worker", nargs=2, metavar=("BACKEND", "TASK"), help="measure one, print JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: this benchmark needs a CUDA device, and torch sees none")
        return 0
    if options.worker:
        backend, task = options.worker
        print(json.dumps(worker(backend, task, options.steps)))
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {options.steps} steps\n")
    print("| task | backend | ms per step | reserved MiB | largest difference to eager |\n|---|---|---|---|---|")
    for task in TASKS:
        for backend in BACKENDS:
            command = [sys.executable, "-m", "tools.bench.cudagraphs", "--worker", backend, task]
            done = subprocess.run(
                [*command, "--steps", str(options.steps)], stdout=subprocess.PIPE, text=True, check=False
            )
            print(row(task, backend, done), flush=True)
    return 0


def row(task: str, backend: str, done: subprocess.CompletedProcess[str]) -> str:
    """One line of the table."""
    if done.returncode != 0:
        return f"| {task} | {backend} | failed with status {done.returncode} | | |"
    found = json.loads(done.stdout.splitlines()[-1])
    if "failed" in found:
        return f"| {task} | {backend} | {found['failed']} | | |"
    figures = f"{found['milliseconds']:.3f} | {found['reserved_mib']:.0f} | {found['largest_difference']:.1e}"
    return f"| {task} | {backend} | {figures} |"


if __name__ == "__main__":
    sys.exit(main())
