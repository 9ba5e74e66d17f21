"""Capture above autograd: operators stay whole that autograd would take apart, grad mode and autocast stay visible.

The graph is functional and computes the forward alone. Changes of grad mode and autocast are nodes of it
(``torch._C._set_grad_enabled``, ``_enter_autocast`` ..), for whoever differentiates the graph later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from aotkit_functionalize import FunctionalLayer, GraphMetadata, records
from aotkit_functionalize.tracing import from_functional, has_data_mutation, is_functional

from . import _torch_compat as compat
from .api import Capture, Origin
from .finish import check_functional, name_placeholders, remove_same_value_nodes
from .graph_function import closed_over, data_dependent, not_functional
from .state import TRACING_LOCK, AutocastState, preserved_state

__all__ = ["capture_pre_dispatch"]


def capture_pre_dispatch(
    fn: Callable[..., Sequence[Any]],
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Capture:
    """Capture ``fn`` of flat fake arguments. The graph returns new values of mutated inputs, then every output.

    Raises :class:`Unsupported` as :func:`.capture` does.
    """
    found: list[GraphMetadata] = []
    autocast = AutocastState.now()

    def traced(*placeholders: Any) -> list[Any]:
        with compat.pre_dispatch_functional_mode():
            inputs = [compat.to_pre_dispatch_functional(v) if isinstance(v, torch.Tensor) else v for v in placeholders]
            outputs = list(fn(*inputs))
            metadata, updated = _metadata(inputs, placeholders, outputs)
        found.append(metadata)
        return [from_functional(v) if is_functional(v) else v for v in (*updated, *outputs)]

    with TRACING_LOCK, preserved_state(), fake_mode:
        plain = [v.detach() if isinstance(v, torch.Tensor) else v for v in fakes]
        try:
            module = compat.run_make_fx(traced, plain, decompositions, pre_dispatch=True)
        except compat.DATA_DEPENDENT_ERRORS as error:
            raise data_dependent(error, None) from error
        except (RuntimeError, AssertionError) as error:
            text = not_functional(error, None) if isinstance(error, RuntimeError) else closed_over(error, None)
            if text is None:
                raise
            raise text from error
    remove_same_value_nodes(module.graph)
    compat.drop_dead_code(module.graph)
    name_placeholders(module.graph, joint=False)
    check_functional(module.graph)
    module.recompile()
    return Capture(module, found[0], fake_mode, Origin(fn, FunctionalLayer.MODE, autocast))


def _metadata(
    inputs: Sequence[Any], plain: Sequence[Any], outputs: Sequence[Any]
) -> tuple[GraphMetadata, list[torch.Tensor]]:
    infos: list[records.InputInfo] = []
    updated: list[torch.Tensor] = []
    for index, (value, original) in enumerate(zip(inputs, plain, strict=True)):
        if not isinstance(value, torch.Tensor):
            kind = records.InputKind.SYMINT if isinstance(value, torch.SymInt) else records.InputKind.OTHER
            infos.append(records.InputInfo(index, kind))
            continue
        mutation = _mutation(value, original)
        writes = mutation in (records.MutationKind.DATA, records.MutationKind.DATA_AND_METADATA)
        position = len(updated) if writes else None
        if writes:
            updated.append(value)
        infos.append(records.InputInfo(index, records.InputKind.TENSOR, mutation=mutation, updated_output=position))
    first = len(updated)
    kinds = (records.OutputKind.CONSTANT, records.OutputKind.FRESH)
    output_infos = tuple(
        records.OutputInfo(i, kinds[isinstance(v, torch.Tensor)], graph_output=first + i) for i, v in enumerate(outputs)
    )
    metadata = GraphMetadata(tuple(infos), output_infos, num_forward_outputs=first + len(outputs), num_mutated=first)
    return metadata, updated


def _mutation(value: torch.Tensor, original: torch.Tensor) -> records.MutationKind:
    data = has_data_mutation(value)
    metadata = value.shape != original.shape or value.stride() != original.stride()
    if metadata:
        return records.MutationKind.DATA_AND_METADATA if data else records.MutationKind.METADATA
    return records.MutationKind.DATA if data else records.MutationKind.NONE
