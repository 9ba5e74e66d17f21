"""Pass: an op that gives back one of its operands is that operand: ``x * 1``, ``x / 1``, ``x - 0``, ``x + -0.0``.

Exact for every number, -0.0 and nan included: 0 is added to integers only, since ``-0.0 + 0.0`` is 0.0. Such ops come
from arguments at their usual values (a scale of 1) and from formulas of statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..ir import Compute, Const, Instr, LoopNest, Program
from ..ir.walk import definitions, instructions, rename
from ..ops.dtypes import is_float
from ..passes import Pass, PassContext

__all__ = ["PASS", "fold_identities"]

_BY_ONE = ("mul", "div")  # also of floats, which floordiv and truncdiv by 1 round
_INTEGERS_BY_ONE = (*_BY_ONE, "floordiv", "truncdiv")
_COMMUTES = ("mul", "add")


def fold_identities(program: Program, ctx: PassContext) -> Program:
    """The program without such ops. Constants that nothing uses any more go with the other dead code."""
    steps = [_folded(step, ctx) if isinstance(step, LoopNest) else step for step in program.steps]
    return replace(program, steps=tuple(steps))


def _folded(nest: LoopNest, ctx: PassContext) -> LoopNest:
    instrs = instructions(nest.stages)
    made = definitions(instrs)
    constants = {name: i for name, i in made.items() if isinstance(i, Const)}
    same: dict[str, str] = {}
    for instr in instrs if constants else ():
        kept = _operand(instr, constants) if isinstance(instr, Compute) else None
        if kept is not None and ctx.fuel.take():
            assert isinstance(instr, Compute)
            same[instr.result] = same.get(kept, kept)
    if not same:
        return nest
    stages = [stage.with_body(tuple(_renamed(stage.body, same))) for stage in nest.stages]
    return replace(nest, stages=tuple(stages))


def _operand(instr: Compute, constants: Mapping[str, Const]) -> str | None:
    """The operand that the instruction gives, if it is one."""
    if len(instr.args) != 2:
        return None
    first, second = instr.args
    for value, other in ((first, second), (second, first)) if instr.op in _COMMUTES else ((first, second),):
        if other in constants and value not in constants and _is_neutral(instr, constants[other]):
            return value
    return None


def _is_neutral(instr: Compute, constant: Const) -> bool:
    if instr.op in (_BY_ONE if is_float(instr.dtype) else _INTEGERS_BY_ONE):
        return constant.value == 1
    if instr.op not in ("add", "sub") or constant.value != 0:
        return False
    return not is_float(instr.dtype) or constant.negative_zero == (instr.op == "add")


def _renamed(body: Iterable[Instr], same: Mapping[str, str]) -> Iterable[Instr]:
    return (rename(i, same) for i in body if not (isinstance(i, Compute) and i.result in same))


PASS = Pass(
    "fold-identities",
    fold_identities,
    why="what is multiplied or divided by 1 stays what it is",
)
