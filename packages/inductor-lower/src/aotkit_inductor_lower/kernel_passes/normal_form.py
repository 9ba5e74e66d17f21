"""The normal form of a kernel: what every target starts from.

Note [Normal form]
    1. Each load and store has one flat offset, aliases are resolved to the memory they view (:mod:`.linearize`).
    2. Divisions that follow from the loops' ranges are gone, and loops are split where their variables are divided by
       constants, so that reshaped views become plain strides.
    3. Loops are ordered by stride, and neighbours that are contiguous in every access are merged. A pointwise op on
       ``[B, S, H]`` ends as one loop.
    4. What the table of ops says in other ops (sigmoid, powers of small integers) is written in these, and
       bytes are cast in one step.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Buffer, LoopNest
from ..kernel_ir.nodes import Kernel, KernelModule
from ..passes import PassContext, in_order
from . import exact_casts, expand_ops, merge_loops, order_loops, simplify_bounds, split_loops_by_divisors
from .linearize import DECLARE_SIZES, linearize_nest

__all__ = ["NORMAL_FORM", "kernel_of", "normalize"]

NORMAL_FORM = in_order(
    simplify_bounds.PASS,
    split_loops_by_divisors.PASS,
    order_loops.PASS,
    merge_loops.PASS,
    expand_ops.PASS,
    exact_casts.PASS,
    DECLARE_SIZES,
)


def normalize(module: KernelModule) -> KernelModule:
    """The module with every kernel in its normal form, and calls that pass what these still take."""
    ctx = PassContext.of()
    for each in NORMAL_FORM:
        module = each.run(module, ctx)
    return module


def kernel_of(nest: LoopNest, buffers: Mapping[str, Buffer]) -> Kernel:
    """The kernel of one nest in its normal form, as if each of its buffers, aliases too, had memory of its own."""
    (kernel,) = normalize(KernelModule(nest.name, (linearize_nest(nest, buffers, {}),), ())).kernels
    return kernel
