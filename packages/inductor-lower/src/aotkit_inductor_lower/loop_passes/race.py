"""Who computes a product where that is measured: ATen's call, or a form of the target's.

Note [Measured choices]
    With ``tune`` a target may have a :class:`~..target.Race`, which runs both ways to compute a fragment of the graph
    (Note [What is measured] in :mod:`.fragments`) and says how long they take. Ours has to win by :data:`GAIN`, since
    kernels also make the plan longer to compile. The rules that hold without ``tune`` decide where nothing is measured:
    sizes that are known at run time only, operands that are too large, no time left. A form that fails is ATen's call.

    Steps are asked about twice: with most to compute first, so that the time that there is for measuring is spent where
    it matters, and then in the order of the program, which finds all that was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..ir import Buffer, BufferKind, Contraction, ExternCall, Program, Step
from ..lowering.convolutions import convolution_parts
from ..passes import PassContext
from ..symbolic import product
from ..target import Choice
from .fragments import Fragments

__all__ = ["fragments_for", "measured_choice", "multiplications"]

GAIN = 0.97  # of ATen's time is what ours must take at most


def fragments_for(program: Program, ctx: PassContext) -> Fragments:
    """What cuts parts out of a program that are measured. Constants are such in them if they are packed."""
    constants = {buffer.name for buffer in program.buffers if buffer.kind is BufferKind.CONSTANT}
    return Fragments.of(program, constants if ctx.options.pack_constants else frozenset())


def multiplications(step: Step, buffers: Mapping[str, Buffer], device: str) -> int:
    """How many a product or a convolution takes; 0 for other steps, and where sizes are not known."""
    parts: list[object] = [step]
    if isinstance(step, ExternCall):
        parts = [part for each in convolution_parts(step, buffers, device).values() for part in each]
    found = 0
    for part in parts:
        if isinstance(part, Contraction):
            found += product(loop.size for loop in (*part.outer, *part.reduced)).constant or 0
    return found


def measured_choice(
    ctx: PassContext, rule: Choice, form: Choice | None, cut: Callable[[], tuple[Program, ...] | str], behind: str
) -> Choice:
    """The faster one of ATen's call and a form, of the two fragments that ``cut`` gives (or why there are none); what
    the ``rule`` says where nothing is measured. ``behind``: the pass that the fragments are cut in."""
    if ctx.race is None or form is None or form.form == "aten":
        return rule
    programs = cut()
    if isinstance(programs, str):
        return _unmeasured(rule, programs)
    library, generated = programs
    times = ctx.race.compare(library, generated, behind)
    if times.library is None or times.generated is None:
        return Choice("aten", f"ATen, {times.why}") if times.failed else _unmeasured(rule, times.why)
    shown = f"ATen {times.library * 1e6:.1f} us, generated {times.generated * 1e6:.1f} us"
    if times.generated <= GAIN * times.library:
        return replace(form, reason=f"generated, {shown}", seconds=times.generated)
    return Choice("aten", f"ATen, {shown}", times.library)


def _unmeasured(rule: Choice, why: str) -> Choice:
    return replace(rule, reason=f"{rule.reason} (not measured: {why})")
