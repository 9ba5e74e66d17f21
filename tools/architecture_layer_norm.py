"""One layer norm for both targets: the part of docs/architecture.md that shows each level of IR beside the next."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

__all__ = ["layer_norm_levels"]

ROWS, COLUMNS = 32, 64


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Over rows of 64 numbers."""
    return F.layer_norm(x, (COLUMNS,), weight, bias)


def layer_norm_levels() -> Iterator[tuple[str, str, str]]:
    """(title with a sentence, language of the block, text) of each level."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from aotkit_inductor_lower import decompositions, lower_graph, print_program, schedule_program
    from aotkit_inductor_lower.ir import LoopNest
    from aotkit_inductor_lower.kernel_ir.print import print_kernel
    from aotkit_inductor_lower.kernel_passes.normal_form import kernel_of
    from aotkit_inductor_lower.targets.cpu import processor_machine
    from aotkit_inductor_lower.targets.cpu.generate import generate
    from aotkit_inductor_lower.targets.cpu.map_loops import map_loops as on_processor
    from aotkit_inductor_lower.targets.triton.generate import render_program
    from aotkit_inductor_lower.targets.triton.map_loops import map_loops as in_tiles

    inputs = torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS), torch.randn(COLUMNS)
    graph = make_fx(layer_norm, decompositions(), tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    program, _ = schedule_program(lower_graph(graph, name="layer_norm"))
    yield "**Loop IR**, the same for both targets but for the device:", "text", print_program(program)

    (nest,) = program.steps
    assert isinstance(nest, LoopNest)
    kernel = kernel_of(nest, {b.name: b for b in program.buffers})
    yield "**Kernel IR** in its normal form, the same for both:", "text", print_kernel(kernel)
    machine = processor_machine("x86-64-v3")
    mapped = _changed(print_kernel(kernel), print_kernel(on_processor(kernel, machine)))
    yield (
        "**The CPU** writes on the loops how they are run: rows are shared out, vectors run along each of them.",
        "diff",
        mapped,
    )
    text = generate(program, machine, keep_text=True).text
    yield "**LLVM**, rendered from that:", "llvm", text
    mapped = _changed(print_kernel(kernel), print_kernel(in_tiles(kernel)))
    yield (
        "**Triton** writes on the same loops which block of rows a program has, and that it holds a row whole.",
        "diff",
        mapped,
    )
    rendered = render_program(program)
    yield "**The Triton kernel**, rendered from that:", "python", rendered.kernels[0].source.text


def _changed(before: str, after: str) -> str:
    """The lines that are others, without their surroundings."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def source_of_layer_norm() -> list[str]:
    """The lines of `layer_norm`."""
    text = Path(__file__).read_text(encoding="utf-8")
    begin = text.index("def layer_norm(")
    return text[begin : text.index("\n\n\n", begin)].splitlines()
