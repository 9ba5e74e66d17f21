"""The loop IR: what the generated kernels compute, as explicit frozen data.

Note [The loop IR in one page]
    A :class:`Program` is an ordered list of steps over named buffers: :class:`LoopNest` (computed by generated
    code), :class:`ExternCall` (an ATen op) and :class:`Alias` (another view of the same memory).

    A LoopNest is ``outer`` ranges around an ordered list of :class:`Stage`. A stage has its own inner ranges
    and a straight-line SSA body::

        loop softmax(i0 < 128):                     outer: independent iterations, may run in any order
          stage(r0 < 64):                           inner loop
            %v0 = load x[i0, r0] : f32
            %v1 = reduce max %v0 : f32              reduces over the stage's ranges
          stage(r1 < 64):
            %v2 = load x[i0, r1] : f32
            %v3 = sub %v2, %v1 : f32                results of reductions are visible in later stages
            %v4 = exp %v3 : f32
            %v5 = reduce sum %v4 : f32
          stage(r2 < 64):
            ...
            store y[i0, r2] = %v9

    * Values computed in a stage with ranges live for one iteration and are visible in that stage only.
      Results of ``reduce``, and every value of a stage *without* ranges, live for one outer iteration and are
      visible in all later stages. Value names are unique in the whole nest.
    * Loads and stores use logical indices, one expression per dimension of the buffer; strides come in only at
      code generation. So a producer is inlined into its reader by substitution.
    * Iterations of ``outer`` are independent: a nest never reads an element that another outer iteration of
      the same nest writes. Within one outer iteration, stages run in order, and a later stage may load what an
      earlier stage of the same iteration stored. Inner iterations of one stage are independent too, except
      through its ``reduce`` and stores that accumulate.
    * A stage may contain several reduces (sibling reductions) and stores.
    * Reductions without ranges do not exist; a reduce over an empty range gives the kind's identity.
    * Indirect addressing: an index expression may hold a VALUE symbol naming an i64 value of the body. Such a
      value first passes :class:`CheckedIndex`, which wraps negatives and reports out-of-range as eager does.
    * All arithmetic has eager's semantics; each op's row in :mod:`..ops.scalar` states domain and edge values.

Note [NaN literals compare equal]
    IR is compared by value, in tests and as a cache key, and nan != nan. Literals holding a nan hold the one object
    ``math.nan``, so that tuples of fields compare equal by identity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from ..ops.dtypes import DType
from ..symbolic import Expr, to_expr

__all__ = [
    "STORE_MODES",
    "Alias",
    "Arg",
    "Buffer",
    "BufferKind",
    "BufferRef",
    "CheckedIndex",
    "Compute",
    "Const",
    "ExternCall",
    "Index",
    "Instr",
    "Literal",
    "Load",
    "LoopNest",
    "Origin",
    "Program",
    "Range",
    "Reduce",
    "Stage",
    "Step",
    "Store",
    "SymInput",
]


class BufferKind(Enum):
    """Who owns a buffer's memory."""

    INPUT = "input"
    CONSTANT = "constant"  # a tensor attribute of the graph
    TEMPORARY = "temporary"  # dies inside the call
    OUTPUT = "output"  # handed to the caller
    SCRATCH = "scratch"  # of one nest, one outer iteration long: indexed by inner ranges only


@dataclass(frozen=True, slots=True)
class Buffer:
    """Named memory. ``dtype`` is torch's name (``"float32"``) because externs may hold any dtype; sizes and
    strides (in elements) are expressions over SIZE symbols. ``device`` as torch prints it."""

    name: str
    dtype: str
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    kind: BufferKind
    device: str = "cpu"

    def offset(self, indices: Iterable[Expr]) -> Expr:
        """Where an element is in memory, in elements from the first."""
        offset = to_expr(0)
        for index, stride in zip(indices, self.strides, strict=True):
            offset = offset + index * stride
        return offset


@dataclass(frozen=True, slots=True)
class Origin:
    """Where generated code came from: names and ops of the FX nodes, and the user's source line."""

    nodes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    line: str = ""


@dataclass(frozen=True, slots=True)
class Range:
    """One loop: ``symbol`` (an INDEX symbol's name) runs over ``[0, size)``."""

    symbol: str
    size: Expr


def _is_negative_zero(value: object) -> bool:
    """Python takes -0.0 and 0.0 for equal; nodes that hold them are not."""
    return isinstance(value, float) and value == 0 and math.copysign(1, value) < 0


# -- instructions of a stage body -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """``result = buffer[indices]``. With ``mask`` (a bool value): lanes where it is false read nothing and
    give ``other``. The value has the buffer's dtype."""

    result: str
    buffer: str
    indices: tuple[Expr, ...]
    dtype: DType
    mask: str | None = None
    other: int | float | bool = 0
    negative_zero: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.other != self.other:
            object.__setattr__(self, "other", math.nan)
        object.__setattr__(self, "negative_zero", _is_negative_zero(self.other))


@dataclass(frozen=True, slots=True)
class Const:
    """A literal. Floats may be inf or nan."""

    result: str
    value: int | float | bool
    dtype: DType
    negative_zero: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.value != self.value:
            object.__setattr__(self, "value", math.nan)
        object.__setattr__(self, "negative_zero", _is_negative_zero(self.value))


@dataclass(frozen=True, slots=True)
class Index:
    """An index expression as a value of type ``dtype`` (i64 or i32)."""

    result: str
    expr: Expr
    dtype: DType


@dataclass(frozen=True, slots=True)
class Compute:
    """``result = op(args)``; ``op`` is a row of the op table (``add``, ``exp``, ``where``, ``cast`` ...), ``dtype``
    the result's type. Except for casts, comparisons and ``where``, arguments have the result's type."""

    result: str
    op: str
    args: tuple[str, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class CheckedIndex:
    """``result`` = ``value`` (i64), plus ``size`` if negative. Outside ``[-size, size)`` the kernel reports
    an index error, with this nest's origin, and the lane reads element 0."""

    result: str
    value: str
    size: Expr


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce ``value`` over the stage's ranges. ``kind``: sum, prod, min, max (NaN propagates), any, all,
    argmin, argmax (first index; result i64, over the flattened stage ranges in order).

    ``running`` makes it a scan: the result, visible in this stage only, is the reduction of all iterations up to and
    including the present one, which then run in order. Not for argmin and argmax.

    ``position``: in a kernel, whose loops may be split, merged and reordered, what argmin and argmax give where the
    value is found; the smallest of equals. In the loop IR the stage's ranges tell."""

    result: str
    kind: str
    value: str
    dtype: DType
    running: bool = False
    position: Expr | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """``buffer[indices] = value``; the other modes (add, mul, min, max; NaN propagates) combine it with what is there.
    Their indices may collide within the nest; a nest with such a store runs its outer iterations in order. The value
    has the buffer's dtype, and so has each intermediate result."""

    buffer: str
    indices: tuple[Expr, ...]
    value: str
    mode: str = "set"
    mask: str | None = None

    @property
    def accumulates(self) -> bool:
        """Whether the element's old value takes part."""
        return self.mode != "set"

    @property
    def plain(self) -> bool:
        """Whether the element is the value afterwards, whatever it was: no old value takes part, nothing is masked."""
        return self.mode == "set" and self.mask is None


STORE_MODES = {"set": "=", "add": "+=", "mul": "*=", "min": "min=", "max": "max="}  # and how they are written

Instr = Load | Const | Index | Compute | CheckedIndex | Reduce | Store


@dataclass(frozen=True, slots=True)
class Stage:
    """An inner loop nest (``ranges`` may be empty: once per outer iteration) and its body."""

    ranges: tuple[Range, ...]
    body: tuple[Instr, ...]

    @property
    def scans(self) -> bool:
        """Whether its iterations run one after the other, in the order of its ranges."""
        return any(isinstance(i, Reduce) and i.running for i in self.body)

    def with_body(self, body: tuple[Instr, ...]) -> Stage:
        """The same loops around another body."""
        return Stage(self.ranges, body)


@dataclass(frozen=True, slots=True)
class LoopNest:
    """One generated kernel (after scheduling), or one op (before)."""

    name: str
    outer: tuple[Range, ...]
    stages: tuple[Stage, ...]
    origin: Origin = field(default=Origin(), compare=False)
    reads: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """Buffers loaded, first use first."""
    writes: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """Buffers stored, first use first."""
    combines: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """Buffers stored so that the old values take part."""

    def __post_init__(self) -> None:
        loads: dict[str, None] = {}
        stores: dict[str, None] = {}
        combines: dict[str, None] = {}
        for stage in self.stages:
            for instr in stage.body:
                if isinstance(instr, Load):
                    loads[instr.buffer] = None
                elif isinstance(instr, Store):
                    stores[instr.buffer] = None
                    if instr.accumulates:
                        combines[instr.buffer] = None
        for name, found in (("reads", loads), ("writes", stores), ("combines", combines)):
            object.__setattr__(self, name, tuple(found))


# -- the other steps ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A tensor argument of an extern call; with ``number`` the Python float that a tensor of one element holds."""

    name: str
    number: bool = False


@dataclass(frozen=True, slots=True)
class SymInput:
    """An integer argument given by a size expression."""

    expr: Expr


@dataclass(frozen=True, slots=True)
class Literal:
    """Any other argument: None, bool, int, float, complex, str, or a torch dtype, device, layout or memory
    format by name (``kind`` says which; ``value`` is then its text, ``"torch.float32"``)."""

    kind: str
    value: bool | int | float | str | None
    negative_zero: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.value != self.value:
            object.__setattr__(self, "value", math.nan)
        object.__setattr__(self, "negative_zero", _is_negative_zero(self.value))


Arg = BufferRef | SymInput | Literal | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class ExternCall:
    """``results = target(*args, **kwargs)`` through ATen. ``target`` is ``"aten.mm.default"``. A result name of
    ``None`` is dropped. ``mutates`` names buffers the op writes. ``reason``: why no kernel was generated."""

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[str | None, ...]
    mutates: tuple[str, ...] = ()
    reason: str = ""
    origin: Origin = field(default=Origin(), compare=False)


@dataclass(frozen=True, slots=True)
class Alias:
    """``result`` is another view of ``base``'s memory: sizes and strides are ``result``'s declared ones, ``offset``
    counts elements of ``result``'s dtype from ``base``'s first element.

    ``reuses``: the memory only. The nest that first writes ``result`` is the last that reads ``base``, see
    Note [In place]."""

    name: str
    result: str
    base: str
    offset: Expr
    origin: Origin = field(default=Origin(), compare=False)
    reuses: bool = False


Step = LoopNest | ExternCall | Alias


@dataclass(frozen=True, slots=True)
class Program:
    """A whole lowered graph.

    ``inputs``: one entry per graph placeholder, a buffer name, or the SIZE symbol's name of an integer input
    (prefixed with ``$``). ``outputs``: per graph output a buffer, an integer expression, or ``None``.
    ``symbol_sources``: for each SIZE symbol (input position, ``"int"`` or ``"size"`` or ``"stride"``, dimension), and
        ``"above"`` and ``"below"``: by how much an integer is above and below 0.
    """

    name: str
    inputs: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    outputs: tuple[BufferRef | SymInput | None, ...]
    symbol_sources: tuple[tuple[str, int, str, int], ...] = ()

    def buffer(self, name: str) -> Buffer:
        """The declaration of a buffer. Raises ``KeyError`` if there is none."""
        for declared in self.buffers:
            if declared.name == name:
                return declared
        raise KeyError(f"program {self.name} declares no buffer named {name!r}")
