"""What kernels of attention have in common, however their products are computed."""

from __future__ import annotations

from ....kernel_ir.attention_site import AttentionSite, Lines
from ....kernel_ir.nodes import Kernel
from ....symbolic import Expr
from ..machine import Machine
from .emitter import Ssa, imm
from .kernel import KernelEmitter
from .types import memory_type

__all__ = ["ALIGNED", "AttentionWriter"]

ALIGNED = 64


class AttentionWriter(KernelEmitter):
    """Writes a kernel that :func:`~....kernel_ir.attention_site.attention_site` knows."""

    def __init__(self, kernel: Kernel, site: AttentionSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, target, declarations)
        self.site, self.target = site, target
        self.queries, self.keys = site.counts
        self.scale = site.scale if site.mask is None else 1.0  # of scores, where that is not done with the mask
        self.places: dict[str, Ssa] = {}
        self.shared = imm(0)  # which of the heads that share keys, in the backward
        self.skips = site.causal and len(site.outputs) < 4  # blocks that no query sees, unless their gradients are kept

    def limit(self, count: Expr, most: int, whole: int) -> int:
        """``most``, or less where there are certainly fewer, in multiples of ``whole``."""
        known = count.constant
        return most if known is None else min(most, -(-known // whole) * whole)

    def reserve(self, sizes: dict[str, int]) -> None:
        """Memory of known sizes, each from where a cache line begins on."""
        sizes = {name: -(-size // ALIGNED) * ALIGNED for name, size in sizes.items()}
        memory = self.large_memory(sum(sizes.values()))
        at = 0
        for name, size in sizes.items():
            self.places[name] = self.em.element("i8", memory, imm(at))
            at += size

    def at(self, name: str, offset: Ssa) -> Ssa:
        """So many bytes into a part of the memory."""
        return self.em.element("i8", self.places[name], offset)

    def start(self, lines: Lines, first: Ssa, key: Ssa | None = None) -> tuple[Ssa, Ssa]:
        """Where lines begin in memory, from a given one (and a key) on, and the step to the next."""
        em, step = self.em, self.ctx.scalar(lines.step)
        offset = em.add(self.ctx.scalar(lines.start), em.mul(first, step))
        offset = em.add(offset, em.mul(self.shared, self.ctx.scalar(lines.head)))
        if key is not None:
            offset = em.add(offset, key)
        return em.element(memory_type(lines.dtype), self.ctx.pointers[lines.buffer], offset), step

    def bit(self, text: str, *operands: Ssa) -> Ssa:
        """A comparison."""
        return self.em.pure("i1", f"icmp {text}", *operands)
