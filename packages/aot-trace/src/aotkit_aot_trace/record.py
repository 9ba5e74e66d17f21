"""The one run: forward, metadata, tangents and backward inside a single recording.

Note [One run of the user's function]
    The function given to ``make_fx`` wraps the placeholders' fake tensors as functional tensors, runs the
    user's function, and reads the metadata off the functional tensors. Only then is it known which forward
    outputs have a gradient, so the tangents' placeholders are made in the middle of the recording: fake
    tensors made while nothing is recorded, declared to the tracer as placeholders. The gradient is taken
    under the same recording. Afterwards the placeholders are moved to the front.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from aotkit_functionalize import (
    ForwardRecord,
    FunctionalLayer,
    FunctionInput,
    GraphMetadata,
    Unsupported,
    collect_metadata,
    function_inputs,
    functional_layer,
)
from aotkit_functionalize.subclasses import SubclassArguments, rebuild, tensors_inside
from aotkit_functionalize.tracing import (
    below_functional_layer,
    count_data_mutations,
    finish_tokens,
    from_functional,
    is_functional,
    to_functional,
)

from . import _torch_compat as compat
from .backward_mutated_inputs import backward_mutated_inputs, settle
from .checkpointed_writes import (
    CheckpointedRegion,
    NotedRegions,
    noting_regions,
    refuse_own_regions,
    regions_to_repeat,
    repeat_writes,
)
from .decompositions import guarded_table
from .exported import ExportRequest, every_output
from .graph_function import GraphFunction, closed_over, data_dependent, not_functional
from .python_kernels import table_above_autograd
from .reach import backward_functions, reached_by, silent_edges
from .rng_state_replay import with_replay
from .state import AutocastState
from .zeros import zeros_in_memory

__all__ = ["Recording", "Request", "record"]


@dataclass(frozen=True, slots=True)
class Request:
    """One capture: the function, its arguments as the caller has them and as fake tensors, and how to trace."""

    fn: Callable[..., Any]
    callers: Sequence[Any]
    plain: Sequence[Any]
    fake_mode: FakeTensorMode
    decompositions: Mapping[Any, Callable[..., Any]]
    layer: FunctionalLayer
    training: bool | None
    python_dispatcher: bool
    subclasses: SubclassArguments | None = None
    export: ExportRequest | None = None
    random_by_memory: bool = True

    @property
    def graph_inputs(self) -> list[Any]:
        """What the graph takes: the arguments, or what is inside of them."""
        return list(self.plain) if self.subclasses is None else self.subclasses.dense


@dataclass(slots=True)
class Recording:
    """The raw result of the run.

    Attributes:
        graph: as recorded: tangents' placeholders in the middle, nothing removed.
        metadata: of the run.
        num_forward_nodes: how many nodes were recorded before the backward began.
        backward_marks: ``(number of nodes recorded, sequence number)`` at the start of each backward function.
        check_saved: refuses backward functions that saved what changed its shape in place since.
        needless: placeholders to be replaced by a node; see :mod:`.backward_mutated_inputs`.
        sums_windows: whether an operation runs that sums overlapping windows itself.
    """

    metadata: GraphMetadata | None = None
    num_forward_nodes: int = 0
    backward_marks: list[tuple[int, int]] = field(default_factory=list)
    check_saved: Callable[[Sequence[Any]], None] | None = None
    needless: list[tuple[torch.fx.Node, torch.fx.Node]] = field(default_factory=list)
    sums_windows: Callable[[], bool] = lambda: False
    graph: torch.fx.GraphModule | None = None


def record(request: Request) -> Recording:
    """Run ``request.fn`` once and record it. Raises :class:`Unsupported`, and what the function itself raises."""
    result = Recording()

    def traced(*placeholders: Any) -> list[Any]:
        return _run(request, placeholders, result)

    with ExitStack() as stack:
        # Not in inference mode: its tensors know no base, from which outputs that share memory are regenerated.
        grad_mode = torch.is_grad_enabled()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad_mode))
        if torch.is_anomaly_check_nan_enabled():  # it reads elements; gradients of calls are looked at as a whole
            stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        stack.enter_context(request.fake_mode)
        stack.enter_context(compat.fake_mode_of_subgraphs(request.fake_mode))
        stack.enter_context(compat.numbers_as_before(request.fake_mode))
        stack.enter_context(compat.without_saving_hooks())
        if request.python_dispatcher:
            stack.enter_context(compat.enable_python_dispatcher())
            stack.enter_context(table_above_autograd(request.decompositions))
        try:

            def in_forward() -> bool:
                return result.metadata is None

            table = guarded_table(request.decompositions, in_forward, lambda: result.sums_windows())
            table = with_replay(table, in_forward, by_memory=request.random_by_memory)
            result.graph = compat.run_make_fx(traced, request.graph_inputs, table)
        except compat.DATA_DEPENDENT_ERRORS as error:
            raise data_dependent(error, None) from error
        except RuntimeError as error:
            refusal = not_functional(error, None)
            if refusal is None:
                raise
            raise refusal from error
        except AssertionError as error:
            refusal = closed_over(error, None)
            if refusal is None:
                raise
            raise refusal from error
    return result


def _run(request: Request, placeholders: Sequence[Any], result: Recording) -> list[Any]:
    before, autocast = torch.is_grad_enabled(), AutocastState.now()
    tracer = compat.current_tracer()
    with functional_layer(request.layer) as storages:
        result.sums_windows = lambda: storages.sums_windows
        apart = request.subclasses
        inputs = (function_inputs if apart is None else apart.enter)(placeholders, request.callers)
        with noting_regions(() if isinstance(request.fn, GraphFunction) else inputs) as noted:
            outputs = _flat(request.fn(*(i.value for i in inputs)))
        refuse_own_regions(noted)
        after = torch.is_grad_enabled()
        if AutocastState.now() != autocast:
            raise Unsupported(
                "the function leaves autocast in another state than it found it",
                "the change would not be seen after a call of the captured graph",
                "Use autocast as a context manager inside the function",
            )
        with _refused("what the function did cannot be told from its functional form"):
            forward = collect_metadata(
                inputs,
                outputs,
                grad_mode=(before, after),
                training=request.training,
                storages=storages,
                sizes=() if apart is None else apart.sizes,
            )
            if request.export is not None:
                forward = every_output(forward, outputs, request.export)
            values = [_unwrap(v) for v in forward.forward_values]
        result.metadata, result.check_saved = forward.metadata, storages.layouts.check_saved
        compat.record_now(values)
        finish_tokens()
        result.num_forward_nodes = len(tracer.graph.nodes)
        if not forward.metadata.is_training:
            return values
        if forward.subclasses is not None:
            return [*values, *_subclass_gradients(forward, inputs, tracer, result, noted)]
        leaves = [i.leaf for i in inputs if i.leaf is not None]
        differentiable = [forward.forward_values[t.forward_output] for t in forward.metadata.tangents]
        tangents: list[torch.Tensor] | None
        tangents = [_tangent(number, from_functional(v), tracer) for number, v in enumerate(differentiable, start=1)]
        if request.export is not None and request.export.loss is not None:
            differentiable, tangents = [outputs[request.export.loss]], None  # the gradient of a loss is one
        functions = backward_functions(differentiable)
        stands_in = functools.partial(_input, tracer=tracer)
        mutated = []
        regions, repeated = _regions_to_repeat(noted, differentiable, functions, inputs)
        if request.export is None:
            mutated = backward_mutated_inputs(inputs, forward.metadata, functions, tracer, stands_in, repeated)
        writable = {one.entered.index for one in mutated} - repeated
        with _refused("the gradient cannot be recorded"), _writes_refused(inputs, tangents, writable):
            gradients, reached = _gradients(differentiable, leaves, tangents, functions, tracer, result)
        finish_tokens()
        by_leaf = iter([None if g is None else _unwrap(g) for g in gradients])
        by_input = [None if i.leaf is None else next(by_leaf) for i in inputs]
        if request.export is None:
            metadata = _without_influence_left_out(forward.metadata, by_input)
            result.metadata = replace(metadata, reached_by=_by_input(reached, inputs))
        memory = {one.entered.index: one.plain for one in mutated if one.entered.index in repeated}
        again = repeat_writes(regions, inputs, memory, [*values, *by_input], tracer)
        if mutated:
            writes, result.needless = settle(mutated, inputs, {index: write for index, (write, _) in again.items()})
            result.metadata = replace(result.metadata, backward_writes=writes)
            for write in writes:
                index = write.input
                by_input[index] = again[index][1] if index in again else _unwrap(inputs[index].value)
        return [*values, *by_input]


def _without_influence_left_out(metadata: GraphMetadata, gradients: Sequence[Any]) -> GraphMetadata:
    """Only inputs with a gradient are differentiable ones.

    Autograd would otherwise visit, and free, the history of an input that the function detaches, though eager mode
    leaves it alone: a second backward through that history would fail.
    """
    reached = tuple(index for index in metadata.differentiable_inputs if gradients[index] is not None)
    return replace(metadata, differentiable_inputs=reached or metadata.differentiable_inputs)


def _by_input(reached: Sequence[tuple[int, ...]], inputs: Sequence[FunctionInput]) -> tuple[tuple[int, ...], ...]:
    numbers = iter(reached)
    return tuple(() if i.leaf is None else next(numbers) for i in inputs) if reached else ()


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """An error of torch's in here, where no code of the user runs, is a refusal: eager mode may well succeed."""
    try:
        yield
    except (Unsupported, *compat.DATA_DEPENDENT_ERRORS):
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise Unsupported(what, reason, "Leave the operation out of the compiled region") from error


@contextmanager
def _writes_refused(
    inputs: Sequence[FunctionInput], tangents: Sequence[torch.Tensor] | None, writable: Collection[int] = ()
) -> Iterator[None]:
    """A backward that writes to what the caller holds is refused, but for the elements of the ``writable`` inputs."""
    watched = [(f"input {i.index}", i.value, i.index in writable) for i in inputs if is_functional(i.value)]
    watched += [(f"the gradient of differentiable output {n}", t, False) for n, t in enumerate(tangents or ())]
    values = [value for _, value, _ in watched]
    states = _states(values)
    yield
    for (name, _, may_be_written), before, now in zip(watched, states, _states(values), strict=True):
        if now[1:] == before[1:] and (may_be_written or now[0] == before[0]):
            continue
        changes = "changes the sizes or strides of" if now[1:] != before[1:] else "writes to"
        raise Unsupported(
            f"the backward {changes} {name} in place",
            "it acts on what the tensor holds when the backward runs, which the captured graph does not get",
            "Write to a copy, or do it in a hook or after the backward",
        )


def _states(values: Sequence[torch.Tensor]) -> list[tuple[int, Any, Any]]:
    with compat.untraced(), compat.unwatched():  # sizes that are symbols would become nodes
        return [(count_data_mutations(value), value.shape, value.stride()) for value in values]


def _flat(outputs: Any) -> list[Any]:
    if isinstance(outputs, list | tuple):
        return list(outputs)
    raise Unsupported(
        "the function returns a single tensor"
        if isinstance(outputs, torch.Tensor)
        else f"it returns a {type(outputs).__name__}",
        "a captured function returns a flat list or tuple",
        "Flatten the result with torch.utils._pytree.tree_flatten",
    )


def _unwrap(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_conj():
        value = value.resolve_conj()
    if value.is_neg():
        value = value.resolve_neg()
    return from_functional(value)


def _regions_to_repeat(
    noted: NotedRegions,
    differentiable: Sequence[torch.Tensor],
    functions: Sequence[Any],
    inputs: Sequence[FunctionInput],
    parts: Collection[int] = (),
) -> tuple[list[CheckpointedRegion], frozenset[int]]:
    any_write = any(region.writes for region in noted.found)
    of_outputs = [backward_functions([output]) for output in differentiable] if any_write else [functions]
    return regions_to_repeat(noted.found, of_outputs, inputs, parts)


def _subclass_gradients(
    forward: ForwardRecord, inputs: Sequence[FunctionInput], tracer: Any, result: Recording, noted: NotedRegions
) -> list[Any]:
    """Dense gradients of a run with tensor subclasses; completes ``result.metadata`` by what they are parts of."""
    run = forward.subclasses
    assert run is not None and forward.metadata.subclasses is not None
    tangents: list[torch.Tensor] = []
    number = 0
    for expected in run.tangents:
        leaves = [_tangent(number + i, leaf, tracer) for i, leaf in enumerate(tensors_inside(expected), start=1)]
        number += len(leaves)
        tangents.append(rebuild(expected, iter(leaves)))
    wanted = [i for i in inputs if i.leaf is not None]
    differentiable = [run.outer_values[t.forward_output] for t in forward.metadata.subclasses.outer.tangents]
    leaves = [i.leaf for i in wanted if i.leaf is not None]
    functions, dense_inputs = backward_functions(differentiable), run.dense_inputs
    regions, repeated = _regions_to_repeat(noted, differentiable, functions, dense_inputs, run.parts)
    stands_in = functools.partial(_input, tracer=tracer)
    mutated = backward_mutated_inputs(dense_inputs, forward.metadata, (), tracer, stands_in, repeated)
    with _refused("the gradient cannot be recorded"), _writes_refused(inputs, ()):
        found, reached = _gradients(differentiable, leaves, tangents, functions, tracer, result)
    finish_tokens()
    for gradient in found:
        for inside in () if gradient is None else tensors_inside(gradient):
            from_functional(inside)  # applies pending writes while that is still recorded
    by_input = {i.index: gradient for i, gradient in zip(wanted, found, strict=True)}
    live = [_unwrap(v) for v in forward.forward_values]
    live += [_unwrap(v) for gradient in found if gradient is not None for v in tensors_inside(gradient)]
    memory = {one.entered.index: one.plain for one in mutated}
    again = repeat_writes(regions, dense_inputs, memory, live, tracer)
    writes, result.needless = settle(mutated, dense_inputs, {index: write for index, (write, _) in again.items()})
    by_input |= {run.input_owner[index][0]: to_functional(value) for index, (_, value) in again.items()}
    with compat.untraced():
        metadata = run.with_backward_writes(forward.metadata, writes)
        result.metadata, dense = run.with_gradients(metadata, by_input, _by_input(reached, inputs))
    return [_unwrap(gradient) for gradient in dense]


def _tangent(number: int, plain: torch.Tensor, tracer: Any) -> torch.Tensor:
    """A functional tensor over a new placeholder, laid out like ``plain`` if that is dense, else contiguous."""
    with compat.untraced(), below_functional_layer(), torch.no_grad():
        if compat.is_dense(plain):
            fake = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
        else:
            fake = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
    return to_functional(_placeholder(number, fake, tracer))


def _input(number: int, plain: torch.Tensor, tracer: Any) -> torch.Tensor:
    """A new placeholder for ``plain``, an input, in the same memory."""
    with compat.untraced(), below_functional_layer(), torch.no_grad():
        fake = plain.detach()
    return _placeholder(number, fake, tracer)


def _placeholder(number: int, fake: torch.Tensor, tracer: Any) -> torch.Tensor:
    proxy = tracer.create_proxy("placeholder", f"tangents_{number}", (), {}, name=f"tangents_{number}")
    compat.track(fake, proxy, tracer)
    return fake


def _gradients(
    outputs: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor] | None,
    functions: Sequence[Any],
    tracer: Any,
    result: Recording,
) -> tuple[Sequence[torch.Tensor | None], Sequence[tuple[int, ...]]]:
    """``torch.autograd.grad``, noting which of the backward ``functions`` each recorded node comes from.

    Also the numbers of the outputs that each gradient comes from, if there are several outputs.
    """
    if result.check_saved is not None:
        result.check_saved(functions)
    hooks = [_mark(fn, tracer.graph, result.backward_marks) for fn in functions]
    try:
        # Eager runs backward outside of the forward's autocast region and with grad mode off.
        with compat.without_autocast(), compat.without_compiled_autograd(), torch.no_grad():
            if len(outputs) < 2:
                return torch.autograd.grad(outputs, leaves, tangents, allow_unused=True), ()
            with silent_edges(functions) as silent:
                found = torch.autograd.grad(outputs, leaves, tangents, allow_unused=True)
            return found, reached_by(outputs, leaves, functions, silent)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise Unsupported(
            "a value that the gradient needs is written to in place before the backward",
            "the backward fails in eager mode as well",
            "Write to a copy of the value, or detach what needs no gradient",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _mark(fn: Any, graph: torch.fx.Graph, marks: list[tuple[int, int]]) -> Any:
    """Note where the nodes of ``fn`` begin, and give it gradients in memory; see :mod:`.zeros`."""
    sequence_number = fn._sequence_nr()

    def note(given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        marks.append((len(graph.nodes), sequence_number))
        return zeros_in_memory(given)

    return fn.register_prehook(note)
