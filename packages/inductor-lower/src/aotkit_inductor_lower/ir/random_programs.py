"""Random programs for differential tests: interpreter against generated code, before against after a pass.

:func:`random_program` gives a verified program for a seed: odd sizes, all element types, transposed, broadcast,
flipped, strided, split, masked and indirect accesses, several reductions and stages, row scratch, scatter-add.
:func:`random_inputs` gives tensors for it.

Note [Comparable results]
    Two correct executions may differ: in the last bits of a transcendental or of a long float sum, in the sign of a
    zero that came out of a minimum, in a nan's sign. A comparison of two such values would then differ by far.
    So floats are drawn as small multiples of 1/4, which makes sums and products exact in any order, every value
    carries its magnitude and whether it is exact, and ops that jump (``floor``, ``eq``, casts to integers) or that
    look at signs of zeros (``copysign``, ``reciprocal``) are applied to values only where that is well defined.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.dtypes import is_float, is_half, torch_name
from ..symbolic import Expr, SymbolKind, contiguous_strides, sym, to_expr
from .builder import NestBuilder, loops
from .nodes import Buffer, BufferKind, BufferRef, Contraction, DType, LoopNest, Program
from .random_bodies import BodyWriter, Known
from .random_contractions import random_contraction
from .verify import verify_program

__all__ = ["RandomOptions", "difference", "random_inputs", "random_program"]


@dataclass(frozen=True, slots=True)
class RandomOptions:
    """What random programs may hold.

    ``max_elements`` bounds the iterations of a nest. ``exact_only``: nothing but ops whose result is the same in
    every correct execution. ``dynamic``: sizes may be symbols. ``specials``: inf, nan and -0.0 among the inputs.
    ``contractions``: one step is a contraction, which choose-contractions must make a nest of.
    """

    nests: int = 3
    max_elements: int = 20_000
    ops: int = 8
    exact_only: bool = False
    dynamic: bool = True
    specials: bool = True
    temporaries: bool = True
    contractions: bool = False
    dtypes: tuple[DType, ...] = tuple(DType)


_SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 65)
_LARGEST = max(_SIZES)


def random_program(seed: int, options: RandomOptions | None = None) -> Program:
    """The program of a seed. It has passed :func:`verify_program`."""
    program = _Generator(random.Random(seed), options or RandomOptions(), f"random{seed}").program()
    verify_program(program, size_minimum=1)
    return program


def random_inputs(program: Program, seed: int, options: RandomOptions | None = None) -> list[Tensor | int]:
    """Inputs that fit the program's declarations. Size symbols get values of their own for each seed."""
    rng = random.Random(seed)
    specials = options is None or options.specials
    env = {name: rng.choice(_SIZES) for name, *_ in program.symbol_sources}
    values = {to_expr(sym(name, SymbolKind.SIZE)).symbol: value for name, value in env.items()}
    known = {symbol: value for symbol, value in values.items() if symbol is not None}
    result: list[Tensor | int] = []
    for name in program.inputs:
        if name.startswith("$"):
            result.append(env[name[1:]])
            continue
        buffer = program.buffer(name)
        shape = [s.evaluate(known) for s in buffer.sizes]
        tensor = torch.empty_strided(
            shape, [s.evaluate(known) for s in buffer.strides], dtype=getattr(torch, buffer.dtype)
        )
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        result.append(tensor.copy_(_values(tuple(shape), tensor.dtype, generator, specials, name.startswith("index"))))
    return result


def _values(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator, specials: bool, small: bool) -> Tensor:
    """Small numbers, a few of them edge values. ``small``: indices into a table of at least two rows."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    if small:
        return torch.randint(-2, 2, shape, generator=g)
    if dtype.is_floating_point:
        number = torch.randint(-16, 17, shape, generator=g).to(dtype) / 4
        edge = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0], dtype=dtype)
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        number = torch.randint(-100, 100, shape, generator=g).to(dtype)
        edge = torch.tensor([low, high, -1 if low else high, 0], dtype=dtype)
    if not specials:
        return number
    chosen = torch.rand(shape, generator=g) < 0.02
    number[chosen] = edge[torch.randint(0, 4, (int(chosen.sum()),), generator=g)]
    return number


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def difference(expected: Tensor, found: Tensor, *, exact: bool = False) -> str | None:
    """How two results of one random program differ, as a sentence, or ``None``. Signs of zeros and nans don't count;
    ``exact``: nor may anything else differ."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{expected.dtype} {tuple(expected.shape)} against {found.dtype} {tuple(found.shape)}"
    tolerance = 0.0 if exact else _TOLERANCE.get(expected.dtype, 0.0)
    if tolerance:
        same = torch.isclose(expected, found, rtol=tolerance, atol=1e-30, equal_nan=True)
    else:
        same = expected == found
        if expected.dtype.is_floating_point:
            same = same | (expected.isnan() & found.isnan())
    if bool(same.all()):
        return None
    first = tuple((~same).nonzero()[0].tolist())
    return (
        f"{int((~same).sum())} of {same.numel()} elements, first at {first}: {expected[first]} against {found[first]}"
    )


class _Generator:
    """State of one program's generation."""

    def __init__(self, rng: random.Random, options: RandomOptions, name: str) -> None:
        self.rng = rng
        self.options = options
        self.name = name
        self.buffers: list[Buffer] = []
        self.inputs: list[str] = []
        self.sources: list[tuple[str, int, str, int]] = []
        self.used: list[Expr] = []
        self.written: dict[str, Known] = {}  # outputs of earlier nests that may be read, with what is known of them

    def program(self) -> Program:
        nests: list[LoopNest | Contraction] = []
        count = self.rng.randint(1, self.options.nests)
        place = self.rng.randrange(count) if self.options.contractions else count
        for number in range(count):
            if number == place:
                nests.append(random_contraction("product", self, self.options.ops, self.options.dtypes))
            shape = self.rng.choice((self.pointwise, self.reduction, self.rows, self.normalize, self.scatter_add))
            nests.extend(shape(f"nest{number}"))
        self.hide_some_outputs({name for nest in nests for name in nest.reads})
        outputs = tuple(BufferRef(b.name) for b in self.buffers if b.kind is BufferKind.OUTPUT)
        return Program(self.name, tuple(self.inputs), tuple(self.buffers), tuple(nests), outputs, tuple(self.sources))

    def hide_some_outputs(self, read: set[str]) -> None:
        """Make temporaries of half of the outputs that later nests read, so that there is something to fuse away."""
        for position, buffer in enumerate(self.buffers):
            outputs = [b for b in self.buffers if b.kind is BufferKind.OUTPUT]
            hidden = buffer in outputs and buffer.name in read and len(outputs) > 1
            if hidden and self.options.temporaries and self.rng.random() < 0.5:
                self.buffers[position] = replace(buffer, kind=BufferKind.TEMPORARY)

    # -- nests -----------------------------------------------------------------------------------

    def pointwise(self, name: str) -> list[LoopNest]:
        """One stage that stores one or two values."""
        outer, inner = self.loops("i", 0, 3), self.loops("r", 0, 1)
        body = self.body(name, outer)
        body.stage(inner)
        body.load_several()
        body.compute(self.options.ops)
        for _ in range(self.rng.randint(1, 2)):
            self.store_output(body)
        return [body.builder.finish()]

    def reduction(self, name: str) -> list[LoopNest]:
        """Sibling reductions, then arithmetic on their results."""
        outer, inner = self.loops("i", 0, 2), self.loops("r", 1, 2)
        body = self.body(name, outer)
        body.stage(inner)
        body.load_several()
        body.compute(self.options.ops // 2)
        reduced = [body.reduce() for _ in range(self.rng.randint(1, 3))]
        body.stage({})
        body.pool.extend(reduced)
        body.compute(self.options.ops // 2)
        for known in reduced:
            self.store_output(body, known)
        self.store_output(body)
        return [body.builder.finish()]

    def normalize(self, name: str) -> list[LoopNest]:
        """Like softmax: reduce a row, reduce again with the result, store the row."""
        outer, size = self.loops("i", 0, 2), self.size()
        body = self.body(name, outer)
        lasting: list[Known] = []
        for stage in range(self.rng.randint(2, 3)):
            body.stage({f"r{stage}": size})
            body.pool.extend(lasting)
            body.load_several()
            body.compute(self.options.ops // 2)
            lasting.append(body.reduce())
        body.stage({"r9": size})
        body.pool.extend(lasting)
        body.load_several()
        body.compute(self.options.ops)
        self.store_output(body)
        return [body.builder.finish()]

    def rows(self, name: str) -> list[LoopNest]:
        """A row kept in scratch between stages."""
        outer, size = self.loops("i", 0, 2), self.size()
        body = self.body(name, outer)
        body.stage({"r0": size})
        body.load_several()
        body.compute(self.options.ops // 2)
        kept, total = body.pick(), body.reduce()
        row = self.declare(f"row{len(self.buffers)}", kept.dtype, [size], BufferKind.SCRATCH)
        body.builder.store_to(row, [sym("r0")], kept.value)
        body.stage({"r1": size})
        index = size - 1 - sym("r1") if self.rng.random() < 0.3 else sym("r1")
        body.pool.extend([total, kept.again(body.builder.load_from(row, [index]))])
        body.compute(self.options.ops // 2)
        self.store_output(body)
        return [body.builder.finish()]

    def scatter_add(self, name: str) -> list[LoopNest]:
        """A table zeroed by one nest and added to, at loaded positions, by another."""
        height, width = self.rng.choice((2, 5, 9)), self.size()
        dtype = self.rng.choice(
            [d for d in (DType.F32, DType.F64, DType.I64, DType.I32) if d in self.options.dtypes] or [DType.F32]
        )
        table = self.output(dtype, [to_expr(height), width])
        zero = NestBuilder(f"{name}_zero", loops({"i0": height, "i1": width}), share=False)
        zero.store_to(table, [sym("i0"), sym("i1")], zero.const(0.0 if is_float(dtype) else 0, dtype))
        body = self.body(name, {"i0": self.size(), "i1": width})
        body.stage({})
        positions = self.input("index", DType.I64, [body.loops["i0"]])
        row = body.builder.check_index(body.builder.load_from(positions, [sym("i0")]), height)
        added = body.load(dtype)
        body.builder.store_to(table, [row, sym("i1")], added.value, mode="add")
        self.written[table.name] = Known(added.value, high=added.high + 7, low=added.low, loose=True)
        return [zero.finish(), body.builder.finish()]

    # -- pieces ----------------------------------------------------------------------------------

    def body(self, name: str, outer: dict[str, Expr]) -> BodyWriter:
        builder = NestBuilder(name, loops(outer), share=False)
        return BodyWriter(self.rng, builder, dict(outer), self.options.exact_only, self)

    def loops(self, letter: str, fewest: int, most: int) -> dict[str, Expr]:
        count = self.rng.randint(fewest, most)
        budget = self.options.max_elements if letter == "i" else 200
        result: dict[str, Expr] = {}
        for position in range(count):
            size = self.size()
            budget //= size.constant or _LARGEST
            result[f"{letter}{position}"] = size if budget else to_expr(self.rng.choice((1, 2, 3)))
        return result

    def size(self) -> Expr:
        """A size used before, so that nests fit each other, or a new one."""
        if self.used and self.rng.random() < 0.5:
            return self.rng.choice(self.used)
        self.used.append(self.new_size())
        return self.used[-1]

    def new_size(self) -> Expr:
        """A static size or, now and then, a symbol (new, or one there already)."""
        if not self.options.dynamic or self.rng.random() < 0.8:
            return to_expr(self.rng.choice(_SIZES))
        if self.sources and self.rng.random() < 0.5:
            return sym(self.rng.choice(self.sources)[0], SymbolKind.SIZE)
        name = f"s{len(self.sources)}"
        if self.rng.random() < 0.3:
            self.sources.append((name, len(self.inputs), "int", 0))
            self.inputs.append(f"${name}")
        else:
            self.sources.append((name, len(self.inputs), "size", 0))
            self.input("extent", DType.U8, [sym(name, SymbolKind.SIZE)])
        return sym(name, SymbolKind.SIZE)

    def input(self, prefix: str, dtype: DType, sizes: Sequence[Expr]) -> Buffer:
        buffer = self.declare(f"{prefix}{len(self.buffers)}", dtype, sizes, BufferKind.INPUT)
        self.inputs.append(buffer.name)
        return buffer

    def output(self, dtype: DType, sizes: Sequence[Expr]) -> Buffer:
        return self.declare(f"out{len(self.buffers)}", dtype, sizes, BufferKind.OUTPUT)

    def declare(self, name: str, dtype: DType, sizes: Sequence[Expr], kind: BufferKind) -> Buffer:
        """A buffer that is contiguous or, unless a row, transposed or padded in memory."""
        order = list(range(len(sizes)))
        if kind is not BufferKind.SCRATCH and self.rng.random() < 0.25:
            self.rng.shuffle(order)
        dense = contiguous_strides([sizes[p] for p in order])
        padding = 2 if kind is BufferKind.INPUT and self.rng.random() < 0.1 else 1
        strides = {p: stride * padding for p, stride in zip(order, dense, strict=True)}
        buffer = Buffer(name, torch_name(dtype), tuple(sizes), tuple(strides[p] for p in range(len(sizes))), kind)
        self.buffers.append(buffer)
        return buffer

    def store_output(self, body: BodyWriter, known: Known | None = None) -> None:
        """Store a value over all loops, in their order or another, into a new output."""
        known = known or body.pick(newest=True)
        names = [n for n, size in body.loops.items()]
        if self.rng.random() < 0.3:
            self.rng.shuffle(names)
        dtype = known.dtype
        if is_float(dtype) and self.rng.random() < 0.3:
            dtype = self.rng.choice(
                [d for d in (DType.BF16, DType.F16, DType.F32) if d in self.options.dtypes] or [dtype]
            )
        indices, sizes = [sym(n) for n in names], [body.loops[n] for n in names]
        if len(names) > 1 and self.rng.random() < 0.2:  # the two last dimensions flattened
            indices = [*indices[:-2], indices[-2] * sizes[-1] + indices[-1]]
            sizes = [*sizes[:-2], sizes[-2] * sizes[-1]]
        buffer = self.output(dtype, sizes)
        body.builder.store_to(buffer, indices, known.value)
        if known.exact and not is_half(dtype):
            self.written[buffer.name] = known
