"""Our partitioner beside torch's on the five architectures: same joint graphs, one run, alternating.

``python -m tools.partition_bench [--models bert ...] [--decompositions none|inductor] [--repeats 9] [--peaks]``

Bytes saved for the backward beyond inputs, operations of forward and backward (FlopCounterMode), time to partition
(CPU seconds, median), and with ``--peaks`` the simulated and the measured peak, also under eleven peak budgets. Ends
with status 1 if a figure misses what the package promises.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tools.bench.models import MODELS, make_batch, make_model

Modules = tuple[torch.fx.GraphModule, torch.fx.GraphModule]
SAVED_LIMIT, FLOPS_LIMIT, TIME_LIMIT, SIMULATION_LIMIT, PEAK_LIMIT = 1.0, 1.02, 0.2, 0.05, 0.8
PEAK_MODELS = ("bert", "llama")  # those promised to fall to PEAK_LIMIT at a budget of 0.3


@dataclass(frozen=True)
class Captured:
    """A joint graph as torch's own stack hands it to a partitioner, with real inputs for the forward."""

    joint: torch.fx.GraphModule
    num_fwd_outputs: int
    static_inputs: tuple[int, ...]
    inputs: list[Any]

    def partition_with(self, partitioner: Callable[..., Modules]) -> Modules:
        """Call as torch calls a ``partition_fn``."""
        return partitioner(
            self.joint, None, num_fwd_outputs=self.num_fwd_outputs, static_lifetime_input_indices=[*self.static_inputs]
        )


def capture(name: str, decompositions: Any, quick: bool = False) -> Captured:
    """Trace one training step through torch's own stack and keep the joint graph."""
    from functorch.compile import min_cut_rematerialization_partition, nop  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    found: list[tuple[torch.fx.GraphModule, dict[str, Any]]] = []
    inputs: list[list[Any]] = []

    def keep(joint: torch.fx.GraphModule, given: Any, **kwargs: Any) -> Modules:
        found.append((joint, kwargs))
        forward, backward = min_cut_rematerialization_partition(joint, given, **kwargs)
        return forward, backward

    def run_and_keep(graph: torch.fx.GraphModule, _examples: Any) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            inputs.append(list(args))
            return graph(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(fw_compiler=run_and_keep, bw_compiler=nop, partition_fn=keep, decompositions=decompositions)
    torch.compile(make_model(name).train(), backend=backend, fullgraph=True)(**make_batch(name, quick))
    torch._dynamo.reset()
    joint, kwargs = found[0]
    static = tuple(kwargs.get("static_lifetime_input_indices") or ())
    return Captured(joint, kwargs["num_fwd_outputs"], static, inputs[0])


def saved_bytes(forward: torch.fx.GraphModule, num_fwd_outputs: int) -> int:
    """Bytes of distinct storages among the saved values that no input owns."""
    owned = {
        node.meta["val"].untyped_storage()._cdata
        for node in forward.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.Tensor)
    }
    total = 0
    for node in forward.graph.find_nodes(op="output")[0].args[0][num_fwd_outputs:]:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in owned:
            owned.add(value.untyped_storage()._cdata)
            total += int(value.untyped_storage().nbytes())
    return total


def flops(modules: Modules, num_fwd_outputs: int, inputs: Sequence[Any]) -> int:
    """Operations of one forward and backward."""
    forward, backward = modules
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        returned = torch.fx.Interpreter(forward).run(*inputs)
        saved = list(returned[num_fwd_outputs:])
        tangents = backward.graph.find_nodes(op="placeholder")[len(saved) :]
        ones = [torch.ones(tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype) for node in tangents]
        torch.fx.Interpreter(backward).run(*saved, *ones)
    return counter.get_total_flops()


def partition_seconds(captured: Captured, partitioners: Sequence[Callable[..., Modules]], repeats: int) -> list[float]:
    """Median CPU seconds of each partitioner, taking turns."""
    times: list[list[float]] = [[] for _ in partitioners]
    for _ in range(repeats):
        for row, partitioner in zip(times, partitioners, strict=True):
            gc.collect()  # or either of them pays for the other's garbage
            begun = time.process_time()
            captured.partition_with(partitioner)
            row.append(time.process_time() - begun)
    return [statistics.median(row) for row in times]


def compare(name: str, captured: Captured, repeats: int) -> list[str]:
    """Print one model's row; return the promises it breaks."""
    from functorch.compile import min_cut_rematerialization_partition as theirs

    from aotkit_partition import min_cut_rematerialization_partition as ours

    num = captured.num_fwd_outputs
    modules = [captured.partition_with(partitioner) for partitioner in (ours, theirs)]
    saved = [saved_bytes(forward, num) for forward, _ in modules]
    work = [flops(pair, num, captured.inputs) for pair in modules]
    seconds = partition_seconds(captured, (ours, theirs), repeats)
    print(
        f"{name:7} {len(captured.joint.graph.nodes):5} nodes  saved {saved[0] / 1e6:6.2f} / {saved[1] / 1e6:6.2f} MB   "
        f"flops {work[0] / 1e9:7.3f} / {work[1] / 1e9:7.3f} G ({work[0] / work[1]:.4f})   "
        f"time {seconds[0] * 1e3:6.1f} / {seconds[1] * 1e3:6.1f} ms ({seconds[0] / seconds[1]:.3f})",
        flush=True,
    )
    checks = {
        "saved bytes": saved[0] <= SAVED_LIMIT * saved[1],
        "flops": work[0] <= FLOPS_LIMIT * work[1],
        "partition time": seconds[0] <= TIME_LIMIT * seconds[1],
    }
    return [f"{name}: {what}" for what, kept in checks.items() if not kept]


def peaks(name: str, captured: Captured) -> list[str]:
    """Print simulated and measured peaks under eleven budgets; return the promises broken."""
    from aotkit_partition import PartitionOptions, partition
    from aotkit_partition.measure import measure_peak

    def both(options: PartitionOptions) -> tuple[int, int]:
        result = partition(captured.joint, captured.num_fwd_outputs, options)
        measured = measure_peak(
            result.forward,
            result.backward,
            result.num_fwd_outputs,
            captured.inputs,
            num_saved_symints=result.num_saved_symints,
        )
        simulated = result.report.peak_bytes
        assert simulated is not None
        return simulated, measured.bytes

    options = [PartitionOptions(static_inputs=captured.static_inputs)]
    options += [
        PartitionOptions(static_inputs=captured.static_inputs, strategy="min-peak", memory_budget=step / 10)
        for step in range(11)
    ]
    rows = [both(option) for option in options]
    shown = " ".join(f"{measured / 1e6:.1f}" for _, measured in rows[1:])
    worst = max(abs(simulated / measured - 1) for simulated, measured in rows)
    print(
        f"{name:7} peak {rows[0][1] / 1e6:.1f} MB at defaults; budgets 0 ... 1: {shown}; simulation off by {worst:.2%}"
    )
    measured = [row[1] for row in rows[1:]]
    checks = {
        "simulated peak": worst <= SIMULATION_LIMIT,
        "monotone peak": measured == sorted(measured),
        "peak at budget 0.3": name not in PEAK_MODELS or measured[3] <= PEAK_LIMIT * measured[10],
    }
    return [f"{name}: {what}" for what, kept in checks.items() if not kept]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--decompositions", choices=("none", "inductor"), default="inductor")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peaks", action="store_true")
    parser.add_argument("--quick", action="store_true", help="short sequences and small images")
    chosen = parser.parse_args(arguments)
    table = None
    if chosen.decompositions == "inductor":
        import torch._inductor.lowering  # noqa: F401  some decompositions look there
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
    print("ours / torch's")
    broken: list[str] = []
    for name in chosen.models:
        captured = capture(name, table, chosen.quick)
        broken += compare(name, captured, chosen.repeats)
        if chosen.peaks:
            broken += peaks(name, captured)
    print("all promises kept" if not broken else "broken: " + "; ".join(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
