"""The main job: compile a small BERT with `torch.compile(backend="aotkit")`, train it on the CPU, compare with eager.

    nox -s demo                       or, with everything installed,   python tools/demo.py
    nox -s demo -- --steps 40 --threads 1

Two copies of one model with equal weights train on equal batches, one eager, one compiled. The model is built from a
`transformers` configuration with random weights; nothing is downloaded. The task has something to learn: each masked
token of a sequence follows from its neighbours, so the loss falls.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

VOCABULARY = 512
MASK = 0
IGNORED = -100

Batch = dict[str, torch.Tensor]


@dataclass(slots=True)
class Training:
    """One model in training: its losses and the milliseconds of each step."""

    label: str
    model: nn.Module
    call: Callable[..., object]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> None:
        """Forward, backward, update."""
        begin = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = self.call(**batch).loss  # type: ignore[attr-defined]
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.milliseconds.append((time.perf_counter() - begin) * 1e3)


def make_model(layers: int) -> nn.Module:
    """A small BERT for masked tokens, dropout 0, weights from a fixed seed."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config).train()


def make_batch(generator: torch.Generator, size: int = 8, length: int = 64) -> Batch:
    """Arithmetic sequences of tokens with every sixth token or so masked; labels are the masked tokens."""
    start = torch.randint(1, 9, (size, 1), generator=generator)
    stride = torch.randint(1, 4, (size, 1), generator=generator)
    tokens = (start + stride * torch.arange(length)) % 31 + 1
    masked = torch.rand(size, length, generator=generator) < 0.15
    masked[:, 0] = True  # no sequence without a label
    return {
        "input_ids": tokens.masked_fill(masked, MASK),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~masked, IGNORED),
    }


def make_trainings(layers: int) -> tuple[Training, Training, Callable[[], dict[str, float]]]:
    """The eager and the compiled training, and a function that returns the seconds per compile stage."""
    eager_model = make_model(layers)
    compiled_model = copy.deepcopy(eager_model)
    call, stage_seconds = compile_with_stage_times(compiled_model)
    eager = Training("eager", eager_model, eager_model, make_optimizer(eager_model))
    compiled = Training("aotkit", compiled_model, call, make_optimizer(compiled_model))
    return eager, compiled, stage_seconds


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as a user would write it; the optimizer itself is not compiled."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def compile_with_stage_times(model: nn.Module) -> tuple[Callable[..., object], Callable[[], dict[str, float]]]:
    """The compiled model, and what its recorder saw of each compile stage (filled by the first calls)."""
    import aotkit

    recorder = aotkit.Recorder()
    options: dict[str, Any] = {"observer": recorder}
    compiled = torch.compile(model, backend="aotkit", options=options)
    return compiled, recorder.stage_seconds


@contextmanager
def progress_display(console: Console) -> Iterator[Progress]:
    """A live bar on a terminal; where there is none, plain lines are printed instead (see `train`)."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


def train(eager: Training, compiled: Training, steps: int, console: Console) -> float:
    """Train both, turn by turn on the same batches; returns the seconds of the compiled model's first call."""
    generator = torch.Generator().manual_seed(1)
    with progress_display(console) as progress:
        task = progress.add_task("compiling (first call)", total=steps)
        first_call = 0.0
        for number in range(steps):
            batch = make_batch(generator)
            begin = time.perf_counter()
            compiled.step(batch)
            if number == 0:
                first_call = time.perf_counter() - begin
                if not console.is_terminal:
                    console.print(f"first call, compilation included: {first_call:.2f} s")
            eager.step(batch)
            description = f"training  loss {compiled.losses[-1]:.4f}"
            progress.update(task, advance=1, description=description)
            if not console.is_terminal and (number + 1) % 10 == 0:
                console.print(f"step {number + 1}/{steps}  {description}")
    return first_call


def results_table(eager: Training, compiled: Training) -> Table:
    """Loss per step, eager and compiled."""
    table = Table(title="Loss per step", title_justify="left")
    for heading in ("step", "eager", "aotkit", "difference"):
        table.add_column(heading, justify="right")
    steps = len(eager.losses)
    every = max(1, steps // 12)
    for number in sorted({*range(0, steps, every), steps - 1}):
        one, other = eager.losses[number], compiled.losses[number]
        table.add_row(str(number + 1), f"{one:.6f}", f"{other:.6f}", f"{other - one:+.1e}")
    return table


def times_table(eager: Training, compiled: Training, first_call: float) -> Table:
    """First call and milliseconds per step."""
    table = Table(title="Times", title_justify="left")
    for heading in ("", "eager", "aotkit", "eager / aotkit"):
        table.add_column(heading, justify="left" if not heading else "right")
    one, other = (statistics.median(training.milliseconds[1:]) for training in (eager, compiled))
    table.add_row("ms per step (median)", f"{one:.2f}", f"{other:.2f}", f"{one / other:.2f}")
    table.add_row("first call, seconds", f"{eager.milliseconds[0] / 1e3:.2f}", f"{first_call:.2f}", "")
    return table


def stages_table(seconds: dict[str, float], first_call: float) -> Table:
    """Seconds per compile stage; what is left of the first call is Dynamo and the step itself."""
    table = Table(title="Seconds per compile stage", title_justify="left")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.3f}")
    table.add_section()
    table.add_row("all stages", f"{sum(seconds.values()):.3f}")
    table.add_row("rest of the first call (imports, Dynamo, running)", f"{first_call - sum(seconds.values()):.3f}")
    return table


def verdict(eager: Training, compiled: Training) -> str | None:
    """What is wrong with the run, or None: the losses must agree and fall."""
    for number, (one, other) in enumerate(zip(eager.losses, compiled.losses, strict=True), start=1):
        if not abs(one - other) <= 2e-2 * abs(one):  # rounding differences grow with every update; NaN is caught too
            return f"the loss differs from eager's by more than 2 % in step {number}: {other}, eager's is {one}"
    if not compiled.losses[-1] < compiled.losses[0]:
        return "the loss did not fall"
    return None


def counted(number: int, thing: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def main(arguments: list[str]) -> int:
    """Run the demo and print its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args(arguments)
    if chosen.steps < 2:
        parser.error("--steps must be at least 2: the first step is the compilation")
    torch.set_num_threads(chosen.threads)
    console = Console()
    sizes = ((chosen.layers, "layer"), (chosen.steps, "step"), (chosen.threads, "thread"))
    console.print(f"A BERT on the CPU: {', '.join(counted(*size) for size in sizes)}.")
    eager, compiled, stage_seconds = make_trainings(chosen.layers)
    first_call = train(eager, compiled, chosen.steps, console)
    console.print(results_table(eager, compiled))
    console.print(times_table(eager, compiled, first_call))
    console.print(stages_table(stage_seconds(), first_call))
    problem = verdict(eager, compiled)
    console.print(problem or "The compiled model trained like the eager one.")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
