"""The loop IR as text: what people read, and what the package stores. :mod:`.parse` reads it back.

Note [IR text]
    One statement a line; indentation is for the eye only, ``#`` starts a comment line. Names that are not plain
    identifiers are written as JSON strings. A program::

        aotkit-ir 2
        program softmax
        symbol $s0 = input 0 size 0
        input x
        buffer x : float32[$s0, 64] strides [64, 1] input on cpu
        buffer y : float32[$s0, 64] strides [64, 1] output on cpu
        loop softmax(i0 < $s0):
          origin nodes ["amax"] ops ["aten.amax.default"] line "model.py:3"
          stage(r0 < 64):
            %v0 = load x[i0, r0] : f32
            %v1 = reduce max %v0 : f32
          stage(r1 < 64):
            %v2 = load x[i0, r1] : f32
            %v3 = sub %v2, %v1 : f32
            store y[i0, r1] = %v3
        contraction mm1 batch() rows(i < $s0) columns(j < 64) reduced(k < 64) in f32 highest:
          left %l:
            %l = load y[i, k] : f32
          right %r:
            %r = load w[k, j] : f32
          sum %t:
            store u[i, j] = %t
          library mm1: u = aten.mm.default(y, w)
        extern mm0: z, _ = aten.mm.default(y, [2, sym(4*$s0)], dtype("torch.float32"), out=none) reason "a matmul"
        alias view0: v = z + 4
        alias over0: w reuses u + 0
        return y, sym(2*$s0), none

    Instructions: ``load b[..] : t`` with ``mask %m other 0.0``; ``const 1.0 : t``; ``index expr : t``;
    ``op %a, %b : t``; ``check %v < size``; ``reduce kind %v : t``, ``scan kind %v : t``;
    ``store b[..] = %v`` or ``+= %v``, with ``mask %m``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from ..errors import IRError
from ..symbolic import Expr
from .nodes import (
    STORE_MODES,
    Alias,
    Arg,
    Buffer,
    BufferRef,
    CheckedIndex,
    Compute,
    Const,
    Contraction,
    ExternCall,
    Index,
    Instr,
    Load,
    LoopNest,
    Origin,
    Program,
    Range,
    Reduce,
    Stage,
    Step,
    Store,
    SymInput,
)

__all__ = ["IR_TEXT_VERSION", "print_instr", "print_nest", "print_program"]

IR_TEXT_VERSION = 2

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
RESERVED = frozenset({"none", "true", "false", "inf", "nan", "sym", "_"})
LITERAL_KINDS = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str"}


def print_program(program: Program, *, origins: bool = True) -> str:
    """The text of a whole program. Without ``origins`` it depends on what is computed only, not on node names."""
    lines = [f"aotkit-ir {IR_TEXT_VERSION}", f"program {name_text(program.name)}"]
    for name, position, kind, dim in program.symbol_sources:
        lines.append(f"symbol ${name_text(name)} = input {position} {name_text(kind)} {dim}")
    lines.extend(f"size ${name_text(name)} = {text}" for name, text in program.computed_sizes)
    lines.extend(f"input {input_text(name)}" for name in program.inputs)
    lines.extend(_buffer_line(buffer) for buffer in program.buffers)
    for step in program.steps:
        lines.extend(_STEP_LINES[type(step)](step, origins))
    lines.append(f"return {', '.join(map(_output_text, program.outputs))}".rstrip())
    return "\n".join(lines) + "\n"


def print_nest(nest: LoopNest, *, origins: bool = True) -> str:
    """The text of one loop nest."""
    return "\n".join(_nest_lines(nest, origins)) + "\n"


def print_instr(instr: Instr) -> str:
    """The text of one instruction."""
    return _INSTR_TEXT[type(instr)](instr)


# -- pieces ------------------------------------------------------------------------------------------


def name_text(name: str) -> str:
    """A name as it is, or quoted if it is no plain identifier."""
    return name if _PLAIN.match(name) and name not in RESERVED else json.dumps(name)


def input_text(name: str) -> str:
    """An entry of ``Program.inputs``: a buffer name, or a symbol's with its ``$``."""
    return "$" + name_text(name[1:]) if name.startswith("$") else name_text(name)


def scalar_text(value: bool | int | float | str | None) -> str:
    """A literal value, exact."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _exprs(exprs: Iterable[Expr]) -> str:
    return ", ".join(map(str, exprs))


def _buffer_line(b: Buffer) -> str:
    return (
        f"buffer {name_text(b.name)} : {name_text(b.dtype)}[{_exprs(b.sizes)}] strides [{_exprs(b.strides)}] "
        f"{b.kind.value} on {_plain_or_quoted(b.device)}"
    )


def _plain_or_quoted(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.:]*", text) and text not in RESERVED else json.dumps(text)


def origin_lines(origin: Origin, origins: bool) -> list[str]:
    """Where a step came from; no line if that is not known or not wanted."""
    if not origins or origin == Origin():
        return []
    return [f"  origin nodes {json.dumps(origin.nodes)} ops {json.dumps(origin.ops)} line {json.dumps(origin.line)}"]


def _nest_lines(nest: LoopNest, origins: bool) -> list[str]:
    lines = [f"loop {name_text(nest.name)}({_ranges(nest.outer)}):", *origin_lines(nest.origin, origins)]
    for stage in nest.stages:
        lines.extend(_stage_lines(stage))
    return lines


def _stage_lines(stage: Stage) -> list[str]:
    return [f"  stage({_ranges(stage.ranges)}):", *["    " + _INSTR_TEXT[type(i)](i) for i in stage.body]]


def _ranges(ranges: Iterable[Range]) -> str:
    return ", ".join([f"{r.symbol} < {r.size}" for r in ranges])


def _extern_lines(step: ExternCall, origins: bool) -> list[str]:
    return [f"extern {_call_text(step)}", *origin_lines(step.origin, origins)]


def _call_text(step: ExternCall) -> str:
    results = ", ".join("_" if r is None else name_text(r) for r in step.results) or "()"
    args = [arg_text(a) for a in step.args] + [f"{name_text(k)}={arg_text(a)}" for k, a in step.kwargs]
    line = f"{name_text(step.name)}: {results} = {_plain_or_quoted(step.target)}({', '.join(args)})"
    if step.mutates:
        line += f" mutates {', '.join(map(name_text, step.mutates))}"
    if step.reason:
        line += f" reason {json.dumps(step.reason)}"
    return line


def _contraction_lines(step: Contraction, origins: bool) -> list[str]:
    groups = (("batch", step.batch), ("rows", step.rows), ("columns", step.columns), ("reduced", step.reduced))
    loops = " ".join([f"{group}({_ranges(ranges)})" for group, ranges in groups])
    lines = [f"contraction {name_text(step.name)} {loops} in {step.accumulate.value} {step.precision}:"]
    lines += origin_lines(step.origin, origins)
    for part, value, body in (
        ("left", step.left.value, step.left.body),
        ("right", step.right.value, step.right.body),
        ("sum", step.result, step.epilogue),
    ):
        lines += [f"  {part} {_value(value)}:", *["    " + _INSTR_TEXT[type(i)](i) for i in body]]
    return lines if step.library is None else [*lines, f"  library {_call_text(step.library)}"]


def _alias_lines(step: Alias, origins: bool) -> list[str]:
    name, result, base = map(name_text, (step.name, step.result, step.base))
    line = f"alias {name}: {result} {'reuses' if step.reuses else '='} {base} + {step.offset}"
    return [line, *origin_lines(step.origin, origins)]


def arg_text(arg: Arg) -> str:
    """An argument of an extern call."""
    if isinstance(arg, BufferRef):
        return f"item({name_text(arg.name)})" if arg.number else name_text(arg.name)
    if isinstance(arg, SymInput):
        return f"sym({arg.expr})"
    if isinstance(arg, tuple):
        return f"[{', '.join(map(arg_text, arg))}]"
    value = scalar_text(arg.value)
    if LITERAL_KINDS[type(arg.value)] != arg.kind:
        return f"{name_text(arg.kind)}({value})"
    return f"str({value})" if isinstance(arg.value, str) else value


def _output_text(output: BufferRef | SymInput | None) -> str:
    return "none" if output is None else arg_text(output)


# -- instructions ------------------------------------------------------------------------------------


def _value(name: str) -> str:
    return "%" + name if _PLAIN.match(name) else "%" + json.dumps(name)


def _load(i: Load) -> str:
    mask = "" if i.mask is None else f" mask {_value(i.mask)} other {scalar_text(i.other)}"
    if i.mask is None and i.other != 0:
        mask = f" other {scalar_text(i.other)}"
    return f"{_value(i.result)} = load {name_text(i.buffer)}[{_exprs(i.indices)}]{mask} : {i.dtype.value}"


def _store(i: Store) -> str:
    mask = "" if i.mask is None else f" mask {_value(i.mask)}"
    sign = STORE_MODES.get(i.mode)
    if sign is None:
        raise IRError(f"store to {i.buffer}: mode must be one of {', '.join(STORE_MODES)}, not {i.mode!r}")
    return f"store {name_text(i.buffer)}[{_exprs(i.indices)}] {sign} {_value(i.value)}{mask}"


def _compute(i: Compute) -> str:
    return f"{_value(i.result)} = {i.op} {', '.join([_value(a) for a in i.args])} : {i.dtype.value}"


def _reduce(i: Reduce) -> str:
    at = "" if i.position is None else f" at {i.position}"
    return f"{_value(i.result)} = {'scan' if i.running else 'reduce'} {i.kind} {_value(i.value)}{at} : {i.dtype.value}"


_INSTR_TEXT: dict[type, Callable[..., str]] = {
    Load: _load,
    Const: lambda i: f"{_value(i.result)} = const {scalar_text(i.value)} : {i.dtype.value}",
    Index: lambda i: f"{_value(i.result)} = index {i.expr} : {i.dtype.value}",
    Compute: _compute,
    CheckedIndex: lambda i: f"{_value(i.result)} = check {_value(i.value)} < {i.size}",
    Reduce: _reduce,
    Store: _store,
}
_STEP_LINES: dict[type[Step], Callable[..., list[str]]] = {
    LoopNest: _nest_lines,
    ExternCall: _extern_lines,
    Alias: _alias_lines,
    Contraction: _contraction_lines,
}
