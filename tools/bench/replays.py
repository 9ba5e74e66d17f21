"""What a training step with recordings takes of the processor: ``python -m tools.bench.replays``.

A ConvNeXt of the usual depth (180 parameters) and few channels trains with ``cudagraphs`` on the simulated device,
whose replays are left out once everything is recorded: what is left is guards, wrappers, finding the recordings and
handing out results, as on a device. Median microseconds of each part of a step, in order.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import aotkit  # noqa: F401  # registers the backend, which no entry point does where it is not installed

__all__ = ["PARTS", "main", "parts_of_steps"]

PARTS = (
    "gradients to None",
    "to the recordings",
    "to the replay",
    "results",
    "to the caller",
    "backward: to the recordings",
    "to the replay",
    "results",
    "to the caller",
)


def make_model() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    torch.manual_seed(0)
    return ConvNextForImageClassification(ConvNextConfig(hidden_sizes=[8] * 4, image_size=32, num_labels=10))


@contextmanager
def _recorded(marks: list[float]) -> Iterator[Any]:
    """The simulated device, on which all graphs are recorded. ``marks`` gets the time at which the recordings are asked
    and left."""
    from aotkit_cudagraphs import CudagraphTrees, TreeOptions
    from aotkit_cudagraphs.drivers import SimulatedDriver

    driver = SimulatedDriver(capacity=1 << 30)
    trees = CudagraphTrees(driver, TreeOptions(check_static_layouts=False))
    plain = CudagraphTrees.call

    def call(self: Any, function: Any, given: Any) -> Any:
        marks.append(time.perf_counter())
        try:
            return plain(self, function, given)
        finally:
            marks.append(time.perf_counter())

    with (
        patch("aotkit.driver.cudagraphs.recorded_device", lambda graph, ctx: torch.device("cpu")),
        patch("aotkit.driver.bound_recordings.trees_of", lambda device, outputs: trees),
        patch.object(CudagraphTrees, "call", call),
    ):
        yield driver


def parts_of_steps(steps: int, model: nn.Module, images: torch.Tensor) -> list[list[float]]:
    """Seconds of the parts of each step, in the order of :data:`PARTS`."""
    marks: list[float] = []
    with _recorded(marks) as driver:
        options: dict[str, Any] = {"cudagraphs": True, "lowering": "none", "fallback": "error", "cache": False}
        fast = torch.compile(model, backend="aotkit", options=options)

        def step() -> None:
            marks[:] = [time.perf_counter()]
            model.zero_grad(set_to_none=True)
            marks.append(time.perf_counter())
            loss = fast(images).logits.square().mean()
            marks.append(time.perf_counter())
            loss.backward()
            marks.append(time.perf_counter())

        for _ in range(5):
            step()
        with patch.object(driver, "replay", lambda recording: marks.append(time.perf_counter())):
            found = []
            for _ in range(steps):
                step()
                found.append([after - before for before, after in pairwise(marks)])
    if any(len(parts) != len(PARTS) for parts in found):
        raise RuntimeError("a step was not one replay of the forward and one of the backward")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parts_of_steps(parser.parse_args(arguments).steps, make_model(), torch.randn(2, 3, 32, 32))
    print("| part of a step | us |\n|---|---:|")
    for name, seconds in zip(PARTS, zip(*steps, strict=True), strict=True):
        print(f"| {name} | {1e6 * statistics.median(seconds):.0f} |")
    print(f"| all | {1e6 * statistics.median(map(sum, steps)):.0f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
