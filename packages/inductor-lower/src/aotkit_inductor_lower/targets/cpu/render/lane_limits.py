"""Comparisons of a place with a limit, in each lane.

Note [Limits in lanes]
    A kernel with padding asks for each vector that it reads which of its lanes lie within the image. As 64-bit numbers
    the places of sixteen lanes fill two registers, and each of the two comparisons takes as many instructions as the
    sums that the loop is there for. But the lanes' places follow each other, and the limit is the same in all of them.
    So the number of the lane, a byte, is compared with how far the limit lies from the first lane, at most as far as
    there are lanes: two instructions on scalars and one on a small register. A depthwise convolution with four taps
    along one dimension takes half the time so.
"""

from __future__ import annotations

from ....ir import Compute, DType
from .context import KernelContext, Value, ramp_literal
from .emitter import Ssa, imm

__all__ = ["limited"]

#: How lanes compare with the distance to the limit, and what is added to that.
_AS_LANES = {"ge": ("icmp sge", 0), "gt": ("icmp sge", 1), "lt": ("icmp slt", 0), "le": ("icmp slt", 1)}
_TURNED = {"ge": "le", "gt": "lt", "lt": "gt", "le": "ge"}
_FAR = 1 << 62  # no distance to a limit nearer than this overflows: places are those of elements


def limited(ctx: KernelContext, instr: Compute) -> Value | None:
    """A comparison of places that follow each other in the lanes with one limit; ``None`` if it is another one."""
    vector = ctx.vector
    if vector is None or vector.lanes == 1 or instr.op not in _AS_LANES:
        return None
    op, (places, limit) = instr.op, (ctx.values[name] for name in instr.args)
    if not places.varying:
        op, places, limit = _TURNED[op], limit, places
    end = _limit(limit)
    if end is None or not places.varying or not places.starts:
        return None
    em, ops, lanes = ctx.em, ctx.ops, vector.lanes
    text, more = _AS_LANES[op]
    numbers = ramp_literal(range(lanes), "i8")
    parts = []
    for start in places.starts:
        distance = em.add(em.sub(end, start), imm(more))
        distance = em.maximum(em.minimum(distance, imm(lanes)), imm(0))
        parts.append(ops.compare(text, numbers, em.splat(ops.convert("trunc", distance, "i8"), lanes)))
    return Value(instr.dtype, tuple(parts), varying=True)


def _limit(value: Value) -> Ssa | None:
    """A number that is the same in all lanes and not far from places; ``None`` for any other value."""
    if value.varying or value.dtype is not DType.I64:
        return None
    constant = value.parts[0].constant
    near = bool(value.starts) if constant is None else abs(constant) < _FAR
    return value.parts[0] if near else None
