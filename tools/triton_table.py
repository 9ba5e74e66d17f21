"""Every Triton kernel of twelve models' training steps beside the incumbent's, compiled for sm_90 without a GPU.

``python -m tools.triton_table [--models bert ...] [--keep FOLDER [--left]] [--write]``

Per graph: launches, bytes read and written, ATen calls, registers of a thread, kernels that spill, loads that are
narrower than they could be, and the time that a model of the device expects; the same of Inductor's kernels, made in
the same run. ``--write`` puts that into docs/triton-kernels.md, ``--keep`` every kernel's facts as JSON into a
folder, and with ``--left`` models that have some there are not measured again: twenty minutes can be cut in parts.
Ends with status 1 if some kernel spills.

``python -m tools.triton_table --run [--quick] [--models bert ...]`` executes the launch plans of the five architectures
on CPU tensors in Triton's interpreter instead and compares each result with eager; status 1 if one differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.targets.triton import (
    TritonKernel,
    compile_kernel,
    kernels_of,
    resource_facts,
    vector_bytes,
)
from tools.bench.models import MODELS, make_batch, make_model
from tools.captured import captured
from tools.without_device.models import MODELS as DEVICE_MODELS
from tools.without_device.table import complaints, gather, page, sizes_of

__all__ = ["Graph", "Row", "capture", "executed", "lower", "main", "measure", "run_difference"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "triton-kernels.md"
ARCH = 90


@dataclass(frozen=True)
class Graph:
    """A forward or backward graph and real inputs of it."""

    name: str
    module: torch.fx.GraphModule
    inputs: list[Any]


@dataclass(frozen=True, slots=True)
class Row:
    """Facts of one graph's kernels."""

    graph: str
    launches: int
    calls: int
    registers: tuple[int, ...]
    spilling: tuple[str, ...]
    widest: tuple[int, ...]

    def text(self) -> str:
        """A line of the table."""
        wide = sum(width >= 16 for width in self.widest)
        return (
            f"| {self.graph} | {self.launches} | {len(self.registers)} | {self.calls} | "
            f"{statistics.median(self.registers or (0,)):.0f} | {max(self.registers, default=0)} | "
            f"{len(self.spilling)} | {wide} |"
        )


def capture(name: str, quick: bool) -> list[Graph]:
    """The forward and backward graphs of one training step, with their inputs."""

    def step(backend: Callable[..., Any]) -> None:
        model = torch.compile(make_model(name).train(), backend=backend, fullgraph=True)
        model(**make_batch(name, quick)).loss.backward()

    found = [Graph(f"{name} {part}", module, inputs) for part, module, inputs in captured(step)]
    torch._dynamo.reset()
    return found


def lower(graph: Graph) -> Compiled:
    """A graph with the kernels of a device, none compiled yet."""
    lowered = compile_to_program(graph.module, options=LowerOptions(processor="triton-interpreter"))
    assert isinstance(lowered, Compiled), f"{graph.name} is compiled in parts"
    return lowered


def measure(graph: Graph, lowered: Compiled) -> Row:
    """Compile every kernel of a graph."""
    registers, spilling, widest = [], [], []
    for kernel in kernels_of(lowered.program):
        facts, width = _facts(kernel)
        registers.append(facts.registers)
        widest.append(width)
        if facts.spills:
            spilling.append(f"{kernel.source.name} ({facts.spills} bytes)")
    calls = sum(type(step).__name__ == "ExternCall" for step in lowered.scheduled.steps)
    launches = len(lowered.program.kernels)
    return Row(graph.name, launches, calls, tuple(registers), tuple(spilling), tuple(widest))


def _facts(kernel: TritonKernel) -> tuple[Any, int]:
    cubin = compile_kernel(kernel.source, ARCH, keep_ptx=True)
    return resource_facts(cubin), max(vector_bytes(cubin.ptx), default=0)


def run_difference(graph: Graph, lowered: Compiled) -> str | None:
    """How the plan's results in the interpreter differ from eager's, or ``None``."""
    bound = bind_program(lowered.program, lowered.constants)
    given = [a.clone() if isinstance(a, torch.Tensor) else a for a in graph.inputs]
    want, got = graph.module(*graph.inputs), bound(given)
    for position, (ours, reference) in enumerate(zip(got, want, strict=True)):
        if not isinstance(reference, torch.Tensor):
            if ours != reference:
                return f"result {position} is {ours}, not {reference}"
            continue
        scale = float(reference.abs().max()) if reference.numel() and reference.is_floating_point() else 0.0
        if not torch.allclose(ours, reference, rtol=1e-4, atol=1e-5 * max(scale, 1e-3), equal_nan=True):
            worst = float((ours.double() - reference.double()).abs().max())
            return f"result {position} {tuple(reference.shape)} differs by up to {worst:g} of {scale:g}"
    return None


def executed(models: Sequence[str], quick: bool) -> list[str]:
    """What the interpreter computes otherwise than eager."""
    found = []
    for name in models:
        for graph in capture(name, quick):
            lowered = lower(graph)
            difference = run_difference(graph, lowered)
            found += [f"{graph.name}: {difference}"] if difference else []
            print(measure(graph, lowered).text(), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=sorted({*MODELS, *DEVICE_MODELS}))
    parser.add_argument("--run", action="store_true", help="execute the plans in the interpreter and compare")
    parser.add_argument("--quick", action="store_true", help="with --run: a quarter of the length")
    parser.add_argument("--keep", type=Path, help="a folder for what is known of every kernel")
    parser.add_argument("--left", action="store_true", help="with --keep: only models without facts in the folder")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    if chosen.run:
        broken = executed(chosen.models or list(MODELS), chosen.quick)
        print("\n".join(broken))
        return 1 if broken else 0
    facts = gather(chosen.models or list(DEVICE_MODELS), chosen.keep, again=not chosen.left)
    import triton

    text = page(facts, sizes_of(facts), "python -m tools.triton_table --write", triton.__version__)
    found = complaints(facts)
    print("\n".join([text, *found]))
    if chosen.write:
        PAGE.write_text(text, encoding="utf-8")
    return 1 if any(" spills " in line for line in found) else 0


if __name__ == "__main__":
    sys.exit(main())
