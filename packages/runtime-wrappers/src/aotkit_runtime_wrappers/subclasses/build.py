"""Graph metadata with subclasses -> the plan over the caller's values, and the record of the dense call inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch.utils._pytree as pytree

from ..contract import (
    Dim,
    GraphMetadata,
    MutationKind,
    Opaque,
    OutputKind,
    SubclassBoundary,
    SubclassMeta,
    SubclassValue,
    SymbolicDim,
)
from ..dims import check_symbol_name, symbols_of
from ..errors import PlanError
from ..inputs import InputPlan
from ..operations.symbols import BindSymbol
from ..plan import WrapperOptions, WrapperPlan
from .call import SubclassCall

__all__ = ["build_subclass_plan"]

Build = Callable[..., WrapperPlan]


def build_subclass_plan(
    metadata: GraphMetadata,
    build: Build,
    input_plan: InputPlan | None,
    saved: tuple[int, int],
    options: WrapperOptions,
) -> WrapperPlan:
    """The plan of a graph whose metadata has ``subclasses``; ``build`` is :func:`.build_plan`."""
    boundary = metadata.subclasses
    assert boundary is not None
    call = _subclass_call(metadata, boundary, saved, options)
    training = call.training
    plan = build(
        boundary.outer,
        input_plan=input_plan,
        num_saved_tensors=saved[0] + sum(map(len, call.witnesses)) if training else 0,
        num_saved_symints=call.num_kept if training else 0,
        options=replace(options, check_aliasing=False),
    )
    nested = [subclass is not None for subclass in boundary.tangents]
    tangents = tuple(replace(t, nested=n) for t, n in zip(plan.call.tangents, nested, strict=True))
    # What these say is about dense tensors here, and the adapters see to it.
    spec = replace(plan.call, own_outputs=(), written_inputs=(), tangents=tangents, subclasses=call)
    return replace(plan, call=spec)


def _subclass_call(
    metadata: GraphMetadata, boundary: SubclassBoundary, saved: tuple[int, int], options: WrapperOptions
) -> SubclassCall:
    if len(boundary.gradients) not in (0, len(boundary.inputs)) or len(boundary.tangents) != len(
        boundary.outer.tangents
    ):
        raise PlanError("the metadata of a graph with tensor subclasses is not complete: gradients or tangents miss")
    first_base = metadata.num_forward_outputs - len(metadata.intermediate_bases)
    own = {o.graph_output for o in metadata.outputs if o.kind is OutputKind.FRESH and o.graph_output is not None}
    own |= set(range(first_base, metadata.num_forward_outputs))
    gradients = [g for g in boundary.gradients if g is not None]
    in_backward = symbols_of([*_dims(gradients), *_subclass_dims(n for n in boundary.tangents if n is not None)])
    in_forward = symbols_of(_dims(boundary.forward))
    wrappers = (
        tuple(i for i, subclass in enumerate(boundary.inputs) if subclass is not None),
        tuple(i for i, made in enumerate(boundary.forward) if made.subclass is not None),
    )
    training = boundary.outer.is_training
    return SubclassCall(
        boundary=boundary,
        num_dense_inputs=len(metadata.inputs),
        num_forward_outputs=metadata.num_forward_outputs,
        num_saved_tensors=saved[0],
        num_saved_symints=saved[1],
        own_outputs=tuple(sorted(own)),
        mutated=tuple(i.index for i in metadata.inputs if i.mutation is not MutationKind.NONE),
        check_aliasing=options.check_aliasing,
        symbols=_symbols(metadata, in_forward | (in_backward if training else set())),
        kept_symbols=tuple(sorted(in_backward)) if training else (),
        kept_opaque=_opaque(gradients) if training else (),
        witnesses=wrappers if training and saved[0] else ((), ()),
    )


def _opaque(values: Iterable[SubclassValue]) -> tuple[Opaque, ...]:
    """The attributes that are no tensors, each once."""
    found: dict[Opaque, None] = {}

    def look(subclass: SubclassMeta) -> None:
        for _, child in subclass.attrs:
            if isinstance(child, SubclassMeta):
                look(child)
            elif isinstance(child, Opaque):
                found[child] = None

    for value in values:
        if value.subclass is not None:
            look(value.subclass)
    return tuple(found)


def _dims(values: Iterable[SubclassValue]) -> list[Dim]:
    values = list(values)
    views = [part.view for value in values for part in value.parts if part.view is not None]
    dims = [d for view in views for d in (*view.sizes, *view.strides, view.offset_delta)]
    return dims + _subclass_dims(value.subclass for value in values if value.subclass is not None)


def _subclass_dims(subclasses: Iterable[SubclassMeta]) -> list[Dim]:
    """Dimensions of wrappers, of what they hold, and in their contexts."""
    dims: list[Dim] = []
    for subclass in subclasses:
        dims += [*subclass.meta.sizes, *subclass.meta.strides]
        dims += [d for leaf in subclass.leaves for d in (*leaf.sizes, *leaf.strides)]
        dims += [item.text for item in pytree.tree_leaves(subclass.type.context) if isinstance(item, SymbolicDim)]
        dims += _subclass_dims(child for _, child in subclass.attrs if isinstance(child, SubclassMeta))
    return dims


def _symbols(metadata: GraphMetadata, wanted: set[str]) -> tuple[BindSymbol, ...]:
    bound: dict[str, BindSymbol] = {}
    for symbol in metadata.symbols:
        check_symbol_name(symbol.name)
        if symbol.name in wanted:
            value = f"d{symbol.input_index}"
            bound.setdefault(symbol.name, BindSymbol(symbol.name, value, symbol.source, symbol.dim))
    if wanted - bound.keys():
        raise PlanError(f"symbols {sorted(wanted - bound.keys())} of tensor subclasses are bound from no dense input")
    return tuple(bound[name] for name in sorted(bound))
