"""The loop IR: what the generated kernels compute, as explicit frozen data.

Note [The loop IR in one page]
    A :class:`Program` is an ordered list of steps over named buffers: :class:`LoopNest` (computed by generated
    code), :class:`ExternCall` (an ATen op), :class:`Alias` (another view of the same memory) and
    :class:`Contraction` (a product of matrices, until it is chosen who computes it).

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

Note [What a contraction is]
    A :class:`Contraction` sums ``left * right`` over its ``reduced`` ranges, for each iteration of ``batch``, ``rows``
    and ``columns``; the epilogue makes of each sum what is stored. ``left`` does not vary along the columns, ``right``
    not along the rows, which is what tiles, packed panels and instructions for products live on. For ``x @ w`` plus a
    bias::

        contraction addmm batch() rows(i < 6) columns(j < 5) reduced(k < 8) in f32 highest:
          left %x:
            %x = load x[i, k] : bf16
          right %w:
            %w = load w[k, j] : bf16
          sum %t:
            %b = load bias[j] : bf16
            ...
            store addmm[i, j] = %v
          library addmm: addmm = aten.addmm.default(bias, x, w)

    * Both factors have the same type. They are widened to the ``accumulate`` type, multiplied and summed in it.
    * The multiplication of its nest is ``mul_contract``: kernels for products may add without rounding the product
      first, as libraries do. A ``mul`` that the user wrote is rounded, as eager rounds it. Where the precision allows
      it, the op is ``mul_contract_high`` or ``mul_contract_medium``, of factors that may lose bits before.
      Factors of i8 are summed in i32, by ``mul``.
    * Operands load at affine indices, so a convolution is one too: rows are images and places, columns the channels of
      the result, and the left operand loads ``x[n, c, oh*stride + kh*dilation - pad, ...]`` under a mask.
    * Which matrix of several a product of the batch is with may be loaded, too: an operand may check an index
      (:class:`CheckedIndex`) that varies along the batch only, and load there.
    * It means what :meth:`Contraction.as_nest` says: that is what the interpreter runs, and the verifier checks.
    * That loops of a product are batch, free on one side or summed is the view of tensor contraction engines; a body
      before each operand and one behind the sum are what CUTLASS calls prologue and epilogue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal as OneOf

from ..errors import IRError
from ..ops.dtypes import FLOATS, DType
from ..symbolic import Expr, to_expr
from .arguments import Arg, BufferRef, Literal, Origin, SymInput
from .instructions import STORE_MODES, CheckedIndex, Compute, Const, Index, Instr, Load, Reduce, Store

__all__ = [
    "CONTRACTIONS",
    "PRECISIONS",
    "STORE_MODES",
    "Alias",
    "Arg",
    "Buffer",
    "BufferKind",
    "BufferRef",
    "CheckedIndex",
    "Compute",
    "Const",
    "Contraction",
    "ExternCall",
    "Index",
    "Instr",
    "Literal",
    "Load",
    "LoopNest",
    "Operand",
    "Origin",
    "Precision",
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
class Range:
    """One loop: ``symbol`` (an INDEX symbol's name) runs over ``[0, size)``."""

    symbol: str
    size: Expr


# -- nests ---------------------------------------------------------------------------------------------


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
        _note_buffers(self, [stage.body for stage in self.stages])


def _note_buffers(step: LoopNest | Contraction, bodies: Iterable[Iterable[Instr]]) -> None:
    """Fill in which buffers the bodies of a step load, store and combine with, first use first."""
    loads: dict[str, None] = {}
    stores: dict[str, None] = {}
    combines: dict[str, None] = {}
    for body in bodies:
        for instr in body:
            if isinstance(instr, Load):
                loads[instr.buffer] = None
            elif isinstance(instr, Store):
                stores[instr.buffer] = None
                if instr.accumulates:
                    combines[instr.buffer] = None
    for name, found in (("reads", loads), ("writes", stores), ("combines", combines)):
        object.__setattr__(step, name, tuple(found))


# -- the other steps ------------------------------------------------------------------------------------


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


# -- products of matrices ------------------------------------------------------------------------------


Precision = OneOf["highest", "high", "medium"]
PRECISIONS: tuple[Precision, ...] = ("highest", "high", "medium")
#: The op that multiplies in the nest of a contraction, by its precision.
CONTRACTIONS: Mapping[Precision, str] = {
    "highest": "mul_contract",
    "high": "mul_contract_high",
    "medium": "mul_contract_medium",
}


@dataclass(frozen=True, slots=True)
class Operand:
    """One factor of a :class:`Contraction`, at each iteration of its loops: ``body`` loads at affine indices, with a
    mask where one may lie outside of the buffer, and makes ``value`` of that (a cast, a scale)."""

    body: tuple[Instr, ...]
    value: str

    @property
    def dtype(self) -> DType:
        """The type of the value. Raises :class:`IRError` if the body does not make it."""
        for instr in self.body:
            if not isinstance(instr, Store | CheckedIndex) and instr.result == self.value:
                return instr.dtype
        raise IRError(f"no instruction of the operand makes its value %{self.value}")


@dataclass(frozen=True, slots=True)
class Contraction:
    """A product of matrices and what its sums become, see Note [What a contraction is].

    For ``mm``: ``rows (m,)``, ``columns (n,)``, ``reduced (k,)``; ``bmm`` has one range of ``batch`` more. ``result``:
    the sum, of type ``accumulate``, in the ``epilogue``, which is straight-line and alone stores. ``precision``: what
    factors of f32 may lose, in the words of ``torch.set_float32_matmul_precision``; ``"highest"`` is nothing.
    ``library``: ATen's call that gives the same, which always competes; ``None`` where there is none.
    """

    name: str
    batch: tuple[Range, ...]
    rows: tuple[Range, ...]
    columns: tuple[Range, ...]
    reduced: tuple[Range, ...]
    left: Operand
    right: Operand
    accumulate: DType
    precision: Precision
    result: str
    epilogue: tuple[Instr, ...]
    library: ExternCall | None = None
    origin: Origin = field(default=Origin(), compare=False)
    reads: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """Buffers loaded, first use first. (ATen's call may name others: a bias that is multiplied by 0.)"""
    writes: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """Buffers stored, first use first."""
    combines: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """None: stores of an epilogue combine with nothing."""

    def __post_init__(self) -> None:
        _note_buffers(self, (self.left.body, self.right.body, self.epilogue))

    @property
    def outer(self) -> tuple[Range, ...]:
        """The loops of the result."""
        return (*self.batch, *self.rows, *self.columns)

    @property
    def body(self) -> tuple[Instr, ...]:
        """Every instruction: of the left operand, of the right one and of the epilogue."""
        return (*self.left.body, *self.right.body, *self.epilogue)

    def as_nest(self) -> LoopNest:
        """What it means: a stage that sums the products, and one that stores what becomes of the sum."""
        taken = {i.result for i in self.body if not isinstance(i, Store)} | {self.result}
        body: list[Instr] = []
        factors: list[str] = []
        for operand, side in ((self.left, "left"), (self.right, "right")):
            body += operand.body
            factors.append(operand.value)
            if operand.dtype is not self.accumulate:
                factors[-1] = _unused(f"{side}_wide", taken)
                body.append(Compute(factors[-1], "cast", (operand.value,), self.accumulate))
        product = _unused("product", taken)
        multiply = CONTRACTIONS[self.precision] if self.accumulate in FLOATS else "mul"
        body.append(Compute(product, multiply, tuple(factors), self.accumulate))
        body.append(Reduce(self.result, "sum", product, self.accumulate))
        stages = (Stage(self.reduced, tuple(body)), Stage((), self.epilogue))
        return LoopNest(self.name, self.outer, stages, self.origin)


def _unused(name: str, taken: set[str]) -> str:
    """``name``, with underscores appended while there is such a value."""
    while name in taken:
        name += "_"
    return name


Step = LoopNest | ExternCall | Alias | Contraction


@dataclass(frozen=True, slots=True)
class Program:
    """A whole lowered graph.

    ``inputs``: one entry per graph placeholder, a buffer name, or the SIZE symbol's name of an integer input
    (prefixed with ``$``). ``outputs``: per graph output a buffer, an integer expression, or ``None``.
    ``symbol_sources``: for each SIZE symbol (input position, ``"int"`` or ``"size"`` or ``"stride"``, dimension), and
        ``"above"`` and ``"below"``: by how much an integer is above and below 0.
    ``computed_sizes``: SIZE symbols that the host computes with floats, each of a text over those before it (see
        Note [Sizes as text]).
    """

    name: str
    inputs: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    outputs: tuple[BufferRef | SymInput | None, ...]
    symbol_sources: tuple[tuple[str, int, str, int], ...] = ()
    computed_sizes: tuple[tuple[str, str], ...] = ()

    @property
    def size_symbols(self) -> tuple[str, ...]:
        """The names of all SIZE symbols, in the order in which they get their values."""
        return (*(source[0] for source in self.symbol_sources), *(name for name, _ in self.computed_sizes))

    def buffer(self, name: str) -> Buffer:
        """The declaration of a buffer. Raises ``KeyError`` if there is none."""
        for declared in self.buffers:
            if declared.name == name:
                return declared
        raise KeyError(f"program {self.name} declares no buffer named {name!r}")
