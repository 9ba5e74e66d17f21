"""An inference graph that writes to its inputs itself, instead of returning their new values."""

from __future__ import annotations

from dataclasses import replace

import torch

from aotkit_functionalize import GraphMetadata, records

__all__ = ["mutations_in_graph"]


def mutations_in_graph(
    graph: torch.fx.GraphModule, metadata: GraphMetadata
) -> tuple[torch.fx.GraphModule, GraphMetadata]:
    """``copy_`` at the end of the graph for every input that autograd has no interest in; the records follow.

    A compiler that sees the ``copy_`` can write to the input where the value is computed. Inputs whose writes
    autograd records, whose version counter must stay, or that change their sizes, stay outputs, which the epilogue
    copies back.

    Args:
        graph: inference graph; it is changed in place.
        metadata: its contract.

    Returns:
        The graph and the contract of the changed graph: ``updated_output`` is ``None`` for what it writes itself.
    """
    asked = {symbol.input_index for symbol in metadata.symbols if symbol.of_output}
    outputs = ((i.updated_output, i) for i in metadata.inputs if i.updated_output is not None)
    moved = {position: i.index for position, i in outputs if position not in asked and _may_be_written(i)}
    if not moved:
        return graph, metadata
    placeholders = graph.graph.find_nodes(op="placeholder")
    (output,) = graph.graph.find_nodes(op="output")
    values = list(output.args[0])
    with graph.graph.inserting_before(output):
        for position, index in moved.items():
            if values[position] is placeholders[index]:
                continue  # what is copied is what is there
            written = graph.graph.call_function(torch.ops.aten.copy_.default, (placeholders[index], values[position]))
            written.meta["val"] = placeholders[index].meta["val"]
            if "stack_trace" in values[position].meta:  # of the last write
                written.meta["stack_trace"] = values[position].meta["stack_trace"]
    kept = [p for p in range(len(values)) if p not in moved]
    output.args = (type(output.args[0])(values[p] for p in kept),)
    graph.recompile()
    return graph, _renumbered(metadata, {old: new for new, old in enumerate(kept)}, frozenset(moved.values()))


def _may_be_written(info: records.InputInfo) -> bool:
    return (
        info.mutation is records.MutationKind.DATA
        and not info.mutation_hidden_from_autograd
        and info.meta is not None
        and not (info.meta.conj or info.meta.neg)
        and (not info.meta.requires_grad or info.mutation_under_no_grad)
    )


def _renumbered(metadata: GraphMetadata, position: dict[int, int], written: frozenset[int]) -> GraphMetadata:
    def moved(old: int | None) -> int | None:
        return None if old is None else position.get(old)

    requires_grad = metadata.forward_requires_grad
    return replace(
        metadata,
        inputs=tuple(replace(i, updated_output=moved(i.updated_output)) for i in metadata.inputs),
        outputs=tuple(replace(o, graph_output=moved(o.graph_output)) for o in metadata.outputs),
        symbols=tuple(replace(s, input_index=position[s.input_index]) if s.of_output else s for s in metadata.symbols),
        num_forward_outputs=len(position),
        num_mutated=metadata.num_mutated - len(written),
        repeated_outputs=tuple(position[old] for old in metadata.repeated_outputs if old in position),
        forward_requires_grad=tuple(requires_grad[old] for old in position) if requires_grad else (),
    )
