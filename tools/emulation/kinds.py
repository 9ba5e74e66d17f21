"""Kinds of kernels: what a run has had executed, and what there is.

What there is, is read from the tables that the generator itself works from: ways to write a kernel, instructions, ops,
reductions, element types. So a kind that is added there is missing here until a test runs it.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator

from aotkit_inductor_lower.ir import DType, Instr, LoopNest, Program
from aotkit_inductor_lower.ir.instructions import STORE_MODES, Compute, Load, Reduce, Store
from aotkit_inductor_lower.kernel_ir.nodes import LOOP_KINDS, Kernel, Loop
from aotkit_inductor_lower.launch_plan import CompiledProgram
from aotkit_inductor_lower.ops.reductions import REDUCTIONS
from aotkit_inductor_lower.ops.scalar import OP_TABLE
from aotkit_inductor_lower.targets.cpu import Machine
from aotkit_inductor_lower.targets.cpu.map_loops import map_loops, version_loops
from aotkit_inductor_lower.targets.cpu.ways import ways_of

__all__ = ["all_kinds", "kinds_of"]

#: Loops as the CPU target maps them (the others are the GPU's), and the forms that a whole kernel may have.
LOOPS = [f"loop {kind}" for kind in LOOP_KINDS if kind not in ("block", "unroll")]
FORMS = ("ordered", "scratch", "combo", "threads")


def all_kinds(machine: Machine) -> frozenset[str]:
    """Every kind that the CPU target renders for the machine: by the tables that it renders from."""
    kinds = {*LOOPS, *FORMS, "masked load", "masked store"} | {f"store {mode}" for mode in STORE_MODES}
    kinds |= {f"op {name}" for name in OP_TABLE} | {f"reduce {kind}" for kind in REDUCTIONS}
    kinds |= {f"scan {row.kind}" for row in REDUCTIONS.values() if row.scannable}
    kinds |= {_name(instruction) for instruction in typing.get_args(Instr)}
    kinds |= {f"{what} {dtype.value}" for what in ("reads", "writes") for dtype in DType}
    kinds |= {f"way {name}" for name in ways_of(machine)}
    kinds |= {"versions"} if machine.vector_bits == 512 else set()  # for short loops, whose vectors are masked
    return frozenset(kinds)


def kinds_of(
    program: Program, compiled: CompiledProgram, written: Iterable[tuple[Kernel, str]], machine: Machine
) -> Iterator[str]:
    """The kinds of the kernels of a program that was compiled for the machine. ``written``: each with its way."""
    for step in program.steps:
        if isinstance(step, LoopNest):
            for stage in step.stages:
                for instr in stage.body:
                    yield from _of_instruction(instr)
    for kernel, way in written:
        yield from _of_kernel(kernel, way, machine)
    if any(record.combo for record in compiled.kernels):
        yield "combo"
    if "GOMP_parallel" in compiled.binary.facts["imports"]:
        yield "threads"


def _name(instruction: type[object]) -> str:
    return f"instruction {instruction.__name__}"


def _of_instruction(instr: Instr) -> Iterator[str]:
    yield _name(type(instr))
    if isinstance(instr, Compute):
        yield f"op {instr.op}"
    elif isinstance(instr, Reduce):
        yield f"{'scan' if instr.running else 'reduce'} {instr.kind}"
    elif isinstance(instr, Store):
        yield f"store {instr.mode}"
    if isinstance(instr, Load | Store) and instr.mask is not None:
        yield f"masked {type(instr).__name__.lower()}"


def _of_kernel(kernel: Kernel, way: str, machine: Machine) -> Iterator[str]:
    for param in kernel.params:
        if param.kind == "memory":
            yield f"{'writes' if param.written else 'reads'} {param.dtype.value}"
    yield f"way {way}"
    if way != "loops":
        return
    mapped = version_loops(map_loops(kernel, machine), machine)
    yield from (name for name in ("ordered", "scratch", "versions") if getattr(mapped, name))
    yield from (f"loop {loop.map.kind}" for loop in mapped.grid)
    yield from _of_loops(mapped.body)


def _of_loops(body: tuple[object, ...]) -> Iterator[str]:
    for stmt in body:
        if isinstance(stmt, Loop):
            yield f"loop {stmt.map.kind}"
            yield from _of_loops(stmt.body)
