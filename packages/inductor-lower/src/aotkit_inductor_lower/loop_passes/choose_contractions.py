"""Pass: which matrix products are loops of ours and which are calls of ATen's; measured, with the reason kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import Buffer, BufferRef, ExternCall, Program, Step
from ..ir.walk import buffers_of
from ..lowering.contractions import matmul_nest
from ..passes import Decision, Pass, PassContext

__all__ = ["PASS", "choose_contractions"]

GAIN = 0.97  # of ATen's time is what a generated product must take at most: it also makes the plan longer to compile


def choose_contractions(program: Program, ctx: PassContext) -> Program:
    """The program with the products that are faster so, or all if the options say that, written as nests. Equal ones
    are measured once."""
    if ctx.measure is None and ctx.options.contractions != "generated":
        return program
    buffers = buffers_of(program)
    known: dict[str, tuple[bool, str]] = {}
    steps: list[Step] = []
    for step in program.steps:
        nest = matmul_nest(step, buffers) if isinstance(step, ExternCall) else None
        if not isinstance(step, ExternCall) or nest is None:
            steps.append(step)
            continue
        product = _product(step, buffers)
        if product not in known:
            known[product] = _choose(step, buffers, ctx)
        generated, reason = known[product]
        generated = generated and ctx.fuel.take()
        ctx.decisions.append(Decision("contraction", step.name, step.target, generated, f"{product}: {reason}"))
        steps.append(nest if generated else step)
    return replace(program, steps=tuple(steps))


def _product(call: ExternCall, buffers: Mapping[str, Buffer]) -> str:
    """A product as a timer sees it: operator, type, and sizes and strides of its tensors."""
    tensors = [buffers[a.name] for a in call.args if isinstance(a, BufferRef)]
    operands = (f"{list(map(str, t.sizes))}:{list(map(str, t.strides))}" for t in tensors)
    return f"{call.target} {tensors[0].dtype} {' x '.join(operands)}"


def _choose(call: ExternCall, buffers: Mapping[str, Buffer], ctx: PassContext) -> tuple[bool, str]:
    """Whether a product is generated, and why."""
    if ctx.options.contractions == "generated" or ctx.measure is None:
        return True, "every product is generated"
    library, generated = ctx.measure(call, buffers)
    better = generated <= GAIN * library
    times = f"ATen {library * 1e6:.1f} us, generated {generated * 1e6:.1f} us"
    return better, f"{'generated' if better else 'ATen'}, {times}"


def _has_form(ctx: PassContext) -> bool:
    return "dot" in ctx.target.capabilities.contraction_forms


PASS = Pass(
    "choose-contractions",
    choose_contractions,
    why="what comes before and after a product is computed in its kernel, if that is as fast as the library's",
    after=("drop-dead-steps",),
    when=_has_form,
)
