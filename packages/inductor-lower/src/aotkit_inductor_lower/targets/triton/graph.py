"""A graph compiled for a CUDA device (or for the interpreter), as :func:`..compile_graph` hands it out.

Note [Cubins are part of the program]
    What is stored is the plan with the cubin of every kernel. A process that finds it stored, in a cache or a package,
    binds it with the CUDA driver alone: it needs neither Triton nor the code generator. So the version of Triton is no
    part of the digest under which a program is kept: torch's own version names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from ...errors import UnsupportedGraphError
from ...graph_passes.fake_values import with_fake_values
from ...ir import Program
from ...launch_plan.store import ObjectStore, generator_digest
from ...options import LowerOptions
from ...passes import Decision, Observer, stage
from ...report import LoweringReport
from ...runtime import bind
from ..select import kernel_device
from .generate import compile_program
from .harness import harness_text
from .load import moved
from .map_loops import SIZE_HINT
from .pipeline import LoweredForDevice, advise_tf32, check_device, check_types, lower_for_device
from .program import DeviceProgram, device_from_json, device_to_json
from .tune import Tuner, device_tuner, extents_of

__all__ = ["DeviceGraph", "compile_device_graph", "compile_device_program"]


class DeviceGraph:
    """A graph compiled for CUDA, in the boxed convention: takes one list, empties it, returns a list.

    ``compiled`` is the whole result as data, which with the tensors of ``constants`` can be bound again; ``program``
    is the scheduled loop IR, ``records`` every fusion decision, ``choices`` who computes each matrix product and why
    (with ``tune``).
    """

    _boxed_call = True

    def __init__(self, compiled: DeviceProgram, lowered: LoweredForDevice) -> None:
        self.compiled = compiled
        self.constants: Mapping[str, torch.Tensor] = lowered.constants
        self.program: Program = lowered.scheduled
        self.records: tuple[Decision, ...] = lowered.records
        self.choices = lowered.choices
        self._report = lowered.report
        self._bound: Callable[[list[Any]], list[Any]] = bind(compiled, lowered.constants)

    def __call__(self, args: list[Any]) -> list[Any]:
        return self._bound(args)

    def report(self) -> LoweringReport:
        """Kernels, fusion groups, ATen calls with reasons; ``str()`` of it is readable."""
        return self._report


def compile_device_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: LowerOptions | None = None,
    observer: Observer | None = None,
    object_store: ObjectStore | None = None,
) -> DeviceGraph:
    """Compile a graph of CUDA tensors for the device that most of it is on; with
    ``LowerOptions(processor="triton-interpreter")`` a graph on the CPU for Triton's interpreter.

    Raises :class:`~..errors.UnsupportedGraphError` for what can be neither generated nor called and for redzones, which
    watch the CPU's memory only, :class:`~.errors.TritonMissing` without Triton, and :class:`~.errors.TritonError` for a
    device or a type that kernels are not made for.
    """
    compiled, lowered = compile_device_program(
        gm, example_inputs, options=options, observer=observer, object_store=object_store
    )
    with stage(observer, "bind"):
        return DeviceGraph(compiled, lowered)


def compile_device_program(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: LowerOptions | None = None,
    observer: Observer | None = None,
    object_store: ObjectStore | None = None,
) -> tuple[DeviceProgram, LoweredForDevice]:
    """The same as data: the program, and what it was generated from."""
    options = options or LowerOptions()
    if options.redzones:
        raise UnsupportedGraphError(
            "a graph for CUDA with redzones", "only memory of the CPU is watched", todo="leave the option redzones out"
        )
    interpreted = options.processor == "triton-interpreter"
    device = "cuda:0" if interpreted else None
    tuner = None
    if options.tune and not interpreted:
        own = str(kernel_device(with_fake_values(gm, example_inputs)))
        check_device(own)
        tuner = device_tuner(own)
    tune = tuner.tuning() if tuner is not None else None
    lowered = lower_for_device(gm, example_inputs, options=options, device=device, tune=tune, observer=observer)
    if observer is not None:
        observer.dump(lowered.scheduled.name, "kernels", lambda: _texts(lowered.program))
    if interpreted:
        compiled = replace(lowered.program, device="cpu", plan=moved(lowered.program.plan, "cpu"))
    else:
        with stage(observer, "compile-kernels"):
            compiled = _compiled(lowered, object_store, tuner)
    return compiled, lowered


def _texts(program: DeviceProgram) -> str:
    """Each kernel as a script that times it."""
    extents = extents_of(program)
    sizes = dict.fromkeys((name for name, *_ in program.plan.symbol_sources), SIZE_HINT)
    return "\n\n".join(harness_text(kernel.source, extents, sizes) for kernel in program.kernels)


def _compiled(lowered: LoweredForDevice, store: ObjectStore | None, tuner: Tuner | None) -> DeviceProgram:
    arch = check_device(lowered.program.device)
    check_types(lowered.scheduled, arch)
    advise_tf32(lowered.scheduled, arch)
    compile_kernels = tuner.compiled if tuner is not None else partial(compile_program, arch=arch)
    if store is None:
        return compile_kernels(lowered.program)
    made = f"sm_{arch}" if tuner is None else f"tuned on {torch.cuda.get_device_name(lowered.program.device)}"
    # The sources, not the IR that they are made from: they differ by options too (TF32, asserts).
    text = f"{generator_digest()}\n{torch.__version__}\n{made}\n{device_to_json(lowered.program)}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    found = store.get(digest)
    if found is not None:
        return device_from_json(found.decode())
    compiled = compile_kernels(lowered.program)
    store.put(digest, device_to_json(compiled).encode())
    return compiled
