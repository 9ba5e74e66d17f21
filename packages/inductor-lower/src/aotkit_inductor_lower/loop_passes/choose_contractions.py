"""Pass: who computes each product of matrices, loops of ours or ATen, as the target says; with the reason kept.

Note [Who computes a product]
    A :class:`~..ir.Contraction` becomes ATen's call in it, or the nest that it means, into which the ordinary passes
    fuse what comes before and after it; or it stays, where the target writes products in tiles, until
    ``generate-contractions``. A target without a form for it leaves all that ATen can compute to ATen. The call is what
    there must be, so it takes no fuel; anything else takes some.

    Who computes it is asked of the product with what computes its right factor (:mod:`.inline_operands`), since only
    loops of ours can take that in: a call reads it from memory, to where other kernels write it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from ..ir import Alias, Buffer, BufferKind, BufferRef, Contraction, ExternCall, LoopNest, Program, Step
from ..ir.walk import buffers_of, without_single_iterations
from ..passes import Decision, Fuel, Pass, PassContext
from ..target import Choice
from .computed_matrices import is_kept_matrix
from .drop_dead_steps import drop_dead_steps
from .expand_convolutions import expand_convolution, is_convolution
from .fold_pads import Pads
from .inline_operands import Producers
from .race import Measuring, Ways, longest_first
from .reshaped_views import through_views
from .take_choice import listed, take_choice

__all__ = ["PASS", "choose_contractions"]

_SUMMED = Choice("nest", "its matrix is computed and kept, and the kernel that does so sums it")


def choose_contractions(program: Program, ctx: PassContext) -> Program:
    """The program with each contraction as whoever computes it needs it. Equal ones are asked about once."""
    if not any(isinstance(step, Contraction) or is_convolution(step) for step in program.steps):
        return program
    fuses = ctx.options.fuse and ctx.target.capabilities.tiles_products
    known = _with_views_of_constants(program) if ctx.options.pack_constants else buffers_of(program)
    views = {step.result: step for step in program.steps if isinstance(step, Alias)}
    measuring = Measuring.of(program, ctx, PASS.name)
    chooser = _Chooser(ctx, known, Producers.of(program) if fuses else None, views=views, measuring=measuring)
    steps: list[Step] = []
    names = {step.name for step in program.steps}
    buffers, pads = program.buffers, None
    measured: dict[str, Choice] = {}
    if measuring is not None:
        chooser.measure_longest_first(program)
    for position, step in enumerate(program.steps):
        if is_convolution(step):
            pads = pads or Pads.of(program)
            expanded = expand_convolution(position, step, pads, ctx, measured, measuring)
            steps += _named_apart(expanded.steps, names - {step.name})
            names.update(each.name for each in expanded.steps)
            buffers += expanded.buffers
        else:
            steps.append(chooser.chosen(position, step) if isinstance(step, Contraction) else step)
    return drop_dead_steps(replace(program, steps=tuple(steps), buffers=buffers))


def _named_apart(steps: Sequence[Step], names: Set[str]) -> list[Step]:
    """The steps of a convolution, renamed where others have these names: results of ``convolution_backward`` and calls
    of later ones are numbered alike."""
    return [replace(step, name=f"{step.name}_apart") if step.name in names else step for step in steps]


def _with_views_of_constants(program: Program) -> dict[str, Buffer]:
    """The buffers, with views of constants as constants too: a target may choose what reads them packed."""
    buffers = buffers_of(program)
    for step in program.steps:
        if isinstance(step, Alias) and buffers[step.base].kind is BufferKind.CONSTANT:
            buffers[step.result] = replace(buffers[step.result], kind=BufferKind.CONSTANT)
    return buffers


@dataclass(slots=True)
class _Chooser:
    """``producers``: what may become part of a product, ``None`` if nothing may. ``known``: what was chosen before.
    ``views``: the aliases of the program, by what they are called."""

    ctx: PassContext
    buffers: Mapping[str, Buffer]
    producers: Producers | None
    known: dict[str, Choice] = field(default_factory=dict)
    views: Mapping[str, Alias] = field(default_factory=dict)
    measuring: Measuring | None = None

    def measure_longest_first(self, program: Program) -> None:
        """Ask about every product once, see Note [Measured choices]."""
        trial = replace(self, ctx=replace(self.ctx, decisions=[], fuel=Fuel()), known={})
        pads = Pads.of(program)
        for position in longest_first(program, self.ctx.target.capabilities.device):
            step = program.steps[position]
            if is_convolution(step):
                expand_convolution(position, step, pads, trial.ctx, {}, self.measuring)
            elif isinstance(step, Contraction):
                trial.chosen(position, step)

    def chosen(self, position: int, product: Contraction) -> Step:
        """What becomes of a contraction, the step at a position."""
        ctx, call = self.ctx, product.library
        if call is None:
            return product.as_nest()  # nobody else can
        if ctx.options.contractions == "aten" or not ctx.target.capabilities.contraction_forms:
            return call
        if self.is_summed_where_it_is_made(product) and take_choice(ctx, _SUMMED, product.name, call, product.name):
            return through_views(without_single_iterations(product.as_nest()), self.views, self.buffers)
        whole, producers = (product, ()) if self.producers is None else self.producers.inlined(position, product)
        choice, key = self.choice(position, whole, call, producers)
        if producers and self.is_better_apart(choice, whole):
            whole, producers = product, ()
            choice, key = self.choice(position, whole, call, producers)
        if not take_choice(ctx, choice, product.name, call, key):
            return call
        if producers and ctx.fuel.take():
            why = "it is computed where the product reads it"
            ctx.decisions.extend(Decision("inline", nest.name, product.name, True, why) for nest in producers)
            return replace(whole, library=None, precision=choice.precision)
        product = replace(product, precision=choice.precision)
        if ctx.target.capabilities.tiles_products:
            return product
        nest = product.as_nest()
        return (
            through_views(without_single_iterations(nest), self.views, self.buffers) if choice.form == "rows" else nest
        )

    def is_summed_where_it_is_made(self, product: Contraction) -> bool:
        """Whether the kernel that makes the matrix can sum the product, see Note [Matrices that are computed and
        kept]."""
        if self.producers is None:
            return False
        return is_kept_matrix(self.producers.program, product, self.buffers, self.producers.dependencies, self.views)

    def is_better_apart(self, choice: Choice, whole: Contraction) -> bool:
        """Whether a product is asked about without what computes its right factor, too."""
        if choice.form == "aten":
            return self.measuring is not None
        return not self.ctx.target.renders_product(whole.as_nest(), self.buffers)

    def choice(
        self, position: int, product: Contraction, call: ExternCall, producers: Sequence[LoopNest]
    ) -> tuple[Choice, str]:
        """Who computes a product, and what the product is known by."""
        key = _operands(call, self.buffers) + "".join(f", of {nest.name}" for nest in producers)
        if key not in self.known:
            self.known[key] = self.ctx.target.choose(product, self.buffers, self.ctx.options, self.ctx.measure)
        rule = self.known[key]
        if self.measuring is None:
            return rule, key
        return self.measured(self.measuring, position, product, call, producers, rule), key

    def measured(
        self,
        measuring: Measuring,
        position: int,
        product: Contraction,
        call: ExternCall,
        producers: Sequence[LoopNest],
        rule: Choice,
    ) -> Choice:
        """Who computes a product, as measured with what is around it, or as the rule says."""

        def form() -> Choice | None:
            return measuring.race.product_form(product, self.buffers)

        def ways(form: Choice) -> Ways:
            own = replace(product, precision=form.precision, library=None if producers else call)
            before = producers[::-1]
            alone = not self.ctx.options.fuse
            return Ways(product.writes, (*before, call), (own,), before=before, alone=alone)

        return measuring.choice(position, len(producers), rule, form, ways)


def _operands(call: ExternCall, buffers: Mapping[str, Buffer]) -> str:
    """A product as a timer sees it: operator, type, and sizes and strides of its tensors."""
    tensors = [buffers[a.name] for a in call.args if isinstance(a, BufferRef)]
    operands = (f"{listed(t.sizes)}:{listed(t.strides)}" for t in tensors)
    return f"{call.target} {tensors[0].dtype} {' x '.join(operands)}"


PASS = Pass(
    "choose-contractions",
    choose_contractions,
    why="what comes before and after a product is computed in its kernel, if that is as fast as the library's",
    after=("drop-dead-steps",),
    required=True,
)
