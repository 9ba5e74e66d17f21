"""Graphs in torch's own log artifacts, so that ``TORCH_LOGS`` and ``TORCH_TRACE`` show ours as they show torch's."""

from __future__ import annotations

import logging

import torch
from torch._logging import getArtifactLogger, trace_structured

__all__ = ["publish_graph"]

_KINDS = ("joint", "forward", "backward", "inference")
_JOINT_LOG = getArtifactLogger(__name__, "aot_joint_graph")
_GRAPHS_LOG = getArtifactLogger(__name__, "aot_graphs")


def publish_graph(name: str, graph: torch.fx.GraphModule) -> None:
    """Log the graph of the stage that ``name`` ends in, as in ``model__0-forward``; text is made only if wanted.

    Artifacts: ``aot_joint_graph`` for the joint graph, ``aot_graphs`` for the others. Structured traces:
    ``aot_joint_graph``, ``aot_forward_graph``, ``aot_backward_graph``, ``aot_inference_graph``.
    """
    kind = name.rpartition("-")[2]
    if kind not in _KINDS:
        return
    log = _JOINT_LOG if kind == "joint" else _GRAPHS_LOG
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s\n%s", name, _text(graph))
    trace_structured(f"aot_{kind}_graph", payload_fn=lambda: _text(graph))


def _text(graph: torch.fx.GraphModule) -> str:
    return str(graph.print_readable(print_output=False, include_stride=True, include_device=True))
