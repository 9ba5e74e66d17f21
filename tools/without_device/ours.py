"""Our kernels for a model on a CUDA device, without one."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from aotkit_inductor_lower import LowerOptions, compile_to_program
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.ir import BufferRef, ExternCall, LoopNest, Program
from aotkit_inductor_lower.launch_plan import CompiledProgram
from aotkit_inductor_lower.ops.dtypes import is_float
from aotkit_inductor_lower.targets.triton import KernelSource, compile_kernel
from aotkit_inductor_lower.targets.triton.binary import contents_of
from aotkit_inductor_lower.targets.triton.render.names import argument_name
from tools.captured import captured

from .kernels import Call, Choice, Graph, Launch, computes, distinct_bytes
from .models import on_fake_device, step
from .pretend import ARCH
from .traffic import Argument, Array, Helpers, namespace

__all__ = ["our_graphs"]


def our_graphs(name: str) -> list[Graph]:
    """Our forward and backward of a training step."""
    options = LowerOptions(processor="triton-interpreter")
    with on_fake_device(name) as (model, batch):
        graphs = captured(lambda backend: step(model, batch, backend), options)
    found = []
    for part, module, _ in graphs:
        lowered = compile_to_program(module, options=options)
        assert isinstance(lowered, Compiled), f"the {part} of {name} is compiled in parts"
        found.append(graph_of(part, lowered.program, lowered.scheduled))
    return found


def graph_of(part: str, program: CompiledProgram, scheduled: Program) -> Graph:
    """The launches of a program whose sizes are known."""
    contents = contents_of(program.binary)
    buffers = {b.name: b for b in program.plan.buffers}
    counts = {slot: count.evaluate({}) for slot, count in contents.counts}
    nests = {name: step.name for step in scheduled.steps if isinstance(step, LoopNest) for name in step.writes}
    read: dict[str, set[str]] = {}  # by what computes in the place of a call of ATen
    launches = []
    for _, own in contents.segments:
        for launch in own:
            source = contents.kernels[launch.kernel].source
            slots = {argument_name(a): (a, slot) for a, slot in zip(source.parameters, launch.slots, strict=False)}
            given = {name: _argument(name, a, buffers[slot]) for name, (a, slot) in slots.items()}
            known = read.setdefault(_nest_of(nests, next(slot for a, slot in slots.values() if a.written)), set())
            again = frozenset(name for name, (_, slot) in slots.items() if slot in known)
            known.update(slot for a, slot in slots.values() if not a.written)
            blocks = dict(source.config.blocks)
            choice = Choice((counts[launch.grid],), blocks, 32 * source.config.num_warps, _maker(source))
            key = f"{launch.kernel} {[(n, a.elements) for n, a in given.items()]} {sorted(again)}"
            launches.append(Launch(key, source.name, source.text, _definer(source), given, (choice,), known=again))
    calls = [_call(s, scheduled) for s in scheduled.steps if isinstance(s, ExternCall) and computes(s.target)]
    return Graph(part, tuple(launches), tuple(calls))


def _nest_of(nests: Mapping[str, str], slot: str) -> str:
    """The nest that writes a buffer, or whose kernels pass something to each other in it."""
    scratch = [nest for nest in nests.values() if slot.startswith(f"{nest}_") and slot.endswith("_scratch")]
    return nests.get(slot) or max(scratch, key=len, default=slot)


def _call(step: ExternCall, scheduled: Program) -> Call:
    def bytes_of(names: Iterable[str]) -> float:
        return float(sum(_bytes_of(scheduled.buffer(name)) for name in names))

    operands = [a.name for a in tree_leaves((step.args, [a for _, a in step.kwargs])) if isinstance(a, BufferRef)]
    results = [name for name in (*step.results, *step.mutates) if name is not None]
    return Call(step.target, bytes_of(operands), bytes_of(results))


def _bytes_of(buffer: Any) -> int:
    sizes, strides = ([n.evaluate({}) for n in each] for each in (buffer.sizes, buffer.strides))
    return distinct_bytes(sizes, strides, getattr(torch, buffer.dtype).itemsize)


def _argument(name: str, argument: Any, buffer: Any) -> Argument:
    sizes, strides = ([n.evaluate({}) for n in each] for each in (buffer.sizes, buffer.strides))
    elements = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if all(sizes) else 0
    return Argument(name, max(1, _bytes(argument.dtype)), elements, is_float(argument.dtype))


def _bytes(dtype: Any) -> int:
    from aotkit_inductor_lower.ops.dtypes import to_torch_dtype

    return to_torch_dtype(dtype).itemsize


def _maker(source: KernelSource) -> Callable[[], tuple[str, bytes, str]]:
    def make() -> tuple[str, bytes, str]:
        cubin = compile_kernel(source, ARCH, keep_ptx=True)
        return cubin.ptx, cubin.code, cubin.name

    return make


def _definer(source: KernelSource) -> Callable[[Any], Callable[..., None]]:
    def define(tl: Any) -> Callable[..., None]:
        known = {"jit": lambda function: function, "libm": Helpers(), "range": tl.range}
        names = namespace(tl, **known)
        filename = f"<ours {source.name}>"
        linecache.cache[filename] = (len(source.text), None, source.text.splitlines(True), filename)
        exec(compile(source.text, filename, "exec"), names)
        names |= {n: f for n, f in _replaced(tl).items() if n in names}
        function: Callable[..., None] = names[source.name]
        return function

    return define


def _replaced(tl: Any) -> dict[str, Callable[..., Any]]:
    """Device functions that store, or that choose what is read."""

    def check_index(value: Any, size: Any, mask: Any) -> Array:
        return value % size  # type: ignore[no-any-return]

    atomics = {name: getattr(tl, name) for name in ("atomic_add", "atomic_min", "atomic_max")}
    return {"check_index": check_index, **atomics}
