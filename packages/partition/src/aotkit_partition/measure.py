"""The measured counterpart of the simulated timeline: torch's own allocation events while an FX interpreter runs.

What an operator allocates and frees again before it returns (its workspace) is left out on request: no choice of
saved values can influence it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.profiler import record_function

from ._torch_compat import AllocationEvent, allocation_events, memory_profile

__all__ = ["MeasuredPeak", "measure_peak"]

_STEP = "aotkit_partition step"


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """Bytes in use at once at most, beyond what was there before; without and with what operators use internally."""

    bytes: int
    bytes_with_workspace: int
    outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]


class _Interpreter(torch.fx.Interpreter):
    """Marks the span of each node for the profiler."""

    def run_node(self, n: torch.fx.Node) -> Any:
        with record_function(_STEP):
            return super().run_node(n)


def measure_peak(
    forward: torch.fx.GraphModule,
    backward: torch.fx.GraphModule,
    num_fwd_outputs: int,
    inputs: Sequence[Any],
    make_tangents: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    num_saved_symints: int = 0,
) -> MeasuredPeak:
    """Run forward and backward once under torch's profiler, and find the peak among its allocation events.

    Args:
        forward: as in :class:`Partition`.
        backward: as in :class:`Partition`.
        num_fwd_outputs: as in :class:`Partition`.
        num_saved_symints: as in :class:`Partition`.
        inputs: arguments of the forward.
        make_tangents: from the forward's outputs; ones by default.
    """

    def step() -> tuple[Sequence[Any], Sequence[Any]]:
        returned = list(_Interpreter(forward).run(*inputs))
        outputs, saved = returned[:num_fwd_outputs], returned[num_fwd_outputs:]
        split = len(saved) - num_saved_symints
        given = [*saved[split:], *saved[:split]]
        del returned, saved
        given.extend(make_tangents(outputs) if make_tangents is not None else _ones(backward, len(given)))
        return outputs, _Interpreter(backward).boxed_run(given)

    with torch.no_grad():
        step()  # lazily made state (thread pools, libraries' caches) is no part of a step
        with memory_profile() as recorded:
            outputs, gradients = step()
    without, with_workspace = _peaks(allocation_events(recorded, _STEP))
    return MeasuredPeak(without, with_workspace, tuple(outputs), tuple(gradients))


def _ones(backward: torch.fx.GraphModule, num_saved: int) -> list[torch.Tensor]:
    """Tangents of ones, as the graph describes them (static sizes)."""
    described = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")[num_saved:]]
    return [torch.ones(tuple(value.shape), dtype=value.dtype, device=value.device) for value in described]


def _peaks(events: Sequence[AllocationEvent]) -> tuple[int, int]:
    """Without and with workspace: memory that comes and goes within one step."""
    open_at: dict[int, int] = {}
    workspace: set[int] = set()
    for position, event in enumerate(events):
        if event.bytes > 0:
            open_at[event.address] = position
        else:
            begun = open_at.pop(event.address, None)
            if begun is not None and event.step is not None and events[begun].step == event.step:
                workspace.update((begun, position))
    lean = full = lean_peak = full_peak = 0
    for position, event in enumerate(events):
        full += event.bytes
        lean += 0 if position in workspace else event.bytes
        lean_peak, full_peak = max(lean_peak, lean), max(full_peak, full)
    return lean_peak, full_peak
