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

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..ir import Buffer, BufferKind, Contraction, ExternCall, Program, Step
from ..ir.walk import buffers_of, step_reads
from ..lowering.convolutions import BACKWARD, CONVOLUTION, convolution_parts
from ..passes import PassContext
from ..symbolic import product
from ..target import Choice, Race
from .fragments import Fragments

__all__ = ["Measuring", "Ways", "longest_first"]

GAIN = 0.97  # of ATen's time is what ours must take at most


@dataclass(frozen=True, slots=True)
class Ways:
    """Steps with ATen's call and steps with a form of ours, which compute the same results; the others as
    :meth:`.Fragments.around` takes them."""

    results: Sequence[str]
    library: Sequence[Step]
    generated: Sequence[Step]
    made: Sequence[Buffer] = ()
    before: Sequence[Step] = ()
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Measuring:
    """Measures choices in one pass. ``behind``: the pass. ``known``: what was chosen, by position and what of it."""

    race: Race
    fragments: Fragments
    behind: str
    known: dict[Hashable, Choice] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, ctx: PassContext, behind: str) -> Measuring | None:
        """For a pass over a program; ``None`` where nothing is measured."""
        if ctx.race is None:
            return None
        constants = {buffer.name for buffer in program.buffers if buffer.kind is BufferKind.CONSTANT}
        kept = constants if ctx.options.pack_constants else frozenset[str]()  # others are read as inputs are
        return Measuring(ctx.race, Fragments.of(program, kept), behind)

    def choice(
        self,
        position: int,
        what: Hashable,
        rule: Choice,
        form: Callable[[], Choice | None],
        ways: Callable[[Choice], Ways],
    ) -> Choice:
        """The faster one of ATen's call and a form for ``what`` the step at a position computes; what the ``rule`` says
        where nothing is measured."""
        key = position, what
        if key not in self.known:
            found = form()
            measured = found is not None and found.form != "aten"
            self.known[key] = self._compared(position, rule, found, ways(found)) if found and measured else rule
        return self.known[key]

    def _compared(self, position: int, rule: Choice, form: Choice, ways: Ways) -> Choice:
        programs = self.fragments.around(
            position,
            ways.results,
            (ways.library, ways.generated),
            made=ways.made,
            before=ways.before,
            alone=ways.alone,
        )
        if isinstance(programs, str):
            return _unmeasured(rule, programs)
        library, generated = programs
        times = self.race.compare(library, generated, self.behind)
        if times.library is None or times.generated is None:
            return Choice("aten", f"ATen, {times.why}") if times.failed else _unmeasured(rule, times.why)
        shown = f"ATen {times.library * 1e6:.1f} us, generated {times.generated * 1e6:.1f} us"
        if times.generated <= GAIN * times.library:
            return replace(form, reason=f"generated, {shown}", seconds=times.generated)
        return Choice("aten", f"ATen, {shown}", times.library)


def _unmeasured(rule: Choice, why: str) -> Choice:
    return replace(rule, reason=f"{rule.reason} (not measured: {why})")


def longest_first(program: Program, device: str) -> list[int]:
    """The positions of products and convolutions, those first that take most multiplications together with all that
    are equal. Where sizes are not known, a step counts as none."""
    buffers = buffers_of(program)
    work = {k: _multiplications(step, buffers, device) for k, step in enumerate(program.steps)}
    kinds = {k: _kind(program.steps[k], buffers) for k, count in work.items() if count is not None}
    total: Counter[Hashable] = Counter()
    for position, kind in kinds.items():
        total[kind] += work[position] or 0
    return sorted(kinds, key=lambda position: -total[kinds[position]])


def _call(step: Step) -> Step:
    return step.library if isinstance(step, Contraction) and step.library is not None else step


def _kind(step: Step, buffers: Mapping[str, Buffer]) -> Hashable:
    """What equal steps have in common."""
    call = _call(step)
    tensors = ((buffers[name].dtype, buffers[name].sizes, buffers[name].strides) for name in step_reads(call))
    return call.target if isinstance(call, ExternCall) else "", *tensors


def _multiplications(step: Step, buffers: Mapping[str, Buffer], device: str) -> int | None:
    """How many a product or a convolution takes; ``None`` for other steps."""
    call = _call(step)
    if isinstance(call, ExternCall) and call.target in (CONVOLUTION, BACKWARD):
        parts = [part for each in convolution_parts(call, buffers, device).values() for part in each]
    elif isinstance(step, Contraction):
        parts = [step]
    else:
        return None
    loops = [(*part.outer, *part.reduced) for part in parts if isinstance(part, Contraction)]
    return sum(product(loop.size for loop in each).constant or 0 for each in loops)
