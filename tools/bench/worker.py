"""One (model, mode, backend) in a process of its own, driven through pipes.

The parent sends one JSON object per line and reads one back. Each backend has its own process, so that a first call
is a first call (nothing imported or compiled by another backend) and its peak memory is its own; the parent
interleaves the timed rounds of all backends. Standard output carries only answers; whatever libraries print goes to
standard error, which the parent keeps in a log file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.bench.memory import peak_resident_mb, peak_tensor_mb
from tools.bench.models import Batch, make_batch, make_model
from tools.bench.numerics import Values, load, save
from tools.bench.ties import Watch, candidates, taken

Step = Callable[[], dict[str, torch.Tensor]]


@dataclass(slots=True)
class Worker:
    """State of one worker: its model, its step, and the answers it has given."""

    model_name: str
    mode: str
    backend: str
    quick: bool
    precision: str = "highest"
    step: Step | None = None
    model: nn.Module = field(init=False)
    batch: Batch = field(init=False)

    def __post_init__(self) -> None:
        if self.precision != "autocast":
            torch.set_float32_matmul_precision(self.precision)
        self.model = make_model(self.model_name).train(self.mode == "train")
        self.batch = make_batch(self.model_name, self.quick)

    def prepare(self) -> dict[str, Any]:
        """Import Dynamo, which every `torch.compile` needs; what a backend imports belongs to its first call."""
        if self.backend != "eager":
            import torch._dynamo

            torch._dynamo.reset()
        return {}

    def first(self) -> dict[str, Any]:
        """Seconds of the first step: importing the backend, tracing and compilation included."""
        begin = time.perf_counter()
        self.connect()
        self.run()
        return {"seconds": time.perf_counter() - begin}

    def connect(self) -> None:
        """Put the backend behind the step; nothing is compiled before the step's first run."""
        call: Callable[..., Any] = self.model
        if self.backend != "eager":
            if self.backend.startswith("aotkit"):
                import aotkit  # noqa: F401  (registers the backend where no entry point is installed)
            name, _, option = self.backend.partition("+")  # aotkit+tune: with this option
            call = torch.compile(self.model, backend=name, options={option: True} if option else None)
        self.step = make_step(self.model, call, self.batch, self.mode, self.precision == "autocast")

    def steady(self, seconds: float) -> dict[str, Any]:
        """Milliseconds of each step of one round that lasts about this long, at least three steps. Those of one thread
        are processor time, which other processes on the machine hardly change."""
        now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        times: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < deadline:
            begin = now()
            self.run()
            times.append((now() - begin) * 1e3)
        return {"ms": times}

    def resident(self) -> dict[str, Any]:
        """Peak of the process's resident memory so far."""
        return {"mb": peak_resident_mb()}

    def tensors(self) -> dict[str, Any]:
        """Peak of the tensor memory of a step, in a worker that has not run a step yet."""
        self.connect()
        return {"mb": peak_tensor_mb(self.run)}

    def values(self, path: str, double: bool) -> dict[str, Any]:
        """Write outputs and gradients of one step to an .npz file; `double` computes them in float64, uncompiled."""
        if double:
            values = self._uncompiled(torch.float64)
        else:
            restored = make_model(self.model_name).state_dict()
            self.model.load_state_dict(restored)  # running statistics moved during the timed steps
            values = self.run()
        save(path, {name: value.numpy() for name, value in values.items()})
        return {"tensors": len(values)}

    def ties(self, reference: str, given: dict[str, str], results: dict[str, str]) -> dict[str, Any]:
        """For values of backends, as files: float64's with ties on the side where a backend had them, and how many
        there were. See Note [Ties at kinks] in `tools/bench/ties.py`."""
        exact, rounded = Watch(), Watch()
        self._uncompiled(torch.float64, exact)
        self._uncompiled(torch.float32, rounded)

        def step(watch: Watch) -> Values:
            return {name: value.numpy() for name, value in self._uncompiled(torch.float64, watch).items()}

        values = {backend: load(path) for backend, path in given.items()}
        found = taken(candidates(exact, rounded), step, load(reference), values)
        for backend, ties in found.items():
            save(results[backend], step(Watch(ties)))
        return {"ties": {backend: len(ties) for backend, ties in found.items()}}

    def _uncompiled(self, dtype: torch.dtype, watch: Watch | None = None) -> dict[str, torch.Tensor]:
        """A step of the model as it was made, in another type: the weights are the same numbers in float64, so that
        this differs in arithmetic only."""
        model = make_model(self.model_name).train(self.mode == "train").to(dtype)
        batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.batch.items()}
        with watch or contextlib.nullcontext():
            return make_step(model, model, batch, self.mode)()

    def facts(self) -> dict[str, Any]:
        """What the backend says about itself: Inductor's and ours differ, so this is free text."""
        import torch._dynamo

        return {"graph_breaks": dict(torch._dynamo.utils.counters["graph_break"])}

    def run(self) -> dict[str, torch.Tensor]:
        """One step."""
        if self.step is None:
            raise RuntimeError("`first` comes first")
        return self.step()


def make_step(model: nn.Module, call: Callable[..., Any], batch: Batch, mode: str, autocast: bool = False) -> Step:
    """One forward (and backward) that returns outputs and, for training, the gradient of every parameter. ``autocast``:
    the forward runs under torch's autocast to bfloat16."""

    def outputs_of(result: Any) -> dict[str, torch.Tensor]:
        return {"output:loss": result.loss.detach().float(), "output:logits": result.logits.detach().float()}

    def forward() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return call(**batch)

    def infer() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return outputs_of(forward())

    def train() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        result = forward()
        result.loss.backward()
        values = outputs_of(result)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                values[f"grad:{name}"] = parameter.grad
        return values

    return train if mode == "train" else infer


def serve(worker: Worker, replies: Any) -> None:
    """Answer requests until the parent closes the pipe; an error is an answer too."""
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        try:
            answer = getattr(worker, command)(**request)
        except Exception as error:  # noqa: BLE001  the parent reports it in the results
            answer = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def main(arguments: list[str]) -> int:
    """`python -m tools.bench.worker <model> <mode> <backend> <threads> <quick 0|1> <precision>`."""
    model, mode, backend, threads, quick, precision = arguments
    torch.set_num_threads(int(threads))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with contextlib.closing(replies):
        serve(Worker(model, mode, backend, quick == "1", precision), replies)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1:]))
