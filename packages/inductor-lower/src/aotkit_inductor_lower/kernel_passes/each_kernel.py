"""Passes over the kernels of a program, one kernel at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..kernel_ir.nodes import Kernel, KernelCall, KernelModule
from ..passes import Pass, PassContext

__all__ = ["kernel_pass", "with_kernels"]


def kernel_pass(
    name: str, change: Callable[[Kernel], Kernel], *, why: str, after: tuple[str, ...] = (), required: bool = False
) -> Pass[KernelModule]:
    """A pass that changes each kernel by itself. One kernel is one rewrite: it takes fuel, unless the pass is
    ``required``. A module in which nothing changes comes back as the same object."""

    def run(module: KernelModule, ctx: PassContext) -> KernelModule:
        kernels = [_changed(change, kernel, ctx, required) for kernel in module.kernels]
        if all(new is old for new, old in zip(kernels, module.kernels, strict=True)):
            return module
        return with_kernels(module, kernels)

    return Pass(name, run, why, after=after, required=required)


def _changed(change: Callable[[Kernel], Kernel], kernel: Kernel, ctx: PassContext, required: bool) -> Kernel:
    new = change(kernel)
    if new is kernel or new == kernel:
        return kernel
    return new if required or ctx.fuel.take() else kernel


def with_kernels(module: KernelModule, kernels: Sequence[Kernel]) -> KernelModule:
    """The module with other kernels in the place of its own, and calls that pass what these take."""
    calls = [_call(call, module.kernels[call.kernel], kernels[call.kernel]) for call in module.calls]
    return replace(module, kernels=tuple(kernels), calls=tuple(calls))


def _call(call: KernelCall, before: Kernel, after: Kernel) -> KernelCall:
    if after.params is before.params or after.params == before.params:
        return call
    given = {(p.kind, p.name): argument for p, argument in zip(before.params, call.arguments, strict=True)}
    for new in after.params:
        if new.kind != "memory":
            given.setdefault((new.kind, new.name), f"${new.name}")
    return replace(call, arguments=tuple(given[p.kind, p.name] for p in after.params))
