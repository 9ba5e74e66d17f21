"""What stands directly around compiled code, where a plan asks for it: a random state, and answers to fake calls.

Note [Random state by seed and offset]
    A graph whose random numbers are a function of (seed, offset, position) takes the two behind its other inputs and
    returns where the next graph has to go on. Reading the state before the call and setting it after is not one step:
    a state that several threads share has to see to that itself.

Note [Fake calls]
    Dynamo, where it cuts a graph into pieces, runs each compiled piece once on fake tensors, to learn what the next one
    is given. Kernels cannot run on them; and what the traced graph says about layouts need not be what the compiled
    code returns. So the plan has a description of every result, and a call that is fake gets fakes made after it, on
    which the rest of the wrapper (views, mutations, autograd) runs as ever. Only plans that ask for this look.

Note [Lazy inputs]
    Compiled code reads memory as it is, so a graph takes the memory of tensors that are conjugated or negated lazily,
    and minds the bits that they had at capture itself (Note [Lazy bits] of :mod:`aotkit_functionalize.lazy_bits`). The
    views without bits that it is called with copy nothing and share version counters with the arguments. A tensor that
    comes with other bits is copied, so that it is right all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ._torch_compat import dtype_from_name, fake_mode_of
from .boxed import BoxedCallable
from .contract import Dim, GraphMetadata, TensorMeta, bits_of, same_with_bits, without_lazy_bits
from .dims import evaluate, evaluate_all, render, render_tuple, symbols_of
from .errors import PlanError
from .operations.symbols import BindSymbol
from .placed_arguments import PlacedArguments
from .plan import CallSpec, FakeResults, LazyInput, RandomState, WrapperPlan
from .runtime import wrong_count
from .source import Source
from .subclasses.bind import AdaptedBackward

__all__ = [
    "Around",
    "RandomSource",
    "bind_around",
    "interpret_around",
    "plan_fake_results",
    "plan_random_state",
]


class RandomSource(Protocol):
    """A random state that a seed and an offset, integers or tensors, describe; see the note above."""

    def get(self) -> tuple[Any, Any]:
        """Seed and offset as they are now."""

    def set_offset(self, offset: Any) -> None:
        """Go on from ``offset``, as a compiled graph returned it."""


# -- planning ------------------------------------------------------------------------------------------


def plan_random_state(plan: WrapperPlan, random: RandomState) -> WrapperPlan:
    """``plan`` for a graph with seed, offset and new offset, which the rest of the plan does not count.

    Raises :class:`PlanError` if a position is none of the compiled code's.
    """
    call = plan.call
    last = num_results(call) if not random.returns_offset else _num_forward_outputs(call) - 1
    if not 0 <= random.forward_offset <= last:
        raise PlanError(f"the new random offset is said to be forward result {random.forward_offset} of 0 to {last}")
    if random.backward_offset is not None:
        if not call.training:
            raise PlanError("an inference graph has no backward that could return a random offset")
        if not 0 <= random.backward_offset <= _num_graph_inputs(call):
            raise PlanError(f"the backward has no result {random.backward_offset} to return a random offset in")
    return replace(plan, call=replace(call, random=random))


def plan_fake_results(
    plan: WrapperPlan, metadata: GraphMetadata, results: Sequence[TensorMeta | Dim | None]
) -> WrapperPlan:
    """``plan`` whose fake calls get fake results; see Note [Fake calls].

    Args:
        plan: from :func:`.build_plan`.
        metadata: that it was built from.
        results: per result of the compiled forward (outputs, saved tensors, saved integers) what it is, with the
            strides that the compiled code gives it; ``None`` for what is no tensor and no integer.

    Raises:
        PlanError: the number of results is wrong, or their sizes use symbols that no input gives.
    """
    if len(results) != num_results(plan.call):
        raise PlanError(f"{len(results)} results are described but the forward has {num_results(plan.call)}")
    dims: list[Dim] = []
    for result in results:
        if isinstance(result, TensorMeta):
            dims += [*result.sizes, *result.strides]
        elif result is not None:
            dims.append(result)
    wanted = symbols_of(dims)
    bound: dict[str, BindSymbol] = {}
    for symbol in metadata.symbols:
        if symbol.name in wanted and not symbol.of_output:
            read = BindSymbol(symbol.name, f"d{symbol.input_index}", symbol.source, symbol.dim)
            bound.setdefault(symbol.name, read)
    if wanted - bound.keys():
        raise PlanError(
            f"results of a fake call need the symbols {sorted(wanted - bound.keys())}, which no input gives"
        )
    fakes = FakeResults(tuple(results), tuple(bound[name] for name in sorted(bound)))
    return replace(plan, call=replace(plan.call, fakes=fakes))


def num_results(call: CallSpec) -> int:
    """How many values the compiled forward returns, a random offset that is taken off not counted."""
    dense = call if call.subclasses is None else call.subclasses
    return dense.num_forward_outputs + dense.num_saved_tensors + dense.num_saved_symints


def _num_forward_outputs(call: CallSpec) -> int:
    return call.num_forward_outputs if call.subclasses is None else call.subclasses.num_forward_outputs


def _num_graph_inputs(call: CallSpec) -> int:
    return len(call.graph_inputs) if call.subclasses is None else call.subclasses.num_dense_inputs


# -- generated code ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Around:
    """Compiled code inside of what a plan puts around it; ``source`` is generated text, empty without any."""

    forward: BoxedCallable
    backward: Any
    source: str = ""


def bind_around(
    call: CallSpec,
    code: Around,
    source: RandomSource | None,
    execute: Callable[[str, dict[str, Any]], None],
) -> Around:
    """``code`` inside of generated functions; ``code`` itself if the plan asks for nothing."""
    if call.lazy_inputs:
        code = replace(code, forward=_boxed(_reading_memory(call.lazy_inputs, code.forward)))
    if call.random is None and call.fakes is None:
        return code
    out = Source()
    space: dict[str, Any] = {"_forward": code.forward, "_fake": fake_tensor, "_fake_mode_of": fake_mode_of}
    if call.random is not None:
        space["_random"] = _required(source)
        space["_wrong_count"] = wrong_count
        trims, count = not call.random.returns_offset, num_results(call)
        _emit_draw("_draw(box)", "_forward(box)", (call.random.forward_offset, trims), ("forward results", count), out)
        if call.random.backward_offset is not None:
            count = _num_graph_inputs(call)
            offset = (call.random.backward_offset, True)
            _emit_draw("_draw_backward(run, box)", "run(box)", offset, ("gradients", count), out)
    if call.fakes is not None:
        _emit_fakes(call.fakes, "_forward" if call.random is None else "_draw", out)
    space.update(out.constants)
    execute(out.text, space)
    forward = space["_answer" if call.fakes is not None else "_draw"]
    forward._boxed_call = True
    backward = code.backward
    if call.random is not None and call.random.backward_offset is not None:
        backward = AdaptedBackward(backward, space["_draw_backward"])
    return Around(forward, backward, out.text)


def _emit_draw(name: str, run: str, offset: tuple[int, bool], results: tuple[str, int], out: Source) -> None:
    """``offset``: its position, and whether it is taken off; ``results``: what they are, and how many stay."""
    (position, trims), (what, count) = offset, results
    out.add(f"def {name}:", 0)
    out.add("box += _random.get()")
    out.add(f"result = list({run})")
    out.add(f"if len(result) != {count + trims}:")
    out.add(f'_wrong_count("{what}", {count + trims}, len(result))', 2)
    out.add(f"_random.set_offset(result{f'.pop({position})' if trims else f'[{position}]'})")
    out.add("return result")
    out.lines.append("")


def _emit_fakes(fakes: FakeResults, forward: str, out: Source) -> None:
    out.add("def _answer(box):", 0)
    out.add("_mode = _fake_mode_of(box)")
    out.add("if _mode is None:")
    out.add(f"return {forward}(box)", 2)
    for binding in fakes.symbols:
        out.add(f"{binding.symbol} = {binding.expression(f'box[{binding.value[1:]}]')}")
    out.add("box.clear()")
    made = [_fake_expression(result, out) for result in fakes.results]
    out.add(f"return [{', '.join(made)}]")
    out.lines.append("")


def _fake_expression(result: TensorMeta | Dim | None, out: Source) -> str:
    if result is None:
        return "None"
    if not isinstance(result, TensorMeta):
        return render(result)
    dtype = out.constant(dtype_from_name(result.dtype))
    return f"_fake(_mode, {render_tuple(result.sizes)}, {render_tuple(result.strides)}, {dtype}, {result.device!r})"


def fake_tensor(mode: Any, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """A fake tensor of its own."""
    with mode:
        return torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device=device)


def _required(source: RandomSource | None) -> RandomSource:
    if source is None:
        raise PlanError("this plan's graph takes a random seed and offset; give bind the state that they come from")
    return source


def _reading_memory(lazy: Sequence[LazyInput], forward: BoxedCallable) -> BoxedCallable:
    """``forward``, given the memory of its ``lazy`` inputs; see Note [Lazy inputs]."""

    def run(box: list[Any]) -> Any:
        for one in lazy:
            box[one.position] = memory_of(box[one.position], one.conj, one.neg)
        if isinstance(box, PlacedArguments):  # a copy lies elsewhere
            box.addresses, box.before, box.moved = None, (), ()
        return forward(box)

    return run


def memory_of(value: Tensor, conj: bool, neg: bool) -> Tensor:
    """A tensor without bits that means ``value`` when it is given these; see Note [Lazy inputs]."""
    with torch.no_grad():
        return without_lazy_bits(value if bits_of(value) == (conj, neg) else same_with_bits(value, conj, neg))


# -- the same, slowly ----------------------------------------------------------------------------------


def interpret_around(call: CallSpec, code: Around, source: RandomSource | None) -> Around:
    """What :func:`bind_around` gives, without generated code."""
    forward, backward = code.forward, code.backward
    if call.lazy_inputs:
        forward = _boxed(_reading_memory(call.lazy_inputs, forward))
    random = call.random
    if random is not None:
        state, dense = _required(source), forward

        def draw(run: BoxedCallable, box: list[Any], position: int, keeps: bool, what: tuple[str, int]) -> list[Any]:
            seed, offset = state.get()
            results = run([*box, seed, offset])
            box.clear()
            if len(results) != what[1] + (not keeps):
                wrong_count(what[0], what[1] + (not keeps), len(results))
            state.set_offset(results[position])
            return [r for i, r in enumerate(results) if keeps or i != position]

        expected, last = ("forward results", num_results(call)), random.backward_offset
        forward = _boxed(lambda box: draw(dense, box, random.forward_offset, random.returns_offset, expected))
        if last is not None:
            grads = ("gradients", _num_graph_inputs(call))
            backward = AdaptedBackward(backward, lambda run, box: draw(run, box, last, False, grads))
    if call.fakes is not None:
        forward = _boxed(_answering(call.fakes, forward))
    return Around(forward, backward)


def _answering(fakes: FakeResults, forward: BoxedCallable) -> BoxedCallable:
    def answer(box: list[Any]) -> Any:
        mode = fake_mode_of(box)
        if mode is None:
            return forward(box)
        symbols = {b.symbol: b.read(box[int(b.value[1:])]) for b in fakes.symbols}
        box.clear()
        results: list[Any] = []
        for result in fakes.results:
            if isinstance(result, TensorMeta):
                sizes, strides = (evaluate_all(dims, symbols) for dims in (result.sizes, result.strides))
                results.append(fake_tensor(mode, sizes, strides, dtype_from_name(result.dtype), result.device))
            else:
                results.append(None if result is None else evaluate(result, symbols))
        return results

    return answer


def _boxed(function: Callable[[list[Any]], Any]) -> BoxedCallable:
    def run(box: list[Any]) -> Any:
        return function(box)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
