"""From one functionalized run of the forward to the complete metadata record, and the values the graph returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import _torch_compat as compat
from .aliases import (
    OutputSource,
    OutputSources,
    carries_gradient,
    gradient_reaches,
    leads_beyond,
    output_sources,
    through_custom_function,
    view_spec,
)
from .effects import ordered_effects
from .errors import OverlappingMutation, Unsupported
from .events import StorageEvents
from .inputs import FunctionInput, overlapping_groups
from .lazy_bits import has_lazy_bits, lazy_bits, without_lazy_bits
from .metadata import GraphMetadata
from .mutations import (
    check_mutation,
    has_data_mutation,
    is_hidden_from_autograd,
    is_under_no_grad,
    metadata_changed_under_no_grad,
    mutation_kind,
    version_steps,
)
from .new_leaves import check_new_leaves, is_new_leaf, sets_requires_grad
from .overlap import repeats_memory
from .records import (
    EffectInfo,
    InputInfo,
    InputKind,
    MutationKind,
    OutputInfo,
    OutputKind,
    StorageChange,
    SymbolBinding,
    TangentInfo,
    TensorMeta,
)
from .storages import storage_change, was_replaced
from .subclasses.collect import SubclassRun, has_subclasses
from .subclasses.values import innermost
from .symbols import bind_symbols, is_symbolic, tensor_meta
from .tangents import check_shapes_that_autograd_knows, is_differentiable, is_training_graph, tangent_meta
from .unbacked_symbols import bind_unbacked_symbols, unbacked_symbols
from .wrap import eager_geometry, from_functional, is_functional, to_functional

__all__ = ["ForwardRecord", "collect_metadata"]

_WRITES = (MutationKind.DATA, MutationKind.DATA_AND_METADATA)


@dataclass(slots=True)
class ForwardRecord:
    """What a forward run amounts to.

    Attributes:
        metadata: the complete calling contract, tangents included.
        forward_values: functional tensors and SymInts in the order of Note [Order of graph inputs and outputs].
        subclasses: what else a run with tensor subclasses gives.
    """

    metadata: GraphMetadata
    forward_values: list[Any]
    subclasses: SubclassRun | None = None


def collect_metadata(
    inputs: Sequence[FunctionInput],
    outputs: Sequence[Any],
    *,
    grad_mode: tuple[bool, bool],
    training: bool | None = None,
    storages: StorageEvents | None = None,
    sizes: Sequence[SymbolBinding] = (),
) -> ForwardRecord:
    """Read the records off the functional tensors after the function ran.

    Args:
        inputs: as made by :func:`function_inputs`; the function has been called with their ``value``.
        outputs: the flat outputs of that call.
        grad_mode: whether grad mode was on before and after the call.
        training: ``False`` for an inference graph in any case; ``True`` to insist on a joint graph; by default a
            joint graph if grad mode was on and something that the graph computes needs a gradient.
        storages: the changes of storage that :func:`functional_layer` saw.
        sizes: of :class:`.SubclassArguments`.

    Raises:
        Unsupported: the function does something that the records cannot express.
        OverlappingMutation: inputs that share memory are mutated.
    """
    if storages is not None:
        storages.layouts.finished = True
        storages.layouts.check_outputs(outputs)
    outputs = _with_those_of_numbers(outputs)
    values = [*(i.value for i in inputs), *outputs]
    subclasses = has_subclasses(inputs, outputs)
    _apply_pending_writes(innermost(values) if subclasses else values)
    # Reading sizes below must not add nodes to a recording in progress.
    with compat.untraced():
        if subclasses:

            def dense(parts: Sequence[FunctionInput], results: Sequence[Any]) -> tuple[GraphMetadata, list[Any]]:
                found = _collect(parts, results, grad_mode, False, storages)
                return found.metadata, found.forward_values

            run = SubclassRun(inputs, outputs, sizes)
            return ForwardRecord(*run.collect(dense, training, grad_mode[0]), run)
        with compat.unwatched():
            record = _collect(inputs, outputs, grad_mode, training, storages)
    _take_bits_off(record)
    return record


def _take_bits_off(record: ForwardRecord) -> None:
    """See Note [Lazy bits]. New values of inputs and what only lends its history to a view stay what they mean."""
    metadata, values = record.metadata, record.forward_values
    fresh = (o.graph_output for o in metadata.outputs if o.kind is OutputKind.FRESH)
    positions = {position for position in fresh if position is not None}
    positions |= set(range(len(values) - len(metadata.intermediate_bases), len(values)))
    for position in positions:
        value = values[position]
        if isinstance(value, torch.Tensor) and has_lazy_bits(value):
            with torch.set_grad_enabled(carries_gradient(value)):
                values[position] = without_lazy_bits(value)


def _with_those_of_numbers(outputs: Sequence[Any]) -> list[Any]:
    """``torch.div(x.shape[0], 2)`` is a tensor that no tensor went into: the functional layer has not seen it yet.

    Two of them that share memory stay as they are, and are refused.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    found = list(outputs)
    for index, output in enumerate(outputs):
        if compat.is_fake_tensor(output) and not is_functional(output) and output.layout is torch.strided:
            storage = output.untyped_storage()._cdata
            if storage not in made:
                made[storage] = (output, to_functional(output))
            if made[storage][0] is output:
                found[index] = made[storage][1]
    return found


def _apply_pending_writes(values: Sequence[Any]) -> None:
    for value in values:
        if is_functional(value):
            from_functional(value)
            if is_functional(value._base):
                from_functional(value._base)
                # Autograd may have to take the view again, which is part of the backward: its sizes are recorded here.
                carries_gradient(value)


def _collect(
    inputs: Sequence[FunctionInput],
    outputs: Sequence[Any],
    grad_mode: tuple[bool, bool],
    training: bool | None,
    storages: StorageEvents | None,
) -> ForwardRecord:
    input_infos, updated = _input_infos(inputs, storages)
    groups = overlapping_groups(inputs, [i.index for i in input_infos if i.mutation in _WRITES])
    if groups:
        raise OverlappingMutation(groups, tuple(i.index for i in input_infos if i.mutation in _WRITES))
    sources = output_sources(inputs, outputs)
    output_infos, computed = _output_infos(inputs, outputs, sources, len(updated))
    bases = tuple(replace(_record(base), conj=False, neg=False) for base in sources.bases)
    told = bind_symbols([i.original for i in inputs])
    names = unbacked_symbols(told, output_infos, bases)
    unbacked, numbers = bind_unbacked_symbols(names, [*updated, *computed], sources.bases, outputs)
    values = [*updated, *computed, *numbers, *sources.bases]
    if storages is not None and storages.layouts.stale:
        storages.layouts.check_uses(values)
    changed = [i for i, info in zip(inputs, input_infos, strict=True) if info.sets_requires_grad is not None]
    check_new_leaves(changed, outputs, values)
    wanted = training is not False
    differentiable = [wanted and is_differentiable(v) for v in values]
    for info in input_infos:
        if info.updated_output is not None and (info.mutation_under_no_grad or info.mutation_hidden_from_autograd):
            differentiable[info.updated_output] = False
    is_training = is_training_graph(differentiable, inputs, training, grad_mode[0])
    check_shapes_that_autograd_knows(input_infos, output_infos, is_training)
    if not is_training:
        differentiable = [False] * len(values)
    tangents = tuple(
        TangentInfo(p, tangent_meta(from_functional(v))) for p, v in enumerate(values) if differentiable[p]
    )
    metadata = GraphMetadata(
        inputs=tuple(input_infos),
        outputs=tuple(output_infos),
        tangents=tangents,
        symbols=(*told, *unbacked),
        effects=_effects(grad_mode, is_training or any(map(_has_history_of_view, output_infos))),
        num_forward_outputs=len(values),
        num_mutated=len(updated),
        intermediate_bases=bases,
        forward_requires_grad=tuple(differentiable),
        differentiable_inputs=tuple(i.index for i in inputs if i.leaf is not None) if is_training else (),
        is_training=is_training,
    )
    return ForwardRecord(metadata, values)


def _effects(grad_mode: tuple[bool, bool], has_history: bool) -> tuple[EffectInfo, ...]:
    found = [EffectInfo("token", kind) for kind in ordered_effects()]
    if has_history and not grad_mode[0]:
        found.append(EffectInfo("enables_grad", True))
    return tuple(found if grad_mode[0] == grad_mode[1] else [*found, EffectInfo("grad_mode", grad_mode[1])])


def _has_history_of_view(info: OutputInfo) -> bool:
    return info.view is not None and info.view.requires_grad and not info.view.under_no_grad


def _record(value: torch.Tensor) -> TensorMeta:
    return tensor_meta(from_functional(value), requires_grad=carries_gradient(value), bits=lazy_bits(value))


def _input_infos(
    inputs: Sequence[FunctionInput], storages: StorageEvents | None
) -> tuple[list[InputInfo], list[torch.Tensor]]:
    infos: list[InputInfo] = []
    updated: list[torch.Tensor] = []
    for entered in inputs:
        if not entered.is_tensor:
            kind = InputKind.SYMINT if isinstance(entered.original, torch.SymInt) else InputKind.OTHER
            infos.append(InputInfo(entered.index, kind))
            continue
        change = storage_change(entered, inputs, storages)
        if change is not None:
            infos.append(_changed_storage(entered, change, updated, storages))
            continue
        becomes = sets_requires_grad(entered)
        check_mutation(entered, becomes)
        mutation = mutation_kind(entered)
        writes = mutation in _WRITES
        position = len(updated) if writes else None
        if writes:
            updated.append(entered.value)
        new_view = None
        if mutation in (MutationKind.METADATA, MutationKind.DATA_AND_METADATA):
            geometry = eager_geometry(entered.value, entered.original)
            unseen = metadata_changed_under_no_grad(entered, storages)
            claims = bool(entered.value.requires_grad)
            bits = lazy_bits(entered.original)
            if writes and claims and any(bits):
                raise Unsupported(
                    f"input {entered.index}, lazily conjugated or negated, is written to and changes its shape",
                    "autograd would get the gradient of the new values in the old shape",
                    "Resolve it first (resolve_conj(), resolve_neg()), or use the operation that returns a new tensor",
                )
            new_view = view_spec(geometry, entered.original, requires_grad=claims, under_no_grad=unseen, bits=bits)
        hidden = writes and is_hidden_from_autograd(entered)
        without_grad = writes and not hidden and is_under_no_grad(entered)
        infos.append(
            InputInfo(
                index=entered.index,
                kind=InputKind.TENSOR,
                meta=tensor_meta(entered.original, requires_grad=entered.requires_grad),
                is_leaf=entered.is_leaf,
                mutation=mutation,
                mutation_hidden_from_autograd=hidden,
                mutation_under_no_grad=without_grad,
                updated_output=position,
                new_view=new_view,
                version_steps=version_steps(entered, storages),
                sets_requires_grad=becomes,
            )
        )
    return infos, updated


def _changed_storage(
    entered: FunctionInput, change: StorageChange, updated: list[torch.Tensor], storages: StorageEvents | None
) -> InputInfo:
    """The record of an input whose storage changes; see Note [Changes of storage]."""
    replaced = was_replaced(entered)
    fresh = replaced and change.input is None and not change.resized
    written = has_data_mutation(entered.value) and change.input is None and change.num_bytes != 0
    if not replaced:
        check_mutation(entered)
    position = len(updated) if fresh or written else None
    if position is not None:
        updated.append(entered.value)
    return InputInfo(
        index=entered.index,
        kind=InputKind.TENSOR,
        meta=tensor_meta(entered.original, requires_grad=entered.requires_grad),
        is_leaf=entered.is_leaf,
        mutation=MutationKind.STORAGE,
        mutation_hidden_from_autograd=written and not replaced and is_hidden_from_autograd(entered),
        mutation_under_no_grad=replaced or is_under_no_grad(entered),
        updated_output=position,
        storage=replace(change, output=position) if fresh else change,
        version_steps=version_steps(entered, storages),
    )


def _output_infos(
    inputs: Sequence[FunctionInput], outputs: Sequence[Any], sources: OutputSources, first: int
) -> tuple[list[OutputInfo], list[Any]]:
    infos: list[OutputInfo] = []
    computed: list[Any] = []
    for index, (output, source) in enumerate(zip(outputs, sources.sources, strict=True)):
        if source.kind is OutputKind.CONSTANT:
            infos.append(OutputInfo(index, source.kind, constant=output))
        elif source.same_as is not None:
            infos.append(OutputInfo(index, source.kind, meta=_record(output)))  # graph_output is known only below
        elif source.kind in (OutputKind.SYMINT, OutputKind.FRESH):
            meta = _record(output) if source.kind is OutputKind.FRESH else None
            position = first + len(computed)
            computed.append(output)
            made = OutputInfo(index, source.kind, meta=meta, graph_output=position, dynamic_dims=_dynamic_dims(output))
            infos.append(replace(made, is_new_leaf=source.kind is OutputKind.FRESH and is_new_leaf(output)))
        else:
            info = _aliasing_output(index, source, inputs, outputs, sources.bases)
            if info.view is not None and _has_own_history(output, source, inputs, outputs, sources.bases):
                info = replace(info, graph_output=first + len(computed))
                computed.append(output)
            infos.append(info)
    for index, source in enumerate(sources.sources):
        if source.same_as is not None:
            twin = infos[source.same_as]
            infos[index] = OutputInfo(
                index, twin.kind, meta=twin.meta, graph_output=twin.graph_output, dynamic_dims=twin.dynamic_dims
            )
    seen: dict[int, int] = {}
    for index, output in enumerate(outputs):
        if isinstance(output, torch.Tensor) and seen.setdefault(id(output), index) != index:
            infos[index] = replace(infos[index], same_as=seen[id(output)])
    return infos, computed


def _aliasing_output(
    index: int,
    source: OutputSource,
    inputs: Sequence[FunctionInput],
    outputs: Sequence[Any],
    bases: Sequence[torch.Tensor],
) -> OutputInfo:
    assert source.base is not None
    output: torch.Tensor = outputs[index]
    if source.kind in (OutputKind.INPUT, OutputKind.ALIAS_OF_INPUT):
        entered = inputs[source.base]
        base, original = entered.value, entered.original
        if was_replaced(entered):
            original = from_functional(base)
        # See Note [Geometry of mutated tensors].
        plain, plain_base = eager_geometry(output, original), eager_geometry(base, original)
    else:
        base = bases[source.base] if source.kind is OutputKind.ALIAS_OF_INTERMEDIATE else outputs[source.base]
        plain, plain_base = from_functional(output), from_functional(base)
    view = None
    claims = bool(output.requires_grad)
    if source.kind is not OutputKind.INPUT:
        _check_history(index, output, base)
        lost = claims and not gradient_reaches(output, base)
        detached = not output._is_view() and not carries_gradient(output)
        apart = detached and not compat.share_version_counter(output, base)
        view = view_spec(
            plain,
            plain_base,
            requires_grad=claims,
            under_no_grad=lost,
            detached=detached,
            own_version=apart,
            bits=lazy_bits(output),
        )
    meta = tensor_meta(plain, requires_grad=claims, bits=lazy_bits(output))
    return OutputInfo(index, source.kind, meta=meta, base=source.base, view=view, dynamic_dims=_dynamic_dims(output))


def _has_own_history(
    output: torch.Tensor,
    source: OutputSource,
    inputs: Sequence[FunctionInput],
    outputs: Sequence[Any],
    bases: Sequence[torch.Tensor],
) -> bool:
    """Whether the gradient of a view is not that of ``as_strided``, and so taken from the graph.

    A custom function may have made the view. Where several elements of the base are the same memory, ``as_strided``
    shares a gradient out among these, but every other view operation leaves it with those that it leads to. And what
    ``as_strided`` shows beyond the view that it is taken of has no gradient.
    """
    assert source.base is not None
    if not carries_gradient(output):
        return False
    if source.kind is OutputKind.ALIAS_OF_INPUT:
        base = inputs[source.base].value
    else:
        base = bases[source.base] if source.kind is OutputKind.ALIAS_OF_INTERMEDIATE else outputs[source.base]
    if through_custom_function(output, base):
        return True
    taken_otherwise = leads_beyond(output, base) or repeats_memory(from_functional(base))
    return taken_otherwise and gradient_reaches(output, base)  # else it has no history: taken where grad mode was off


def _check_history(index: int, output: torch.Tensor, base: torch.Tensor) -> None:
    """Refuse what was detached and then written to: it shares memory with its base, but has another gradient."""
    if carries_gradient(output) and _root(output) is not _root(base):
        raise Unsupported(
            f"output {index} shares memory with another value but not its gradient: it was detached, then written to",
            "the record of a view has no place for a history of its own",
            "Detach a clone instead",
        )


def _root(value: torch.Tensor) -> torch.Tensor:
    return value if value._base is None else value._base


def _dynamic_dims(output: Any) -> tuple[int, ...]:
    if not isinstance(output, torch.Tensor):
        return ()
    return tuple(i for i, size in enumerate(from_functional(output).shape) if is_symbolic(size))
