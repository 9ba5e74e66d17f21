"""Numbers of a byte that are converted twice are converted once: every float type holds them exactly.

What int8 weights are multiplied as in bfloat16 is rounded to bfloat16 before it is widened, which changes nothing and
takes longer than the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import Compute, DType, Instr
from ..ir.walk import computes, instructions, used_values, value_types
from ..kernel_ir.nodes import Kernel
from ..kernel_ir.walk import map_instructions, without_values
from ..ops.dtypes import is_float
from .each_kernel import kernel_pass

__all__ = ["PASS", "exact_casts"]

_BYTES = (DType.BOOL, DType.I8, DType.U8)
_WIDE = (DType.F32, DType.F64)


def exact_casts(kernel: Kernel) -> Kernel:
    """The kernel with bytes cast to f32 and f64 in one step; the same object if they all are."""
    instrs = instructions(kernel.body)
    types = value_types(instrs)
    narrow = {
        i.result: i.args[0]
        for i in computes(instrs)
        if i.op == "cast" and types.get(i.args[0]) in _BYTES and is_float(i.dtype)
    }
    if not any(_widens(i, narrow) for i in computes(instrs)):
        return kernel
    body = map_instructions(kernel.body, lambda instr: _in_one_step(instr, narrow))
    return replace(kernel, body=without_values(body, narrow.keys() - used_values(instructions(body))))


def _widens(instr: Instr, narrow: Mapping[str, str]) -> bool:
    return isinstance(instr, Compute) and instr.op == "cast" and instr.dtype in _WIDE and instr.args[0] in narrow


def _in_one_step(instr: Instr, narrow: Mapping[str, str]) -> Instr:
    if isinstance(instr, Compute) and _widens(instr, narrow):
        return Compute(instr.result, instr.op, (narrow[instr.args[0]],), instr.dtype)
    return instr


PASS = kernel_pass(
    "exact-casts",
    exact_casts,
    why="rounding what a narrower float holds exactly takes time and changes nothing",
)
