"""One run of a PyTorch function, captured as an FX graph with the metadata of its calling contract.

:func:`capture` decides between an inference graph and a joint forward and backward graph during the run;
:func:`trace_inference` and :func:`trace_joint` insist.
"""

from aotkit_functionalize import FunctionalLayer, GraphMetadata, OverlappingMutation, Unsupported

from .__about__ import __version__
from .api import Capture, TraceOptions, capture, trace_inference, trace_joint
from .graph_function import GraphFunction
from .observer import Observer
from .state import TRACING_LOCK

__all__ = [
    "TRACING_LOCK",
    "Capture",
    "FunctionalLayer",
    "GraphFunction",
    "GraphMetadata",
    "Observer",
    "OverlappingMutation",
    "TraceOptions",
    "Unsupported",
    "__version__",
    "capture",
    "trace_inference",
    "trace_joint",
]
