"""Our kernels for a model on a CUDA device, without one."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

from aotkit_inductor_lower import LowerOptions, compile_to_program
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.launch_plan import CompiledProgram
from aotkit_inductor_lower.ops.dtypes import is_float
from aotkit_inductor_lower.targets.triton import KernelSource, compile_kernel
from aotkit_inductor_lower.targets.triton.binary import contents_of
from aotkit_inductor_lower.targets.triton.render.names import argument_name
from tools.captured import captured

from .kernels import Choice, Graph, Launch, computes
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
        found.append(graph_of(part, lowered.program, lowered.scheduled.steps))
    return found


def graph_of(part: str, program: CompiledProgram, steps: Any = ()) -> Graph:
    """The launches of a program whose sizes are known."""
    contents = contents_of(program.binary)
    buffers = {b.name: b for b in program.plan.buffers}
    counts = {slot: count.evaluate({}) for slot, count in contents.counts}
    launches = []
    for _, own in contents.segments:
        for launch in own:
            source = contents.kernels[launch.kernel].source
            given = {
                argument_name(a): _argument(argument_name(a), a, buffers[slot])
                for a, slot in zip(source.parameters, launch.slots, strict=False)
            }
            blocks = dict(source.config.blocks)
            choice = Choice((counts[launch.grid],), blocks, 32 * source.config.num_warps, _maker(source))
            key = f"{launch.kernel} {[(n, a.elements) for n, a in given.items()]}"
            launches.append(Launch(key, source.name, source.text, _definer(source), given, (choice,)))
    calls = [s.target for s in steps if type(s).__name__ == "ExternCall"]
    return Graph(part, tuple(launches), tuple(c for c in calls if computes(c)))


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
