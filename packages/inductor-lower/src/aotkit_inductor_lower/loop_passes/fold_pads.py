"""Pads before a convolution of ours, as part of what it reads.

Note [Pads as masks]
    ``F.pad(x, (0, 1, 0, 1))`` before a convolution writes the image once more, a little larger. The factor of a
    contraction can read the image itself, under the pad's masks. What computes the image stays where it is: each of its
    elements is read at several taps. Zeros that are padded so are multiplied with weights, as eager does, while with
    the padding of the convolution itself nothing is multiplied; so only convolutions without such padding take pads in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..analysis.dependencies import Dependencies
from ..analysis.nests import has_division, identity_store
from ..ir import Buffer, BufferKind, CheckedIndex, Contraction, LoopNest, Operand, Program, Store
from ..ir.builder import NestBuilder
from ..ir.inlining import Inlinable
from ..ir.walk import buffers_of, computes, contains, instructions, loads, rename, step_writes

__all__ = ["Pads"]

_MOVES = frozenset({"lt", "ge", "gt", "le", "logical_and", "logical_or", "logical_not", "where"})


@dataclass(frozen=True, slots=True)
class Pads:
    """The pads of a program, see Note [Pads as masks]."""

    program: Program
    buffers: Mapping[str, Buffer]
    dependencies: Dependencies

    @staticmethod
    def of(program: Program) -> Pads:
        """Analyze a program."""
        return Pads(program, buffers_of(program), Dependencies.of(program))

    def folded(self, position: int, product: Contraction) -> Contraction:
        """A part of the step at a position that reads through pads."""
        return replace(
            product,
            left=self._through(position, product, product.left, "left"),
            right=self._through(position, product, product.right, "right"),
        )

    def _through(self, position: int, product: Contraction, operand: Operand, side: str) -> Operand:
        found = loads(operand.body)
        pad = self._pad(found[0].buffer, position) if len(found) == 1 and found[0].mask is None else None
        if pad is None:
            return operand
        builder = NestBuilder("", (*product.outer, *product.reduced), product.origin, self.buffers, pad)
        names: dict[str, str] = {}
        builder.copy(operand.body, {}, names)
        (stage,) = builder.finish().stages
        own = {i.result: f"{side}_{i.result}" for i in stage.body if not isinstance(i, Store)}
        return Operand(tuple(rename(instr, own) for instr in stage.body), own[names[operand.value]])

    def _pad(self, buffer: str, reader: int) -> dict[str, Inlinable] | None:
        """What pads into a buffer, if nothing else is done there and what it reads is the same at ``reader``."""
        writers = self.dependencies.writers.get(buffer, [])
        if self.buffers[buffer].kind is not BufferKind.TEMPORARY or len(writers) != 1:
            return None
        nest = self.program.steps[writers[0]]
        symbols = identity_store(nest, self.buffers) if isinstance(nest, LoopNest) else None
        if not isinstance(nest, LoopNest) or symbols is None or has_division(nest):
            return None
        body = instructions(nest.stages)
        moved = loads(body)
        if len(moved) != 1 or moved[0].mask is None or contains(body, CheckedIndex):
            return None
        if any(i.op not in _MOVES for i in computes(body)) or self._changed(nest, writers[0], reader):
            return None
        return {buffer: Inlinable(nest, symbols)}

    def _changed(self, nest: LoopNest, first: int, last: int) -> bool:
        """Whether what a nest reads is overwritten after it, before step ``last``."""
        root, unstable = self.dependencies.root, self.dependencies.unstable
        read = {root[name] for name in nest.reads} & unstable
        written = {root[name] for step in self.program.steps[first + 1 : last] for name in step_writes(step)}
        return not read.isdisjoint(written)
