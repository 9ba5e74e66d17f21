"""How long analysis and tracing take beside torch's: `python -m tools.bench.tracing`.

From the flat function and its example inputs to the joint graph, fake inputs included, up to where the partitioner is
called. Two ways in: the plain module, and the graph that Dynamo hands to a backend. One process and one thread;
the two stacks take turns, and the ratio is that of their medians of processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function as torchs_aot_function
from torch._functorch.aot_autograd import aot_module_simplified as torchs_aot_module_simplified

import aotkit
from tools.bench.models import MODELS, make_batch, make_model

__all__ = ["WAYS", "Timing", "main", "measure"]

LIMIT = 0.6


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds per trace of one model."""

    model: str
    way: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours divided by torch's."""
        return self.ours / self.theirs


class _Stop(Exception):
    """Raised where tracing ends."""


def _stop(*_: Any, **__: Any) -> Any:
    raise _Stop


def measure(name: str, way: str, rounds: int) -> Timing:
    """Trace one model ``rounds`` times by each stack, in turns; the first turn of each is thrown away."""
    ours, theirs = WAYS[way](name)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(rounds + 1):
        for label, trace in (("ours", ours), ("theirs", theirs)):
            taken = _timed(trace)
            if turn:
                seconds[label].append(taken)
    return Timing(name, way, statistics.median(seconds["ours"]), statistics.median(seconds["theirs"]))


def _timed(trace: Callable[[], Any]) -> float:
    started = time.process_time()
    try:
        trace()
    except _Stop:
        return time.process_time() - started
    raise AssertionError("the partitioner was not called, so more than tracing was measured")


def _plain(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The module's own Python code, its parameters and buffers as arguments."""
    model, batch = make_model(name), make_batch(name, quick=True)
    batch.pop("attention_mask", None)  # what the model does with one depends on its elements
    if "input_ids" in batch:  # so that positions are not looked at either
        length = batch["input_ids"].shape[1]
        batch["position_ids"] = torch.arange(length).unsqueeze(0)
        if name in ("gpt2", "llama"):  # of positions they ask whether they are those of several texts
            batch["attention_mask"] = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def fn(state: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(model, state, kwargs=batch).loss

    def ours() -> Any:
        return aotkit.aot_function(fn, aotkit.nop, partition_fn=_stop)(state, batch)

    def theirs() -> Any:
        return torchs_aot_function(fn, lambda graph, _: graph, partition_fn=_stop)(state, batch)

    return ours, theirs


def _graph(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The graph that Dynamo captures."""
    model, batch = make_model(name), make_batch(name, quick=True)
    seen: list[tuple[torch.fx.GraphModule, Sequence[Any]]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append((graph, inputs))
        return graph

    torch._dynamo.reset()
    torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(**batch)
    ((graph, inputs),) = seen
    given = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in inputs]

    def ours() -> Any:
        return aotkit.aot_module_simplified(graph, given, aotkit.nop, partition_fn=_stop)

    def theirs() -> Any:
        return torchs_aot_module_simplified(graph, given, lambda g, _: g, partition_fn=_stop)

    return ours, theirs


WAYS: dict[str, Callable[[str], tuple[Callable[[], Any], Callable[[], Any]]]] = {"plain": _plain, "graph": _graph}
"""Ways in: each makes, for a model, what traces it by ours and by torch's own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per model and way. Returns 1 if a ratio is above the limit."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.tracing", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    timings = []
    for way in chosen.ways:
        for name in chosen.models:
            timing = measure(name, way, chosen.rounds)
            timings.append(timing)
            print(
                f"{way:6} {name:7} ours {timing.ours * 1e3:7.0f} ms   torch {timing.theirs * 1e3:7.0f} ms   "
                f"ratio {timing.ratio:.2f}",
                flush=True,
            )
    worst = max(timing.ratio for timing in timings)
    print(f"worst ratio {worst:.2f}, limit {LIMIT}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
