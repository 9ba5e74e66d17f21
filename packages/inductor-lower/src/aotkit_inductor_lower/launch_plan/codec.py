"""Plans and compiled programs as JSON and bytes, without pickle."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from .._size_text import parse_size, write_size
from ..ir.arguments import Arg, BufferRef, Literal, Origin, SymInput
from ..symbolic import Call, Expr, Symbol, SymbolKind
from .records import (
    Allocate,
    ArenaBuffer,
    Binary,
    CallExtern,
    CallSegment,
    CompiledProgram,
    Free,
    KernelRecord,
    LaunchPlan,
    PlannedBuffer,
    PlanStep,
    Return,
    ReuseBuffer,
    View,
)

__all__ = ["compiled_from_json", "compiled_from_raw", "compiled_to_json", "compiled_to_raw", "plan_from_json"]
__all__ += ["plan_to_json"]

FORMAT = 7
Json = Any  # what json.loads gives


def plan_to_json(plan: LaunchPlan) -> str:
    """The plan as JSON text."""
    return json.dumps(_plan_out(plan), separators=(",", ":"))


def plan_from_json(text: str) -> LaunchPlan:
    """The inverse of :func:`plan_to_json`. Raises ``ValueError`` for another format version."""
    return _plan_in(json.loads(text))


def compiled_to_json(compiled: CompiledProgram) -> str:
    """A compiled program as JSON text; code is base64."""
    return json.dumps(compiled_to_raw(compiled), separators=(",", ":"))


def compiled_from_json(text: str) -> CompiledProgram:
    """The inverse of :func:`compiled_to_json`. Raises ``ValueError`` for another format."""
    return compiled_from_raw(json.loads(text))


def compiled_to_raw(compiled: CompiledProgram) -> Json:
    """A compiled program as JSON values."""
    binary = compiled.binary
    return {
        "format": FORMAT,
        "plan": _plan_out(compiled.plan),
        "kernels": [
            [k.name, k.function, k.segment, list(k.origin.nodes), list(k.origin.ops), k.origin.line, k.combo]
            for k in compiled.kernels
        ],
        "target": binary.target,
        "facts": binary.facts,
        "sections": [[name, base64.b64encode(code).decode("ascii")] for name, code in binary.sections],
        "digest": binary.digest,
        "text": compiled.text,
    }


def compiled_from_raw(data: Json) -> CompiledProgram:
    """The inverse of :func:`compiled_to_raw`. Raises ``ValueError`` for another format and for a damaged program."""
    try:
        _check(data)
        return _compiled_in(data)
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"the compiled program is damaged: {type(error).__name__}: {error}") from error


def _compiled_in(data: Json) -> CompiledProgram:
    kernels = tuple(
        KernelRecord(name, function, segment, Origin(tuple(nodes), tuple(ops), line), combo)
        for name, function, segment, nodes, ops, line, combo in data["kernels"]
    )
    sections = tuple((name, base64.b64decode(code)) for name, code in data["sections"])
    binary = Binary(data["target"], data["facts"], sections, data["digest"])
    return CompiledProgram(_plan_in(data["plan"]), kernels, binary, data["text"])


def _check(data: Json) -> None:
    if data.get("format") != FORMAT:
        raise ValueError(
            f"this plan has format {data.get('format')}, this version reads format {FORMAT}; compile again"
        )


def _plan_out(plan: LaunchPlan) -> Json:
    return {
        "format": FORMAT,
        "name": plan.name,
        "inputs": list(plan.inputs),
        "buffers": [
            [b.name, b.dtype, _exprs_out(b.sizes), _exprs_out(b.strides), b.storage, b.device] for b in plan.buffers
        ],
        "slots": list(plan.slots),
        "arena": [[a.buffer, a.first, a.last, a.reuses] for a in plan.arena],
        "steps": [_step_out(step) for step in plan.steps],
        "symbols": [list(source) for source in plan.symbol_sources],
        "computed": [[name, parse_size(text)] for name, text in plan.computed_sizes],
        "wide": _exprs_out(plan.wide_sizes),
    }


def _plan_in(data: Json) -> LaunchPlan:
    _check(data)
    return LaunchPlan(
        data["name"],
        tuple(data["inputs"]),
        tuple(
            PlannedBuffer(name, dtype, _exprs_in(sizes), _exprs_in(strides), storage, device)
            for name, dtype, sizes, strides, storage, device in data["buffers"]
        ),
        tuple(data["slots"]),
        tuple(ArenaBuffer(*entry) for entry in data["arena"]),
        tuple(_STEPS_IN[kind](*fields) for kind, *fields in data["steps"]),
        tuple((name, position, kind, dim) for name, position, kind, dim in data["symbols"]),
        tuple((name, write_size(tree)) for name, tree in data["computed"]),
        _exprs_in(data["wide"]),
    )


# -- steps -------------------------------------------------------------------------------------------------


def _step_out(step: PlanStep) -> Json:
    if isinstance(step, Allocate):
        return ["allocate", step.buffer]
    if isinstance(step, CallSegment):
        return ["segment", step.function, list(step.launches)]
    if isinstance(step, CallExtern):
        kwargs = [[name, _arg_out(value)] for name, value in step.kwargs]
        args = [_arg_out(value) for value in step.args]
        return ["extern", step.target, args, kwargs, list(step.results), step.out, step.reason]
    if isinstance(step, View):
        return ["view", step.result, step.base, _expr_out(step.offset)]
    if isinstance(step, ReuseBuffer):
        return ["reuse", step.result, step.base]
    if isinstance(step, Free):
        return ["free", list(step.buffers)]
    return ["return", [None if o is None else _arg_out(o) for o in step.outputs]]


def _extern_in(target: str, args: Json, kwargs: Json, results: Json, out: str | None, reason: str) -> CallExtern:
    named = tuple((name, _arg_in(value)) for name, value in kwargs)
    return CallExtern(target, tuple(_arg_in(a) for a in args), named, tuple(results), out, reason)


def _return_in(outputs: Json) -> Return:
    found: list[BufferRef | SymInput | None] = []
    for output in outputs:
        arg = None if output is None else _arg_in(output)
        assert arg is None or isinstance(arg, BufferRef | SymInput)
        found.append(arg)
    return Return(tuple(found))


_STEPS_IN: dict[str, Callable[..., PlanStep]] = {
    "allocate": Allocate,
    "segment": lambda function, launches: CallSegment(function, tuple(launches)),
    "extern": _extern_in,
    "view": lambda result, base, offset: View(result, base, _expr_in(offset)),
    "reuse": ReuseBuffer,
    "free": lambda buffers: Free(tuple(buffers)),
    "return": _return_in,
}


def _arg_out(arg: Arg) -> Json:
    if isinstance(arg, BufferRef):
        return {"number": arg.name} if arg.number else {"buffer": arg.name}
    if isinstance(arg, SymInput):
        return {"size": _expr_out(arg.expr)}
    if isinstance(arg, tuple):
        return [_arg_out(a) for a in arg]
    value = arg.value
    if isinstance(value, float):
        return {"float": value.hex()}
    return {"literal": [arg.kind, str(value) if isinstance(value, complex) else value]}


def _arg_in(data: Json) -> Arg:
    if isinstance(data, list):
        return tuple(_arg_in(a) for a in data)
    if "buffer" in data:
        return BufferRef(data["buffer"])
    if "number" in data:
        return BufferRef(data["number"], number=True)
    if "size" in data:
        return SymInput(_expr_in(data["size"]))
    if "float" in data:
        return Literal("float", float.fromhex(data["float"]))
    kind, value = data["literal"]
    return Literal(kind, value)


# -- expressions -------------------------------------------------------------------------------------------


def _exprs_out(exprs: tuple[Expr, ...]) -> Json:
    return [_expr_out(e) for e in exprs]


def _exprs_in(data: Json) -> tuple[Expr, ...]:
    return tuple(_expr_in(e) for e in data)


def _expr_out(expr: Expr) -> Json:
    constant = expr.constant
    if constant is not None:
        return constant
    return [[factor, *map(_atom_out, monomial)] for monomial, factor in expr.terms]


def _atom_out(atom: Symbol | Call) -> Json:
    if isinstance(atom, Symbol):
        return str(atom)
    return [atom.fn, *map(_expr_out, atom.args)]


def _expr_in(data: Json) -> Expr:
    if isinstance(data, int):
        return Expr((((), data),)) if data else Expr(())
    return Expr(tuple((tuple(map(_atom_in, atoms)), factor) for factor, *atoms in data))


def _atom_in(data: Json) -> Symbol | Call:
    if isinstance(data, str):
        kind = next((k for k in SymbolKind if k.value and data.startswith(k.value)), SymbolKind.INDEX)
        return Symbol(data[len(kind.value) :], kind)
    fn, *args = data
    return Call(fn, tuple(map(_expr_in, args)))
