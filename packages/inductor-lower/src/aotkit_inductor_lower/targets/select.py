"""Which target a graph is compiled for.

Note [Graphs over several devices]
    Kernels are generated for one device: the CUDA device that most of a graph's tensors are on, or the CPU. Numbers
    that a graph keeps as 0-d tensors on the CPU, and that eager lets take part in CUDA arithmetic, are copied to the
    device where they are used. Every other operator with a tensor elsewhere (copies between devices, what is computed
    on another device) stays an ATen call of the same plan, in its place, with that as its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from ..graph_passes.node_facts import tensors_of
from ..options import LowerOptions
from ..target import HOST, Capabilities, Target
from .interpreter.target import INTERPRETER
from .triton.target import TRITON_INTERPRETER, TritonTarget, cuda_capabilities

__all__ = ["as_present_device", "capabilities_for", "kernel_device", "named_target", "start_workers"]
__all__ += ["target_for", "target_on"]

_CPU = torch.device("cpu")

#: Targets of graphs on the CPU that ``options.processor`` names and that are no processors.
_NAMED: Mapping[str, Target] = {target.id: target for target in (INTERPRETER, TRITON_INTERPRETER)}


def target_for(gm: GraphModule, options: LowerOptions) -> Target:
    """The target of a graph: the device that its kernels are for, and the options say which processor the CPU is.

    Raises :class:`~.errors.CodegenError` for a processor that this one can't stand for.
    """
    return target_on(kernel_device(gm), options)


def target_on(device: torch.device, options: LowerOptions) -> Target:
    """The target of graphs whose kernels are for ``device``; raises as :func:`target_for` does."""
    if device.type != "cpu":
        capabilities = cuda_capabilities(str(device))
        named = TRITON_INTERPRETER.id if options.processor == TRITON_INTERPRETER.id else capabilities.device
        return TritonTarget(named, capabilities)
    if options.processor in _NAMED:
        return _NAMED[options.processor]
    from .cpu.target import cpu_target

    return cpu_target(options.processor)


def start_workers(device: torch.device, options: LowerOptions) -> None:
    """Start the processes that compile kernels for ``device``, if there are such."""
    if device.type == "cuda" and options.processor != TRITON_INTERPRETER.id:
        from .triton.workers import start_shared

        start_shared(options.compile_workers)


def named_target(name: str) -> Target:
    """A target by name: ``"cpu"``; ``"cpu:NAME"`` with a level of x86-64, of which nothing else is known and which this
    processor need not have, or with LLVM's name of a processor whose choices are made; ``"cuda:0"``;
    ``"interpreter"``, ``"triton-interpreter"``.

    Raises ``ValueError`` for another name.
    """
    kind, _, which = name.partition(":")
    if name in _NAMED:
        return _NAMED[name]
    if kind == "cuda" and which.isdecimal():
        return TritonTarget(name, cuda_capabilities(name))
    from .cpu.machine import LEVELS, level_machine
    from .cpu.target import cpu_target, target_of

    if kind != "cpu" or (which.startswith("x86-64") and which not in LEVELS):
        raise ValueError(f"there is no target {name}; there are cpu, cpu:NAME, cuda:NUMBER, {', '.join(_NAMED)}")
    if which in LEVELS:
        return target_of(level_machine(which), which)
    if not which:
        return cpu_target()
    return replace(cpu_target(), processor=which)


def capabilities_for(gm: GraphModule, options: LowerOptions) -> Capabilities:
    """What the target of a graph can do."""
    device = kernel_device(gm)
    if device.type != "cpu":
        return cuda_capabilities(str(device))
    return _NAMED[options.processor].capabilities if options.processor in _NAMED else HOST


def kernel_device(gm: GraphModule) -> torch.device:
    """The device that the graph's kernels are for; see Note [Graphs over several devices]."""
    if not any(map(_names_cuda, gm.graph.nodes)):
        return _CPU
    found = Counter(tensor.device for node in gm.graph.nodes for tensor in tensors_of(node))
    on_cuda = {device: count for device, count in found.items() if device.type == "cuda"}
    return max(on_cuda, key=lambda device: (on_cuda[device], -(device.index or 0)), default=_CPU)


def _names_cuda(node: Node) -> bool:
    """Whether tensors on CUDA begin at the node: an input, or an operator that is told so."""
    if node.op == "placeholder" or node.op == "get_attr":
        return any(tensor.device.type == "cuda" for tensor in tensors_of(node))
    device = node.kwargs.get("device") if node.kwargs else None
    return device is not None and torch.device(str(device)).type == "cuda"


def as_present_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a CUDA device is the present one, on which kernels of the user's own are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
