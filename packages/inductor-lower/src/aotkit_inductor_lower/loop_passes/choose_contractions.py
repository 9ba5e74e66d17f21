"""Pass: who computes each product of matrices, loops of ours or ATen, as the target says; with the reason kept.

Note [Who computes a product]
    A :class:`~..ir.Contraction` becomes ATen's call in it, or the nest that it means, into which the ordinary passes
    fuse what comes before and after it; or it stays, where the target writes products in tiles, until
    ``generate-contractions``. A target without a form for it leaves all that ATen can compute to ATen. The call is what
    there must be, so it takes no fuel; anything else takes some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import Buffer, BufferRef, Contraction, ExternCall, Program, Step
from ..ir.walk import buffers_of, contractions
from ..passes import NO_FUEL, Decision, Pass, PassContext
from ..target import Choice

__all__ = ["PASS", "choose_contractions"]


def choose_contractions(program: Program, ctx: PassContext) -> Program:
    """The program with each contraction as whoever computes it needs it. Equal ones are asked about once."""
    if not contractions(program):
        return program
    buffers = buffers_of(program)
    known: dict[str, Choice] = {}
    steps = [_chosen(s, buffers, known, ctx) if isinstance(s, Contraction) else s for s in program.steps]
    return replace(program, steps=tuple(steps))


def _chosen(product: Contraction, buffers: Mapping[str, Buffer], known: dict[str, Choice], ctx: PassContext) -> Step:
    call = product.library
    if call is None:
        return product.as_nest()  # nobody else can
    if ctx.options.contractions == "aten" or not ctx.target.capabilities.contraction_forms:
        return call
    key = _operands(call, buffers)
    if key not in known:
        known[key] = ctx.target.choose(product, buffers, ctx.options, ctx.measure)
    choice = known[key]
    generated = choice.form != "aten" and ctx.fuel.take()
    reason = choice.reason if generated or choice.form == "aten" else NO_FUEL
    ctx.decisions.append(Decision("contraction", product.name, call.target, generated, f"{key}: {reason}"))
    if not generated:
        return call
    return product if ctx.target.capabilities.tiles_products else product.as_nest()


def _operands(call: ExternCall, buffers: Mapping[str, Buffer]) -> str:
    """A product as a timer sees it: operator, type, and sizes and strides of its tensors."""
    tensors = [buffers[a.name] for a in call.args if isinstance(a, BufferRef)]
    operands = (f"{list(map(str, t.sizes))}:{list(map(str, t.strides))}" for t in tensors)
    return f"{call.target} {tensors[0].dtype} {' x '.join(operands)}"


PASS = Pass(
    "choose-contractions",
    choose_contractions,
    why="what comes before and after a product is computed in its kernel, if that is as fast as the library's",
    after=("drop-dead-steps",),
    required=True,
)
