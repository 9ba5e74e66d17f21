"""Pass: attention becomes kernels, where the target has a form for it, see Note [Attention as a nest].

It comes after all passes that fuse and split nests: an attention takes nothing in, and nothing may take it apart.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import ExternCall, Program, Step
from ..ir.walk import buffers_of
from ..lowering.attention import ATTENTIONS, attention_of
from ..passes import Pass, PassContext
from ..target import Choice
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
    steps: list[Step] = []
    for step in program.steps:
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
            choice = known[attention.form] = ctx.target.choose_attention(nest, there, ctx.options)
        query, key, _ = attention.factors
        what = f"{attention.call.target} {query.dtype} {listed(query.sizes)} x {listed(key.sizes)}"
        if not take_choice(ctx, choice, attention.call.name, attention.call, what):
            steps.append(step)
            continue
        steps.append(nest if choice.precision == "highest" else attention.nest(choice.precision)[0])
        made += scratch
    return replace(program, steps=tuple(steps), buffers=tuple(made))


PASS = Pass(
    "generate-attention",
    generate_attention,
    why="blocks of scores in registers take less time than ATen's kernels",
    after=("generate-contractions", "split-reductions"),
)
