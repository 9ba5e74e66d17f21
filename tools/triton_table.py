"""Every Triton kernel of the five architectures' training graphs, compiled for sm_90 without a GPU.

``python -m tools.triton_table [--models bert ...] [--run] [--quick] [--write]``

Per model: how many kernels are launched and how many different ones are compiled, registers of a thread (median and
most), kernels that spill, bytes of the widest loads. ``--run`` also executes the launch plans on CPU tensors in
Triton's interpreter and compares each result with eager. ``--write`` puts the table into docs/triton-kernels.md. Ends
with status 1 if a kernel does not compile, spills, or a result differs.
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

__all__ = ["Graph", "Row", "capture", "lower", "main", "measure", "run_difference"]

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


HEAD = """\
# Triton kernels

What the training graphs of the five architectures become on a CUDA device: kernels launched per graph, different ones
among them, ATen calls left, registers of a thread, kernels that spill to local memory, kernels whose loads move 16
bytes per thread at once. Compiled for sm_90 by Triton {version}, without a GPU. Written by `{command}`.{executed}

| graph | launches | kernels | ATen calls | registers (median) | registers (most) | spilling | 16-byte loads |
|---|---:|---:|---:|---:|---:|---:|---:|
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--run", action="store_true", help="execute the plans in the interpreter and compare")
    parser.add_argument("--quick", action="store_true", help="a quarter of the length")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    broken, lines = [], []
    for name in chosen.models:
        for graph in capture(name, chosen.quick):
            lowered = lower(graph)
            row = measure(graph, lowered)
            lines.append(row.text())
            broken += [f"{graph.name}: {kernel} spills" for kernel in row.spilling]
            if chosen.run:
                difference = run_difference(graph, lowered)
                broken += [f"{graph.name}: {difference}"] if difference else []
            print(row.text(), flush=True)
    print("\n".join(broken))
    if chosen.write and not broken:
        import triton

        flags = "".join(f" --{name}" for name in ("quick", "run") if getattr(chosen, name))
        command = f"python -m tools.triton_table{flags} --write"
        executed = (
            "\nThe launch plans were executed in Triton's interpreter and agree with eager." if chosen.run else ""
        )
        head = HEAD.format(version=triton.__version__, command=command, executed=executed)
        PAGE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
