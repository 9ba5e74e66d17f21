"""The IR's executable rules: what :mod:`.nodes` says in words. Run between passes under ``verify=True``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from .._size_text import parse_size, symbols_in
from ..errors import IRError
from ..symbolic import Expr, SymbolKind
from .in_place import may_write_over
from .nodes import (
    Alias,
    Arg,
    Buffer,
    BufferKind,
    BufferRef,
    Contraction,
    ExternCall,
    Load,
    LoopNest,
    Program,
    Step,
    SymInput,
)
from .verify_contraction import check_contraction
from .verify_nest import verify_nest_against
from .walk import accesses, buffers_of, instructions, ranges_within

__all__ = ["verify_nest", "verify_program"]

_INTEGERS = ("int", "above", "below")
_SOURCE_KINDS = (*_INTEGERS, "size", "stride")
_ALWAYS_DEFINED = (BufferKind.INPUT, BufferKind.CONSTANT)


def verify_nest(nest: LoopNest, program: Program, *, size_minimum: int = 0) -> None:
    """Check one nest against the buffers of ``program``. Raises :class:`IRError` naming stage and instruction.

    ``size_minimum``: the smallest value that dynamic sizes are known to have.
    """
    verify_nest_against(nest, buffers_of(program), size_minimum=size_minimum)


def verify_program(program: Program, *, size_minimum: int = 0) -> None:
    """Check a whole program. Raises :class:`IRError` for the first rule that is broken, naming the place."""
    _ProgramChecker(program, size_minimum).run()


class _ProgramChecker:
    def __init__(self, program: Program, size_minimum: int) -> None:
        self.program = program
        self.size_minimum = size_minimum
        self.buffers = buffers_of(program)
        self.symbols = set(program.size_symbols)
        self.defined = {b.name for b in program.buffers if b.kind in _ALWAYS_DEFINED}
        self.memory = {b.name: b.name for b in program.buffers}  # buffer -> the one that owns its memory
        self.scratch_owner: dict[str, str] = {}
        self.reused: dict[str, str] = {}  # what will be written -> over what
        self.gone: dict[str, str] = {}  # memory -> what was written over it

    def fail(self, problem: str) -> IRError:
        return IRError(f"program {self.program.name}: {problem}")

    def run(self) -> None:
        p = self.program
        self.check_unique((b.name for b in p.buffers), "buffer")
        self.check_unique((s.name for s in p.steps), "step")
        self.check_unique(p.inputs, "input")
        self.check_unique(p.size_symbols, "size symbol")
        self.check_inputs()
        self.check_sources()
        for buffer in p.buffers:
            self.check_declaration(buffer)
        for step in p.steps:
            _STEP_CHECKS[type(step)](self, step)
        for output in p.outputs:
            if isinstance(output, BufferRef):
                self.check_defined(output.name, "an output")
            elif output is not None:
                self.check_size_expr(output.expr, "an output")

    def check_unique(self, names: Iterable[str], what: str) -> None:
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise self.fail(f"{what} {name!r} appears twice")
            seen.add(name)

    def check_inputs(self) -> None:
        for name in self.program.inputs:
            if name.startswith("$"):
                if name[1:] not in self.symbols:
                    raise self.fail(f"integer input {name} has no symbol source")
            elif name not in self.buffers or self.buffers[name].kind is not BufferKind.INPUT:
                raise self.fail(f"input {name!r} is not declared as an input buffer")
        missing = [
            b.name for b in self.program.buffers if b.kind is BufferKind.INPUT and b.name not in self.program.inputs
        ]
        if missing:
            raise self.fail(f"input buffer {missing[0]!r} is not among the program's inputs")

    def check_sources(self) -> None:
        inputs = self.program.inputs
        for name, position, kind, dim in self.program.symbol_sources:
            if kind not in _SOURCE_KINDS:
                raise self.fail(f"${name} comes from {kind!r}; sources are {', '.join(_SOURCE_KINDS)}")
            if not 0 <= position < len(inputs):
                raise self.fail(f"${name} comes from input {position}, but there are {len(inputs)}")
            source = inputs[position]
            if source.startswith("$") != (kind in _INTEGERS):
                raise self.fail(f"${name} comes from the {kind} of input {position}, which is {source}")
            if kind not in _INTEGERS and not 0 <= dim < len(self.buffers[source].sizes):
                raise self.fail(f"${name} comes from {kind} {dim} of {source}, which has fewer dimensions")

        known = {f"${name}" for name, *_ in self.program.symbol_sources}
        for name, text in self.program.computed_sizes:
            unknown = sorted(symbols_in(parse_size(text)) - known)
            if unknown:
                raise self.fail(f"${name} is computed of {unknown[0]}, which has no source before it")
            known.add(f"${name}")

    def check_declaration(self, buffer: Buffer) -> None:
        if len(buffer.sizes) != len(buffer.strides):
            raise self.fail(f"buffer {buffer.name} has {len(buffer.sizes)} sizes and {len(buffer.strides)} strides")
        for expr in (*buffer.sizes, *buffer.strides):
            self.check_size_expr(expr, f"the shape of {buffer.name}")
            if expr.constant is not None and expr.constant < 0:
                raise self.fail(f"buffer {buffer.name} has a negative size or stride")

    def check_size_expr(self, expr: Expr, what: str) -> None:
        for symbol in sorted(expr.symbols):
            if symbol.kind is not SymbolKind.SIZE:
                raise self.fail(f"{what} may hold size symbols only, not {symbol}")
            if symbol.name not in self.symbols:
                raise self.fail(f"{what} holds {symbol}, which has no source")

    def check_defined(self, name: str, where: str) -> None:
        if name not in self.buffers:
            raise self.fail(f"{where} names {name!r}, which is not declared")
        if name not in self.defined:
            raise self.fail(f"{where} reads {name!r} before anything writes it")
        if self.memory[name] in self.gone:
            raise self.fail(f"{where} uses {name!r}, which {self.gone[self.memory[name]]} was written over")

    # -- steps -----------------------------------------------------------------------------------

    def check_contraction(self, contraction: Contraction) -> None:
        check_contraction(contraction)
        call = contraction.library
        if call is not None:
            self.check_arguments(call)
            for result in contraction.writes:
                if result in self.defined:
                    raise self.fail(f"ATen's call in {contraction.name} makes {result!r}, which is there already")
        self.check_nest(contraction.as_nest())

    def check_nest(self, nest: LoopNest) -> None:
        verify_nest_against(nest, self.buffers, size_minimum=self.size_minimum)
        for r in ranges_within(nest):
            self.check_size_expr(r.size, f"a range of nest {nest.name}")
        for name in (*nest.reads, *nest.writes):
            if (
                self.buffers[name].kind is BufferKind.SCRATCH
                and self.scratch_owner.setdefault(name, nest.name) != nest.name
            ):
                raise self.fail(f"scratch buffer {name} is used by nests {self.scratch_owner[name]} and {nest.name}")
        for name in _read_first(nest):
            self.check_defined(name, f"nest {nest.name}")
        for name in nest.reads:
            for other in nest.writes:
                if name != other and self.memory[name] == self.memory[other]:
                    raise self.fail(f"nest {nest.name} loads {name} and stores {other}, which share memory")
        for name in nest.writes:
            if name in self.reused:
                self.check_written_over(nest, name, self.reused.pop(name))
        self.defined.update(nest.writes)

    def check_written_over(self, nest: LoopNest, result: str, base: str) -> None:
        if base not in nest.reads or not may_write_over(nest, base, result, self.buffers):
            raise self.fail(f"nest {nest.name} may not write {result} over {base}, whose elements it needs longer")
        self.gone[self.memory[base]] = result

    def check_extern(self, call: ExternCall) -> None:
        self.check_arguments(call)
        where = f"extern {call.name}"
        for result in call.results:
            if result is not None:
                self.check_result(result, where)

    def check_arguments(self, call: ExternCall) -> None:
        where = f"extern {call.name}"
        for arg in _leaves((*call.args, *(value for _, value in call.kwargs))):
            if isinstance(arg, BufferRef):
                self.check_defined(arg.name, where)
            elif isinstance(arg, SymInput):
                self.check_size_expr(arg.expr, where)
        for name in call.mutates:
            self.check_defined(name, where)

    def check_alias(self, alias: Alias) -> None:
        where = f"alias {alias.name}"
        # A view may be made before its base is written: concatenation stores through views of the result.
        if alias.base not in self.buffers:
            raise self.fail(f"{where} names {alias.base!r}, which is not declared")
        self.check_size_expr(alias.offset, where)
        if alias.result not in self.buffers:
            raise self.fail(f"{where} makes {alias.result!r}, which is not declared")
        if alias.reuses:
            self.check_defined(alias.base, where)
            if alias.offset != 0 or alias.result in self.defined:
                raise self.fail(f"{where}: what reuses memory is new, and begins where that does")
            self.reused[alias.result] = alias.base
            return
        self.memory[alias.result] = self.memory[alias.base]
        self.defined.add(alias.result)

    def check_result(self, name: str, where: str) -> None:
        if name not in self.buffers:
            raise self.fail(f"{where} makes {name!r}, which is not declared")
        if name in self.defined:
            raise self.fail(f"{where} makes {name!r}, which is there already")
        self.defined.add(name)


def _read_first(nest: LoopNest) -> list[str]:
    """Buffers whose first access in the nest needs a value that is there already: a load, or an adding store."""
    first: dict[str, bool] = {}
    for access in accesses(instructions(nest.stages)):
        first.setdefault(access.buffer, isinstance(access, Load) or access.accumulates)
    return [name for name, needed in first.items() if needed]


def _leaves(args: Iterable[Arg]) -> Iterator[Arg]:
    for arg in args:
        if isinstance(arg, tuple):
            yield from _leaves(arg)
        else:
            yield arg


_STEP_CHECKS: dict[type[Step], Callable[..., None]] = {
    LoopNest: _ProgramChecker.check_nest,
    ExternCall: _ProgramChecker.check_extern,
    Alias: _ProgramChecker.check_alias,
    Contraction: _ProgramChecker.check_contraction,
}
