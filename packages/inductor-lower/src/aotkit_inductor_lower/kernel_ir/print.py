"""Kernels as text: what people read in dumps and tests. :mod:`.parse` reads it back.

Note [Kernel text]
    As the loop IR's (Note [IR text]), but loops nest, and **indentation counts**: a loop's body is what stands further
    to the right. A module::

        aotkit-kernel 1
        module softmax
        kernel softmax(x: f32 aligned, y: f32 written also i32, $s0: size) index i64
          origin nodes ["amax"] ops ["aten.amax.default"] line "model.py:3"
          scratch exp: f32[64] stack
          grid i0 < $s0 units, i1 < 8
          loop r0 < 64 lanes 16 x2 masked:
            %v0 = load x[64*i0 + r0] : f32
            %v1 = reduce argmax %v0 at r0 : i64
        call softmax = kernel 0(arg0_1, add, $s0) line "model.py:3"

    ``ordered`` follows the index type where the grid's iterations run in order. A loop's map is its kind, its width if
    not 1, ``x2`` if two are interleaved, the name of its block, and its tail if there is one. What a compiler is told
    stands in a line ``config num_warps 4, num_stages 2``. Versions end a kernel: ``version 8 - $s0`` before the kernel
    that runs where that is not negative, four columns to the right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from ..ir.print import name_text, origin_lines, print_instr
from .nodes import SERIAL, Kernel, KernelCall, KernelModule, Loop, LoopMap, Param, Scratch, Stmt

__all__ = ["KERNEL_TEXT_VERSION", "print_kernel", "print_module"]

KERNEL_TEXT_VERSION = 1


def print_module(module: KernelModule, *, origins: bool = True) -> str:
    """The text of all kernels of a program, and their calls."""
    lines = [f"aotkit-kernel {KERNEL_TEXT_VERSION}", f"module {name_text(module.name)}"]
    for kernel in module.kernels:
        lines += _kernel_lines(kernel, origins)
    lines += [_call_line(call, origins) for call in module.calls]
    return "\n".join(lines) + "\n"


def print_kernel(kernel: Kernel, *, origins: bool = True) -> str:
    """The text of one kernel. Without ``origins`` it depends on what is computed only."""
    return "\n".join(_kernel_lines(kernel, origins)) + "\n"


def _kernel_lines(kernel: Kernel, origins: bool) -> list[str]:
    ordered = " ordered" if kernel.ordered else ""
    params = ", ".join(map(_param_text, kernel.params))
    lines = [f"kernel {name_text(kernel.name)}({params}) index {kernel.index_type.value}{ordered}"]
    lines += origin_lines(kernel.origin, origins)
    if kernel.config:
        lines.append(f"  config {', '.join(f'{name} {value}' for name, value in kernel.config)}")
    if kernel.scratch:
        lines.append(f"  scratch {', '.join(map(_scratch_text, kernel.scratch))}")
    if kernel.grid:
        lines.append(f"  grid {', '.join(map(_loop_text, kernel.grid))}")
    lines += _body_lines(kernel.body, "  ")
    for condition, version in kernel.versions:
        lines.append(f"  version {condition}")
        lines += (f"    {line}" for line in _kernel_lines(version, origins))
    return lines


def _param_text(param: Param) -> str:
    if param.kind != "memory":
        return f"${name_text(param.name)}: {param.kind}"
    also = f" also {' '.join(dtype.value for dtype in param.also)}" if param.also else ""
    words = " written" * param.written + " aligned" * param.aligned + " nontemporal" * param.nontemporal
    return f"{name_text(param.name)}: {param.dtype.value}{words}{also}"


def _scratch_text(scratch: Scratch) -> str:
    return f"{name_text(scratch.name)}: {scratch.dtype.value}[{scratch.extent}] {scratch.storage}"


def _loop_text(loop: Loop) -> str:
    return f"{loop.symbol} < {loop.extent}{_map_text(loop.map)}"


def _map_text(map_: LoopMap) -> str:
    if map_ == SERIAL:
        return ""
    text = f" {map_.kind}"
    if map_.width != 1:
        text += f" {map_.width}"
    if map_.interleave != 1:
        text += f" x{map_.interleave}"
    if map_.block:
        text += f" of {name_text(map_.block)}"
    return text if map_.tail == "exact" else f"{text} {map_.tail}"


def _body_lines(body: Iterable[Stmt], indent: str) -> Iterable[str]:
    for stmt in body:
        if isinstance(stmt, Loop):
            yield f"{indent}loop {_loop_text(stmt)}:"
            yield from _body_lines(stmt.body, indent + "  ")
        else:
            yield indent + print_instr(stmt)


def _call_line(call: KernelCall, origins: bool) -> str:
    arguments = ", ".join("$" + name_text(a[1:]) if a.startswith("$") else name_text(a) for a in call.arguments)
    line = f" line {json.dumps(call.line)}" if call.line and origins else ""
    return f"call {name_text(call.step)} = kernel {call.kernel}({arguments}){line}"
