"""Graph metadata -> :class:`.WrapperPlan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .contract import CallContract, Dim, GraphMetadata, InputKind, MutationKind, OutputKind
from .dims import check_symbol_name, symbols_of
from .epilogue import mutation_operations, output_operations, quiet_operations, returned_value
from .errors import PlanError
from .inputs import InputPlan
from .operations import Operation, Value
from .operations.bases import BuildBase
from .operations.checks import CheckAliases, CheckDuplicate, CheckPlace, CheckValue
from .operations.modes import SetGradMode
from .operations.mutations import SetStrides
from .operations.symbols import BindSymbol
from .operations.versions import BumpVersions, ReadVersion, SetVersion
from .operations.views import ReplayView
from .plan import CallSpec, LazyInput, Return, TangentSpec, WrapperOptions, WrapperPlan
from .subclasses.build import build_subclass_plan

__all__ = ["build_plan"]


def build_plan(
    metadata: CallContract,
    *,
    input_plan: InputPlan | None = None,
    num_saved_tensors: int = 0,
    num_saved_symints: int = 0,
    saved_inputs: Sequence[int] | None = None,
    options: WrapperOptions | None = None,
    addressed: Mapping[int, int] | None = None,
) -> WrapperPlan:
    """Work out the operations around a captured graph.

    Args:
        metadata: of the graph over prepared (distinct) inputs: its :class:`.GraphMetadata`, or a contract alone.
        input_plan: how the caller's flat arguments become graph inputs; default: one to one.
        num_saved_tensors: how many saved tensors follow the forward outputs of the compiled forward.
        num_saved_symints: how many saved SymInts follow those.
        saved_inputs: per saved tensor the graph input that it is, or -1 (default: not known).
        options: what to generate.
        addressed: graph inputs whose storage the graph counts elements from the start of, and the byte it reads to.

    Raises:
        PlanError: the records contradict each other.
    """
    options = options or WrapperOptions()
    if isinstance(metadata, GraphMetadata) and metadata.subclasses is not None:
        saved = (num_saved_tensors, num_saved_symints)
        plan = build_subclass_plan(metadata, build_plan, input_plan, saved, options)
        return replace(plan, call=replace(plan.call, lazy_inputs=_lazy_inputs(metadata)))
    input_plan = input_plan or InputPlan.one_to_one(len(metadata.inputs))
    names = input_plan.graph_input_names()
    _check_records(metadata, names)
    identities = dict(input_plan.returned_inputs)
    restrided = _restrided_members(input_plan)
    epilogue = mutation_operations(metadata, names, restrided)
    epilogue += _bump_versions(metadata, input_plan, restrided)
    epilogue += [SetStrides(f"in{m.index}", m.view, no_grad=True) for m in input_plan.restrided]
    moved = {f"base{number}" for number, members in enumerate(restrided) if members}
    outputs = output_operations(metadata, names, skip=identities, debug=options.debug)
    epilogue += [_by_strides(o) if isinstance(o, ReplayView) and o.base in moved else o for o in outputs]
    checks = _alias_checks(metadata, names) if options.check_aliasing else []
    checks += _place_checks(metadata, names, addressed or {})
    if options.debug:
        checks += _input_checks(metadata, names)
    prologue: list[Operation] = [CheckDuplicate(f"in{i}", f"in{first}") for i, first in input_plan.duplicates()]
    prologue += input_plan.symbols
    for number, base in enumerate(input_plan.bases):
        members = tuple(f"in{member}" for member in base.members)
        views = tuple(v.view for v in base.views)
        symbols = symbols_of(d for v in views for d in (*v.sizes, *v.strides, v.offset_delta))
        prologue.append(BuildBase(f"base{number}", members, views, base.flat, tuple(sorted(symbols))))
    early, late = _bind_symbols(metadata, names, symbols_of(d for op in (*checks, *epilogue) for d in op.dims_read))
    prologue += early
    epilogue[:0] = late
    notes = [ReadVersion(o.before, o.value) for o in epilogue if isinstance(o, SetVersion)]
    kinds = {effect.kind for effect in metadata.effects}
    if "enables_grad" in kinds:  # operations without history say so themselves
        epilogue = [SetGradMode(True), *epilogue, *([] if "grad_mode" in kinds else [SetGradMode(False)])]
    call = _with_history(
        _call_spec(metadata, names, (num_saved_tensors, num_saved_symints)), metadata, saved_inputs, options
    )
    return WrapperPlan(
        num_inputs=input_plan.num_inputs,
        prologue=(*prologue, *checks, *quiet_operations(metadata, names), *notes),
        call=replace(call, lazy_inputs=_lazy_inputs(metadata)),
        epilogue=tuple(epilogue),
        returns=_returns(metadata, names, identities),
    )


def _by_strides(operation: ReplayView) -> ReplayView:
    """The same view of a base that may be one of the arguments whose sizes or strides were changed before."""
    return replace(operation, method="as_strided", permutation=())


def _restrided_members(input_plan: InputPlan) -> list[int]:
    """Per base, how many of its members have their sizes or strides changed, each of which moves the version."""
    changed = {m.index for m in input_plan.restrided}
    return [len(changed.intersection(base.members)) for base in input_plan.bases]


def _bump_versions(metadata: CallContract, input_plan: InputPlan, restrided: list[int]) -> list[Operation]:
    """Version counters of the arguments behind a written base that has another one: all of them if it is flat, else
    those that ``.data`` gave."""
    operations: list[Operation] = []
    for number, (base, info) in enumerate(zip(input_plan.bases, metadata.inputs, strict=False)):
        if info.mutation is MutationKind.NONE or info.mutation_hidden_from_autograd:
            continue
        if base.flat or len({member.view.requires_grad for member in base.views}) > 1:
            members = tuple(f"in{member}" for member in base.members)
            steps = max(info.version_steps - restrided[number], 1)
            operations.append(BumpVersions(members, steps, None if base.flat else f"base{number}"))
    return operations


def _check_records(metadata: CallContract, names: Sequence[Value]) -> None:
    if len(names) != len(metadata.inputs):
        raise PlanError(
            f"the metadata describes {len(metadata.inputs)} graph inputs but the input plan prepares {len(names)}; "
            "capture the graph over the prepared inputs"
        )
    for kind, indices in (
        ("input", [i.index for i in metadata.inputs]),
        ("output", [o.index for o in metadata.outputs]),
    ):
        if indices != list(range(len(indices))):
            raise PlanError(f"{kind} records must be in order of their index, from 0 on; found {indices}")
    positions = [i.updated_output for i in metadata.inputs] + [o.graph_output for o in metadata.outputs]
    positions += [t.forward_output for t in metadata.tangents]
    for position in positions:
        if position is not None and not 0 <= position < metadata.num_forward_outputs:
            raise PlanError(f"forward output {position} is named but the graph has {metadata.num_forward_outputs}")
    if metadata.reached_by and len(metadata.reached_by) != len(metadata.inputs):
        raise PlanError(f"{len(metadata.reached_by)} of {len(metadata.inputs)} inputs say which tangents reach them")
    for position, requires_grad in enumerate(metadata.forward_requires_grad):
        if metadata.is_training and requires_grad and all(t.forward_output != position for t in metadata.tangents):
            raise PlanError(f"forward output {position} requires grad but the joint graph has no tangent for it")


def _alias_checks(metadata: CallContract, names: Sequence[Value]) -> list[Operation]:
    """Look for aliases that appear only at run time. Static inputs (parameters, buffers) mostly stay where they are,
    but one may be replaced, or given the memory of another one (``p.data = q.data``)."""
    changes = (MutationKind.DATA, MutationKind.DATA_AND_METADATA)
    tensors = [i for i in metadata.inputs if i.kind is InputKind.TENSOR]
    late = {write.input for write in metadata.backward_writes}
    written = tuple(names[i.index] for i in tensors if i.mutation in changes or i.index in late)
    others = tuple(names[i.index] for i in tensors if names[i.index] not in written)
    if not written or len(tensors) == 1:
        return []
    fixed = all(i.meta and all(type(n) is int for n in (*i.meta.sizes, *i.meta.strides)) for i in tensors)
    return [CheckAliases(written, others, fixed=fixed)]


def _place_checks(metadata: CallContract, names: Sequence[Value], addressed: Mapping[int, int]) -> list[Operation]:
    metas = [(names[i], metadata.inputs[i].meta, nbytes) for i, nbytes in sorted(addressed.items())]
    return [
        CheckPlace(name, meta.storage_offset, nbytes)
        for name, meta, nbytes in metas
        if meta is not None and isinstance(meta.storage_offset, int)
    ]


def _input_checks(metadata: CallContract, names: Sequence[Value]) -> list[Operation]:
    return [
        CheckValue(names[i.index], f"input {i.index} ({names[i.index]})", i.meta, True, True)
        for i in metadata.inputs
        if i.kind is InputKind.TENSOR and i.meta is not None
    ]


def _bind_symbols(
    metadata: CallContract, names: Sequence[Value], wanted: set[str]
) -> tuple[list[BindSymbol], list[BindSymbol]]:
    """Bindings to inputs and bindings to forward outputs, of which the latter can be read only after the call."""
    bound: dict[str, BindSymbol] = {}
    for symbol in metadata.symbols:
        check_symbol_name(symbol.name)
        if symbol.name in wanted and symbol.name not in bound:
            if symbol.source not in ("int", "size", "stride", "storage_offset"):
                raise PlanError(f"symbol {symbol.name} is read from {symbol.source!r}, which is not a known source")
            value = f"fw{symbol.input_index}" if symbol.of_output else names[symbol.input_index]
            bound[symbol.name] = BindSymbol(symbol.name, value, symbol.source, symbol.dim)
    if wanted - bound.keys():
        raise PlanError(f"symbols {sorted(wanted - bound.keys())} are used in the metadata but bound from no input")
    ordered = [bound[name] for name in sorted(bound)]
    return [b for b in ordered if not b.of_output], [b for b in ordered if b.of_output]


def _call_spec(metadata: CallContract, names: tuple[Value, ...], saved: tuple[int, int]) -> CallSpec:
    own = {o.graph_output for o in metadata.outputs if o.kind is not OutputKind.SYMINT and o.graph_output is not None}
    first_base = metadata.num_forward_outputs - len(metadata.intermediate_bases)
    own |= set(range(first_base, metadata.num_forward_outputs))
    repeated = tuple(sorted({*metadata.repeated_outputs, *_new_values_in_new_shapes(metadata)}))
    training = metadata.is_training and bool(metadata.tangents) and bool(metadata.differentiable_inputs)
    if not training:
        if any(saved):
            raise PlanError("an inference graph (or one with nothing to differentiate) saves nothing for a backward")
        return CallSpec(names, metadata.num_forward_outputs, tuple(sorted(own)), repeated_outputs=repeated)
    dims = [d for t in metadata.tangents for d in (*t.meta.sizes, *t.meta.strides)]
    return CallSpec(
        graph_inputs=names,
        num_forward_outputs=metadata.num_forward_outputs,
        own_outputs=tuple(sorted(own)),
        training=True,
        num_saved_tensors=saved[0],
        num_saved_symints=saved[1],
        written_inputs=tuple(i.index for i in metadata.inputs if i.mutation is not MutationKind.NONE),
        differentiable_inputs=tuple(sorted(metadata.differentiable_inputs)),
        differentiable_outputs=tuple(sorted({t.forward_output for t in metadata.tangents})),
        tangents=tuple(TangentSpec(t.forward_output, t.meta) for t in metadata.tangents),
        repeated_outputs=repeated,
        backward_mutated_inputs=tuple(write.input for write in metadata.backward_writes),
        backward_version_steps=tuple(write.version_steps for write in metadata.backward_writes),
        backward_symbols=_symbols_for_backward(metadata, names, dims),
        reached_by=_reached_by(metadata),
        enables_grad=any(effect.kind == "enables_grad" for effect in metadata.effects),
    )


def _reached_by(metadata: CallContract) -> tuple[tuple[int, ...], ...]:
    rows = tuple(metadata.reached_by[i] for i in sorted(metadata.differentiable_inputs)) if metadata.reached_by else ()
    return rows if any(len(row) < len(metadata.tangents) for row in rows) else ()


def _lazy_inputs(metadata: CallContract) -> tuple[LazyInput, ...]:
    metas = [(i.index, i.meta) for i in metadata.inputs if i.meta is not None]
    return tuple(LazyInput(index, m.conj, m.neg) for index, m in metas if m.conj or m.neg)


def _new_values_in_new_shapes(metadata: CallContract) -> list[int]:
    """Values that are copied into inputs after a change of shape, when a view of the input could not be read."""
    both = [i for i in metadata.inputs if i.mutation is MutationKind.DATA_AND_METADATA]
    return [i.updated_output for i in both if i.updated_output is not None]


def _symbols_for_backward(
    metadata: CallContract, names: Sequence[Value], dims: Sequence[Dim]
) -> tuple[BindSymbol, ...]:
    early, late = _bind_symbols(metadata, names, symbols_of(dims))
    return (*early, *late)


def _with_history(
    call: CallSpec, metadata: CallContract, saved_inputs: Sequence[int] | None, options: WrapperOptions
) -> CallSpec:
    """What a training call has to remember for second derivatives; see Note [Second derivatives]."""
    if not call.training:
        return call
    if saved_inputs is None:
        saved_inputs = (-1,) * call.num_saved_tensors
    lazy = {one.position for one in _lazy_inputs(metadata)}
    saved_inputs = [-1 if i in lazy else i for i in saved_inputs]  # what is saved is their memory
    if len(saved_inputs) != call.num_saved_tensors:
        raise PlanError(f"{len(saved_inputs)} saved inputs are given for {call.num_saved_tensors} saved tensors")
    tensors = [i for i in metadata.inputs if i.kind is InputKind.TENSOR]
    if options.keep_inputs:
        kept, unsaved = [i.index for i in tensors], []
    else:
        certain = () if call.written_inputs else saved_inputs
        moving = [i for i in call.differentiable_inputs if not metadata.inputs[i].is_static]
        kept = [i for i in moving if i not in certain]
        unsaved = [i.index for i in tensors if i.index not in saved_inputs]
    names = call.graph_inputs
    dims = [d for i in tensors if i.meta is not None for d in (*i.meta.sizes, *i.meta.strides)]
    dims += [d for t in metadata.tangents for d in (*t.meta.sizes, *t.meta.strides)]
    return replace(
        call,
        saved_inputs=tuple(saved_inputs),
        unsaved_inputs=tuple(unsaved),
        kept_inputs=tuple(kept),
        keeps_values=options.keep_inputs,
        scalar_inputs=tuple(i.index for i in metadata.inputs if i.kind is not InputKind.TENSOR),
        backward_symbols=_symbols_for_backward(metadata, names, dims),
    )


def _returns(metadata: CallContract, names: tuple[Value, ...], identities: dict[int, int]) -> tuple[Return, ...]:
    values: list[Return] = []
    for output in metadata.outputs:
        if output.same_as is not None:
            values.append(values[output.same_as])
        elif output.index in identities:
            values.append(Return(value=f"in{identities[output.index]}"))
        else:
            value = returned_value(metadata, output, names)
            values.append(Return(constant=output.constant) if value is None else Return(value=value))
    return tuple(values)
