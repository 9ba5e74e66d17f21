"""The ways through a program: its steps, the instructions of a nest or a kernel, the expressions and values in these.

Loop IR and kernel IR share instructions, so most of it serves both. A *block* has a body of instructions and further
blocks: a stage of a nest, a loop of a kernel; a contraction is one as well. Passes ask here and change programs by the
functions at the end; none walks by itself. What is asked of many instructions builds lists and not generators, and
looks at types by tuples and not unions: both take half the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..ops.dtypes import DType
from ..symbolic import Expr, Symbol, SymbolKind, sym, to_expr
from .nodes import (
    Alias,
    Arg,
    Buffer,
    BufferRef,
    CheckedIndex,
    Compute,
    Const,
    Contraction,
    Index,
    Instr,
    Load,
    LoopNest,
    Operand,
    Program,
    Range,
    Reduce,
    Stage,
    Step,
    Store,
)

__all__ = [
    "access_at",
    "accesses",
    "buffer_args",
    "buffers_of",
    "computes",
    "contains",
    "contractions",
    "definitions",
    "expressions",
    "flat_map",
    "index_exprs",
    "instructions",
    "load_at",
    "loads",
    "loops_of_places",
    "loops_of_values",
    "map_contraction",
    "map_expressions",
    "map_nest",
    "nests",
    "operands",
    "placed",
    "places_in",
    "ranges_within",
    "reduces",
    "rename",
    "rename_contraction",
    "step_reads",
    "step_writes",
    "stores",
    "substitute",
    "used_values",
    "value_types",
    "with_buffers",
    "without_single_iterations",
]

Definition = Load | Const | Index | Compute | CheckedIndex | Reduce

_INSTRUCTIONS = (Compute, Load, Store, Const, Index, Reduce, CheckedIndex)
_ACCESS = (Load, Store)
_ONE_VALUE = (Reduce, CheckedIndex)


class Block(Protocol):
    """What holds instructions, and maybe further blocks."""

    @property
    def body(self) -> tuple[Any, ...]:
        """What it holds, in order."""


# -- steps of a program ----------------------------------------------------------------------------------


def buffers_of(program: Program) -> dict[str, Buffer]:
    """The declared buffers, by name."""
    return {b.name: b for b in program.buffers}


def nests(program: Program) -> list[LoopNest]:
    """The steps that are nests, in order."""
    return [step for step in program.steps if isinstance(step, LoopNest)]


def contractions(program: Program) -> list[Contraction]:
    """The steps that are products of matrices nobody has chosen a form for, in order."""
    return [step for step in program.steps if isinstance(step, Contraction)]


def buffer_args(args: Iterable[Arg]) -> Iterator[str]:
    """Buffers named in the arguments of an extern call."""
    for arg in args:
        if isinstance(arg, BufferRef):
            yield arg.name
        elif isinstance(arg, tuple):
            yield from buffer_args(arg)


def step_reads(step: Step) -> tuple[str, ...]:
    """Buffers a step reads; of a contraction also those that ATen's call in it would."""
    if isinstance(step, LoopNest):
        return tuple(dict.fromkeys((*step.reads, *step.combines))) if step.combines else step.reads
    if isinstance(step, Alias):
        return (step.base,)
    if isinstance(step, Contraction):
        return tuple(dict.fromkeys((*step.reads, *(step_reads(step.library) if step.library else ()))))
    return tuple(dict.fromkeys((*buffer_args(step.args), *buffer_args(value for _, value in step.kwargs))))


def step_writes(step: Step) -> tuple[str, ...]:
    """Buffers a step writes."""
    if isinstance(step, LoopNest | Contraction):
        return step.writes
    if isinstance(step, Alias):
        return (step.result,)
    return tuple(dict.fromkeys((*(r for r in step.results if r is not None), *step.mutates)))


def ranges_within(nest: LoopNest | Contraction) -> tuple[Range, ...]:
    """The outer loops, then those of each stage, or the summed ones."""
    if isinstance(nest, Contraction):
        return (*nest.outer, *nest.reduced)
    return (*nest.outer, *(r for stage in nest.stages for r in stage.ranges))


# -- instructions ----------------------------------------------------------------------------------------


def instructions(blocks: Iterable[Instr | Block]) -> list[Instr]:
    """Every instruction of stages, of a kernel's body or of a loop, in order."""
    found: list[Instr] = []
    for block in blocks:
        if isinstance(block, _INSTRUCTIONS):
            found.append(block)
        elif isinstance(block, Stage):
            found += block.body
        else:
            found += instructions(block.body)
    return found


def placed(stages: Iterable[Stage]) -> list[tuple[int, int, Instr]]:
    """Every instruction with the number of its stage and its place there."""
    return [(number, place, i) for number, stage in enumerate(stages) for place, i in enumerate(stage.body)]


def contains(body: Iterable[Instr], kinds: type[Instr] | tuple[type[Instr], ...]) -> bool:
    """Whether an instruction is of one of these kinds."""
    return any(isinstance(i, kinds) for i in body)


def loads(body: Iterable[Instr], buffer: str | None = None) -> list[Load]:
    """The loads, of one buffer or of all."""
    return [i for i in body if isinstance(i, Load) and (buffer is None or i.buffer == buffer)]


def stores(body: Iterable[Instr], buffer: str | None = None) -> list[Store]:
    """The stores, to one buffer or to all."""
    return [i for i in body if isinstance(i, Store) and (buffer is None or i.buffer == buffer)]


def accesses(body: Iterable[Instr], buffer: str | None = None) -> list[Load | Store]:
    """The loads and stores, of one buffer or of all."""
    return [i for i in body if isinstance(i, _ACCESS) and (buffer is None or i.buffer == buffer)]


def computes(body: Iterable[Instr]) -> list[Compute]:
    """The scalar operations."""
    return [i for i in body if isinstance(i, Compute)]


def reduces(body: Iterable[Instr]) -> list[Reduce]:
    """The reductions and scans."""
    return [i for i in body if isinstance(i, Reduce)]


# -- values ----------------------------------------------------------------------------------------------


def definitions(body: Iterable[Instr]) -> dict[str, Definition]:
    """The instruction that makes each value."""
    return {i.result: i for i in body if not isinstance(i, Store)}


def value_types(body: Iterable[Instr]) -> dict[str, DType]:
    """The type of each value, but for checked indices, which are i64."""
    return {i.result: i.dtype for i in body if not isinstance(i, (Store, CheckedIndex))}


def operands(instr: Instr) -> tuple[str, ...]:
    """Names of the values that an instruction uses, also inside its index expressions."""
    if isinstance(instr, Compute):
        return instr.args
    if isinstance(instr, _ONE_VALUE):
        return (instr.value,)
    if isinstance(instr, _ACCESS):
        names = [s.name for e in instr.indices for s in e.symbols if s.kind is SymbolKind.VALUE]
        if instr.mask is not None:
            names.append(instr.mask)
        if isinstance(instr, Store):
            names.append(instr.value)
        return tuple(names)
    if isinstance(instr, Index):
        return tuple(s.name for s in instr.expr.symbols if s.kind is SymbolKind.VALUE)
    return ()


def used_values(body: Iterable[Instr]) -> set[str]:
    """Names of the values that instructions use."""
    return {name for i in body for name in operands(i)}


# -- expressions -----------------------------------------------------------------------------------------


def index_exprs(instr: Instr) -> tuple[Expr, ...]:
    """The index expressions of an instruction: where it loads or stores, what it gives, the position it names."""
    if isinstance(instr, _ACCESS):
        return instr.indices
    if isinstance(instr, Index):
        return (instr.expr,)
    return (instr.position,) if isinstance(instr, Reduce) and instr.position is not None else ()


def expressions(body: Iterable[Instr]) -> list[Expr]:
    """Every index expression: of accesses and index values in order, then the positions of argmin and argmax."""
    found: list[Expr] = []
    positions: list[Expr] = []
    for i in body:
        if isinstance(i, _ACCESS):
            found += i.indices
        elif isinstance(i, Index):
            found.append(i.expr)
        elif isinstance(i, Reduce) and i.position is not None:
            positions.append(i.position)
    return found + positions


def loops_of_values(body: Iterable[Instr]) -> dict[str, frozenset[str]]:
    """Per value the symbols of the loops that it may vary along. What is made of values from elsewhere is left out."""
    found: dict[str, frozenset[str]] = {}
    for instr in body:
        if isinstance(instr, Store):
            continue
        names = operands(instr)
        if all(name in found for name in names):
            symbols = {symbol for expr in index_exprs(instr) for symbol in expr.symbols}
            own = frozenset(symbol.name for symbol in symbols if symbol.kind is not SymbolKind.VALUE)
            found[instr.result] = own.union(*(found[name] for name in names))
    return found


def loops_of_places(body: Sequence[Instr]) -> frozenset[str]:
    """The symbols of the loops that checked indices of a body may vary along."""
    checks = [i.result for i in body if isinstance(i, CheckedIndex)]
    varies = loops_of_values(body) if checks else {}
    return frozenset[str]().union(*(varies.get(name, frozenset()) for name in checks))


def places_in(body: Sequence[Instr]) -> tuple[Instr, ...]:
    """The checked indices of a body, with all that they are made of."""
    wanted: set[str] = set()
    kept: list[Instr] = []
    for instr in reversed(body):
        if isinstance(instr, CheckedIndex) or (not isinstance(instr, Store) and instr.result in wanted):
            kept.append(instr)
            wanted.update(operands(instr))
    return tuple(reversed(kept))


# -- changes ---------------------------------------------------------------------------------------------


def load_at(load: Load, buffer: str, indices: tuple[Expr, ...]) -> Load:
    """The same load from elsewhere. (``dataclasses.replace`` takes ten times as long.)"""
    return Load(load.result, buffer, indices, load.dtype, load.mask, load.other)


def access_at(access: Load | Store, buffer: str, indices: tuple[Expr, ...]) -> Load | Store:
    """The same load or store elsewhere."""
    if isinstance(access, Load):
        return load_at(access, buffer, indices)
    return Store(buffer, indices, access.value, access.mode, access.mask)


def map_expressions(instr: Instr, change: Callable[[Expr], Expr]) -> Instr:
    """The instruction with every index expression changed, the same object if all stay."""
    if isinstance(instr, _ACCESS):
        if len(instr.indices) == 1:  # as in every kernel
            (old,) = instr.indices
            new = change(old)
            return instr if new is old else access_at(instr, instr.buffer, (new,))
        indices = tuple([change(e) for e in instr.indices])
        same = all(new is old for new, old in zip(indices, instr.indices, strict=True))
        return instr if same else access_at(instr, instr.buffer, indices)
    if isinstance(instr, Index):
        expr = change(instr.expr)
        return instr if expr is instr.expr else Index(instr.result, expr, instr.dtype)
    if isinstance(instr, Reduce) and instr.position is not None:
        return replace(instr, position=change(instr.position))
    return instr


def substitute(instr: Instr, env: Mapping[Symbol, Expr]) -> Instr:
    """The instruction with symbols replaced in its index expressions."""
    return map_expressions(instr, lambda e: e.substitute(env))


def with_buffers(instr: Instr, names: Mapping[str, str]) -> Instr:
    """The instruction with the buffer that it loads or stores called otherwise."""
    if isinstance(instr, _ACCESS):
        name = names.get(instr.buffer)
        return instr if name is None else access_at(instr, name, instr.indices)
    return instr


def rename(instr: Instr, names: Mapping[str, str]) -> Instr:
    """The instruction with values called otherwise: its result and all that it uses."""

    def new(name: str) -> str:
        return names.get(name, name)

    if not isinstance(instr, Store):
        instr = replace(instr, result=new(instr.result))
    if isinstance(instr, Compute):
        return replace(instr, args=tuple(map(new, instr.args)))
    if isinstance(instr, _ONE_VALUE):
        return replace(instr, value=new(instr.value))
    if isinstance(instr, _ACCESS) and instr.mask is not None:
        instr = replace(instr, mask=new(instr.mask))
    if isinstance(instr, Store):
        instr = replace(instr, value=new(instr.value))
    values = {s for e in index_exprs(instr) for s in e.symbols if s.kind is SymbolKind.VALUE and s.name in names}
    return substitute(instr, {s: sym(names[s.name], SymbolKind.VALUE) for s in values}) if values else instr


def flat_map(body: Iterable[Instr], change: Callable[[Instr], Iterable[Instr]]) -> tuple[Instr, ...]:
    """The body with every instruction replaced by any number of others."""
    return tuple([new for i in body for new in change(i)])


def map_nest(nest: LoopNest, change: Callable[[Instr], Instr]) -> LoopNest:
    """The nest with every instruction changed."""
    return replace(nest, stages=tuple([stage.with_body(tuple(map(change, stage.body))) for stage in nest.stages]))


def without_single_iterations(nest: LoopNest) -> LoopNest:
    """The nest without outer loops of one iteration, as nests of elementwise ops are written."""
    env = {Symbol(loop.symbol): to_expr(0) for loop in nest.outer if loop.size == 1}
    if not env:
        return nest
    outer = tuple(loop for loop in nest.outer if loop.size != 1)
    return map_nest(replace(nest, outer=outer), lambda instr: substitute(instr, env))


def map_contraction(contraction: Contraction, change: Callable[[Instr], Instr]) -> Contraction:
    """The contraction with every instruction changed but for the names of values. ATen's call stays as it is."""
    return _with_bodies(contraction, change, {})


def rename_contraction(contraction: Contraction, names: Mapping[str, str]) -> Contraction:
    """The contraction with values called otherwise."""
    return _with_bodies(contraction, lambda instr: rename(instr, names), names)


def _with_bodies(contraction: Contraction, change: Callable[[Instr], Instr], names: Mapping[str, str]) -> Contraction:
    left, right = (
        Operand(tuple(map(change, operand.body)), names.get(operand.value, operand.value))
        for operand in (contraction.left, contraction.right)
    )
    result = names.get(contraction.result, contraction.result)
    epilogue = tuple(map(change, contraction.epilogue))
    return replace(contraction, left=left, right=right, result=result, epilogue=epilogue)
