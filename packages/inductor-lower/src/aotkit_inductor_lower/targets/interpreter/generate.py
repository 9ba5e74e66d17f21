"""A scheduled program to a launch plan and the text of its kernels."""

from __future__ import annotations

import itertools

from ...ir import Program
from ...kernel_ir.nodes import KernelModule
from ...kernel_ir.print import print_module
from ...kernel_passes.linearize import memory_extents, memory_starts
from ...launch_plan.records import Binary, CompiledProgram, KernelRecord
from ...memory.build_plan import build_plan
from ...memory.segments import segments
from ...memory.storage import assign_storage, check_on_cpu

__all__ = ["generate"]


def generate(program: Program, kernels: KernelModule, *, keep_text: bool = False) -> CompiledProgram:
    """The plan of ``program``, with its ``kernels`` as text. ``keep_text`` keeps that in the result, too.

    The binary's facts say how many bytes each memory has, from its address on and before it: kernels are given
    addresses, and the interpreter looks whether an access is inside.

    Raises :class:`~.errors.CodegenError` for a nest over buffers that are not on the CPU.
    """
    check_on_cpu(program)
    storage, extents, starts = assign_storage(program), memory_extents(program), memory_starts(program)
    records = [
        KernelRecord(nest.name, nest.name, segment.function, nest.origin)
        for segment in itertools.chain(*segments(program, storage))
        for nest in segment.nests
    ]
    arguments = {argument: None for call in kernels.calls for argument in call.arguments}
    memories = [name for name in arguments if not name.startswith("$")]
    sizes = {"bytes": {name: extents[name] for name in memories}}
    sizes["before"] = {name: starts[name] for name in memories if name in starts}
    symbols = {f"${symbol.name}": None for of in sizes.values() for size in of.values() for symbol in size.symbols}
    plan = build_plan(program, storage, (*arguments, *(name for name in symbols if name not in arguments)))
    text = print_module(kernels)
    facts = {what: {name: str(size) for name, size in of.items()} for what, of in sizes.items()}
    binary = Binary.of("interpreter", facts, (("kernels", text.encode()),) if records else ())
    return CompiledProgram(plan, tuple(records), binary, text if keep_text else "")
