"""Pass: attention becomes kernels, where the target has a form for it, see Note [Attention as a nest].

It comes after all passes that fuse and split nests: an attention takes nothing in, and nothing may take it apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import Buffer, ExternCall, Program, Step
from ..ir.walk import buffers_of, step_writes
from ..lowering.attention import ATTENTIONS, Attention, attention_of
from ..passes import Pass, PassContext
from ..target import Choice
from .fragments import Fragments
from .race import fragments_for, measured_choice
from .take_choice import listed, take_choice

__all__ = ["PASS", "generate_attention"]


def generate_attention(program: Program, ctx: PassContext) -> Program:
    """The program with the calls of fused attention that the target computes as nests."""
    found = any(isinstance(step, ExternCall) and step.target in ATTENTIONS for step in program.steps)
    forms = ctx.target.capabilities.contraction_forms
    if not found or not forms or ctx.options.contractions == "aten":
        return program
    buffers, made = buffers_of(program), list(program.buffers)
    known: dict[object, Choice] = {}
    fragments = None if ctx.race is None else fragments_for(program, ctx)
    steps: list[Step] = []
    for position, step in enumerate(program.steps):
        attention = None
        if isinstance(step, ExternCall):
            attention = attention_of(step, buffers, ctx.target.capabilities.device)
        if attention is None:
            steps.append(step)
            continue
        nest, scratch = attention.nest("highest")
        choice = known.get(attention.form)
        if choice is None:
            there = {**buffers, **{buffer.name: buffer for buffer in scratch}}
            choice = ctx.target.choose_attention(nest, there, ctx.options)
            if fragments is not None and not attention.own:  # of ours the call is no kernel
                choice = _measured(position, attention, there, ctx, choice, fragments)
            known[attention.form] = choice
        query, key, _ = attention.factors
        what = f"{attention.call.target} {query.dtype} {listed(query.sizes)} x {listed(key.sizes)}"
        if not take_choice(ctx, choice, attention.call.name, attention.call, what):
            steps.append(step)
            continue
        steps.append(nest if choice.precision == "highest" else attention.nest(choice.precision)[0])
        made += scratch
    return replace(program, steps=tuple(steps), buffers=tuple(made))


def _measured(
    position: int,
    attention: Attention,
    buffers: Mapping[str, Buffer],
    ctx: PassContext,
    rule: Choice,
    fragments: Fragments,
) -> Choice:
    """The faster one of ATen's call and the nest, or what the rule says."""
    assert ctx.race is not None
    form = ctx.race.attention_form(attention.nest("highest")[0], buffers)

    def cut() -> tuple[Program, ...] | str:
        assert form is not None
        nest, scratch = attention.nest(form.precision)
        ways = (attention.call,), (nest,)
        return fragments.around(position, step_writes(attention.call), ways, made=scratch, alone=True)

    return measured_choice(ctx, rule, form, cut, PASS.name)


PASS = Pass(
    "generate-attention",
    generate_attention,
    why="blocks of scores in registers take less time than ATen's kernels",
    after=("generate-contractions", "split-reductions"),
)
