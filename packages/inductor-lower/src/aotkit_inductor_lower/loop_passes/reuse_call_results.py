"""Pass: kernels write over results of ATen calls that die there, see Note [In place] in :mod:`..ir.in_place`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir import Alias, Buffer, BufferKind, BufferRef, ExternCall, LoopNest, Program, Step
from ..ir.in_place import may_write_over
from ..ir.walk import buffers_of, step_reads, step_writes
from ..ops.aten import out_overload
from ..passes import Fuel, Pass, PassContext
from ..symbolic import to_expr
from ..target import NO_MACHINE

__all__ = ["PASS", "reuse_call_results"]

#: Operators whose only result, or first of several, is known to be new memory of its own.
_ALLOCATE = frozenset(
    f"{name}.default"
    for name in (
        *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution", "aten.convolution_backward"),
        "mkldnn._linear_pointwise",
    )
)


def reuse_call_results(program: Program, fuel: Fuel) -> Program:
    """The program with an alias for each result of a kernel that is written over the result of an ATen call."""
    buffers = buffers_of(program)
    roots = _roots(program)
    last = {roots.get(name, name): place for place, step in enumerate(program.steps) for name in _uses(step)}
    last.update((roots.get(o.name, o.name), len(program.steps)) for o in program.outputs if isinstance(o, BufferRef))
    made = {  # the first results, and whether the arena may have them
        step.results[0]: len(step.results) == 1 and out_overload(step.target) is not None
        for step in program.steps
        if isinstance(step, ExternCall)
        and step.target in _ALLOCATE
        and step.results[0] is not None
        and not step.mutates
    }
    born: set[str] = set()
    steps: list[Step] = []
    for place, step in enumerate(program.steps):
        if isinstance(step, LoopNest):
            shared = {roots[name] for name in (*step.reads, *step.writes) if name in roots}
            dying = [
                n for n in step.reads if n in made and last[n] == place and n not in shared and n not in step.writes
            ]
            for result in step.writes if dying else ():
                if result in born:
                    continue
                planned = buffers[result].kind is BufferKind.TEMPORARY  # the arena's, see find_reuses
                wanted = [n for n in dying if not (planned and made[n])]
                argument = _written_over(step, result, wanted, buffers)
                if argument is not None and fuel.take():
                    dying.remove(argument)
                    steps.append(_reusing(result, argument, step))
        born.update(_uses(step))
        steps.append(step)
    return replace(program, steps=tuple(steps))


def _written_over(nest: LoopNest, result: str, dying: Sequence[str], buffers: Mapping[str, Buffer]) -> str | None:
    """The argument that ``result`` may be written over."""
    if buffers[result].kind not in (BufferKind.TEMPORARY, BufferKind.OUTPUT):
        return None
    return next((argument for argument in dying if may_write_over(nest, argument, result, buffers)), None)


def _reusing(result: str, argument: str, nest: LoopNest) -> Alias:
    return Alias(f"{result}_over_{argument}", result, argument, to_expr(0), nest.origin, reuses=True)


def _roots(program: Program) -> dict[str, str]:
    """Whose memory each alias views."""
    roots: dict[str, str] = {}
    for step in program.steps:
        if isinstance(step, Alias):
            roots[step.result] = roots.get(step.base, step.base)
    return roots


def _uses(step: Step) -> tuple[str, ...]:
    return (*step_reads(step), *step_writes(step))


def _run(program: Program, ctx: PassContext) -> Program:
    return reuse_call_results(program, ctx.fuel)


def _has_arena(ctx: PassContext) -> bool:
    return ctx.target is not NO_MACHINE and ctx.target.capabilities.arena


PASS = Pass(
    "reuse-call-results",
    _run,
    why="the last kernel to read the result of a product or a convolution may write its own result there",
    after=("order-steps", "split-reductions", "choose-library-calls"),  # none of which looks through such an alias
    when=_has_arena,
)
