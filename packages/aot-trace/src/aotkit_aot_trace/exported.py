"""What a graph returns that is exported, rather than called by wrappers that know its metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aotkit_functionalize import ForwardRecord

__all__ = ["ExportRequest", "every_output"]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A graph whose forward outputs are the new values of mutated inputs, then every output of the function.

    ``loss``: index of the output that gradients are taken of, without a tangent. ``tangents``: take them of every
    output that has one, given tangents. Neither: a graph without backward.
    """

    loss: int | None = None
    tangents: bool = False


def every_output(forward: ForwardRecord, outputs: Sequence[Any], request: ExportRequest) -> ForwardRecord:
    """``forward`` with the outputs that are otherwise regenerated around the graph: views, inputs, constants."""
    metadata = forward.metadata
    first = metadata.num_mutated
    positions = range(first, first + len(outputs))
    infos = tuple(replace(o, graph_output=p) for o, p in zip(metadata.outputs, positions, strict=True))
    count = first + len(outputs)
    moved = {o.graph_output: p for o, p in zip(metadata.outputs, positions, strict=True) if o.graph_output is not None}
    wanted = metadata.tangents if request.tangents else ()
    tangents = tuple(replace(t, forward_output=moved[t.forward_output]) for t in wanted if t.forward_output in moved)
    differentiable = {t.forward_output for t in tangents}
    if request.loss is not None:
        differentiable = {first + request.loss}
    changed = replace(
        metadata,
        outputs=infos,
        tangents=tangents,
        num_forward_outputs=count,
        intermediate_bases=(),
        forward_requires_grad=tuple(position in differentiable for position in range(count)),
        is_training=metadata.is_training and bool(differentiable),
    )
    return ForwardRecord(changed, [*forward.forward_values[:first], *outputs])
