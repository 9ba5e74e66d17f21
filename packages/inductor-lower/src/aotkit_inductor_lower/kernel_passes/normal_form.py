"""The normal form of a kernel: what every target starts from.

Note [Normal form]
    1. Each load and store has one flat offset, aliases are resolved to the memory they view (:mod:`.linearize`).
    2. Divisions that follow from the loops' ranges are gone, and loops are split where their variables are divided by
       constants, so that reshaped views become plain strides.
    3. Loops are ordered by stride, and neighbours that are contiguous in every access are merged. A pointwise op on
       ``[B, S, H]`` ends as one loop.
    4. What the table of ops says in other ops (sigmoid, powers of small integers) is written in these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir import Buffer, LoopNest
from ..kernel_ir.nodes import Kernel, KernelCall, KernelModule
from ..passes import Pass, PassContext, in_order
from . import expand_ops, merge_loops, order_loops, simplify_bounds, split_loops_by_divisors
from .linearize import DECLARE_SIZES, Placement, linearize_nest

__all__ = ["NORMAL_FORM", "kernel_of", "normal_form", "normalize", "run_on_module"]

NORMAL_FORM = in_order(
    simplify_bounds.PASS,
    split_loops_by_divisors.PASS,
    order_loops.PASS,
    merge_loops.PASS,
    expand_ops.PASS,
    DECLARE_SIZES,
)


def normal_form(kernel: Kernel) -> Kernel:
    """The kernel after all of :data:`NORMAL_FORM`."""
    ctx = PassContext.of()
    for each in NORMAL_FORM:
        kernel = each.run(kernel, ctx)
    return kernel


def kernel_of(nest: LoopNest, buffers: Mapping[str, Buffer], where: Mapping[str, Placement]) -> Kernel:
    """A nest's kernel in its normal form. ``where`` gives the owner of each alias."""
    return normal_form(linearize_nest(nest, buffers, where))


def normalize(module: KernelModule) -> KernelModule:
    """The module with every kernel in its normal form, and calls that pass what these still take."""
    return run_on_module(module, NORMAL_FORM)


def run_on_module(module: KernelModule, passes: Sequence[Pass[Kernel]]) -> KernelModule:
    """The module after ``passes`` over each of its kernels, and calls that pass what these still take."""
    ctx = PassContext.of()
    kernels = module.kernels
    for each in passes:
        kernels = tuple(each.run(kernel, ctx) for kernel in kernels)
    calls = (_call(call, module.kernels[call.kernel], kernels[call.kernel]) for call in module.calls)
    return replace(module, kernels=kernels, calls=tuple(calls))


def _call(call: KernelCall, before: Kernel, after: Kernel) -> KernelCall:
    given = {(p.kind, p.name): argument for p, argument in zip(before.params, call.arguments, strict=True)}
    for new in after.params:
        if new.kind != "memory":
            given.setdefault((new.kind, new.name), f"${new.name}")
    return replace(call, arguments=tuple(given[p.kind, p.name] for p in after.params))
