"""What tests of kernels in tile registers, and of attention in any blocks, share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, bind_program, compile_graph
from aotkit_inductor_lower.targets.cpu import host_machine
from aotkit_inductor_lower.targets.cpu.machine import processor_machine

needs_tiles = pytest.mark.skipif(
    not host_machine().has("amx-bf16"),
    reason="kernels in tile registers run where the processor and the system have AMX",
)

#: Levels of x86-64 whose vectors are multiplied and added at once, as far as this processor has them.
_BITS = host_machine().vector_bits if host_machine().triple.startswith("x86_64") else 0
LEVELS = [name for name, bits in (("x86-64-v3", 256), ("x86-64-v4", 512)) if bits <= _BITS]

#: Attention is computed in blocks: in tile registers, or else on vectors.
needs_blocks = pytest.mark.skipif(
    not host_machine().has("fma"), reason="attention is ATen's where vectors are not multiplied and added at once"
)


def generated(program: Callable[..., Any], args: list[torch.Tensor], **options: Any) -> CompiledGraph:
    """The program as one kernel."""
    graph = make_fx(program, tracing_mode=options.pop("tracing_mode", "fake"))(*args)
    compiled = compile_graph(graph, options=LowerOptions(contractions="generated", **options))
    assert isinstance(compiled, CompiledGraph) and not compiled.report().externs, compiled.report()
    assert compiled.report().kernel_count == 1
    machine = processor_machine(options.get("processor", "host"))
    assert bool(compiled.compiled.binary.facts.get("tiles")) == machine.has("amx-bf16")
    return compiled


def watched(compiled: CompiledGraph, args: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results, and the same on another number of threads with nothing read or written beside the tensors."""
    got = compiled(list(args))
    bound = bind_program(compiled.compiled, compiled.constants, redzones=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        for again, first in zip(bound(list(args)), got, strict=True):
            assert torch.equal(again.nan_to_num(7.0), first.nan_to_num(7.0))
    finally:
        torch.set_num_threads(threads)
    return got
