"""What a kernel is, as data: its text, how it is launched, its compiled form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...ir import DType
from ...symbolic import Expr, to_expr

__all__ = ["DESCRIPTOR_BYTES", "Config", "Cubin", "Gpu", "KernelArgument", "KernelSource", "KnownMemory"]
__all__ += ["TritonKernel"]

_NOTHING = to_expr(0)
DESCRIPTOR_BYTES = 128
_SHARED = {
    70: 96,
    72: 96,
    75: 64,
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    110: 227,
    120: 99,
    121: 99,
}  # KiB of an instance


@dataclass(frozen=True, slots=True)
class Gpu:
    """``arch``: 90 for sm_90. ``processors``: multiprocessors."""

    arch: int = 90
    processors: int = 132

    @property
    def is_known(self) -> bool:
        """Whether :attr:`shared` is this device's own."""
        return self.arch in _SHARED

    @property
    def shared(self) -> int:
        """Bytes of shared memory that an instance may have; of an unknown device, that all have."""
        return _SHARED.get(self.arch, min(_SHARED.values())) * 1024


@dataclass(frozen=True, slots=True)
class Config:
    """Block sizes by constexpr name, and what Triton is told: warps of a program instance, pipeline stages."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 2

    def block(self, name: str) -> int:
        """The size of a block. Raises ``KeyError`` for an unknown name."""
        return dict(self.blocks)[name]


@dataclass(frozen=True, slots=True)
class KnownMemory:
    """What is known of the memory of a program, by name. ``fresh``: its zeros are not stored, see
    :mod:`.walked_rows`. ``bytes``: those that are there from its beginning on, where that is known."""

    fresh: frozenset[str] = frozenset()
    bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelArgument:
    """A parameter: ``kind`` ``pointer`` (``name`` a buffer that owns memory), ``scratch`` (a row of each outer
    iteration, of ``extent`` elements in total) or ``size`` (``name`` a symbol). ``dtype``: the element type.
    ``aligned``: the pointer is a multiple of 16 bytes. The last one may be of kind ``descriptors``: memory in which
    each program instance writes down what the device's copies of tiles are told, the first of the pointers that Triton
    itself adds to the parameters, so no parameter of the text."""

    kind: str
    name: str
    dtype: DType
    written: bool = False
    extent: Expr = _NOTHING
    aligned: bool = True


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel's text and how to launch it.

    ``text`` is the function with the device functions it calls; it needs ``tl``, ``jit`` and ``libm`` in scope.
    ``grid``: (size, block name or ``None``) per outer loop; the number of program instances is the product of the
    sizes divided by their blocks, rounded up. ``checks``: it stops on an index out of range. ``fast``: a product and a
    sum may be rounded once, and quotients and square roots not to nearest (``numerics="fast"``).
    """

    name: str
    text: str
    arguments: tuple[KernelArgument, ...]
    grid: tuple[tuple[Expr, str | None], ...]
    config: Config
    checks: bool
    persistent: bool
    fast: bool = False

    @property
    def parameters(self) -> tuple[KernelArgument, ...]:
        """The arguments that are parameters of the text."""
        return tuple(a for a in self.arguments if a.kind != "descriptors")


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled kernel. ``arch``: 90 for sm_90. ``shared``: bytes of dynamic shared memory. ``threads`` of a program
    instance. ``hidden``: null pointers that follow the arguments. ``ptx`` is kept on request."""

    name: str
    code: bytes
    arch: int
    shared: int
    threads: int
    hidden: int
    config: Config
    ptx: str = ""


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """A kernel: its source and, once compiled, its cubin. ``alternatives``: other ways to compute the same, until one
    is chosen; ``choice`` says why it was."""

    source: KernelSource
    alternatives: tuple[KernelSource, ...] = ()
    cubin: Cubin | None = None
    choice: str = ""
