"""Records of mutated inputs and of outputs -> the operations after the call.

Note [Order of the epilogue]
    Mutations come first, because views of an input are taken of the tensor as the caller gets it back. Then
    outputs, a view of another output after that output. Grad mode changes last: everything before runs in
    the caller's grad mode, in which autograd records the write-backs as it would have in eager.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from aotkit_functionalize.view_methods import view_method

from .contract import (
    CallContract,
    InputInfo,
    InputKind,
    MutationKind,
    OutputInfo,
    OutputKind,
    StorageChange,
    TensorMeta,
    ViewSpec,
)
from .errors import PlanError
from .operations import Operation, Value
from .operations.checks import CheckStrides, CheckValue
from .operations.modes import SetGradMode
from .operations.mutations import CopyBack, CopyMode, SetRequiresGrad, SetStrides
from .operations.storages import Resize, ResizeStorage, SetStorage
from .operations.versions import BumpVersion, SetVersion
from .operations.views import MarkDynamic, ReplayView, SetLazyBits

__all__ = ["mutation_operations", "output_operations", "quiet_operations", "returned_value"]

_ALIASES = (OutputKind.ALIAS_OF_INPUT, OutputKind.ALIAS_OF_INTERMEDIATE, OutputKind.ALIAS_OF_OUTPUT)
_CHANGES_DATA = (MutationKind.DATA, MutationKind.DATA_AND_METADATA)
_CHANGES_METADATA = (MutationKind.METADATA, MutationKind.DATA_AND_METADATA)


def mutation_operations(
    metadata: CallContract, names: Sequence[Value], announced: Sequence[int] = ()
) -> list[Operation]:
    """What the caller's tensors have to be given after the call.

    Version counters that move though nothing changes (``squeeze_()`` of nothing) are no part of it: they move before
    the call, so that what the backward saves of these tensors stays valid; see :func:`quiet_operations`.
    ``announced``: for the first inputs, by how much something else moves their version counters.
    """
    operations: list[Operation] = []
    for info in metadata.inputs:
        if info.mutation is not MutationKind.NONE:
            done = announced[info.index] if info.index < len(announced) else 0
            operations += _mutation(replace(info, version_steps=max(info.version_steps - done, 0)), names)
    return operations


def quiet_operations(metadata: CallContract, names: Sequence[Value]) -> list[Operation]:
    """Version counters that move in eager mode without any change of the tensor."""
    quiet = [i for i in metadata.inputs if i.version_steps and i.mutation is MutationKind.NONE]
    return [BumpVersion(names[i.index], i.version_steps) for i in quiet]


def _mutation(info: InputInfo, names: Sequence[Value]) -> list[Operation]:
    value = names[info.index]
    operations: list[Operation] = []
    if info.kind is not InputKind.TENSOR and info.mutation is not MutationKind.NONE:
        raise PlanError(f"input {info.index} is a {info.kind.value} and cannot be mutated")
    if info.mutation in _CHANGES_METADATA:
        if info.new_view is None:
            raise PlanError(f"input {info.index} has a metadata mutation but no new_view to give the caller's tensor")
        operations.append(SetStrides(value, info.new_view, no_grad=info.new_view.under_no_grad))
    if info.storage is not None:
        operations += _storage_operations(info.storage, value, names)
    if info.updated_output is not None and (info.storage is None or info.storage.output is None):
        operations.append(CopyBack(value, f"fw{info.updated_output}", _copy_mode(info)))
    elif info.mutation in _CHANGES_DATA and not info.mutation_hidden_from_autograd:
        return [*operations, SetVersion(value, f"version_{value}", max(info.version_steps, 1))]
    # First: autograd makes the history of a view anew whose counter has moved, and of a lazily negated one in the shape
    # that its base's view had; a change of shape comes after that.
    return _missing_steps(info, value, operations) + operations


def _storage_operations(change: StorageChange, value: Value, names: Sequence[Value]) -> list[Operation]:
    operations: list[Operation] = []
    if change.resized:
        if change.view is None:
            raise PlanError(f"{value} is resized but its new sizes are not recorded")
        operations.append(Resize(value, change.view.sizes))
    elif change.input is not None:
        operations.append(SetStorage(value, names[change.input], change.view))
    elif change.output is not None:
        operations.append(SetStorage(value, f"fw{change.output}"))
    if change.num_bytes is not None:
        operations.append(ResizeStorage(value, change.num_bytes))
    return operations


def _missing_steps(info: InputInfo, value: Value, operations: Sequence[Operation]) -> list[Operation]:
    """What the version counter moves in eager mode beyond what ``operations`` move it by."""
    done = sum(
        isinstance(o, SetStrides | Resize) or (isinstance(o, CopyBack) and o.mode != "hidden") for o in operations
    )
    missing = info.version_steps - done
    return [BumpVersion(value, missing)] if missing > 0 else []


def _copy_mode(info: InputInfo) -> CopyMode:
    if info.mutation_hidden_from_autograd:
        return "hidden"
    return "no_grad" if info.mutation_under_no_grad else "autograd"


def output_operations(
    metadata: CallContract, names: Sequence[Value], *, skip: Collection[int] = (), debug: bool = False
) -> list[Operation]:
    """Views regenerated, dynamic dimensions marked, grad mode set; see Note [Order of the epilogue].

    ``skip`` are outputs that the caller gets from elsewhere.
    """
    operations: list[Operation] = []
    checked: set[Value] = set()
    for output in _bases_before_views(metadata):
        if output.index in skip or output.same_as is not None:
            continue
        if output.kind in _ALIASES:
            replay_view = _replay_view(metadata, output, names)
            if replay_view.base.startswith("fw") and replay_view.method == "as_strided":
                strides = _base_meta(metadata, output)
                if strides is not None and replay_view.base not in checked:
                    operations.append(CheckStrides(replay_view.base, strides.strides))
                    checked.add(replay_view.base)
            operations.append(replay_view)
        elif output.kind is OutputKind.FRESH and output.meta is not None and (output.meta.conj or output.meta.neg):
            operations.append(SetLazyBits(f"fw{output.graph_output}", output.meta.conj, output.meta.neg))
        value = returned_value(metadata, output, names)
        if output.is_new_leaf and value is not None:
            operations.append(SetRequiresGrad(value, True))
        if output.dynamic_dims and value is not None:
            operations.append(MarkDynamic(value, output.dynamic_dims))
        if debug and value is not None and output.meta is not None:
            operations.append(_output_check(value, output, output.meta))
    for info in metadata.inputs:
        if info.sets_requires_grad is not None:
            operations.append(SetRequiresGrad(names[info.index], info.sets_requires_grad))
    for effect in metadata.effects:
        if effect.kind in ("token", "enables_grad"):
            continue  # the graph orders such operations itself; the plan turns grad mode on
        if effect.kind != "grad_mode":
            raise PlanError(f"effect {effect.kind!r} is not known to the run-time wrappers; only 'grad_mode' is")
        operations.append(SetGradMode(bool(effect.value)))
    return operations


def returned_value(metadata: CallContract, output: OutputInfo, names: Sequence[Value]) -> Value | None:
    """Name of the value that the caller gets for ``output``; ``None`` for a constant."""
    if output.same_as is not None:
        return returned_value(metadata, metadata.outputs[output.same_as], names)
    match output.kind:
        case OutputKind.FRESH | OutputKind.SYMINT:
            if output.graph_output is None:
                raise PlanError(f"output {output.index} is {output.kind.value} but has no graph_output")
            return f"fw{output.graph_output}"
        case OutputKind.INPUT:
            return names[_base_index(output, len(names))]
        case OutputKind.CONSTANT:
            return None
    return f"out{output.index}"


def _output_check(value: Value, output: OutputInfo, meta: TensorMeta) -> CheckValue:
    grad = output.kind is not OutputKind.INPUT
    return CheckValue(value, f"output {output.index} ({output.kind.value})", meta, True, grad)


def _base_index(output: OutputInfo, count: int) -> int:
    if output.base is None or not 0 <= output.base < count:
        raise PlanError(f"output {output.index} is {output.kind.value} of number {output.base}, but there are {count}")
    return output.base


def _bases_before_views(metadata: CallContract) -> list[OutputInfo]:
    """Outputs in an order where a view of another output comes after it."""
    ordered: list[OutputInfo] = []
    waiting = list(metadata.outputs)
    done: set[int] = set()
    while waiting:
        ready = [o for o in waiting if o.kind is not OutputKind.ALIAS_OF_OUTPUT or o.base in done]
        if not ready:
            raise PlanError(f"outputs {[o.index for o in waiting]} are views of each other; one has to be a base")
        ordered += ready
        done |= {o.index for o in ready}
        waiting = [o for o in waiting if o.index not in done]
    return ordered


def _base_meta(metadata: CallContract, output: OutputInfo) -> TensorMeta | None:
    """Metadata of the tensor that ``output`` is a view of, as the caller gets it; ``None`` if not known."""
    match output.kind:
        case OutputKind.ALIAS_OF_INPUT:
            info = metadata.inputs[_base_index(output, len(metadata.inputs))]
            return None if info.mutation in _CHANGES_METADATA else info.meta
        case OutputKind.ALIAS_OF_INTERMEDIATE:
            return metadata.intermediate_bases[_base_index(output, len(metadata.intermediate_bases))]
    return metadata.outputs[_base_index(output, len(metadata.outputs))].meta


def _base_value(metadata: CallContract, output: OutputInfo, names: Sequence[Value]) -> Value:
    match output.kind:
        case OutputKind.ALIAS_OF_INPUT:
            return names[_base_index(output, len(names))]
        case OutputKind.ALIAS_OF_INTERMEDIATE:
            bases = len(metadata.intermediate_bases)
            return f"fw{metadata.num_forward_outputs - bases + _base_index(output, bases)}"
    value = returned_value(metadata, metadata.outputs[_base_index(output, len(metadata.outputs))], names)
    if value is None:
        raise PlanError(f"output {output.index} is a view of output {output.base}, which is a constant")
    return value


def _replay_view(metadata: CallContract, output: OutputInfo, names: Sequence[Value]) -> ReplayView:
    view = output.view
    if view is None:
        raise PlanError(f"output {output.index} is {output.kind.value} but has no view")
    base = _base_value(metadata, output, names)
    meta = _base_meta(metadata, output)
    base_requires_grad = _base_requires_grad(metadata, output)
    method, permutation = ("as_strided", ()) if meta is None else view_method(meta, view)
    position = output.graph_output
    history = position is not None and metadata.is_training and _is_differentiable(metadata, position)
    if history:
        view = replace(view, detached=True)
    return ReplayView(
        result=f"out{output.index}",
        base=base,
        view=view,
        base_dtype=_base_dtype(metadata, output) or view.dtype,
        method=method,
        permutation=permutation,
        detach=base_requires_grad and not view.requires_grad and not view.under_no_grad,
        set_requires_grad=view.requires_grad and (view.detached or not base_requires_grad) and not history,
        history=f"fw{position}" if history else None,
        lazy=_has_bits(view) or _has_bits(_any_base_meta(metadata, output)),
    )


def _has_bits(record: ViewSpec | TensorMeta | None) -> bool:
    return record is not None and (record.conj or record.neg)


def _base_dtype(metadata: CallContract, output: OutputInfo) -> str | None:
    meta = _any_base_meta(metadata, output)
    return None if meta is None else meta.dtype


def _any_base_meta(metadata: CallContract, output: OutputInfo) -> TensorMeta | None:
    """Metadata of the tensor that ``output`` is a view of, of an input as it came in."""
    if output.kind is OutputKind.ALIAS_OF_INPUT:
        return metadata.inputs[_base_index(output, len(metadata.inputs))].meta
    return _base_meta(metadata, output)


def _base_requires_grad(metadata: CallContract, output: OutputInfo) -> bool:
    """Whether the base takes part in autograd at the time the view is taken of it."""
    match output.kind:
        case OutputKind.ALIAS_OF_INPUT:
            info = metadata.inputs[_base_index(output, len(metadata.inputs))]
            written = info.updated_output
            # A buffer that was given a value with a history has one itself afterwards.
            gains = (
                written is not None
                and metadata.is_training
                and not info.mutation_hidden_from_autograd
                and not info.mutation_under_no_grad
                and _is_differentiable(metadata, written)
            )
            return gains or (info.meta is not None and info.meta.requires_grad)
        case OutputKind.ALIAS_OF_INTERMEDIATE:
            position = metadata.num_forward_outputs - len(metadata.intermediate_bases) + (output.base or 0)
            return metadata.is_training and _is_differentiable(metadata, position)
    base = metadata.outputs[_base_index(output, len(metadata.outputs))]
    if base.kind is OutputKind.FRESH and base.graph_output is not None:
        return metadata.is_training and _is_differentiable(metadata, base.graph_output)
    known = base.view if base.view is not None else base.meta
    return known is not None and known.requires_grad


def _is_differentiable(metadata: CallContract, position: int) -> bool:
    return any(t.forward_output == position for t in metadata.tangents)
