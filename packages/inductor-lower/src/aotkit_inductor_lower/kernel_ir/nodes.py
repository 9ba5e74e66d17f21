"""The kernel IR: what a target turns into machine code, as explicit frozen data.

Note [The kernel IR in one page]
    A :class:`Kernel` is one launch: parameters, scratch memory, a ``grid`` of independent iterations around a tree of
    loops. Its instructions are those of the loop IR (:mod:`..ir.nodes`), but a ``Load`` and a ``Store`` have exactly
    one index, the offset of the element in the memory that owns it. Views are gone: what a kernel names is memory::

        kernel softmax(x: f32, y: f32 written, $s0: size) index i64
          grid i0 < $s0
          loop r0 < 64:
            %v0 = load x[64*i0 + r0] : f32
            %v1 = reduce max %v0 : f32
          loop r1 < 64:
            ...
            store y[64*i0 + r1] = %v9

    * Iterations of the grid are independent, unless the kernel is ``ordered``: then they run one after the other, in
      the order of the grid. ``ordered`` is any kernel with a store that accumulates.
    * A value lives where it is defined, from there to the end of the loop's body, and in the loops within. Names are
      unique in the kernel.
    * A reduction goes over all loops around it, but not the grid. Its result is visible after the outermost of these
      loops, to the end of the kernel. A scan runs in the order of the loops and is visible in its own body.
    * Iterations of a loop are independent too, except through reductions, scans and stores that accumulate.
    * argmin and argmax name the ``position`` that they give: loops may be split, merged and reordered.
    * Scratch is memory of one grid iteration. A later loop may load what an earlier one stored there.
    * A memory may hold elements that are read as another type, too (``also``): a view as another dtype. Offsets count
      elements of the type that is loaded or stored.
    * A loop's ``map`` says how a target runs it (lanes of a vector, a tile, unrolled); what is computed does not
      depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..ir import DType, Instr, Origin
from ..symbolic import Expr, Symbol, SymbolKind

__all__ = [
    "LENGTH",
    "LOOP_KINDS",
    "PARAM_KINDS",
    "SERIAL",
    "STORAGES",
    "TAILS",
    "Kernel",
    "KernelCall",
    "KernelModule",
    "Loop",
    "LoopMap",
    "Param",
    "Scratch",
    "Stmt",
]

ParamKind = Literal["memory", "size", "length"]
Storage = Literal["registers", "stack", "heap", "global", "shared", "tile"]
LoopKind = Literal["serial", "units", "lanes", "strip", "tile", "block", "unroll"]
Tail = Literal["exact", "masked", "scalar"]

PARAM_KINDS: dict[str, ParamKind] = {"size": "size", "length": "length"}  # of numbers; what has a type is memory
STORAGES: dict[str, Storage] = {s: s for s in ("registers", "stack", "heap", "global", "shared", "tile")}
LOOP_KINDS: dict[str, LoopKind] = {k: k for k in ("serial", "units", "lanes", "strip", "tile", "block", "unroll")}
TAILS: dict[str, Tail] = {t: t for t in ("exact", "masked", "scalar")}


#: The length of a loop that each launch gives of its own, in a kernel with a parameter of the kind ``length``.
LENGTH = Symbol("length", SymbolKind.SIZE)


@dataclass(frozen=True, slots=True)
class Param:
    """What a launch passes: the address of a ``memory``, or an integer: a ``size`` symbol of the graph, or a
    ``length`` that each launch gives of its own. ``dtype``: what the first access takes its elements for; ``also``:
    what others do. ``written``: the kernel stores to it, ``nontemporal``: past the caches, where the target can.
    ``aligned``: its address suits the target's widest access."""

    name: str
    kind: ParamKind = "memory"
    dtype: DType = DType.I64
    written: bool = False
    aligned: bool = False
    nontemporal: bool = False
    also: tuple[DType, ...] = ()


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of one grid iteration: ``extent`` elements, in a ``storage`` that the target chooses."""

    name: str
    dtype: DType
    extent: Expr
    storage: Storage = "stack"


@dataclass(frozen=True, slots=True)
class LoopMap:
    """How a target runs a loop. ``width`` iterations at once (lanes, elements of a tile), ``interleave`` of these side
    by side; ``block``: the name of a width that is chosen when the kernel is compiled. ``tail``: what runs the
    iterations that are left over: there are none (``exact``), the same code under a mask, or one at a time. Before
    these come whole widths one by one, where they don't fill an interleaved step.

    ``units``: iterations of the grid that may be handed to threads, or to program instances. ``lanes``: of a vector.
    ``strip``: of the grid, ``width`` iterations within each step of the lanes.
    ``tile``: whole; the loops that are alone in it are part of the tile. Of the grid, one side of a square that is
    transposed in registers, the lanes are the other. ``block``: a part of the whole, again with the loops within."""

    kind: LoopKind = "serial"
    width: int = 1
    interleave: int = 1
    block: str = ""
    tail: Tail = "exact"


SERIAL = LoopMap()


@dataclass(frozen=True, slots=True)
class Loop:
    """``symbol`` (an INDEX symbol's name) runs over ``[0, extent)``. A loop of the grid has no body of its own."""

    symbol: str
    extent: Expr
    body: tuple[Stmt, ...] = ()
    map: LoopMap = SERIAL

    def with_body(self, body: tuple[Stmt, ...]) -> Loop:
        """The same loop around another body."""
        return Loop(self.symbol, self.extent, body, self.map)


Stmt = Instr | Loop


@dataclass(frozen=True, slots=True)
class Kernel:
    """One function that a target makes. ``index_type``: what offsets are computed in.

    ``versions``: other ways to run the same; the first whose size expression is not negative runs instead. ``config``:
    what a target's compiler is told by name."""

    name: str
    params: tuple[Param, ...]
    scratch: tuple[Scratch, ...]
    grid: tuple[Loop, ...]
    body: tuple[Stmt, ...]
    ordered: bool = False
    index_type: DType = DType.I64
    versions: tuple[tuple[Expr, Kernel], ...] = ()
    config: tuple[tuple[str, int], ...] = ()
    origin: Origin = field(default=Origin(), compare=False)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A launch of ``kernels[kernel]`` for a step of the program. ``arguments``: one for each parameter, the buffer that
    owns the memory, or a size symbol with its ``$``. ``line``: the user's, for messages."""

    step: str
    kernel: int
    arguments: tuple[str, ...]
    line: str = ""


@dataclass(frozen=True, slots=True)
class KernelModule:
    """All kernels of a program, and their calls in the order of the steps."""

    name: str
    kernels: tuple[Kernel, ...]
    calls: tuple[KernelCall, ...]
