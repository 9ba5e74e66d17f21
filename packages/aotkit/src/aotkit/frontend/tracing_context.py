"""What a compile leaves where torch looks: in the ``TracingContext``, for compilers and Dynamo, and in torch's own log
artifacts, so that ``TORCH_LOGS`` and ``TORCH_TRACE`` show our graphs as they show torch's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext
from torch._logging import getArtifactLogger, trace_structured

from aotkit_functionalize import GraphMetadata

__all__ = [
    "PublishedMetadata",
    "publish_absent",
    "publish_graph",
    "publish_metadata",
    "publish_parameters",
    "publish_strides",
]

_KINDS = ("joint", "forward", "backward", "inference")

# Below torch's own logger, whose handlers print them: it gives handlers to those loggers alone that it knows when it
# is imported. `TORCH_LOGS=+aotkit` shows the graphs too, by the logger that torch makes for a module of that name.
_ARTIFACT_LOGS = {
    kind: getArtifactLogger("torch.aotkit", "aot_joint_graph" if kind == "joint" else "aot_graphs") for kind in _KINDS
}
_OWN_LOG = logging.getLogger("aotkit")


@dataclass(slots=True)
class PublishedMetadata:
    """``TracingContext.fw_metadata``: the contract, and by torch's names what compilers read of it.

    ``static_input_indices`` are graph inputs that stay in the same memory; ``num_mutated_inp_runtime_indices`` is how
    many forward outputs are new values of inputs; ``bw_donated_idxs`` is empty, no buffer is donated.
    """

    contract: GraphMetadata
    static_input_indices: list[int]
    num_mutated_inp_runtime_indices: int
    num_forward: int
    num_outputs: int
    bw_donated_idxs: list[int] = field(default_factory=list)


def publish_parameters(params_flat: Sequence[torch.Tensor]) -> None:
    """Leading arguments that are parameters and buffers, in order."""
    context = TracingContext.try_get()
    if context is not None:
        context.params_flat = list(params_flat)


def publish_metadata(metadata: GraphMetadata) -> None:
    """The contract of the captured graph, before any compiler runs."""
    context = TracingContext.try_get()
    if context is None:
        return
    published: Any = PublishedMetadata(
        metadata,
        [i.index for i in metadata.inputs if i.is_static],
        metadata.num_mutated,
        metadata.num_forward_outputs,
        len(metadata.outputs),
    )
    context.fw_metadata = published


def publish_strides(graph: torch.fx.GraphModule) -> None:
    """Strides of the compiled graph's results, where a frontend collects them: per result, ``None`` if no tensor."""
    context = TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    (output,) = graph.graph.find_nodes(op="output")
    results: Any = output.args[0]
    for result in results:
        value = result.meta.get("val") if isinstance(result, torch.fx.Node) else None
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            context.output_strides.append(tuple(map(_number, value.stride())))
        else:
            context.output_strides.append(None)


def _number(stride: Any) -> int:
    """A symbolic stride as the number that it is for the inputs at hand."""
    hint = stride.node.hint if isinstance(stride, torch.SymInt) else stride
    return int(hint)


def publish_graph(name: str, graph: torch.fx.GraphModule | Callable[[], torch.fx.GraphModule]) -> None:
    """Log the graph of the stage that ``name`` ends in, as in ``model__0-forward``; text is made only if wanted, and
    so is a ``graph`` that is read by a function.

    Artifacts: ``aot_joint_graph`` for the joint graph, ``aot_graphs`` for the others. Structured traces:
    ``aot_joint_graph``, ``aot_forward_graph``, ``aot_backward_graph``, ``aot_inference_graph``.
    """
    kind = name.rpartition("-")[2]
    if kind not in _KINDS:
        return
    log = _listening(kind)
    if log is not None:
        log.debug("%s\n%s", name, _text(graph))
    trace_structured(f"aot_{kind}_graph", payload_fn=lambda: _text(graph))


def publish_absent(name: str, sentence: str) -> None:
    """Say, where the graph ``name`` would be logged, that it was loaded from a cache that does not keep it."""
    log = _listening(name.rpartition("-")[2])
    if log is not None:
        log.debug("%s is not kept with what was loaded from the cache. %s", name, sentence)


def _listening(kind: str) -> logging.Logger | None:
    """The logger by which somebody wants to see graphs of this kind."""
    logs = (_ARTIFACT_LOGS[kind], _OWN_LOG)
    return next((log for log in logs if log.isEnabledFor(logging.DEBUG)), None)


def _text(graph: torch.fx.GraphModule | Callable[[], torch.fx.GraphModule]) -> str:
    graph = graph if isinstance(graph, torch.fx.GraphModule) else graph()
    return str(graph.print_readable(print_output=False, include_stride=True, include_device=True))
