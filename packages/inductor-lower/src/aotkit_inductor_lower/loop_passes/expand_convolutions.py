"""Convolutions that the target computes: each result as steps of ours, and ATen's call for what is left.

Note [One call for three gradients]
    ``convolution_backward`` is one call of ATen's for up to three results, and a target may have a form for some of
    them only. So the target is asked for each result; what it takes is computed by contractions (the gradient of a bias
    by a plain sum), and ATen's call stays with an output mask for the others. It is the call as it was where the target
    takes nothing. ATen computes the gradient of a bias beside that of the weights, so who computes the weights'
    computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir import Buffer, Contraction, ExternCall, Instr, Literal, Load, LoopNest, Step, Store
from ..ir.walk import loads, operands, without_single_iterations
from ..lowering.convolutions import BACKWARD, CONVOLUTION, Parts, convolution_parts
from ..passes import PassContext
from ..target import Choice, Measure
from .fold_pads import Pads
from .race import Measuring, Ways
from .take_choice import take_choice
from .unroll_taps import own_masks, sums_beside_each_other, taps_of, with_channels_together, written_out

__all__ = ["expand_convolution", "is_convolution", "nest_of"]

_RESULTS = {CONVOLUTION: ("",), BACKWARD: (" by its input", " by its weights", " by its bias")}
_WEIGHTS, _BIAS = 1, 2
GAIN = 0.97  # of ATen's time is what kernels must take at most: they also make the plan longer to compile


def is_convolution(step: Step) -> bool:
    """Whether a step is one of ATen's calls, or the contraction of one, that :func:`expand_convolution` takes."""
    call = step.library if isinstance(step, Contraction) else step
    return isinstance(call, ExternCall) and call.target in _RESULTS


@dataclass(frozen=True, slots=True)
class Expanded:
    """What becomes of a convolution: steps, and buffers that these need beside those there are."""

    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...] = ()


def expand_convolution(
    position: int,
    step: Step,
    pads: Pads,
    ctx: PassContext,
    known: dict[str, Choice],
    measuring: Measuring | None = None,
) -> Expanded:
    """What becomes of a convolution, the step at a position, see Note [One call for three gradients]. ``known``: what
    was measured of equal ones before. ``measuring``: where choices are measured."""
    buffers = pads.buffers
    call = step.library if isinstance(step, Contraction) else step
    assert isinstance(call, ExternCall)
    if ctx.options.contractions == "aten" or not ctx.target.capabilities.contraction_forms:
        return Expanded((call,))
    parts = convolution_parts(call, buffers, ctx.target.capabilities.device)
    taken: dict[int, Expanded] = {}
    for number, each in parts.items():
        if ctx.options.fuse:
            each = tuple(pads.folded(position, part) if isinstance(part, Contraction) else part for part in each)
        if number != _BIAS or call.target == CONVOLUTION:
            found = _taken(position, each, number, call, buffers, ctx, known, measuring)
            if found is not None:
                taken[number] = found
    wanted = {number for number, name in enumerate(call.results) if name is not None}
    if not taken:
        return Expanded((call,))
    if _BIAS in parts and (_WEIGHTS in taken or wanted - {*taken, _BIAS} == set()):
        taken[_BIAS] = Expanded(parts[_BIAS])
    left = wanted - taken.keys()
    kept = (_narrowed(call, left),) if left else ()
    made = [taken[number] for number in sorted(taken)]
    steps = (step for each in made for step in each.steps)
    return Expanded((*kept, *steps), tuple(buffer for each in made for buffer in each.buffers))


def _taken(
    position: int,
    parts: Parts,
    number: int,
    call: ExternCall,
    buffers: Mapping[str, Buffer],
    ctx: PassContext,
    known: dict[str, Choice],
    measuring: Measuring | None,
) -> Expanded | None:
    """What computes one result, if the target takes it."""
    products = [part for part in parts if isinstance(part, Contraction)]
    if not products:
        return None
    choice = ctx.target.choose_convolution(products, call, buffers, ctx.options)
    what = f"{_described(products[0], buffers)}{_RESULTS[call.target][number]}"
    if choice.form == "implicit" and ctx.options.contractions == "auto":
        key = f"{what} {call.args[3:]}"
        if key not in known:
            known[key] = _compared(choice, _narrowed(call, {number}), buffers, ctx.measure)
        choice = known[key]
    if measuring is not None:
        choice = _measured(measuring, position, parts, number, call, buffers, ctx, choice)
    if not take_choice(ctx, choice, parts[0].name, call, what):
        return None
    return _as_form(choice, parts, number, buffers, ctx)


def _measured(
    measuring: Measuring,
    position: int,
    parts: Parts,
    number: int,
    call: ExternCall,
    buffers: Mapping[str, Buffer],
    ctx: PassContext,
    rule: Choice,
) -> Choice:
    """The faster one of ATen's call of one result and the kernels for it, or what the rule says."""

    def form() -> Choice | None:
        products = [part for part in parts if isinstance(part, Contraction)]
        return measuring.race.convolution_form(products, call, buffers)

    def ways(form: Choice) -> Ways:
        own, library = _as_form(form, parts, number, buffers, ctx), _narrowed(call, {number})
        results = [name for name in library.results if name is not None]
        return Ways(results, (library,), own.steps, made=own.buffers, alone=not ctx.options.fuse)

    return measuring.choice(position, number, rule, form, ways)


def _as_form(choice: Choice, parts: Parts, number: int, buffers: Mapping[str, Buffer], ctx: PassContext) -> Expanded:
    """What computes one result in a form."""
    products = [part for part in parts if isinstance(part, Contraction)]
    if choice.form == "implicit":
        nests = (without_single_iterations(p.as_nest()) if isinstance(p, Contraction) else p for p in parts)
        return Expanded(tuple(nests))
    if choice.form == "nest" or not ctx.target.capabilities.tiles_products:
        return _as_nests(parts, number, buffers)
    return Expanded(tuple(replace(p, precision=choice.precision) if p in products else p for p in parts))


def _compared(choice: Choice, call: ExternCall, buffers: Mapping[str, Buffer], measure: Measure | None) -> Choice:
    """The faster one of ATen's call of one result and the kernels for it; where nothing is measured, ATen's, or what
    the target knows to be faster."""
    if measure is None and choice.unmeasured:
        return choice
    if measure is None:
        return Choice("aten", "ATen, nothing is measured without tune")
    library, generated = measure(call, buffers)
    times = f"ATen {library * 1e6:.1f} us, generated {generated * 1e6:.1f} us"
    if generated <= GAIN * library:
        return replace(choice, reason=f"generated, {times}", seconds=generated)
    return Choice("aten", f"ATen, {times}", library)


def _as_nests(parts: Parts, number: int, buffers: Mapping[str, Buffer]) -> Expanded:
    """The nests that parts are, written for what they are."""
    steps: list[Step] = []
    made: list[Buffer] = []
    for part in parts:
        if not isinstance(part, Contraction):
            steps.append(part)
        elif number == _WEIGHTS:
            steps.append(sums_beside_each_other(part) if taps_of(part.columns) is not None else nest_of(part))
        elif taps_of(part.reduced) is not None:
            product, before = with_channels_together(part, buffers)
            for buffer, nest in before:
                made.append(buffer)
                steps.append(nest)
            steps.append(written_out(product))
        else:
            steps.append(nest_of(part))
    return Expanded(tuple(steps), tuple(made))


def _described(product: Contraction, buffers: Mapping[str, Buffer]) -> str:
    """The images and the weights, or what takes their place, as they lie in memory."""
    tensors = [buffers[load.buffer] for load in loads(product.body)[:2]]
    return f"{tensors[0].dtype} " + " x ".join(
        f"{list(map(str, t.sizes))}:{list(map(str, t.strides))}" for t in tensors
    )


def _narrowed(call: ExternCall, left: set[int]) -> ExternCall:
    """ATen's call for some of its results."""
    if left == {number for number, name in enumerate(call.results) if name is not None}:
        return call
    mask = tuple(Literal("bool", number in left) for number in range(len(call.results)))
    results = tuple(name if number in left else None for number, name in enumerate(call.results))
    return replace(call, args=(*call.args[:-1], mask), results=results)


def nest_of(product: Contraction) -> LoopNest:
    """The nest of a contraction of a convolution, in which neither factor is read where the image is padded.

    ATen multiplies nothing with what it pads, so that an infinite weight is no nan there. In a nest both loads may have
    the mask of one, which those of a contraction cannot: its factors do not vary along all loops."""
    nest = without_single_iterations(product.as_nest())
    summed, after = nest.stages
    masks = own_masks(product)
    if len(masks) != 1:
        return nest
    (mask,) = masks
    ready = _computed_by(summed.body, mask)
    rest = [instr for instr in summed.body if instr not in ready]
    masked = [replace(i, mask=mask, other=0.0) if isinstance(i, Load) and i.mask is None else i for i in rest]
    return replace(nest, stages=(summed.with_body((*ready, *masked)), after))


def _computed_by(body: Sequence[Instr], value: str) -> list[Instr]:
    """The instructions that a value needs, in their order."""
    needed = {value}
    found: list[Instr] = []
    for instr in reversed(body):
        if not isinstance(instr, Store) and instr.result in needed:
            found.append(instr)
            needed.update(operands(instr))
    return found[::-1]
