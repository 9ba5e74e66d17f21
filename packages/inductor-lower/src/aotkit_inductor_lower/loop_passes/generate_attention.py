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
from .race import Measuring, Ways
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
    measuring = Measuring.of(program, ctx, PASS.name)
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
            if measuring is not None and not attention.own:  # of ours the call is no kernel
                choice = _measured(measuring, position, attention, there, choice)
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
    measuring: Measuring, position: int, attention: Attention, buffers: Mapping[str, Buffer], rule: Choice
) -> Choice:
    """The faster one of ATen's call and the nest, or what the rule says."""

    def form() -> Choice | None:
        return measuring.race.attention_form(attention.nest("highest")[0], buffers)

    def ways(form: Choice) -> Ways:
        nest, scratch = attention.nest(form.precision)
        return Ways(step_writes(attention.call), (attention.call,), (nest,), made=scratch, alone=True)

    return measuring.choice(position, "", rule, form, ways)


PASS = Pass(
    "generate-attention",
    generate_attention,
    why="blocks of scores in registers take less time than ATen's kernels",
    after=("generate-contractions", "split-reductions"),
)
